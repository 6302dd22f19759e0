"""The rules in the kernel, as a tree: of services, chains or maps, backends; with counters.

Three modules read the kernel or run programs: `resolve_target.py`, `read_iptables.py` and
`read_nftables.py`. All others work on texts and values.

| file | what |
|---|---|
| `resolve_target.py` | asks the daemon what a target means, and has the kernel read for it |
| `read_iptables.py`, `read_nftables.py` | read the rules: by iptables, nft, and maps over netlink |
| `dispatch.py` | the services that the shared chains lead to |
| `iptables_tree.py`, `iptables_shared.py` | the tree of one service; the chains that all services share |
| `nftables_table.py` | a table as it was read |
| `nftables_tree.py` | the trees of a table |
| `tree.py` | nodes |
| `expected.py` | services as the daemon has them, and trees compared with them |
| `kernel_rules.py` | all that was read: the trees of what is asked for |
| `rows.py` | trees as lines of a screen |
| `graph.py`, `graphviz.py` | drawings |

The words for rules are beside the compilers: `vipd/dataplane/*/descriptions.py`.
"""
