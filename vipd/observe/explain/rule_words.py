"""Words for what a single rule of either dataplane does. Pure.

With nftables, what a map or set gave begins with its name: `@endpoints: to 10.244.0.5:53`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from vipd.dataplane.nftables.chains import Refuse, limits_sources
from vipd.dataplane.nftables.layout import CLAIMED, FRONTENDS, HAIRPIN, HANDLERS, NODE_PORTS, UNUSED
from vipd.model.service import socket_text
from vipd.observe.simulator import Step

_WHY = {
    Refuse().name: "no backend is ready",
    Refuse(silent=True).name: "no backend is ready, or none on this host",
    Refuse(silent=True, resets=True).name: "no backend is ready, or none on this host",
    UNUSED: "no service has this port",
}
"""Chains that end flows, and why."""

_ENDS = {"accept": "accepted", "drop": "dropped", "return": "nothing more to do here", "reject": "refused"}
_SLOT_BY = (
    ("numgen random", "at random"),
    ("numgen inc", "in turn"),
    ("jhash", "by the client's address"),
)

Words = Callable[[Step, "re.Match[str]", str], str]


_TARGETS = {
    "MASQUERADE": "this host's address becomes the source",
    "ACCEPT": "accepted",
    "DROP": "dropped",
    "REJECT": "refused",
    "RETURN": "nothing more to do here",
}

_CLUSTER_IP = " cluster IP"
"""How kube-proxy's comments call a service's own address, after its name."""


def words_for_rule(step: Step, service_port: str = "") -> str:
    """What a rule does; for a jump what it is for, or where it leads.

    `service_port` is that of the packet's first destination: maps of the nftables dataplane name no service.
    """
    return _table_rule(step, service_port) if in_table(step) else _iptables_rule(step)


def in_table(step: Step) -> bool:
    """The step is of the nftables dataplane."""
    return step.table.startswith(("ip ", "ip6 "))


def _iptables_rule(step: Step) -> str:
    # Comments stand before the target in every rule that vipd writes.
    _, jumps, target = step.rule.rpartition(" -j ")
    if not jumps:
        return step.comment or step.rule
    name, _, argument = target.partition(" ")
    match name:
        case "DNAT":
            return f"to {argument.removeprefix('--to-destination ')}"
        case "MARK":
            return "mark taken off again" if argument.endswith("/0x0") else "marked for masquerade"
        case "CONNMARK":
            value = argument.removeprefix("--set-xmark ")
            return "flow is not vipd's after all" if value.startswith("0x0/") else "flow marked as vipd's"
    if name in ("DROP", "REJECT") and step.comment:
        return f"{_TARGETS[name]}: {step.comment.replace('endpoints', 'backends')}"
    return _TARGETS.get(name) or _purpose(name, step.comment)


def _purpose(chain: str, comment: str) -> str:
    """What a jump to a chain is for."""
    if chain.endswith("-MARK-MASQ"):
        return "to be masqueraded"
    if comment.endswith(_CLUSTER_IP):
        return f"virtual IP of {comment.removesuffix(_CLUSTER_IP)}"
    return comment or f"on to {chain}"


def _table_rule(step: Step, service_port: str) -> str:
    """What a rule does. `service_port`: that of the packet's first destination; maps name no service."""
    if step.slots is not None:
        return _slots(step)
    for pattern, words in _PATTERNS:
        found = pattern.search(step.rule)
        if found:
            return words(step, found, service_port)
    return step.rule


def _slots(step: Step) -> str:
    slots = step.slots
    if slots is None or slots.of == 1:
        return "the first slot"
    how = next((how for words, how in _SLOT_BY if words in step.rule), "by the packet")
    count = len(slots.chosen)
    chosen = f"slot {slots.chosen[0]} of {slots.of}" if count == 1 else f"{count} of {slots.of} slots"
    return f"{chosen} {how}"


def _looked_up(step: Step, found: re.Match[str], service_port: str) -> str:
    name, key = found[1], _key(step)
    of = f" of {service_port}" if service_port else ""
    if name == FRONTENDS.name and len(key) == 3:
        return f"@{name}: {socket_text(key[0], int(key[2]))}/{key[1]}{of}"
    if name == HANDLERS.name:
        return f"@{name}: on to {step.element.rpartition(' ')[2]}" if step.element else f"@{name}"
    if name == NODE_PORTS.name and len(key) == 2:
        return f"@{name}: {key[1]}/{key[0]}{of}"
    length = name.removeprefix("allowed_")
    return f"@{name}: sources in {key[0]}/{length}" if length != name else f"@{name}: {step.element}"


def _translated(step: Step, found: re.Match[str], _: str) -> str:
    value = _value(step)
    to = socket_text(value[0], int(value[1])) if len(value) == 2 else step.element
    return f"@{found[1]}: to {to}"


def _written(step: Step, found: re.Match[str], _: str) -> str:
    number = f" number {' . '.join(_value(step))}" if step.element else ""
    return f"@{found[1]}: {'client is known, ' if found[1] == 'pins' else ''}backend{number}"


def _member(step: Step, found: re.Match[str], _: str) -> str:
    if found[1] == HAIRPIN.name:
        return f"@{found[1]}: a backend meets itself, masqueraded"
    return f"@{found[1]}: {step.element} is a virtual IP" if found[1] == CLAIMED.name else f"@{found[1]}"


def _ended(step: Step, found: re.Match[str], _: str) -> str:
    does = _ENDS[found[1]]
    why = "this source may not come" if limits_sources(step.chain) else _WHY.get(step.chain)
    return f"{does}: {why}" if why else does


def _always(text: str) -> Words:
    return lambda *_: text


_PATTERNS: tuple[tuple[re.Pattern[str], Words], ...] = (
    (re.compile(rf"map @({FRONTENDS.name}) goto "), _looked_up),
    (re.compile(r"vmap @(\S+)$"), _looked_up),
    (re.compile(r"dnat .*map @(\S+)$"), _translated),
    (re.compile(r"dnat ip6? to (\S+)$"), lambda _, found, __: f"to {found[1]}"),
    (re.compile(r"saddr set ct original ip6? saddr$"), _always("the client's address put back")),
    (re.compile(r"daddr set ct original ip6? daddr$"), _always("the address that was asked put back")),
    (re.compile(r"daddr set .*map @(\S+)$"), _written),
    (re.compile(r"update @(\S+) .* timeout (\w+)"), lambda _, found, __: f"@{found[1]}: kept for {found[2]}"),
    (re.compile(r"(?:update|add) @(\S+) .* counter }"), lambda _, found, __: f"@{found[1]}: flow counted"),
    (re.compile(r"delete @(\S+) "), lambda _, found, __: f"@{found[1]}: client forgotten"),
    (re.compile(r"ct mark set ct mark \|"), _always("flow marked as vipd's")),
    (re.compile(r"@(\S+) (?:masquerade|goto|jump)"), _member),
    (re.compile(r"\bmasquerade\b"), _always("this host's address becomes the source")),
    (re.compile(r"meta mark set meta mark \|"), _always("marked for masquerade")),
    (re.compile(r"\bredirect\b"), _always("answered by this host itself")),
    (re.compile(r"\b(accept|drop|return|reject)\b"), _ended),
    (re.compile(r"\b(?:goto|jump) (\S+)$"), lambda _, found, __: f"on to {found[1]}"),
)
"""By a rule's characteristic part; the first pattern that matches."""


def _key(step: Step) -> list[str]:
    return step.element.partition(" : ")[0].split(" . ")


def _value(step: Step) -> list[str]:
    return step.element.rpartition(" : ")[2].split(" . ")
