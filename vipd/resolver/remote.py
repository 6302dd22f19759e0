"""Lookups in the worker process (`vipd/host/worker.py`): its end and the daemon's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from vipd.declaration.problems import internal_error
from vipd.host.worker import Worker
from vipd.model.service import Family, NameKind
from vipd.model.text import shortened
from vipd.resolver.answers import LookupResult, NameState, Part, Question, Target
from vipd.resolver.lookup import LONGEST, LookupThreads, ServerOptions
from vipd.resolver.saved_answers import GARBAGE, read_target

log = logging.getLogger(__name__)

_MOST_SECONDS = 2.0**32
"""A TTL has 32 bits."""
_MOST_REASON = 500


class RemoteLookup:
    """Has the worker look a name up."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def __call__(
        self,
        question: Question,
        families: Collection[Family],
        options: ServerOptions,
        known: NameState,
        most: int,
    ) -> LookupResult:
        """As `lookup.look_up`. Raises ValueError if the worker's answer is none."""
        asked = _Asked(most)
        request = _request(question, families, options, known, most)
        number = self._worker.ask("lookup", request, asked, LONGEST * options.timeout)
        try:
            return await asked.result
        finally:
            self._worker.cancel(number)


class _Asked:
    """A lookup that the worker was asked for."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.result: asyncio.Future[LookupResult] = asyncio.get_running_loop().create_future()

    def answered(self, answer: Any) -> None:
        """Take the result. Raises ValueError for what is none."""
        result = read_result(answer, self._most)
        if not self.result.done():
            self.result.set_result(result)

    def failed(self, why: str) -> None:
        """There is none."""
        if not self.result.done():
            self.result.set_result(LookupResult(fault=why))


class LookupServer:
    """Looks names up in the worker."""

    def __init__(self) -> None:
        self._look_up = LookupThreads()

    def start(self, request: list[Any], done: Callable[[list[Any]], None]) -> asyncio.Task[None]:
        """Begin a lookup."""
        return asyncio.create_task(self._answer(request, done), name="look up")

    async def _answer(self, request: list[Any], done: Callable[[list[Any]], None]) -> None:
        try:
            result = await self._result(*request)
        except Exception as error:  # a fault of this name alone
            log.exception("looking up %s fails", request[1])
            result = LookupResult(fault=internal_error(error, f"looking up {request[1]}"))
        done(written_result(result))

    async def _result(self, *request: Any) -> LookupResult:
        kind, name, families, (servers, timeout, resolv_conf), (serving, trial), most = request
        known = NameState(
            tuple(Target(*target) for target in serving), trial=dict.fromkeys(map(tuple, trial), 0.0)
        )
        options = ServerOptions(tuple(map(tuple, servers)), timeout, Path(resolv_conf))
        wanted = [Family(family) for family in families]
        return await self._look_up(Question(NameKind(kind), name), wanted, options, known, most)


def _request(
    question: Question, families: Collection[Family], options: ServerOptions, known: NameState, most: int
) -> list[Any]:
    servers = [options.servers, options.timeout, str(options.resolv_conf)]
    return [
        question.kind.value,
        question.name,
        [family.value for family in families],
        servers,
        [known.serving, list(known.trial)],
        most,
    ]


def written_result(result: LookupResult) -> list[Any]:
    """A result as an answer."""
    failed = [[part.host, part.family.value, why] for part, why in result.failed.items()]
    return [result.targets, result.ttl, result.fault, failed, result.left_out]


def read_result(answer: Any, most: int) -> LookupResult:
    """The result in an answer, which may be anything, of at most `most` targets. Raises ValueError."""
    try:
        targets, ttl, fault, failed, left_out = answer
        if len(targets) > most or not 0 <= ttl < _MOST_SECONDS or not 0 <= left_out <= 2**16:
            raise ValueError
        parts = {
            Part(shortened(host, 255), Family(family)): shortened(why, _MOST_REASON)
            for host, family, why in failed
        }
        found = tuple(map(read_target, targets))
        return LookupResult(found, float(ttl), shortened(fault, _MOST_REASON), parts, int(left_out))
    except GARBAGE:
        raise ValueError("no result of a lookup") from None
