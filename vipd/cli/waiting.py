"""`vipctl drain --wait`: until backends have no flows any more, also across a restart of vipd."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import urlencode

from vipd.cli.connection import Daemon
from vipd.cli.errors import INTERRUPTED, TIMED_OUT, UNREACHABLE, CliError
from vipd.cli.terminal import CLEAR_LINE
from vipd.model.formatting import counted, duration

POLL_SECONDS = 0.5
PRINT_SECONDS = 10.0
"""How often a wait without a terminal prints its progress."""
RESTART_SECONDS = 120.0
"""How long vipd may be away, as during a restart or an upgrade: the drain continues."""

TargetQuery = dict[str, str]
"""A backend of a service, or an address in every service, in the form of the API."""


class Wait(NamedTuple):
    """The words about a wait that ends early: what goes on all the same, how to take that back, and what to
    do after the time is over."""

    stays: str
    take_back: str
    hint: str


def wait_until_drained(
    daemon: Daemon, targets: Sequence[TargetQuery], timeout: float | None, quiet: bool
) -> None:
    """Until the backends have no flows; raises CliError at the end of the time."""

    def flows() -> int:
        return sum(int(daemon.get_query("flows", urlencode(target))["flows"]) for target in targets)

    words = Wait(
        "the drain stays",
        "vipctl resume takes it back",
        "the drain stays; wait again, or vipctl disable cuts them as on_remove says",
    )
    wait_until_no_flows(flows, words, timeout, quiet=quiet)


def wait_until_no_flows(flows: Callable[[], int], words: Wait, timeout: float | None, *, quiet: bool) -> None:
    """Until there are none; raises CliError at the end of the time. `flows` asks vipd for their number."""
    began, line = time.monotonic(), _ProgressLine(quiet)
    poller = _FlowPoller(flows)
    try:
        while left := poller.flows():
            waited = time.monotonic() - began
            if timeout is not None and waited >= timeout:
                raise CliError(f"{left} after {duration(waited)}", hint=words.hint, code=TIMED_OUT)
            rest = "" if timeout is None else f", {duration(timeout - waited)} to go"
            line.show(f"{left}{rest}")
            time.sleep(POLL_SECONDS)
        line.show("no flows left", last=True)
    except CliError as err:
        if err.code == TIMED_OUT:
            raise
        stays = f"{words.stays}: wait again with the same command"
        raise CliError(f"{err.message}; {stays}", code=err.code, details=err.details) from None
    except KeyboardInterrupt:
        what = f"stopped waiting; {words.stays}"
        raise CliError(what, hint=words.take_back, code=INTERRUPTED) from None
    finally:
        line.end()


class _FlowPoller:
    """Requests the number of remaining flows; tolerates a short absence of vipd."""

    def __init__(self, flows: Callable[[], int]) -> None:
        self._flows = flows
        self._away_since: float | None = None

    def flows(self) -> str:
        """The remaining flows, in words; empty if there are none. Raises CliError."""
        try:
            left = self._flows()
        except CliError as err:
            now = time.monotonic()
            self._away_since = self._away_since or now
            if err.code != UNREACHABLE or now - self._away_since >= RESTART_SECONDS:
                raise
            return "vipd does not answer"
        self._away_since = None
        return f"{counted(left, 'flow')} left" if left else ""


class _ProgressLine:
    """The progress of a wait: one changing line on a terminal, else a line at intervals."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._terminal = quiet, sys.stderr.isatty()
        self._printed_at = float("-inf")
        self._open = False

    def show(self, text: str, *, last: bool = False) -> None:
        """Print the progress."""
        now = time.monotonic()
        if self._quiet or not (self._terminal or last or now - self._printed_at >= PRINT_SECONDS):
            return
        self._printed_at, self._open = now, self._terminal
        line, end = (f"{CLEAR_LINE}{text}", "") if self._terminal else (text, "\n")
        print(line, end=end, file=sys.stderr)
        sys.stderr.flush()

    def end(self) -> None:
        """Leave the line."""
        if self._open:
            print(file=sys.stderr)
            self._open = False
