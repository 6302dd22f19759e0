"""Decides on a change of services: from a state of one moment, and in a thread if the change is
large."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from vipd.control.address_policy import AddressPolicy, admit_service, questions
from vipd.declaration import operations
from vipd.declaration.operations import Outcome, Services, declared, invalid
from vipd.declaration.problems import Problem
from vipd.host.facts import NO_FACTS
from vipd.host.gc_control import loading
from vipd.model.check import Check
from vipd.model.service import Service

NEW = ("created", "changed")
AT_ONCE = 200
"""Services up to which a decision takes some milliseconds."""
TRIES = 3
"""How often a decision is made in a thread. The state has changed each time then, so the last one runs on the
event loop."""

Answers = Mapping[Check, tuple[str, ...]]


class Change(Protocol):
    """The change of a request, computed from all services and those of its store."""

    def __call__(self, snapshot: Services, stored: Services, /, *, source: str) -> Outcome:
        """Raises RefusedError."""


@dataclass(frozen=True, slots=True)
class Known:
    """Every service as declared at one moment. The mappings do not change."""

    running: Services
    """The reconciler's services, which alone would be outdated while a step is running."""
    fleet: Services
    """The services in etcd, as last received."""
    here: Services
    """The services in this host's own store."""

    def services(self) -> dict[str, Service]:
        """Files as last read by a step, etcd and the store as they are now; without backends that registered
        themselves."""
        changeable = (operations.CLI, "etcd")
        files = {n: declared(s) for n, s in self.running.items() if s.origin.source not in changeable}
        # A key in etcd whose name a file already has does not serve.
        return {**self.fleet, **files, **self.here}

    def same(self, other: Known) -> bool:
        """Whether nothing has changed in between."""
        return self.running is other.running and self.here is other.here and self.fleet == other.fleet

    def __len__(self) -> int:
        return len(self.running) + len(self.fleet) + len(self.here)


@dataclass(frozen=True, slots=True)
class Asked:
    """A requested change."""

    change: Change
    source: str
    """The source of the services that it may change."""
    policy: AddressPolicy
    """The claims that services may make at the time of the request."""
    size: int = 1
    """Number of services that it names."""


@dataclass(frozen=True, slots=True)
class _Judged:
    outcome: Outcome
    unknown: frozenset[Check]
    """Checks that only this host can judge, and about which it has not been queried."""
    problems: tuple[Problem, ...]


async def decide(
    asked: Asked,
    known: Callable[[], Known],
    ask_host: Callable[[Collection[Check]], Awaitable[Answers]],
) -> Outcome:
    """The outcome of a change. When this returns, `known` still is its basis, so a caller that stores it
    without awaiting stores a valid result. Raises RefusedError.

    Others may change services while the host is queried, so the decision is repeated after each answer. A
    check without an answer counts as one without problems, and is not queried again.
    """
    answers: dict[Check, tuple[str, ...]] = {}
    while True:
        judged = await _judge_now(asked, known, answers)
        if not judged.unknown:
            break
        found = await ask_host(judged.unknown)
        answers.update({check: found.get(check, ()) for check in judged.unknown})
    if judged.problems:
        raise invalid(judged.problems)
    return judged.outcome


async def _judge_now(asked: Asked, known: Callable[[], Known], answers: Answers) -> _Judged:
    """The judgement on the state at the time when this returns. Raises RefusedError."""
    for _ in range(TRIES):
        basis = known()
        if len(basis) + asked.size <= AT_ONCE:
            break
        with loading():
            judging = asyncio.ensure_future(asyncio.to_thread(_judge, asked, basis, dict(answers)))
            await asyncio.wait((judging,))
        if basis.same(known()):
            return judging.result()
        judging.exception()
    return _judge(asked, known(), answers)


def _judge(asked: Asked, basis: Known, answers: Answers) -> _Judged:
    """The outcome of a change, and its problems. Pure. Raises RefusedError."""
    known = basis.services()
    stored = basis.here if asked.source == operations.CLI else basis.fleet
    outcome = asked.change(known, stored, source=asked.source)
    fresh = [outcome.stored[name] for name, action in outcome.results.items() if action in NEW]
    unknown = {check for service in fresh for check in questions(service, asked.policy)} - answers.keys()
    problems = () if unknown else tuple(_problems(fresh, known, asked.policy, answers))
    return _Judged(outcome, frozenset(unknown), problems)


def _problems(
    fresh: Collection[Service], known: Services, policy: AddressPolicy, answers: Answers
) -> list[Problem]:
    """Why new services are refused: services must not claim these things. An existing claim of a service is
    not a problem: it may be repaired, and lose backends, however the host has changed."""
    policy = replace(policy, check_problems=partial(_answer, answers))
    held = replace(policy, host_addresses=(), host=NO_FACTS)
    problems = list[Problem]()
    for service in fresh:
        before = known.get(service.name)
        same = before is not None and before.frontends() == service.frontends()
        problems += admit_service(service, held if same else policy)
    return problems


def _answer(answers: Answers, check: Check) -> tuple[str, ...]:
    return answers.get(check, ())
