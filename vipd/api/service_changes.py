"""Decides on a change of services: all of it from what is known at one moment, and beside the event loop
where that is much."""

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
"""How often a decision is made beside the event loop. What is known has changed each time then, so the last
one waits for nobody."""

Answers = Mapping[Check, tuple[str, ...]]


class Change(Protocol):
    """What a request wants, decided on all services and on those of the store that it is for."""

    def __call__(self, snapshot: Services, stored: Services, /, *, source: str) -> Outcome:
        """Raises RefusedError."""


@dataclass(frozen=True, slots=True)
class Known:
    """Every service as it is declared at one moment. The mappings do not change."""

    running: Services
    """What the reconciler has taken up, which alone would be behind while a step is running."""
    fleet: Services
    """What etcd holds, as last received."""
    here: Services
    """What this host's own store holds."""

    def services(self) -> dict[str, Service]:
        """Files as last taken up, etcd and the store as they are now; without backends that registered
        themselves."""
        changeable = (operations.CLI, "etcd")
        files = {n: declared(s) for n, s in self.running.items() if s.origin.source not in changeable}
        # A key in etcd whose name a file has already serves nobody.
        return {**self.fleet, **files, **self.here}

    def same(self, other: Known) -> bool:
        """Whether nothing has changed in between."""
        return self.running is other.running and self.here is other.here and self.fleet == other.fleet

    def __len__(self) -> int:
        return len(self.running) + len(self.fleet) + len(self.here)


@dataclass(frozen=True, slots=True)
class Asked:
    """A change that somebody asks for."""

    change: Change
    source: str
    """Of the services that it may change."""
    policy: AddressPolicy
    """What services may claim when they ask."""
    size: int = 1
    """How many services it names."""


@dataclass(frozen=True, slots=True)
class _Judged:
    outcome: Outcome
    unknown: frozenset[Check]
    """Checks that only this host can judge, and was not asked about."""
    problems: tuple[Problem, ...]


async def decide(
    asked: Asked,
    known: Callable[[], Known],
    ask_host: Callable[[Collection[Check]], Awaitable[Answers]],
) -> Outcome:
    """What a change comes to. When this returns, `known` still is what it was decided on, so whoever stores
    it without waiting stores what is right. Raises RefusedError.

    Others may change services while the host is asked, so it is decided anew after each answer. A check
    without an answer counts as one that nothing keeps from working, and is not asked again.
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
    """The judgement on what is known when this returns. Raises RefusedError."""
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
    """What a change comes to, and what is wrong with it. Pure. Raises RefusedError."""
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
    """Why new services may not be: what they claim is not for services. What a service claims already is not
    held against it: it may be mended, and relieved of backends, whatever the host has become meanwhile."""
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
