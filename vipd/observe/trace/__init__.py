"""What one real packet meets on its way through the kernel, and whether that is what `explain` says.

Pure: `packets` (addresses, flows), `markers` (the table that marks packets, as messages), `events` (what the
kernel says, read), `journey` (events put together), `hits` (rules in words), `outcome` (what became of the
packet, compared with a prediction), `report` (all of it, as values).

At the edge: `table` and `watching` (marking packets, reading events), `legacy` (events of legacy iptables),
`rules` (the text of rules that were hit), `sending`.
"""
