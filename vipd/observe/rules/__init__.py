"""The rules that the kernel holds, as a tree: of services, chains or maps, backends; with counters.

Readings of the kernel come from four modules; all else is made of texts and values, and changes nothing.

| file | what |
|---|---|
| `looking.py` | what a target means: the daemon asked, the kernel read |
| `reading_iptables.py`, `reading_nftables.py` | the kernel read: iptables, nft, maps over netlink |
| `saved.py` | what iptables-save prints, by chain |
| `forms.py` | which rules vipd writes, and what each means in words; others are foreign |
| `dispatch.py` | which services the shared chains lead to |
| `iptables_tree.py`, `iptables_shared.py` | the tree of one service; the chains that all go through |
| `nftables_table.py`, `nftables_words.py` | a table as it was read; its rules in words |
| `nftables_tree.py` | the trees of a table |
| `tree.py` | nodes |
| `wanted.py` | what the daemon says of services, and trees compared with it |
| `forest.py` | all readings together: the trees of what is asked for |
| `rows.py` | trees as lines of a screen |
| `graph.py`, `dot.py`, `mermaid.py`, `graphviz.py` | drawings |
"""
