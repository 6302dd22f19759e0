"""What a lookup finds, and what of it serves. Pure.

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

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from vipd.model.service import Family, NamedBackend, NameKind, family_of


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
    def place(self) -> tuple[str, int]:
        """What makes it the same target in another answer, whatever its weight."""
        return self.address, self.port


class Part(NamedTuple):
    """The part of a lookup that asks for the addresses of one host in one family."""

    host: str
    """Empty: the name itself."""
    family: Family


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What one lookup found."""

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
    held: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """Places among them that the last answer lacks -> when an answer that still lacks it may remove it."""
    trial: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """Places among them that came while others were held -> when it has served long enough to be held."""
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
        return tuple(target for target in self.serving if target.place not in self.trial)


def apply_result(
    state: NameState, result: LookupResult, limits: AnswerLimits, now: float, wall: float, part: float
) -> NameState:
    """The state after a lookup. `part`, from 0 up to 1, spreads the next one."""
    found = _with_kept(result, state.serving)
    if not found:
        fault = result.fault or next(iter(result.failed.values()), "") or "the answer lists no address"
        failures = state.failures + 1
        pause = _spread(min(limits.min_ttl * 2.0 ** min(failures - 1, 20), limits.max_ttl), part)
        return replace(state, fault=fault, failures=failures, next_at=now + pause)
    partly = next(iter(result.failed.values()), "")
    state = replace(
        state,
        answered_at=wall,
        fault=partly,
        failures=state.failures + 1 if partly else 0,
        left_out=result.left_out,
        ttl=result.ttl,
    )
    state = _guarded(state, found, {target.place for target in result.targets}, limits, now)
    pause = min(max(result.ttl, limits.min_ttl), limits.max_ttl)
    if partly:  # what is missing should not be missed for the whole of a long TTL
        pause = min(pause, limits.min_ttl * 2.0 ** min(state.failures - 1, 20))
    if state.held:
        pause = min(pause, max(min(state.held.values()) - now, limits.min_ttl))
    return replace(state, next_at=now + _spread(pause, part))


def _spread(pause: float, part: float) -> float:
    """Never earlier, as a resolver would give the same records again; up to a tenth later, so that the names
    of a host and the hosts of a fleet do not ask together."""
    return pause * (1.0 + part / 10)


def _with_kept(result: LookupResult, serving: Iterable[Target]) -> dict[tuple[str, int], Target]:
    """The targets found, and those of failed parts as the last good answer had them; by place."""
    found = {target.place: target for target in result.targets}
    if result.fault or not result.failed:
        return found
    for target in serving:
        if Part(target.host, family_of(target.address)) in result.failed:
            found.setdefault(target.place, target)
    return found


def _guarded(
    state: NameState,
    found: Mapping[tuple[str, int], Target],
    listed: Collection[tuple[str, int]],
    limits: AnswerLimits,
    now: float,
) -> NameState:
    """The state with this answer, as far as the guard allows. `listed`: the places that the answer itself
    has; it says nothing of others in `found`."""
    established = {target.place: target for target in state.established}
    lacking = established.keys() - found.keys()
    suspicious = 2 * len(lacking) > len(established) or not lacking.isdisjoint(state.held)
    until = {place: state.held.get(place, now + limits.hold) for place in lacking} if suspicious else {}
    held = {place: end for place, end in until.items() if end > now}
    held.update((place, end) for place, end in state.held.items() if place in found and place not in listed)
    trial = {p: state.trial.get(p, now + limits.hold) for p in found if p not in established} if held else {}
    trial = {place: end for place, end in trial.items() if end > now}
    kept = {place: established[place] for place in held if place not in found}
    # Answers that differ each time must not pile up what serves.
    serving, beyond = limited((*kept.values(), *found.values()), state, 2 * limits.max_targets)
    left = {target.place for target in serving}
    return replace(
        state,
        serving=tuple(sorted(serving)),
        held=held,
        trial={place: end for place, end in trial.items() if place in left},
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
    distinct = list({target.place: target for target in targets}.values())
    rank = {target.place: 1 if target.place in known.trial else 0 for target in known.serving}
    distinct.sort(key=lambda t: (rank.get(t.place, 2), t.priority, t.place))
    return distinct[:most], max(0, len(distinct) - most)
