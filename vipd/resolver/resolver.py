"""The interface of name resolution: follows the names of services, looks them up, and reports changes.

`run` schedules; the worker process looks up, few names at a time. All state belongs to the event loop. Each
author of services has a share of the names and of the lookups under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from random import random
from time import monotonic, time
from typing import NamedTuple

from vipd.declaration.problems import internal_error
from vipd.host.observer import Observer
from vipd.host.systemd.fields import Event, fields
from vipd.model.fair_queue import FairQueue
from vipd.model.service import Family, Service, family_of
from vipd.model.text import shortened
from vipd.resolver.answers import (
    AnswerLimits,
    LookupResult,
    NameState,
    Question,
    Target,
    apply_result,
    without_useless,
)
from vipd.resolver.saved_answers import GARBAGE, SavedAnswer, decode, encode, key_of
from vipd.sources.cache import Cache

log = logging.getLogger(__name__)

LOOKUPS_AT_ONCE = 64
"""One author has at most half of them, and of that half three quarters for names without an answer, each of
which takes the whole timeout."""
FIRST_ANSWERS_SECONDS = 10.0
"""How long a vipd that applies its declarations once waits for answers."""
_MOST_SHOWN = 5

Answers = Mapping[Question, tuple[Target, ...]]
"""What serves, by question; none for a question without an answer yet."""
LookUp = Callable[[Question, Collection[Family], NameState], Coroutine[None, None, LookupResult]]
"""Looks up the addresses of these families. What serves is preferred where there are too many."""


@dataclass(frozen=True, slots=True)
class ResolverOptions:
    """The settings of name resolution."""

    limits: AnswerLimits = field(default_factory=AnswerLimits)
    max_names: int = 1000
    cache: Cache | None = None
    """It keeps the last good answers."""


class _User(NamedTuple):
    """A service that uses a name."""

    author: str
    families: frozenset[Family]


@dataclass(slots=True, eq=False)
class _Lookup:
    """A lookup that is due or under way."""

    question: Question
    due: float
    slow: bool
    """The last one gave no answer, or none has yet."""
    author: str = ""
    """In whose share it is."""
    running: bool = False
    gone: bool = False


def fair_share(names: Mapping[Question, Iterable[str]], most: int) -> set[Question]:
    """The names that are looked up if only so many can be. `names`: the authors of each, oldest first. The
    authors take turns, each with its oldest name that nobody has taken."""
    if len(names) <= most:
        return set(names)
    of_author: dict[str, list[Question]] = {}
    for question, authors in names.items():
        for author in authors:
            of_author.setdefault(author, []).append(question)
    taken, turns = set[Question](), deque(map(iter, of_author.values()))
    while len(taken) < most:
        turn = turns.popleft()
        for question in turn:
            if question not in taken:
                taken.add(question)
                turns.append(turn)
                break
    return taken


class Resolver:
    """Knows the names of all services and what serves of their answers. Looks up while `run` runs.

    `look_up` looks one name up. `clock` is monotonic, `wall` returns seconds since 1970,
    `part` numbers from 0 up to 1.
    """

    def __init__(
        self,
        options: ResolverOptions,
        observer: Observer,
        look_up: LookUp,
        clock: Callable[[], float] = monotonic,
        wall: Callable[[], float] = time,
        part: Callable[[], float] = random,
    ) -> None:
        self._options, self._observer, self._look_up = options, observer, look_up
        self._clock, self._wall, self._part = clock, wall, part
        cache = options.cache
        self._bucket = cache.bucket("answer", encode, self._whole) if cache else None
        self.states: dict[Question, NameState] = {}
        """Every question that is looked up."""
        self._kept: dict[Question, NameState] = {}
        """Questions that are not, with answers of an earlier run, or from before there were too many."""
        self._users: dict[Question, dict[str, _User]] = {}
        """The services that use each question, by name; the oldest question first."""
        self._followed: dict[str, frozenset[Question]] = {}
        """The questions of each service."""
        self._undivided = False
        """Names have come or gone since it was decided which are looked up."""
        self._due: list[tuple[float, Question]] = []
        """A heap of lookups to come. An entry counts if it has the time of the question's state."""
        self._slots = FairQueue("lookups", LOOKUPS_AT_ONCE)
        self._lookups: dict[Question, _Lookup] = {}
        """The lookups that wait for a slot or are under way."""
        self._asked: dict[Question, frozenset[Family]] = {}
        """The families of each question's last lookup."""
        self._wake = asyncio.Event()
        self._looked_up = asyncio.Event()
        """A lookup has ended."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.usable: Callable[[str], bool] = lambda _: True
        """Whether a service of any source may have a backend at an address that a name resolves to."""
        self.lookups = {"answered": 0, "failed": 0}
        """Number of lookups by how they ended."""

    def load(self) -> None:
        """Read the answers of an earlier run, which serve from the first step on. Blocks."""
        for key, text in self._bucket.load().items() if self._bucket else ():
            try:
                question, saved = decode(key, text)
            except GARBAGE as error:
                log.warning("the last answer for %s cannot be read: %s", shortened(key, 100), error)
                continue
            self._kept[question] = NameState(saved.targets, answered_at=saved.answered_at)

    @property
    def answers(self) -> Answers:
        """What serves. Values are replaced, never changed."""
        known = (*self._kept.items(), *self.states.items())
        return {question: state.serving for question, state in known if state.serving}

    @property
    def beyond_limit(self) -> int:
        """Number of names that are not looked up, because there are too many."""
        return max(0, len(self._users) - self._options.max_names)

    def seconds_until(self, state: NameState) -> float:
        """Seconds until the next lookup is due."""
        return max(0.0, state.next_at - self._clock())

    def services_of(self, question: Question) -> list[str]:
        """The services that use it."""
        return sorted(self._users.get(question, ()))

    def follow(self, service: str, declared: Service | None) -> None:
        """Set the names of a service; None: it is gone."""
        if service not in self._followed and not (declared and declared.names):
            return  # most services
        before = self._followed.pop(service, frozenset())
        for question in before:
            del self._users[question][service]
        wanted = frozenset[Question]()
        if declared and declared.names:
            wanted = self._followed[service] = frozenset(map(Question.of, declared.names))
            user = _User(declared.origin.author, frozenset(map(family_of, declared.all_addresses())))
            for question in wanted:
                self._users.setdefault(question, {})[service] = user
                if question in self.states and not user.families <= self._asked.get(question, user.families):
                    self._put(question, replace(self.states[question], next_at=self._clock()))
        for question in before - wanted:
            if not self._users[question]:
                self._forget(question)
        self._undivided = True
        self._wake.set()

    def _forget(self, question: Question) -> None:
        """No service uses it any more."""
        del self._users[question]
        self._kept.pop(question, None)
        self._stop(question)
        self._save({question: None})

    def _stop(self, question: Question) -> None:
        """Look it up no longer."""
        self.states.pop(question, None)
        self._asked.pop(question, None)
        lookup = self._lookups.get(question)
        if lookup and not lookup.running:
            lookup.gone = True
            del self._lookups[question]

    def _divide(self) -> None:
        """Decide which names are looked up. The last answers of the others serve on."""
        self._undivided, now = False, self._clock()
        most = self._options.max_names
        taken = fair_share({question: self._authors(question) for question in self._users}, most)
        for question in self.states.keys() - taken:
            self._kept[question] = self.states[question]
            self._stop(question)
        for question in taken - self.states.keys():
            self._put(question, replace(self._kept.pop(question, NameState()), next_at=now))

    def _authors(self, question: Question) -> list[str]:
        return list(dict.fromkeys(user.author for user in self._users[question].values()))

    def _families(self, question: Question) -> frozenset[Family]:
        return frozenset[Family]().union(*(user.families for user in self._users.get(question, {}).values()))

    def _put(self, question: Question, state: NameState) -> None:
        self.states[question] = state
        heappush(self._due, (state.next_at, question))
        self._wake.set()

    async def run(self) -> None:
        """Look up what is due, for ever."""
        while True:
            self._wake.clear()
            if self._undivided:
                self._divide()
            self._begin_due()
            pause = max(0.0, self._due[0][0] - self._clock()) if self._due else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    async def first_answers(self) -> bool:
        """Look up every name once, instead of `run`; names that take too long are left. Returns whether
        anything else serves then."""
        self._divide()
        before, running = self.answers, asyncio.create_task(self.run())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ANSWERS_SECONDS):
                while self.states.keys() - (self._asked.keys() - self._lookups.keys()):
                    self._looked_up.clear()
                    await self._looked_up.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return self.answers != before

    def _begin_due(self) -> None:
        """Begin the lookups that are due, as far as there are slots."""
        while self._due and self._due[0][0] <= self._clock():
            due, question = heappop(self._due)
            state = self.states.get(question)
            if state is not None and state.next_at == due and question not in self._lookups:
                slow = state.failures > 0 or state.answered_at is None
                waiting = self._lookups[question] = _Lookup(question, due, slow)
                waiting.author = self._slots.wait(waiting, self._authors(question))
        while isinstance(lookup := self._slots.next(), _Lookup):
            lookup.running = True
            task = asyncio.create_task(self._ask(lookup), name=f"looking up {lookup.question}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask(self, lookup: _Lookup) -> None:
        """Look up one question, and take over the answer."""
        question = lookup.question
        families = self._asked[question] = self._families(question)
        try:
            result = await self._result(question, families)
        finally:
            del self._lookups[question]
            self._slots.ended(lookup.author, lookup.slow)
            self._wake.set()
            self._looked_up.set()
        before = self.states.get(question)
        if before is None:  # it is not looked up any more
            self._asked.pop(question, None)
            return
        after = self._apply(question, before, result)
        if not self._families(question) <= families:  # a service of another family came meanwhile
            after = replace(after, next_at=self._clock())
        self.lookups["failed" if after.failures else "answered"] += 1
        self._put(question, after)
        if after.established != before.established:
            # What is on trial must not be the last good answer after a restart.
            saved = SavedAnswer(after.established, after.answered_at) if after.serving else None
            self._save({question: saved})
        if after.serving != before.serving:
            self._observer.names_resolved(str(question), self.services_of(question))
        log_change(question, self.services_of(question), before, after)

    async def _result(self, question: Question, families: frozenset[Family]) -> LookupResult:
        """The result of a lookup. An unexpected exception is a fault of this name alone."""
        try:
            return await self._look_up(question, families, self.states.get(question, NameState()))
        except Exception as error:
            return _failed(f"looking up {question}", error)

    def _apply(self, question: Question, before: NameState, result: LookupResult) -> NameState:
        """The state after a lookup. After an unexpected exception what served serves on, and the name is
        asked again."""
        limits, times = self._options.limits, (self._clock(), self._wall(), self._part())
        try:
            return apply_result(before, without_useless(result, self.usable), limits, *times)
        except Exception as error:
            return apply_result(before, _failed(f"handling the answer for {question}", error), limits, *times)

    def close(self) -> None:
        """Have all answers kept with their newest times, and no others."""
        self._save({question: None for question in self._kept if question not in self._users})
        self._save(dict(self._answers_to_save()))

    def _save(self, answers: Mapping[Question, SavedAnswer | None]) -> None:
        if self._bucket:
            self._bucket.put({key_of(question): saved for question, saved in answers.items()})

    def _whole(self) -> dict[str, SavedAnswer]:
        return {key_of(question): saved for question, saved in self._answers_to_save()}

    def _answers_to_save(self) -> Iterator[tuple[Question, SavedAnswer]]:
        kept = [(question, state) for question, state in list(self._kept.items()) if question in self._users]
        for question, state in (*kept, *self.states.items()):
            if state.serving:  # what is on trial must not be the last good answer after a restart
                yield question, SavedAnswer(state.established, state.answered_at)


def _failed(doing: str, error: Exception) -> LookupResult:
    log.error("%s fails", doing, exc_info=error)
    return LookupResult(fault=internal_error(error, doing))


def log_change(question: Question, services: Collection[str], before: NameState, after: NameState) -> None:
    """Log what a lookup changed. A fault is logged when it begins, when its reason is another one, and when
    it is over."""

    def write(level: int, event: Event, text: str, reason: str = "") -> None:
        log.log(level, "%s", text, extra=fields(event, service=services, cause=str(question), reason=reason))

    if after.fault and after.fault != before.fault:
        kept = "its last good answer serves" if after.serving else "it has no answer yet: no backend of it"
        write(logging.WARNING, Event.NAME_FAILED, f"{question}: {after.fault}; {kept}", after.fault)
    elif before.fault and not after.fault:
        write(logging.INFO, Event.NAME_RECOVERED, f"{question} is resolved again")
    if after.held and not before.held:
        held = _shown(target for target in after.serving if target.endpoint in after.held)
        reason = f"an answer lacks {held}; they serve on until answers have lacked them for a while"
        write(logging.WARNING, Event.NAME_HELD, f"{question}: {reason}", reason)
    if after.serving != before.serving:
        reason = _difference(before.serving, after.serving)
        write(logging.INFO, Event.NAME_CHANGED, f"{question}: {reason}", reason)


def _difference(before: Collection[Target], after: Collection[Target]) -> str:
    old, new = {target.endpoint for target in before}, {target.endpoint for target in after}
    parts = []
    if new - old:
        parts.append(f"new: {_shown(target for target in after if target.endpoint not in old)}")
    if old - new:
        parts.append(f"gone: {_shown(target for target in before if target.endpoint not in new)}")
    return ", ".join(parts) or "other weights or priorities"


def _shown(targets: Iterable[Target]) -> str:
    texts = list(map(str, targets))
    more = f" and {len(texts) - _MOST_SHOWN} more" if len(texts) > _MOST_SHOWN else ""
    return " ".join(texts[:_MOST_SHOWN]) + more
