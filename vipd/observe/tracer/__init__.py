"""What rules do to one packet, worked out from their text: iptables rules here, nftables in `nftables/`.

The room interprets the rule forms that vipd and kube-proxy write and refuses every other: a trace is either
right or an error. It must not read the kernel; callers bring the text of `iptables-save` or of a restore.

`parse_ruleset(text, family)` gives a `Ruleset`; `trace(ruleset, packet, host)` gives a `Trace`.
"""

from vipd.observe.tracer.errors import RulesetError, UnknownRule
from vipd.observe.tracer.evaluate import trace
from vipd.observe.tracer.ruleset import Ruleset, parse_ruleset
from vipd.observe.tracer.trace import Arrival, Host, Outcome, Packet, Slots, Step, Trace, Verdict

__all__ = [
    "Arrival",
    "Host",
    "Outcome",
    "Packet",
    "Ruleset",
    "RulesetError",
    "Slots",
    "Step",
    "Trace",
    "UnknownRule",
    "Verdict",
    "parse_ruleset",
    "trace",
]
