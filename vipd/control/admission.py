"""Decides which version of each unit may serve: checks its claims against this host's policy. Pure.

A candidate must satisfy the whole policy; an accepted version must satisfy only the settings. The number of
endpoints of all units together is limited, and that of the host ports of one author's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from vipd.control.address_policy import (
    AddressPolicy,
    CheckProblems,
    admit_addresses,
    admit_service,
    checks_to_query,
    host_port_numbers,
    no_problems,
    port_share_problem,
)
from vipd.declaration.problems import Declaration, Problem, ProblemList, internal_problem
from vipd.declaration.unit import EMPTY_DECLARATION, Unit
from vipd.model import limits
from vipd.model.check import Check
from vipd.model.service import Service


def admit(
    declaration: Declaration,
    policy: AddressPolicy,
    passed: Collection[int] = frozenset(),
    serving: Mapping[str, Service] | None = None,
) -> Declaration:
    """The declaration with a problem for each thing that the policy does not allow, in line order, and
    without the addresses that it refuses alone. Skips services whose `id` is in `passed`; `serving` are the
    versions in use by name. If the declaration already has problems, the host is not queried."""
    if not declaration.ok:
        policy = replace(policy, check_problems=no_problems)
    found: list[Problem] = []
    services = list(declaration.services)
    for index, service in enumerate(declaration.services):
        if id(service) in passed:
            continue
        try:
            known = (serving or {}).get(service.name)
            services[index], left_out = admit_addresses(service, policy, known)
            found += (*left_out, *admit_service(services[index], policy, known))
        except Exception as error:
            # The exception is reported only if the declaration has no problems yet. Otherwise the service may
            # have been read only in part, which may be the exception's cause.
            origin = service.origin
            place, doing = origin.path or origin.source, f"admitting {service.name}"
            found += [internal_problem(error, doing, place, origin.line)] if declaration.ok else []
    if not found:
        return declaration
    problems = ProblemList((*found, *declaration.problems)).by_line()
    return replace(declaration, services=tuple(services), problems=problems)


def _allowed_part(service: Service, policy: AddressPolicy) -> Service | None:
    """The part of a service that was accepted earlier and may continue to serve; None: no part of it."""
    try:
        service, _ = admit_addresses(service, policy)
        return None if admit_service(service, policy) else service
    except Exception:  # the same exception refuses its candidate, and is reported there
        return service


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A unit as the source gave it, and as admitted. The sets contain the `id` of services, which is unique
    while the unit is kept."""

    given: Unit
    unit: Unit
    passed_policy: frozenset[int] = frozenset()
    """Services that pass the whole policy."""
    passed_settings: frozenset[int] = frozenset()
    """Services that pass the policy for accepted versions."""


def admit_unit(unit: Unit, policy: AddressPolicy) -> Unit:
    """The part of a unit that may serve.

    A candidate must satisfy the whole policy. An unchanged accepted version must satisfy only the settings,
    and loses the services that they forbid. The host's state does not matter for it, because a host may take
    over an address that is already served, as keepalived does.
    """
    return _admitted(unit, policy, None).unit


def _admitted(unit: Unit, policy: AddressPolicy, before: _Admitted | None) -> _Admitted:
    passed_policy, passed_settings = (
        (before.passed_policy, before.passed_settings) if before else (frozenset[int](), frozenset[int]())
    )
    accepted_policy = policy.for_accepted()
    services = unit.accepted.services
    parts = [s if id(s) in passed_settings else _allowed_part(s, accepted_policy) for s in services]
    allowed = tuple([part for part in parts if part is not None])
    same = all(part is service for part, service in zip(parts, services, strict=True))
    accepted = unit.accepted if same else replace(unit.accepted, services=allowed)
    if unit.candidate is unit.accepted:
        candidate = accepted if same else admit(unit.candidate, accepted_policy)
        known = passed_policy.intersection(map(id, allowed))
    else:
        # A service that did not change is not checked again, nor is what a changed one claims already. The
        # host may have taken over its address since then, or somebody may listen on its port: neither keeps
        # the services of the unit from changing.
        serving = {service.name: service for service in allowed}
        unchanged = {id(s) for s in unit.candidate.services if serving.get(s.name) == s}
        candidate = admit(unit.candidate, policy, passed_policy | unchanged, serving)
        known = frozenset(map(id, unit.candidate.services)) if candidate is unit.candidate else frozenset()
    return _Admitted(
        unit, replace(unit, candidate=candidate, accepted=accepted), known, known.union(map(id, allowed))
    )


class Admission:
    """The admitted part of all units. Unchanged units are not checked again, nor are unchanged services of a
    changed unit, while the policy is the same."""

    def __init__(self) -> None:
        self._policy: AddressPolicy | None = None
        self._admitted: dict[str, _Admitted] = {}
        self._given: dict[str, Unit] = {}
        self._refused: set[str] = set()
        self._budget, self._port_shares = EndpointBudget(), HostPortShares()
        self.units: dict[str, Unit] = {}
        """The admitted units by name; later calls update it."""

    def update_units(self, sources: Sequence[Mapping[str, Unit]], policy: AddressPolicy) -> set[str]:
        """Read the sources' current units. Returns the names of the units to check and of those that are
        gone."""
        # Check refused units again, because the host may have changed: a missing program may exist now.
        changed, number = set(self._refused), 0
        if policy != self._policy:
            self._admitted.clear()
            changed.update(self._given)
        self._policy = policy  # an equal policy may have other sockets
        given = self._given
        for units in sources:
            number += len(units)
            for name, unit in units.items():
                if name not in given or given[name] is not unit:
                    given[name] = unit
                    changed.add(name)
        if number < len(given):
            changed |= self._leave({name for units in sources for name in units})
        return changed

    def size(self, units: Iterable[str]) -> int:
        """Number of services that these units declare."""
        return sum(len(self._given[name].candidate.services) for name in units if name in self._given)

    def checks_to_query(self, units: Iterable[str]) -> set[Check]:
        """The checks in these units that depend on the host's state. Candidates with problems are left
        out."""
        assert self._policy is not None  # noqa: S101 (units are noticed under a policy)
        found = set[Check]()
        for name in units:
            unit, before = self._given.get(name), self._admitted.get(name)
            if unit is None or unit.candidate is unit.accepted or not unit.candidate.ok:
                continue
            passed = before.passed_policy if before else frozenset[int]()
            fresh = [service for service in unit.candidate.services if id(service) not in passed]
            found.update(check for service in fresh for check in checks_to_query(service, self._policy))
        return found

    def admit(self, changed: Iterable[str], check_problems: CheckProblems | None = None) -> set[str]:
        """Check the units that `update_units` returned. Returns the names of those that changed or are gone.

        `check_problems` returns what the host lacks for each check of `checks_to_query`; None: the policy's
        own function is called.
        """
        assert self._policy is not None  # noqa: S101 (units are noticed under a policy)
        policy = self._policy
        if check_problems is not None:
            policy = replace(policy, check_problems=check_problems)
        found = set[str]()
        # Units that already serve come first, so that the endpoint limit refuses newcomers rather than them.
        for name in sorted(changed, key=lambda name: (self._newcomer(name), name)):
            unit, before = self._given.get(name), self._admitted.get(name)
            if unit is None:
                found.add(name)
                continue
            if before and name not in self._refused and _same(before.given, unit):
                continue
            try:
                after = _admitted(unit, policy, before)
            except Exception as error:  # refuses only this unit
                after = _Admitted(unit, refused(name, unit, error, "admitting it"))
            if self._record(name, after):
                found.add(name)
        return found

    def _newcomer(self, name: str) -> bool:
        unit = self._given.get(name)
        return unit is not None and unit.candidate is not unit.accepted

    def _leave(self, present: set[str]) -> set[str]:
        gone = self._given.keys() - present
        for name in gone:
            del self._given[name]
            self._admitted.pop(name, None)
            self._budget.drop(name)
            self._port_shares.drop(name)
            self.units.pop(name, None)
            self._refused.discard(name)
        return gone

    def _record(self, name: str, admitted: _Admitted) -> bool:
        """Record an admitted unit, as far as the limits of endpoints and host ports allow it. Returns whether
        the admitted part has changed."""
        assert self._policy is not None  # noqa: S101 (units are noticed under a policy)
        most = self._policy.host_ports_per_author
        unit = self._budget.admit(name, self._port_shares.admit(name, admitted.unit, most))
        self._admitted[name] = replace(admitted, unit=unit)
        (self._refused.discard if unit.candidate.ok else self._refused.add)(name)
        known = self.units.get(name)
        if known is not None and _equivalent(known, unit):
            return False
        self.units[name] = unit
        return True


def refused(name: str, unit: Unit, error: Exception, doing: str) -> Unit:
    """The unit with an unexpected exception as a further problem of its candidate, so that its accepted
    version continues to serve."""
    problem = internal_problem(error, doing, name.removeprefix("file:"))
    problems = (*unit.candidate.problems, problem)
    return Unit(replace(unit.candidate, problems=problems), unit.accepted)


def _same(one: Unit, other: Unit) -> bool:
    return one.candidate is other.candidate and one.accepted is other.accepted


def _equivalent(one: Unit, other: Unit) -> bool:
    """Whether two units are equivalent; a refused unit is a new object at each check."""
    refused = bool(other.candidate.problems) and one.candidate == other.candidate
    return one.accepted is other.accepted and (refused or one.candidate is other.candidate)


class EndpointBudget:
    """Limits the endpoints of all units together. Counts each unit in the version that serves."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._size = 0

    def drop(self, name: str) -> None:
        """Stop counting a unit."""
        self._size -= self._sizes.pop(name, 0)

    def admit(self, name: str, unit: Unit) -> Unit:
        """Count a unit; returns it, with a problem of the candidate if that exceeds the limit.

        An accepted version was within the limit when it was accepted. If it dates from before the limit
        existed, up to twice the limit is allowed; beyond that it does not serve.
        """
        self.drop(name)
        chosen = unit.candidate if unit.candidate.ok else unit.accepted
        size, most = _size_of(chosen), limits.MAX_TOTAL_SIZE
        if self._size + size > most and chosen is not unit.accepted:
            unit = Unit(_over_limit(name, unit.candidate, size, most - self._size), unit.accepted)
            chosen, size = unit.accepted, _size_of(unit.accepted)
        if self._size + size > 2 * most:
            unit = Unit(_over_limit(name, unit.candidate, size, 0), EMPTY_DECLARATION)
            size = 0
        self._sizes[name] = size
        self._size += size
        return unit


class HostPortShares:
    """Limits the ports of this host that the units of one author take together. Counts each unit in the
    version that serves."""

    def __init__(self) -> None:
        self._units: dict[str, tuple[str, set[int]]] = {}
        """By unit: its author, and the numbers of its ports; only units with such ports."""
        self._taken: dict[str, Counter[int]] = {}
        """By author: the number of units that have each port."""

    def drop(self, name: str) -> None:
        """Stop counting a unit."""
        author, numbers = self._units.pop(name, ("", set[int]()))
        for number in numbers:
            self._taken[author][number] -= 1
            if not self._taken[author][number]:
                del self._taken[author][number]
        if numbers and not self._taken[author]:
            del self._taken[author]

    def admit(self, name: str, unit: Unit, most: int) -> Unit:
        """Count a unit; returns it, with a problem of the candidate if that has new ports beyond what its
        author may have. An accepted version keeps its ports."""
        self.drop(name)
        chosen = unit.candidate if unit.candidate.ok else unit.accepted
        numbers, author = _host_ports_of(chosen)
        if not numbers:
            return unit
        if chosen is not unit.accepted and not numbers <= _host_ports_of(unit.accepted)[0]:
            problem = port_share_problem(chosen.services, self._taken.get(author, ()), most)
            if problem:
                problems = (*chosen.problems, problem)
                unit = Unit(replace(chosen, problems=problems), unit.accepted)
                numbers, author = _host_ports_of(unit.accepted)
        if numbers:
            self._units[name] = author, numbers
            self._taken.setdefault(author, Counter()).update(numbers)
        return unit


def _host_ports_of(declaration: Declaration) -> tuple[set[int], str]:
    """The ports of this host that it takes, and their author."""
    services = declaration.services
    numbers = {number for service in services for number in host_port_numbers(service)}
    return numbers, services[0].origin.author if services else ""


def _size_of(declaration: Declaration) -> int:
    return sum(map(limits.declared_size, declaration.services))


def _over_limit(name: str, candidate: Declaration, size: int, room: int) -> Declaration:
    what = f"its services have {size} endpoints, and there is room for {max(0, room)} beside all others"
    hint = f"{limits.MAX_TOTAL_SIZE} are the most: remove services, or backends"
    problem = Problem(name.removeprefix("file:"), 0, "", what, hint)
    return replace(candidate, problems=(*candidate.problems, problem))
