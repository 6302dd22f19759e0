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
from vipd.resolver.lookup import LONGEST, ServerOptions, look_up
from vipd.resolver.saved_answers import GARBAGE, read_target

log = logging.getLogger(__name__)

_MOST_SECONDS = 2.0**32
"""A TTL has 32 bits."""
_MOST_REASON = 500
_MOST_LEFT_OUT = 2**16


class RemoteLookup:
    """Has the worker look a name up."""

    def __init__(self, worker: Worker, options: ServerOptions, most: int) -> None:
        """`most`: addresses that an answer may have."""
        self._worker, self._options, self._most = worker, options, most

    async def __call__(
        self, question: Question, families: Collection[Family], known: NameState
    ) -> LookupResult:
        """As `lookup.look_up`."""
        options = self._options
        servers = [options.servers, options.timeout, str(options.resolv_conf)]
        serving = [known.serving, list(known.trial)]
        client = _Client(self._most)
        request = [question, list(families), servers, serving, self._most]
        number = self._worker.ask("lookup", request, client, LONGEST * options.timeout)
        try:
            return await client.result
        finally:
            self._worker.cancel(number)


class _Client:
    """Waits for the worker's result."""

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


def start_lookup(request: list[Any], done: Callable[[list[Any]], None]) -> asyncio.Task[None]:
    """Begin what a request asks for, in the worker."""
    return asyncio.create_task(_answer(request, done), name="look up")


async def _answer(request: list[Any], done: Callable[[list[Any]], None]) -> None:
    (kind, name), families, (servers, timeout, resolv_conf), (serving, trial), most = request
    known = NameState(
        tuple(Target(*target) for target in serving), trial=dict.fromkeys(map(tuple, trial), 0.0)
    )
    options = ServerOptions(tuple(map(tuple, servers)), timeout, Path(resolv_conf))
    try:
        result = await look_up(
            Question(NameKind(kind), name), [Family(family) for family in families], options, known, most
        )
    except Exception as error:  # a fault of this name alone
        log.exception("looking up %s fails", name)
        result = LookupResult(fault=internal_error(error, f"looking up {name}"))
    failed = [[part.host, part.family.value, why] for part, why in result.failed.items()]
    done([result.targets, result.ttl, result.fault, failed, min(result.left_out, _MOST_LEFT_OUT)])


def read_result(answer: Any, most: int) -> LookupResult:
    """The result in an answer, which may be anything, of at most `most` targets. Raises ValueError."""
    try:
        targets, ttl, fault, failed, left_out = answer
        if len(targets) > most or not 0 <= ttl < _MOST_SECONDS or not 0 <= left_out <= _MOST_LEFT_OUT:
            raise ValueError
        parts = {
            Part(shortened(host, 255), Family(family)): shortened(why, _MOST_REASON)
            for host, family, why in failed
        }
        return LookupResult(
            tuple(map(read_target, targets)),
            float(ttl),
            shortened(fault, _MOST_REASON),
            parts,
            int(left_out),
        )
    except GARBAGE:
        raise ValueError("no result of a lookup") from None
