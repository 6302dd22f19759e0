"""Describes each rule that the compiler writes in words, by the kind of its chain. Pure.

`vipctl explain`, `vipctl trace` and `vipctl rules` print these words. Patterns match rules in the form of
iptables-save, including kube-proxy's (`compat: kube-proxy`). Any other rule in a chain of vipd's is foreign.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from functools import cache
from typing import NamedTuple

from vipd.dataplane.iptables.names import ChainId
from vipd.dataplane.iptables.syntax import OVER_LIMITS
from vipd.declaration.syntax import duration_text
from vipd.model.service import Frontend, Protocol


class Role(Enum):
    """Purpose of a rule."""

    FRONTEND = auto()
    """For one address and port, or one node port, of a service."""
    GROUP = auto()
    """On to a part of the dispatch."""
    ADDRESS = auto()
    """For an address as a whole: ping, unused ports."""
    SHARE = auto()
    """A step of the probability chain: it passes on a share of the new flows."""
    AFFINITY = auto()
    """Clients that keep their backend."""
    ONWARD = auto()
    """On to another chain of the same service."""
    TRANSLATION = auto()
    PLAIN = auto()
    """Everything else that vipd writes."""


class ParsedRule(NamedTuple):
    """A rule that vipd writes."""

    role: Role
    words: str
    """Those of its pattern."""
    parts: Mapping[str, str]
    """Parts of the rule: `address`, `port`, `protocol`, `note`, `chance`, `every`, `endpoint`..."""

    @property
    def text(self) -> str:
        """Describes it in words. Computed on demand: trees of large tables parse every rule."""
        parts, note = self.parts, self.parts.get("note", "")
        return self.words.format_map(
            {
                **parts,
                "frontend": _frontend(parts),
                "owner": f" of {self.service_port}" if "{owner}" in self.words and note else "",
                "sort": next((words for end, words in _SORTS.items() if note.endswith(end)), ""),
                "refused": _refused(parts),
                "unless": _unless(parts),
                "chance": f"{float(parts.get('chance', 1)):.6g}",
                "kept": duration_text(int(parts.get("seconds", "0"))),
                "remembered": ", client remembered" if "remember" in parts else "",
            }
        )

    @property
    def frontend(self) -> str:
        """The frontend that it belongs to, in the syntax of `vipctl`; empty for none."""
        return _frontend(self.parts) if self.role is Role.FRONTEND else ""

    @property
    def service_port(self) -> str:
        """The service port that its comment names; empty when there is none."""
        return _AFTER_NAME.sub("", _BEFORE_NAME.sub("", self.parts.get("note") or ""))


class Pattern(NamedTuple):
    """A regular expression for a rule, and its words, in which `{part}` stands for a part of the rule."""

    role: Role
    words: str
    expression: str


_AFTER_NAME = re.compile(
    r" (?:cluster IP|external IP|loadbalancer IP|has no (?:local )?endpoints|is over its limits"
    r"|health check node port|external destinations|traffic not accepted by \S+"
    r"|will be dropped by \S+|-> \S+)$"
)
_BEFORE_NAME = re.compile(
    r"^(?:(?:masquerade|pod|masquerade LOCAL|route LOCAL) traffic for|other traffic to) "
)

_NOTE = r'-m comment --comment (?:"(?P<note>[^"]*)"|(?P<word>\S+)) '
_MAYBE_NOTE = f"(?:{_NOTE})?"
_TO = r"-d (?P<address>[0-9a-f.:]+)/(?:32|128) "
_PORT = r"-m (?P=protocol) --dport (?P<port>\d+) "
_TO_PORT = rf"-p (?P<protocol>tcp|udp|sctp) {_NOTE}{_PORT}"
_REFUSE = r"-j (?P<refusal>DROP|REJECT)(?: --reject-with \S+)?"
_UNDER_WAY = r"! --tcp-flags FIN,SYN,RST,ACK SYN "
_UNTRANSLATED = r"(?:-m conntrack ! --ctstate DNAT )?"
_LIST = r"--name \S+ --mask \S+ --rsource "
_MARK = r"-j P-(?P<mark>MARK-MASQ|MARK-OFF-CLUSTER)"

_OVER = r'-m comment --comment "(?:[^"]*) over (?P<limit>[a-z_]+)" '

_LET_IN = "-j P-(?:EXT|SVC|SVL)-H"

_GROUP = Pattern(Role.GROUP, "addresses in {network}", r"-d (?P<network>\S+) -j P-GRP-H")
_REFUSALS = (
    Pattern(
        Role.PLAIN,
        "flows of {frontend} that began before: reset",
        rf"{_TO}{_TO_PORT}{_UNDER_WAY}-j REJECT --reject-with \S+",
    ),
    Pattern(
        Role.PLAIN,
        "flows of {frontend} that began before: reset",
        rf"-p (?P<protocol>tcp) {_NOTE}-m addrtype --dst-type LOCAL {_PORT}{_UNDER_WAY}"
        r"-j REJECT --reject-with \S+",
    ),
    Pattern(Role.FRONTEND, "{frontend}: {refused}", rf"{_TO}{_TO_PORT}{_REFUSE}"),
    Pattern(
        Role.FRONTEND,
        "{frontend}: {refused}",
        r"(?:(?:! )?-d \S+ )?-p (?P<protocol>tcp|udp|sctp) "
        rf"{_NOTE}(?:-m addrtype --dst-type LOCAL )?{_UNTRANSLATED}{_PORT}"
        rf"{_REFUSE}",
    ),
    Pattern(
        Role.ADDRESS,
        "other ports of {address}/{protocol}: {refused}",
        rf"{_TO}-p (?P<protocol>tcp|udp|sctp) {_NOTE}{_REFUSE}",
    ),
    _GROUP,
)
_BALANCE = (
    Pattern(Role.ONWARD, "limits on new flows", r"-j (?P<chain>P-LIM-H)"),
    Pattern(
        Role.PLAIN,
        "to be masqueraded{unless}",
        r"(?:! -s (?P<inside>\S+) )?"
        rf"{_TO}{_TO_PORT}(?P<forwarded>-m addrtype ! --src-type LOCAL )?{_MARK}",
    ),
    Pattern(
        Role.AFFINITY,
        "clients pinned to {endpoint} for {kept}",
        rf"{_MAYBE_NOTE}-m recent --rcheck --seconds (?P<seconds>\d+) --reap {_LIST}-j (?P<chain>P-SEP-H)",
    ),
    Pattern(
        Role.SHARE,
        "to {endpoint}, probability {chance}",
        rf"{_MAYBE_NOTE}-m statistic --mode random --probability (?P<chance>[\d.]+) -j (?P<chain>P-SEP-H)",
    ),
    Pattern(
        Role.SHARE,
        "to {endpoint}, one of every {every}",
        rf"{_MAYBE_NOTE}-m statistic --mode nth --every (?P<every>\d+)(?: --packet 0)? -j (?P<chain>P-SEP-H)",
    ),
    Pattern(Role.SHARE, "to {endpoint}, all others", rf"{_MAYBE_NOTE}-j (?P<chain>P-SEP-H)"),
)
_DISPATCH = (
    Pattern(Role.FRONTEND, "{frontend}{owner}{sort}", rf"{_TO}{_TO_PORT}-j P-(?:SVC|SVL|EXT|FW)-H"),
    Pattern(Role.FRONTEND, "{frontend}{owner}", rf"{_TO_PORT}-j P-(?:EXT|FW)-H"),
    Pattern(
        Role.ADDRESS,
        "ping to {address}: answered by this host",
        rf"{_TO}-p (?:icmp|ipv6-icmp) {_NOTE}-m icmp6? --icmp(?:v6)?-type \d+ -j REDIRECT",
    ),
    _GROUP,
    Pattern(
        Role.PLAIN,
        "node ports",
        rf"(?:(?:! )?-d \S+ )?{_NOTE}(?:-m addrtype --dst-type LOCAL )?-j P-NODEPORTS",
    ),
)

PATTERNS: dict[tuple[str, str], tuple[Pattern, ...]] = {
    ("nat", "SERVICES"): _DISPATCH,
    ("nat", "NODEPORTS"): _DISPATCH,
    ("nat", "GRP"): _DISPATCH,
    ("nat", "SVC"): _BALANCE,
    ("nat", "SVL"): _BALANCE,
    ("nat", "EXT"): (
        Pattern(Role.PLAIN, "to be masqueraded", rf"{_NOTE}{_MARK}"),
        Pattern(Role.PLAIN, "from {inside}: to be masqueraded", rf"-s (?P<inside>\S+) {_NOTE}{_MARK}"),
        Pattern(
            Role.PLAIN, "from this host: to be masqueraded", rf"{_NOTE}-m addrtype --src-type LOCAL {_MARK}"
        ),
        Pattern(
            Role.ONWARD,
            "from this host: to every backend",
            rf"{_NOTE}-m addrtype --src-type LOCAL -j P-SVC-H",
        ),
        Pattern(Role.ONWARD, "from {inside}: to every backend", rf"-s (?P<inside>\S+) {_NOTE}-j P-SVC-H"),
        Pattern(Role.ONWARD, "on to the backends of this host", r"-j P-SVL-H"),
        Pattern(Role.ONWARD, "on to the backends", r"-j P-SVC-H"),
    ),
    ("nat", "FW"): (
        Pattern(Role.ONWARD, "from {network}: let in", rf"-s (?P<network>\S+) {_NOTE}{_LET_IN}"),
        Pattern(Role.ONWARD, "from everywhere: let in", rf"{_NOTE}{_LET_IN}"),
        Pattern(Role.ONWARD, "from this host: let in", rf"{_NOTE}-m addrtype --src-type LOCAL {_LET_IN}"),
        Pattern(Role.PLAIN, "all others: dropped, in filter", _NOTE.rstrip()),
    ),
    ("nat", "LIM"): (
        Pattern(
            Role.PLAIN,
            "over {limit} {most}/s, {burst} at once: refused, in filter",
            rf"{_OVER}-m hashlimit --hashlimit-above (?P<most>\d+)/sec --hashlimit-burst (?P<burst>\d+) "
            r"(?:--hashlimit-\S+ \S+ )+-j ACCEPT",
        ),
        Pattern(
            Role.PLAIN,
            "over {limit} {most}: refused, in filter",
            rf"{_OVER}-m connlimit --connlimit-above (?P<most>\d+) --connlimit-mask \d+ --connlimit-saddr "
            r"-j ACCEPT",
        ),
    ),
    ("nat", "SEP"): (
        Pattern(Role.PLAIN, "from itself: to be masqueraded", rf"-s \S+ {_MAYBE_NOTE}{_MARK}"),
        Pattern(
            Role.TRANSLATION,
            "DNAT to {endpoint}{remembered}",
            rf"-p (?P<protocol>tcp|udp|sctp) {_MAYBE_NOTE}(?P<remember>-m recent --set {_LIST})?"
            r"-m (?P=protocol) -j DNAT --to-destination (?P<endpoint>\S+)",
        ),
    ),
    ("nat", "MARK-MASQ"): (
        Pattern(Role.PLAIN, "marked for masquerade", r"-j MARK --set-xmark 0x[0-9a-f]+/0x[0-9a-f]+"),
    ),
    ("nat", "MARK-OFF-CLUSTER"): (
        Pattern(Role.PLAIN, "from {inside}: not masqueraded", r"-s (?P<inside>\S+) -j RETURN"),
        Pattern(Role.PLAIN, "all others: to be masqueraded", _MARK),
    ),
    ("nat", "PREROUTING"): (
        Pattern(Role.PLAIN, "flow is not vipd's after all", r"-j CONNMARK --set-xmark 0x0/\S+"),
        Pattern(Role.PLAIN, "flow marked as vipd's", r"-j CONNMARK --set-xmark \S+"),
        Pattern(Role.PLAIN, "on to {chain}", r"-j (?P<chain>P-SERVICES)"),
    ),
    ("nat", "POSTROUTING"): (
        Pattern(Role.PLAIN, "not marked: nothing to do", r"-m mark ! --mark \S+ -j RETURN"),
        Pattern(Role.PLAIN, "mark taken off again", r"-j MARK --set-xmark \S+/0x0"),
        Pattern(
            Role.PLAIN,
            "this host's address becomes the source",
            rf"{_NOTE}-j MASQUERADE(?: --random-fully)?",
        ),
    ),
    ("filter", "SERVICES"): _REFUSALS,
    ("filter", "EXTERNAL-SERVICES"): _REFUSALS,
    ("filter", "PROXY-FIREWALL"): _REFUSALS,
    ("filter", "UNUSED"): _REFUSALS,
    ("filter", "GRP"): _REFUSALS,
    ("filter", "NODEPORTS"): (
        Pattern(Role.FRONTEND, "health {frontend}{owner}: accepted", rf"{_TO_PORT}-j ACCEPT"),
    ),
    ("filter", "FORWARD"): (
        Pattern(
            Role.PLAIN,
            "flows that vipd translated: accepted",
            rf"{_NOTE}-m conntrack --ctstate DNAT -m connmark --mark \S+ -j ACCEPT",
        ),
        Pattern(Role.PLAIN, "invalid: dropped", r"-m conntrack --ctstate INVALID -j DROP"),
        Pattern(Role.PLAIN, "marked: accepted", rf"{_NOTE}-m mark --mark \S+ -j ACCEPT"),
        Pattern(
            Role.PLAIN,
            "established: accepted",
            rf"{_NOTE}-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
        ),
    ),
    ("filter", "FIREWALL"): (
        Pattern(
            Role.PLAIN,
            "127.0.0.0/8 from elsewhere: dropped",
            rf"! -s \S+ -d \S+ {_NOTE}-m conntrack ! --ctstate \S+ -j DROP",
        ),
    ),
}
"""By table and kind of chain. In a pattern `P-` represents the prefix and `H` a hash."""

_ENTRY = Pattern(
    Role.ONWARD,
    "on to {chain}",
    rf"(?:-m conntrack --ctstate NEW )?{_MAYBE_NOTE}-j (?P<chain>P-[A-Z-]+)",
)
"""A jump from a built-in chain."""
_BUILT_IN = frozenset({"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"})
_ANY_PREFIX = re.compile(r"(?:^|-j )([A-Z][A-Z0-9]*)-[A-Z]")

_SORTS = {"external IP": ", external IP", "loadbalancer IP": ", load balancer IP"}


class RuleParser:
    """Recognises the rules under one chain prefix."""

    def __init__(self, prefix: str) -> None:
        self._kind = re.compile(rf"{prefix}-([A-Z-]+?)(?:-[A-Z2-7]{{16}})?")
        self._patterns, self._entry = _compiled(prefix)

    def kind_of(self, chain: str) -> str:
        """`SVC` of `VIPD-SVC-…`, `SERVICES` of `VIPD-SERVICES`; empty for another name."""
        found = self._kind.fullmatch(chain)
        return found[1] if found else ""

    def parse(self, chain: ChainId, rule: str) -> ParsedRule | None:
        """Parses a rule of a chain of vipd's, or a jump to one from a built-in chain. `rule` is its text
        after `-A CHAIN `. None if vipd writes no such rule there."""
        patterns = self._patterns.get((chain.table, self.kind_of(chain.name)), ())
        for pattern, expression in patterns if chain.name not in _BUILT_IN else self._entry:
            if found := expression.fullmatch(rule):
                parts = {name: value for name, value in found.groupdict().items() if value}
                if "word" in parts:
                    parts["note"] = parts.pop("word")
                return _parsed(pattern, parts)
        return None


def describe(chain: ChainId, rule: str) -> str:
    """Describes a rule of vipd's in words, whatever the prefix of its chains; returns the text of a rule that
    vipd does not write."""
    prefix = _ANY_PREFIX.search(rule if chain.name in _BUILT_IN else chain.name)
    parsed = RuleParser(prefix[1]).parse(chain, rule) if prefix else None
    return parsed.text if parsed else rule


_Compiled = Sequence[tuple[Pattern, "re.Pattern[str]"]]


@cache
def _compiled(prefix: str) -> tuple[Mapping[tuple[str, str], _Compiled], _Compiled]:
    def expressions(patterns: Iterable[Pattern]) -> _Compiled:
        return [(pattern, re.compile(_with_prefix(pattern.expression, prefix))) for pattern in patterns]

    return {kind: expressions(patterns) for kind, patterns in PATTERNS.items()}, expressions((_ENTRY,))


def _with_prefix(expression: str, prefix: str) -> str:
    return re.sub(r"\bP-", f"{prefix}-", expression).replace("-H", "-[A-Z2-7]{16}")


def _frontend(parts: Mapping[str, str]) -> str:
    if "port" not in parts:
        return ""
    return str(Frontend(parts.get("address", ""), int(parts["port"]), Protocol(parts["protocol"])))


def _parsed(pattern: Pattern, parts: dict[str, str]) -> ParsedRule:
    if pattern.role in (Role.SHARE, Role.AFFINITY):
        # Above a number of endpoints kube-proxy's rules have no comments.
        parts["endpoint"] = parts.get("note", "").rpartition(" -> ")[2] or parts["chain"]
    return ParsedRule(pattern.role, pattern.words, parts)


def _refused(parts: Mapping[str, str]) -> str:
    note = parts.get("note", "")
    if "traffic not accepted by" in note:
        return "dropped, unless let in"
    does = "dropped" if parts.get("refusal") == "DROP" else "refused"
    if note.endswith(OVER_LIMITS):
        return f"{does} if over a limit of {note.removesuffix(OVER_LIMITS).rstrip()}"
    return f"{does}, {note.replace('endpoints', 'backends')}" if note.endswith("endpoints") else does


def _unless(parts: Mapping[str, str]) -> str:
    if "inside" in parts:
        return f", unless from {parts['inside']}"
    if parts.get("mark") == "MARK-OFF-CLUSTER":
        return ", if from outside the cluster"
    return ", unless from this host" if "forwarded" in parts else ""
