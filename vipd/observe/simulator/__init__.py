"""Computes the effect of rules on one packet from their text: `iptables/` and `nftables/` parse the
languages, `walk.py` takes the packet through the chains of either.

It knows the rule forms that vipd and kube-proxy write and rejects every other: a trace is either right or an
error. It does not read the kernel; callers supply the text of `iptables-save`, of a restore, or of nft.

`parse_ruleset(text, family)` returns a `Ruleset` (iptables), `parse_tables(text, family)` returns `Tables`
(nftables); `trace(rules, packet, host)` returns a `SimulationResult` for either.
"""

from vipd.observe.simulator.errors import RulesetError, UnknownRule
from vipd.observe.simulator.iptables.ruleset import Ruleset, parse_ruleset
from vipd.observe.simulator.nftables.tables import Tables, parse_tables
from vipd.observe.simulator.outcome import Outcome, PacketVerdict, SimulationResult, Slots, Step
from vipd.observe.simulator.packet import Arrival, Host, Packet
from vipd.observe.simulator.walk import trace

__all__ = [
    "Arrival",
    "Host",
    "Outcome",
    "Packet",
    "PacketVerdict",
    "Ruleset",
    "RulesetError",
    "SimulationResult",
    "Slots",
    "Step",
    "Tables",
    "UnknownRule",
    "parse_ruleset",
    "parse_tables",
    "trace",
]
