"""The grammar of affinity, masquerade and fallback, which `defaults` may say too, and of `check`. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from vipd.declaration.backend_reader import read_backends
from vipd.declaration.fields import Placed, Report, known_keys, one_or_more, read_choice, read_notation
from vipd.declaration.nodes import Mapping, Node, Scalar, null
from vipd.declaration.notation import parse_duration, shown
from vipd.model import MAX_AFFINITY_SECONDS, Affinity, Backend, Masquerade, Refusal

_MASQUERADE: dict[str, tuple[Masquerade | None]] = {
    **{mode.value: (mode,) for mode in Masquerade},
    "auto": (None,),
}
_REFUSALS = {refusal.value: refusal for refusal in Refusal}
_AFFINITIES: dict[str, tuple[Affinity | None]] = {"none": (None,), "client-ip": (Affinity(),)}
_CHECK_TYPES = {name: name for name in ("none", "tcp", "http", "https", "udp", "dns", "exec")}


@dataclass(slots=True)
class Policy:
    """What `defaults` may set for every service of a document, and a service for itself."""

    affinity: Affinity | None = None
    masquerade: Masquerade | None = None
    refusal: Refusal = Refusal.REJECT
    fallback: tuple[Placed[Backend], ...] = ()
    own_fallback: bool = False
    """Whether `fallback` was declared here, rather than taken over from `defaults`."""


PolicyKey: TypeAlias = Callable[[Report, Policy, Node, str], None]


def read_policy(report: Report, node: Node, path: str) -> Policy:
    """The `defaults` of a document."""
    policy = Policy()
    unsupported = (*UNSUPPORTED_KEYS, "check")
    if not null(node):
        for key, value in known_keys(report, node, path, DEFAULTS_KEYS, unsupported):
            DEFAULTS_KEYS[key](report, policy, value, f"{path}.{key}")
    return policy


def _read_affinity(report: Report, policy: Policy, node: Node, path: str) -> None:
    if not isinstance(node, Mapping):
        choice = read_choice(report, node, path, _AFFINITIES)
        if choice is not None:
            policy.affinity = choice[0]
        return
    values: dict[str, Node] = dict(known_keys(report, node, path, AFFINITY_KEYS))
    if "by" not in values:
        report.add(node.line, path, "by is missing", "write {by: client-ip, timeout: 3h}")
    else:
        read_choice(report, values["by"], f"{path}.by", {"client-ip": True})
    affinity = Affinity()
    if "timeout" in values:
        affinity = _read_timeout(report, values["timeout"], f"{path}.timeout")
    policy.affinity = affinity


def _read_timeout(report: Report, node: Node, path: str) -> Affinity:
    seconds = read_notation(report, node, path, parse_duration, "a duration like 3h")
    if seconds is None:
        return Affinity()
    if not 1 <= seconds <= MAX_AFFINITY_SECONDS:
        text = node.text if isinstance(node, Scalar) else ""
        report.add(node.line, path, f"{shown(text)} is out of range", "from 1s to 1d")
        return Affinity()
    return Affinity(seconds)


def _read_masquerade(report: Report, policy: Policy, node: Node, path: str) -> None:
    choice = read_choice(report, node, path, _MASQUERADE)
    if choice is not None:
        policy.masquerade = choice[0]


def _read_fallback(report: Report, policy: Policy, node: Node, path: str) -> None:
    policy.own_fallback = True
    policy.refusal = Refusal.REJECT
    policy.fallback = ()
    if not isinstance(node, Mapping):
        policy.refusal = read_choice(report, node, path, _REFUSALS) or Refusal.REJECT
        return
    values: dict[str, Node] = dict(known_keys(report, node, path, FALLBACK_KEYS))
    if "backends" not in values:
        report.add(node.line, path, "backends is missing", "write reject, drop or {backends: [10.0.0.9]}")
        return
    place = f"{path}.backends"
    if not one_or_more(values["backends"], place) or null(values["backends"]):
        report.add(values["backends"].line, place, "the list is empty", "name a backend, or write reject")
    policy.fallback = tuple(read_backends(report, values["backends"], place))


def read_check(report: Report, policy: Policy, node: Node, path: str) -> None:
    """`none` or `{type: none}`; every other check is reported as unsupported."""
    del policy  # this version checks no backend: there is nothing to keep
    wanted, place = node, path
    if isinstance(node, Mapping):
        if "type" not in node.items:
            report.add(node.line, path, "type is missing", "write none or {type: none}")
            return
        wanted, place = node.items["type"], f"{path}.type"
    name = read_choice(report, wanted, place, _CHECK_TYPES)
    if name == "none" and isinstance(node, Mapping):
        for _ in known_keys(report, node, path, CHECK_KEYS):
            pass
    elif name not in {None, "none"}:
        what = f"the check type {name} is not supported by this version"
        report.add(wanted.line, place, what, "write none, or remove check")


DEFAULTS_KEYS: dict[str, PolicyKey] = {
    "affinity": _read_affinity,
    "masquerade": _read_masquerade,
    "fallback": _read_fallback,
}
"""The keys of `defaults`."""

AFFINITY_KEYS = ("by", "timeout")
FALLBACK_KEYS = ("backends",)
CHECK_KEYS = ("type",)

UNSUPPORTED_KEYS = (
    "slow_start",
    "balance",
)
"""Keys that the language knows and this version does not serve."""
