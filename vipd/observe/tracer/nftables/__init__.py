"""What nftables rules do to one packet, worked out from their text. Pure.

The room interprets the forms that vipd writes and refuses every other: a trace is either right or an error.
It reads what `vipctl render --dataplane nftables` prints and what `nft list ruleset` prints of that.

`parse_tables(text, family)` gives `Tables`; `trace(tables, packet, host)` gives the same `Trace` as for
iptables. Dynamic maps hold what the text has in them, and what the packet itself puts there.
"""

from vipd.observe.tracer.nftables.evaluate import trace
from vipd.observe.tracer.nftables.tables import Tables, parse_tables

__all__ = ["Tables", "parse_tables", "trace"]
