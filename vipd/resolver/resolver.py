"""The interface of name resolution: follows the names of services, looks them up, and reports changes.

`run` schedules; the worker process looks up, few names at a time. All state belongs to the event loop. Each
author of services has a share of the names and of the lookups under way; a name that several authors use is
in the share of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from random import random as any_part
from time import monotonic, time

from vipd.declaration.problems import internal_error
from vipd.host.observer import Observer
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
from vipd.resolver.log import log_change
from vipd.resolver.lookup import LOOKUPS_AT_ONCE, LookupThreads, ServerOptions
from vipd.resolver.saved_answers import GARBAGE, SavedAnswer, decode, encode, key_of
from vipd.sources.cache import Cache

log = logging.getLogger(__name__)

FIRST_ANSWERS_SECONDS = 10.0
"""How long a vipd that applies its declarations once waits for answers."""

Answers = Mapping[Question, tuple[Target, ...]]
"""What serves, by question; none for a question without an answer yet."""
LookUp = Callable[
    [Question, Collection[Family], ServerOptions, NameState, int], Coroutine[None, None, LookupResult]
]
"""As `lookup.look_up`, without blocking."""


@dataclass(frozen=True, slots=True)
class ResolverOptions:
    """The settings of name resolution."""

    servers: ServerOptions = field(default_factory=ServerOptions)
    limits: AnswerLimits = field(default_factory=AnswerLimits)
    max_names: int = 1000
    cache: Cache | None = None
    """It keeps the last good answers."""


@dataclass(slots=True)
class _Share:
    """The names of one author, oldest first."""

    looked_up: dict[Question, None] = field(default_factory=dict)
    waiting: dict[Question, None] = field(default_factory=dict)
    """Names beyond the limit."""


@dataclass(slots=True, eq=False)
class _Lookup:
    """A lookup that is due or under way."""

    question: Question
    author: str
    due: float
    slow: bool
    """The last one failed."""
    running: bool = False
    gone: bool = False


class Resolver:
    """Knows the names of all services and what serves of their answers. Looks up while `run` runs.

    `look_up` looks one name up; None: threads do. `clock` is monotonic, `wall` returns seconds since 1970,
    `part` numbers from 0 up to 1.
    """

    def __init__(
        self,
        options: ResolverOptions = ResolverOptions(),
        observer: Observer | None = None,
        look_up: LookUp | None = None,
        clock: Callable[[], float] = monotonic,
        wall: Callable[[], float] = time,
        part: Callable[[], float] = any_part,
    ) -> None:
        self._options, self._observer = options, observer or Observer()
        self._look_up = look_up or LookupThreads()
        self._clock, self._wall, self._part = clock, wall, part
        cache = options.cache
        self._bucket = cache.bucket("answer", encode, self._whole) if cache else None
        self._saved: dict[Question, SavedAnswer] = {}
        self._states: dict[Question, NameState] = {}
        self._users: dict[Question, dict[str, frozenset[Family]]] = {}
        """The services that use each question, and their families."""
        self._families: dict[Question, Counter[Family]] = {}
        """Number of these services of each family: thousands may use one name."""
        self._followed: dict[str, frozenset[Question]] = {}
        self._authors: dict[str, str] = {}
        """The author of each followed service."""
        self._shares: dict[str, _Share] = {}
        self._author_of: dict[Question, str] = {}
        """The author in whose share a question is."""
        self._answers: dict[Question, tuple[Target, ...]] = {}
        self._due: list[tuple[float, Question]] = []
        """A heap of lookups to come. An entry counts if it has the time of the question's state."""
        self._slots = FairQueue("lookups", LOOKUPS_AT_ONCE)
        self._asking: dict[Question, _Lookup] = {}
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
            self._saved[question], self._answers[question] = saved, saved.targets

    @property
    def answers(self) -> Answers:
        """What serves. Values are replaced, never changed."""
        return dict(self._answers)

    @property
    def states(self) -> Mapping[Question, NameState]:
        """Every followed question that is looked up."""
        return self._states

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
        wanted = frozenset(map(Question.of, declared.names)) if declared else frozenset[Question]()
        before = self._followed.pop(service, frozenset())
        self._authors.pop(service, None)
        for question in before:
            self._families[question].subtract(self._users[question].pop(service))
        if declared and wanted:
            self._followed[service], self._authors[service] = wanted, declared.origin.author
        families = frozenset(map(family_of, declared.all_addresses())) if declared else frozenset[Family]()
        for question in wanted:
            self._users.setdefault(question, {})[service] = families
            self._families.setdefault(question, Counter()).update(families)
        for question in before | wanted:
            self._update(question, self._authors.get(service))

    def _update(self, question: Question, author: str | None) -> None:
        """Begin, continue or end to look up a question. `author` is that of the service that has changed;
        None: it is gone."""
        if not self._users.get(question):
            self._end(question)
            return
        self._assign(question, author)
        state = self._states.get(question)
        if state is None:
            self._begin(question)
        elif not self._families_of(question) <= self._asked.get(question, frozenset()):
            self._put(question, replace(state, next_at=self._clock()))

    def _assign(self, question: Question, author: str | None) -> None:
        """Put a question into the share of that author of its services who has the fewest names."""
        before, services = self._author_of.get(question), self._users[question]
        if any(self._authors[service] == before for service in services):
            if author is None or author == before or self._load(author) >= self._load(before):
                return
        else:
            author = min({self._authors[service] for service in services}, key=self._load)
        self._leave_share(question)
        share = self._shares.setdefault(author, _Share())
        (share.looked_up if question in self._states else share.waiting)[question] = None
        self._author_of[question] = author

    def _leave_share(self, question: Question) -> None:
        author = self._author_of.pop(question, None)
        if author is not None:
            share = self._shares[author]
            share.looked_up.pop(question, None)
            share.waiting.pop(question, None)
            if not share.looked_up and not share.waiting:
                del self._shares[author]

    def _load(self, author: str | None) -> int:
        """How many names of an author are looked up."""
        share = self._shares.get(author or "")
        return len(share.looked_up) if share else 0

    def _begin(self, question: Question) -> None:
        """Look a question up from now on, if it has a place."""
        author = self._author_of[question]
        if len(self._states) >= self._options.max_names and not self._make_room(author):
            return
        share = self._shares[author]
        share.waiting.pop(question, None)
        share.looked_up[question] = None
        saved = self._saved.pop(question, SavedAnswer((), None))
        self._put(question, NameState(saved.targets, answered_at=saved.answered_at, next_at=self._clock()))

    def _make_room(self, author: str) -> bool:
        """Whether the author with the most names had at least two more than this one. Then the newest of them
        waits, and its last answer serves on."""
        most = max(self._shares, key=self._load)
        if self._load(most) < self._load(author) + 2:
            return False
        question, _ = self._shares[most].looked_up.popitem()
        self._shares[most].waiting[question] = None
        state = self._states[question]
        self._saved[question] = SavedAnswer(state.established, state.answered_at)
        self._stop(question)
        return True

    def _stop(self, question: Question) -> None:
        """Look it up no longer."""
        self._states.pop(question, None)
        self._asked.pop(question, None)
        lookup = self._asking.get(question)
        if lookup and not lookup.running:
            lookup.gone = True
            del self._asking[question]

    def _end(self, question: Question) -> None:
        for known in (self._users, self._families, self._answers, self._saved):
            known.pop(question, None)
        self._leave_share(question)
        self._stop(question)
        self._save({question: None})
        if len(self._states) < self._options.max_names:
            authors = (author for author, share in self._shares.items() if share.waiting)
            if (author := min(authors, key=self._load, default=None)) is not None:
                self._begin(next(iter(self._shares[author].waiting)))

    def _families_of(self, question: Question) -> frozenset[Family]:
        return frozenset(+self._families.get(question, Counter[Family]()))

    def _put(self, question: Question, state: NameState) -> None:
        self._states[question] = state
        if state.serving:
            self._answers[question] = state.serving
        heappush(self._due, (state.next_at, question))
        self._wake.set()

    async def run(self) -> None:
        """Look up what is due, for ever."""
        while True:
            self._wake.clear()
            pause = self._begin_due()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    async def first_answers(self) -> bool:
        """Look up every name once, instead of `run`; names that take too long are left. Returns whether
        anything else serves then."""
        before, running = self.answers, asyncio.create_task(self.run())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ANSWERS_SECONDS):
                while self._states.keys() - (self._asked.keys() - self._asking.keys()):
                    self._looked_up.clear()
                    await self._looked_up.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return self.answers != before

    def _begin_due(self) -> float | None:
        """Begin the lookups that are due, as far as there is room. Returns the seconds until the next one;
        None: none is to come before something changes."""
        now, pause = self._clock(), None
        while self._due and pause is None:
            due, question = self._due[0]
            state = self._states.get(question)
            current = state is not None and state.next_at == due and question not in self._asking
            if current and due > now:
                pause = due - now
                continue
            heappop(self._due)
            if state is not None and current:
                author = self._author_of[question]
                self._asking[question] = _Lookup(question, author, due, state.failures > 0)
                self._slots.wait(self._asking[question], (author,))
        while isinstance(lookup := self._slots.next(), _Lookup):
            lookup.running = True
            task = asyncio.create_task(self._ask(lookup), name=f"looking up {lookup.question}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return pause

    async def _ask(self, lookup: _Lookup) -> None:
        """Look up one question, and take over the answer."""
        question = lookup.question
        families = self._families_of(question)
        self._asked[question] = families
        known = self._states.get(question, NameState())
        try:
            result = await self._result(question, families, known)
        finally:
            self._asking.pop(question, None)
            self._slots.ended(lookup.author, lookup.slow)
            self._wake.set()
            self._looked_up.set()
        before = self._states.get(question)
        if before is None:  # no service uses it any more
            self._asked.pop(question, None)
            return
        after = self._handle(question, before, result)
        if not self._families_of(question) <= families:  # a service of another family came meanwhile
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

    def _handle(self, question: Question, before: NameState, result: LookupResult) -> NameState:
        """The state after a lookup. An unexpected exception is a fault of this name alone, which is asked
        again: what it had serves on."""
        limits, now, part = self._options.limits, self._clock(), self._part()
        try:
            usable = without_useless(result, self.usable)
            return apply_result(before, usable, limits, now, self._wall(), part)
        except Exception as error:
            log.exception("handling the answer for %s fails", question)
            fault = internal_error(error, f"handling the answer for {question}")
            return apply_result(before, LookupResult(fault=fault), limits, now, self._wall(), part)

    async def _result(
        self, question: Question, families: Collection[Family], known: NameState
    ) -> LookupResult:
        """An unexpected exception is a fault of this name alone."""
        options = self._options
        try:
            return await self._look_up(question, families, options.servers, known, options.limits.max_targets)
        except Exception as error:
            log.exception("looking up %s fails", question)
            return LookupResult(fault=internal_error(error, f"looking up {question}"))

    def close(self) -> None:
        """Have all answers kept with their newest times, and no others."""
        self._save({question: None for question in self._saved if question not in self._users})
        self._save(dict(self._answers_to_save()))

    def _save(self, answers: Mapping[Question, SavedAnswer | None]) -> None:
        if self._bucket:
            self._bucket.put({key_of(question): saved for question, saved in answers.items()})

    def _whole(self) -> dict[str, SavedAnswer]:
        return {key_of(question): saved for question, saved in self._answers_to_save()}

    def _answers_to_save(self) -> Iterator[tuple[Question, SavedAnswer]]:
        for question, state in list(self._states.items()):
            if state.serving:  # what is on trial must not be the last good answer after a restart
                yield question, SavedAnswer(state.established, state.answered_at)
        for question, saved in list(self._saved.items()):
            if question in self._users:  # it waits for a place
                yield question, saved
