"""The text of nftables, from `vipctl render --dataplane nftables` and `nft list ruleset`. Pure.

Dynamic maps contain the elements of the text, and those that the packet itself adds.
"""
