"""What rules do to one packet, worked out from their text: `iptables/` and `nftables/` read the languages,
`walk.py` takes the packet through the chains of either.

It reads the rule forms that vipd and kube-proxy write and refuses every other: a trace is either right or an
error. It does not read the kernel; callers bring the text of `iptables-save`, of a restore, or of nft.

`parse_ruleset(text, family)` gives a `Ruleset` (iptables), `parse_tables(text, family)` gives `Tables`
(nftables); `trace(rules, packet, host)` gives a `Trace` for either.
"""

from vipd.observe.simulator.errors import RulesetError, UnknownRule
from vipd.observe.simulator.iptables.ruleset import Ruleset, parse_ruleset
from vipd.observe.simulator.nftables.tables import Tables, parse_tables
from vipd.observe.simulator.outcome import Outcome, Slots, Step, Trace, Verdict
from vipd.observe.simulator.packet import Arrival, Host, Packet
from vipd.observe.simulator.walk import trace

__all__ = [
    "Arrival",
    "Host",
    "Outcome",
    "Packet",
    "Ruleset",
    "RulesetError",
    "Slots",
    "Step",
    "Tables",
    "Trace",
    "UnknownRule",
    "Verdict",
    "parse_ruleset",
    "parse_tables",
    "trace",
]
