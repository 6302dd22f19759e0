"""The text of nftables, as `vipctl render --dataplane nftables` and `nft list ruleset` print it. Pure.

Dynamic maps hold what the text has in them, and what the packet itself puts there.
"""
