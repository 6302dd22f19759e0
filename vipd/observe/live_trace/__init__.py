"""What one real packet meets on its way through the kernel, and whether that is what `explain` predicts.

Pure: `packets` (addresses, flows), `table_messages` (the table that marks packets), `events` (the kernel's
messages), `packet_trace` (events put together), `matching` (the rules of a trace), `matched_rules` (what
they do), `outcome` (what became of the packet, compared with a prediction), `report` (all of it, as values).

At the edge: `table` and `watching` (marking packets, reading events), `legacy` (events of legacy iptables),
`rule_reader` (the text of matched rules), `sending`. Only `vipctl trace` imports the package.
"""
