"""Finds what this host lacks for checks, in threads: a lookup that hangs delays only checks that need its
result.

Users come from the name service, which may use the network; programs and certificates may be on a file
system that does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial

from vipd.declaration.problems import PLEASE_REPORT, internal_error
from vipd.host.bounded_threads import BoundedThreads
from vipd.model.check import Check

log = logging.getLogger(__name__)

WAIT_SECONDS = 0.5
"""How long a step waits for answers. A local name service and file system take less than a millisecond."""
PATIENCE_EACH_SECONDS = 0.002
MOST_THREADS = 16
MAX_PENDING = 10_000
"""Questions that may wait for an answer."""

Problems = tuple[str, ...]
Answer = asyncio.Future[Problems]

UNANSWERED: Problems = (
    "this host does not tell whether it can make this check; hint: a name service or file system hangs",
)


class Prerequisites:
    """Finds what prevents checks on this host. `question` is called in threads."""

    def __init__(self, question: Callable[[Check], Problems], patience: float = WAIT_SECONDS) -> None:
        self._question, self._patience = question, patience
        self._open: dict[Check, Answer] = {}
        self._threads = BoundedThreads("ask this host", MOST_THREADS)

    @property
    def answered_late(self) -> bool:
        """Whether an answer arrived after its caller stopped waiting: the caller should retry."""
        return any(answer.done() for answer in self._open.values())

    async def problems(self, checks: Collection[Check]) -> Mapping[Check, Problems]:
        """The problems of each check, as "what: why; hint: ...". If the host does not answer about a check
        at once, that is its problem; call again later."""
        fresh = [
            self._ask(check) for check in checks if check not in self._open and len(self._open) < MAX_PENDING
        ]
        if fresh:  # an answer is waited for once only
            patience = self._patience + PATIENCE_EACH_SECONDS * len(fresh)
            await asyncio.wait(fresh, timeout=patience)
        return {check: self._answer(check) for check in checks}

    def _ask(self, check: Check) -> Answer:
        """Raises RuntimeError if no thread can be started; then it is asked again later."""
        answer = asyncio.get_running_loop().create_future()
        self._threads.submit(partial(self._work, check, answer))
        self._open[check] = answer
        return answer

    def _answer(self, check: Check) -> Problems:
        answer = self._open.get(check)
        if answer is None or not answer.done():
            return UNANSWERED
        del self._open[check]
        return answer.result()

    def _work(self, check: Check, answer: Answer) -> None:
        """Answer one question; in a thread."""
        try:
            found = self._question(check)
        except Exception as error:
            log.exception("this host cannot be asked about a check")
            found = (f"{internal_error(error, 'asking this host about it')}; hint: {PLEASE_REPORT}",)
        with contextlib.suppress(RuntimeError):  # the loop is closed: vipd stops
            answer.get_loop().call_soon_threadsafe(_settle, answer, found)


def _settle(answer: Answer, found: Problems) -> None:
    if not answer.done():
        answer.set_result(found)
