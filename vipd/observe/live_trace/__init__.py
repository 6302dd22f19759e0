"""Traces a real packet through the kernel, and compares the result with the prediction of `explain`.

Pure: `packets` (addresses, flows), `table_messages` (the table that marks packets), `events` (the kernel's
messages), `packet_trace` (collects the events of a packet), `matching` (the rules of a trace),
`matched_rules` (their effects), `outcome` (the outcome, and the comparison with a prediction), `report` (all
of it, as values).

With I/O: `table` and `watching` (marking packets, reading events), `rule_reader` (the text of matched rules),
`sending`. Only `vipctl trace` imports the package.
"""
