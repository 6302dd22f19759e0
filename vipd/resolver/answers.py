"""What a lookup results in, what of it serves, and the backends that it stands for. Pure.

Rules:
- An answer that fails, or lists nothing that may serve, changes nothing: the last good one serves on,
  however old.
- What one part of a lookup could not find out (the IPv6 addresses of a name, the addresses of one SRV
  target) stays as the last good answer had it.
- What an answer adds serves at once. If it lacks more than half of what serves, each address that it lacks
  serves on beside it until answers have lacked that address for `hold` seconds: one wrong answer must not
  remove a service.
- Until then what such an answer adds is on trial: it goes as soon as an answer lacks it, and neither counts
  for that half nor takes the room of what served before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from vipd.model.service import MAX_WEIGHT, Backend, Family, NamedBackend, NameKind, family_of, socket_text

_SMALL = 100
"""A record of weight 0 beside others gets one part where the others get this many (RFC 2782: "a very small
chance of being selected"); in vipd weight 0 would be none at all."""


Endpoint = tuple[str, int]
"""Address and port of a target."""


class Question(NamedTuple):
    """What is looked up: however many services use a name, it is one question."""

    kind: NameKind
    name: str

    @classmethod
    def of(cls, named: NamedBackend) -> Question:
        """The question for a declared name."""
        return cls(named.kind, named.name)

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


class Target(NamedTuple):
    """One address of an answer."""

    address: str
    port: int = 0
    """Of an SRV record; 0: the declaration says it."""
    priority: int = 0
    weight: int = 1
    """Of an SRV record, 0..65535 as in DNS."""
    host: str = ""
    """The target of the SRV record, or empty."""

    @property
    def endpoint(self) -> Endpoint:
        """What makes it the same target in another answer, whatever its weight."""
        return self.address, self.port

    def __str__(self) -> str:
        return socket_text(self.address, self.port) if self.port else self.address


class Part(NamedTuple):
    """The part of a lookup that asks for the addresses of one host in one family."""

    host: str
    """Empty: the name itself."""
    family: Family


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The result of one lookup."""

    targets: tuple[Target, ...] = ()
    ttl: float = 0.0
    """Seconds: the smallest of the records used."""
    fault: str = ""
    """Why there is no answer at all; empty: there is one."""
    failed: Mapping[Part, str] = field(default_factory=dict)
    """Why parts of it have none."""
    left_out: int = 0
    """Targets beyond the limit."""


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """The settings that bound what an answer may do."""

    min_ttl: float = 5.0
    max_ttl: float = 300.0
    hold: float = 30.0
    max_targets: int = 100


@dataclass(frozen=True, slots=True)
class NameState:
    """What is known of one question. Times are seconds of one monotonic clock."""

    serving: tuple[Target, ...] = ()
    """What serves, sorted."""
    held: Mapping[Endpoint, float] = field(default_factory=dict)
    """Endpoints among them that the last answer lacks -> when an answer that still lacks it may remove it."""
    trial: Mapping[Endpoint, float] = field(default_factory=dict)
    """Endpoints among them that came while others were held -> when it has served long enough to be held."""
    answered_at: float | None = None
    """When the last good answer came, by the calendar; None: never."""
    fault: str = ""
    """Why the last lookup gave no answer, or a part of it; empty: it gave one."""
    failures: int = 0
    """Lookups without an answer in a row."""
    left_out: int = 0
    next_at: float = 0.0
    """When it is looked up next."""
    ttl: float = 0.0
    """Of the last good answer."""

    @property
    def established(self) -> tuple[Target, ...]:
        """What serves and is not on trial."""
        return tuple(target for target in self.serving if target.endpoint not in self.trial)


def apply_result(
    state: NameState, result: LookupResult, limits: AnswerLimits, now: float, wall: float, part: float
) -> NameState:
    """The state after a lookup. `part`, from 0 up to 1, spreads the next one."""
    targets = _with_kept(result, state.serving)
    fault = result.fault or next(iter(result.failed.values()), "")
    if not targets:
        fault = fault or "the answer lists no address"
        state = replace(state, fault=fault, failures=state.failures + 1)
        return _due_in(state, _retry_pause(state, limits), now, part)
    state = replace(
        state,
        answered_at=wall,
        fault=fault,
        failures=state.failures + 1 if fault else 0,
        left_out=result.left_out,
        ttl=result.ttl,
    )
    state = _guarded(state, targets, {target.endpoint for target in result.targets}, limits, now)
    pause = min(max(result.ttl, limits.min_ttl), limits.max_ttl)
    if fault:  # what is missing should not be missed for the whole of a long TTL
        pause = min(pause, _retry_pause(state, limits))
    if state.held:
        pause = min(pause, max(min(state.held.values()) - now, limits.min_ttl))
    return _due_in(state, pause, now, part)


def _retry_pause(state: NameState, limits: AnswerLimits) -> float:
    return min(limits.min_ttl * 2.0 ** min(state.failures - 1, 20), limits.max_ttl)


def _due_in(state: NameState, pause: float, now: float, part: float) -> NameState:
    """Never earlier, as a resolver would give the same records again; up to a tenth later, so that the names
    of a host and the hosts of a fleet do not ask together."""
    return replace(state, next_at=now + pause * (1.0 + part / 10))


def _with_kept(result: LookupResult, serving: Iterable[Target]) -> dict[Endpoint, Target]:
    """The targets of a result, and those of failed parts as the last good answer had them."""
    targets = {target.endpoint: target for target in result.targets}
    for target in () if result.fault else serving:
        if Part(target.host, family_of(target.address)) in result.failed:
            targets.setdefault(target.endpoint, target)
    return targets


def _guarded(
    state: NameState,
    targets: Mapping[Endpoint, Target],
    answered: Collection[Endpoint],
    limits: AnswerLimits,
    now: float,
) -> NameState:
    """The state with this answer, as far as the guard allows. `answered`: the endpoints that the answer
    itself has; it says nothing of others in `targets`."""
    established = {target.endpoint: target for target in state.established}
    lacking = established.keys() - targets.keys()
    suspicious = 2 * len(lacking) > len(established) or not lacking.isdisjoint(state.held)
    until = {key: state.held.get(key, now + limits.hold) for key in lacking} if suspicious else {}
    held = {key: end for key, end in until.items() if end > now}
    held.update((key, end) for key, end in state.held.items() if key in targets and key not in answered)
    new = targets.keys() - established.keys() if held else ()
    trial = {key: state.trial.get(key, now + limits.hold) for key in new}
    kept = [established[key] for key in held if key not in targets]
    # Answers that differ each time must not pile up what serves.
    serving, beyond = limited((*kept, *targets.values()), state, 2 * limits.max_targets)
    endpoints = {target.endpoint for target in serving}
    return replace(
        state,
        serving=tuple(sorted(serving)),
        held=held,
        trial={key: end for key, end in trial.items() if end > now and key in endpoints},
        left_out=state.left_out + beyond,
    )


def without_useless(result: LookupResult, usable: Callable[[str], bool]) -> LookupResult:
    """The result; a failure if it lists addresses, and none that any service may use: a resolver that blocks
    a name answers 0.0.0.0, and must not take the last good answer away."""
    if not result.targets or any(usable(target.address) for target in result.targets):
        return result
    more = f" and {len(result.targets) - 1} more" if len(result.targets) > 1 else ""
    return LookupResult(fault=f"it resolves to {result.targets[0].address}{more}, which no backend may have")


def limited(targets: Iterable[Target], known: NameState, most: int) -> tuple[list[Target], int]:
    """As many targets as may serve, and the number of those left out. What serves already comes first, on
    trial last; then those of the lowest priority, in the order of their addresses."""
    distinct = list({target.endpoint: target for target in targets}.values())
    rank = {target.endpoint: 1 if target.endpoint in known.trial else 0 for target in known.serving}
    distinct.sort(key=lambda t: (rank.get(t.endpoint, 2), t.priority, t.endpoint))
    return distinct[:most], max(0, len(distinct) - most)


def backends_of(
    named: NamedBackend, targets: Collection[Target], families: Collection[Family]
) -> Iterator[Backend]:
    """The backends that a name stands for, in these families.

    The SRV records of the lowest priority serve, the others are their backups. Each address of a record's
    target has the weight of the record.
    """
    wanted = [target for target in targets if family_of(target.address) in families]
    weights: dict[int, list[int]] = {}
    for target in wanted:
        weights.setdefault(target.priority, []).append(target.weight)
    extremes = {priority: (min(values), max(values)) for priority, values in weights.items()}
    for target in wanted:
        backend = replace(named.template, address=target.address, resolved_from=str(named))
        if named.kind is NameKind.SRV:
            backend = replace(
                backend,
                port=target.port,
                weight=_weight(target.weight, *extremes[target.priority]),
                backup=backend.backup or target.priority > min(extremes),
            )
        yield backend


def _weight(weight: int, smallest: int, largest: int) -> int:
    """The weight of an SRV record among those of its priority."""
    if smallest > 0 or largest == 0:
        return weight or 1
    return max(1, weight * min(_SMALL, MAX_WEIGHT // largest))
