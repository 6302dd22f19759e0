"""What this host lacks for checks, asked in threads: whatever hangs there holds up only those who need the
answer.

Users come from the name service, which may ask the network; programs and certificates may lie on a file
system that does not answer. None of these calls can be ended, so the number of threads is limited."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping

from vipd.declaration.problems import PLEASE_REPORT, internal_error
from vipd.model.check import Check

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 0.5
"""How long a step waits for answers. A local name service and file system take less than a millisecond."""
PATIENCE_EACH_SECONDS = 0.002
MOST_THREADS = 16
MOST_OPEN = 10_000
"""Questions that may wait for an answer."""

Problems = tuple[str, ...]
Answer = asyncio.Future[Problems]

UNANSWERED: Problems = (
    "this host does not tell whether it can make this check; hint: a name service or file system hangs",
)


class Prerequisites:
    """Asks what keeps checks from working on this host. `question` is called in threads."""

    def __init__(self, question: Callable[[Check], Problems], patience: float = PATIENCE_SECONDS) -> None:
        self._question, self._patience = question, patience
        self._open: dict[Check, Answer] = {}
        self._queue: deque[tuple[Check, Answer]] = deque()
        self._threads = 0
        self._guard = threading.Lock()

    @property
    def answered_late(self) -> bool:
        """Whether an answer is there that its asker had no time to wait for: it should ask again."""
        return any(answer.done() for answer in self._open.values())

    async def problems(self, checks: Collection[Check]) -> Mapping[Check, Problems]:
        """What is amiss for each check, as "what: why; hint: ...". A check of which the host does not tell
        within a moment has that as its problem; ask again later."""
        fresh = [
            self._ask(check) for check in checks if check not in self._open and len(self._open) < MOST_OPEN
        ]
        if fresh:  # those that somebody has waited for already are not waited for again
            patience = self._patience + PATIENCE_EACH_SECONDS * len(fresh)
            await asyncio.wait(fresh, timeout=patience)
        return {check: self._answer(check) for check in checks}

    def _ask(self, check: Check) -> Answer:
        answer = self._open[check] = asyncio.get_running_loop().create_future()
        with self._guard:
            self._queue.append((check, answer))
            if self._threads < MOST_THREADS:
                self._threads += 1
                # A daemon thread: one that hangs must not hold up the end of the process.
                threading.Thread(target=self._work, name="ask this host", daemon=True).start()
        return answer

    def _answer(self, check: Check) -> Problems:
        answer = self._open.get(check)
        if answer is None or not answer.done():
            return UNANSWERED
        del self._open[check]
        return answer.result()

    def _work(self) -> None:
        """Answer questions until there are none left; in a thread."""
        while True:
            with self._guard:
                if not self._queue:
                    self._threads -= 1
                    return
                check, answer = self._queue.popleft()
            try:
                found = self._question(check)
            except Exception as error:
                log.exception("this host cannot be asked about a check")
                found = (f"{internal_error(error, 'asking this host about it')}; hint: {PLEASE_REPORT}",)
            try:
                answer.get_loop().call_soon_threadsafe(_settle, answer, found)
            except RuntimeError:  # the loop has been closed meanwhile: vipd stops
                return


def _settle(answer: Answer, found: Problems) -> None:
    if not answer.done():
        answer.set_result(found)
