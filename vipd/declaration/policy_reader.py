"""The grammar of keys that a service may inherit from `defaults`: affinity, fallback, checks. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from vipd.declaration.backend_reader import read_backends
from vipd.declaration.check_reader import read_check
from vipd.declaration.fields import Located, Report, known_keys, one_or_more, read_choice, read_short_form
from vipd.declaration.limits_reader import read_limits
from vipd.declaration.nodes import Mapping, Node, Scalar, is_null
from vipd.declaration.syntax import parse_duration, quoted
from vipd.model.check import Check
from vipd.model.flow_limits import FlowLimits
from vipd.model.service import (
    MAX_AFFINITY_SECONDS,
    MAX_SLOW_START_SECONDS,
    Affinity,
    AnnounceMethod,
    Backend,
    Balance,
    Masquerade,
    NamedBackend,
    NameKind,
    RejectAction,
)

_MASQUERADE: dict[str, tuple[Masquerade | None]] = {
    **{mode.value: (mode,) for mode in Masquerade},
    "auto": (None,),
}
_AFFINITIES: dict[str, tuple[Affinity | None]] = {
    "none": (None,),
    "client-ip": (Affinity(),),
    "true": (Affinity(),),
    "false": (None,),
}
_METHODS: dict[str, tuple[AnnounceMethod | None]] = {
    **{method.value: (method,) for method in AnnounceMethod},
    "none": (None,),
}
_FALLBACKS = {**{refusal.value: refusal for refusal in RejectAction}, "keep": None}
_ONE_BACKEND = ("address", *NameKind)
"""A mapping with one of these keys is a single backend."""


@dataclass(slots=True)
class AnnounceSpec:
    """The key `announce` as written."""

    by: AnnounceMethod
    inside: bool | None = None
    """Whether `address` is announced, too; None: only if the service has no other address."""


@dataclass(slots=True)
class ServiceDefaults:
    """Values that `defaults` may set for every service of a document, and a service for itself."""

    affinity: Affinity | None = None
    masquerade: Masquerade | None = None
    refusal: RejectAction = RejectAction.REJECT
    fallback: tuple[Located[Backend], ...] = ()
    named_fallback: tuple[Located[NamedBackend], ...] = ()
    own_fallback: bool = False
    """Whether the fallback was declared here, not inherited from `defaults`."""
    keeps_unhealthy: bool = False
    check: Located[Check] | None = None
    own_check: bool = False
    """Whether `check` was declared here."""
    slow_start: int = 0
    balance: Balance = Balance.RANDOM
    weight_from: Located[bool] | None = None
    """Whether checks report the weight."""
    announce: Located[AnnounceSpec] | None = None
    own_announce: bool = False
    """Whether `announce` was declared here, not inherited from `defaults`."""
    limits: FlowLimits | None = None


PolicyKey: TypeAlias = Callable[[Report, ServiceDefaults, Node, str], None]


def read_policy(report: Report, node: Node, path: str) -> ServiceDefaults:
    """The `defaults` of a document."""
    policy = ServiceDefaults()
    if not is_null(node):
        for key, value in known_keys(report, node, path, DEFAULTS_KEYS):
            DEFAULTS_KEYS[key](report, policy, value, f"{path}.{key}")
    return policy


def _read_affinity(report: Report, policy: ServiceDefaults, node: Node, path: str) -> None:
    if isinstance(node, Scalar) and node.text[:1].isdigit():
        policy.affinity = _read_timeout(report, node, path)
        return
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
    seconds = read_short_form(report, node, path, parse_duration, "a duration like 3h")
    if seconds is None:
        return Affinity()
    if not 1 <= seconds <= MAX_AFFINITY_SECONDS:
        text = node.text if isinstance(node, Scalar) else ""
        report.add(node.line, path, f"{quoted(text)} is out of range", "from 1s to 1d")
        return Affinity()
    return Affinity(seconds)


def _read_masquerade(report: Report, policy: ServiceDefaults, node: Node, path: str) -> None:
    choice = read_choice(report, node, path, _MASQUERADE)
    if choice is not None:
        policy.masquerade = choice[0]


def _read_fallback(report: Report, policy: ServiceDefaults, node: Node, path: str) -> None:
    policy.own_fallback = True
    policy.refusal = RejectAction.REJECT
    policy.fallback, policy.named_fallback, policy.keeps_unhealthy = (), (), False
    if isinstance(node, Scalar) and not _looks_like_address(node):
        choice = read_choice(report, node, path, {word: word for word in _FALLBACKS})
        policy.keeps_unhealthy = choice == "keep"
        policy.refusal = _FALLBACKS.get(choice or "") or RejectAction.REJECT
        return
    backends, place = node, path
    if isinstance(node, Mapping) and node.items.keys().isdisjoint(_ONE_BACKEND):
        values: dict[str, Node] = dict(known_keys(report, node, path, FALLBACK_KEYS))
        if "backends" not in values:
            hint = "write reject, drop, keep or {backends: [10.0.0.9]}"
            report.add(node.line, path, "backends is missing", hint)
            return
        backends, place = values["backends"], f"{path}.backends"
    if not one_or_more(backends, place) or is_null(backends):
        report.add(backends.line, place, "the list is empty", "name a backend, or write reject")
    words = [(at, item) for at, item in one_or_more(backends, place) if _is_word(item)]
    for at, item in words:
        report.wrong_type(item, at, "a backend", "write reject, drop or keep alone, or only backends")
    if words:
        return
    found, named = read_backends(report, backends, place)
    policy.fallback, policy.named_fallback = tuple(found), tuple(named)


def _is_word(node: Node) -> bool:
    return isinstance(node, Scalar) and node.text in _FALLBACKS


def _looks_like_address(node: Scalar) -> bool:
    """Whether a fallback is a backend, by address or name, and no word."""
    return any(sign in node.text for sign in ".:")


def _read_check(report: Report, policy: ServiceDefaults, node: Node, path: str) -> None:
    check = read_check(report, node, path)
    if check is not None:
        policy.check, policy.own_check = Located(check, node.line, path), True


def _read_balance(report: Report, policy: ServiceDefaults, node: Node, path: str) -> None:
    choice = read_choice(report, node, path, {balance.value: balance for balance in Balance})
    if choice is not None:
        policy.balance = choice


def _read_slow_start(report: Report, policy: ServiceDefaults, node: Node, path: str) -> None:
    seconds = read_short_form(report, node, path, parse_duration, "a duration like 30s")
    if seconds is None:
        return
    if seconds > MAX_SLOW_START_SECONDS:
        text = node.text if isinstance(node, Scalar) else ""
        report.add(node.line, path, f"{quoted(text)} is out of range", "at most 1h")
        return
    policy.slow_start = seconds


def _read_weight_from(report: Report, policy: ServiceDefaults, node: Node, path: str) -> None:
    choice = read_choice(report, node, path, WEIGHT_FROM)
    if choice is not None:
        policy.weight_from = Located(choice, node.line, path)


def _read_announce(report: Report, policy: ServiceDefaults, node: Node, path: str) -> None:
    policy.announce, policy.own_announce = None, True
    if not isinstance(node, Mapping):
        choice = read_choice(report, node, path, _METHODS)
        if choice is not None and choice[0] is not None:
            policy.announce = Located(AnnounceSpec(choice[0]), node.line, path)
        return
    values: dict[str, Node] = dict(known_keys(report, node, path, ANNOUNCE_KEYS))
    if "by" not in values:
        report.add(node.line, path, "by is missing", "write {by: routes, addresses: all}")
        return
    method = read_choice(report, values["by"], f"{path}.by", {word.value: word for word in AnnounceMethod})
    inside = None
    if "addresses" in values:
        inside = read_choice(report, values["addresses"], f"{path}.addresses", ANNOUNCED_ADDRESSES)
    if method is not None:
        policy.announce = Located(AnnounceSpec(method, inside), node.line, path)


def _read_limits(report: Report, policy: ServiceDefaults, node: Node, path: str) -> None:
    policy.limits = read_limits(report, node, path)


DEFAULTS_KEYS: dict[str, PolicyKey] = {
    "affinity": _read_affinity,
    "masquerade": _read_masquerade,
    "fallback": _read_fallback,
    "balance": _read_balance,
    "check": _read_check,
    "slow_start": _read_slow_start,
    "weight_from": _read_weight_from,
    "announce": _read_announce,
    "limits": _read_limits,
}
"""The keys of `defaults`."""

AFFINITY_KEYS = ("by", "timeout")
FALLBACK_KEYS = ("backends",)
ANNOUNCE_KEYS = ("by", "addresses")
ANNOUNCED_ADDRESSES = {"external": False, "all": True}
"""Which addresses are announced: whether `address` is one of them."""
WEIGHT_FROM = {"declaration": False, "check": True}
"""The origin of a backend's weight."""
