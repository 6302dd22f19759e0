"""`vipctl top`: busy services, live. curses draws the screen; `top_frame` computes its content."""

from __future__ import annotations

import contextlib
import curses
import locale
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from urllib.parse import urlencode

import click

from vipd.cli.connection import Daemon, connect
from vipd.cli.errors import INTERRUPTED, NOT_FOUND, OK, USAGE, CliError
from vipd.cli.output import screen as output_screen
from vipd.cli.output import socket_option
from vipd.cli.top_frame import BOLD, CHOSEN, TITLES, State, batch, frame, press
from vipd.declaration.syntax import InvalidTextError, parse_period
from vipd.model.text import one_line
from vipd.observe.api_client import Json

MIN_DELAY_SECONDS, MAX_DELAY_SECONDS = 0.2, 3600.0
PAUSE_PER_REQUEST_TIME = 4
"""After a slow answer the next request waits for this many times as long: large hosts answer slowly."""
TIMEOUT_SECONDS = 10.0
GONE_SECONDS = 0.05
"""A closed terminal returns at once, again and again, until the signal arrives."""

_KEYS = {
    curses.KEY_UP: "UP",
    curses.KEY_DOWN: "DOWN",
    curses.KEY_PPAGE: "PAGEUP",
    curses.KEY_NPAGE: "PAGEDOWN",
    curses.KEY_HOME: "HOME",
    curses.KEY_END: "END",
    curses.KEY_ENTER: "ENTER",
    10: "ENTER",
    13: "ENTER",
    27: "ESC",
    curses.KEY_BACKSPACE: "BACKSPACE",
    8: "BACKSPACE",
    127: "BACKSPACE",
}
_STYLES = {BOLD: curses.A_BOLD, TITLES: curses.A_REVERSE, CHOSEN: curses.A_BOLD | curses.A_UNDERLINE}


class _EndedError(Exception):
    """A signal requested the end; the terminal is restored first."""


@click.command()
@click.option(
    "-d", "--delay", metavar="TIME", default="1s", help="How often to look, as 5s or 0.5; default: 1s."
)
@click.option(
    "--batch", "in_batch", is_flag=True, help="Print text instead of a screen, also to a file or a pipe."
)
@click.option(
    "-n", "--count", type=click.IntRange(min=1), help="With --batch: print so many times, then end."
)
@socket_option
def top(*, delay: str, in_batch: bool, count: int | None) -> int:
    """Show which services are busy, live: backends that are ready, new flows a second, flows now, bytes and
    packets a second.

    P, M and N sort by new flows a second, flows and name; s takes the next column, r the other direction.
    / filters, b shows bits, Enter shows the backends of the chosen service, q quits.

    \b
    vipctl top --batch -n 3 -d 0.5
    """
    wanted = _pause(delay)
    if count is not None and not in_batch:
        raise CliError("-n needs --batch", hint=f"vipctl top --batch -n {count}", code=USAGE)
    if in_batch:
        return _print_batches(wanted, count)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CliError(
            "top needs a terminal", hint="vipctl top --batch, or vipctl stats --rate 2s", code=USAGE
        )
    daemon, state = connect(TIMEOUT_SECONDS), State()
    state.take(_ask(daemon, state))  # an unreachable daemon is reported before curses starts
    locale.setlocale(locale.LC_ALL, "")
    try:
        with _ended_by_signals(), _screen() as screen:
            _run(screen, daemon, state, wanted)
    except KeyboardInterrupt:
        return INTERRUPTED
    except _EndedError as ended:
        number = signal.Signals(ended.args[0])
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return OK


def _pause(word: str) -> float:
    """Seconds of `0.5`, `500ms` or `5s`."""
    try:
        found = float(word) if word[-1:].isdecimal() else parse_period(word)
    except (ValueError, InvalidTextError):
        found = 0.0
    if not MIN_DELAY_SECONDS <= found <= MAX_DELAY_SECONDS:
        hint = f"{MIN_DELAY_SECONDS:g}s to {MAX_DELAY_SECONDS:g}s, such as 0.5 or 5s"
        raise CliError(f"{word} is no time to look again after", hint=hint, code=USAGE)
    return found


def _print_batches(pause: float, count: int | None) -> int:
    """Print the numbers, each time after a pause: rates need two readings."""
    daemon, state, printed = connect(TIMEOUT_SECONDS), State(), 0
    state.take(_ask(daemon, state))
    while count is None or printed < count:
        time.sleep(pause)
        state.take(_ask(daemon, state))
        text = batch(state, output_screen().width or 0)
        print(text if printed == 0 else f"\n{text}", end="", flush=True)
        printed += 1
    return OK


def _run(screen: curses.window, daemon: Daemon, state: State, pause: float) -> None:
    due = time.monotonic() + pause
    while not state.quitting:
        _draw(screen, state)
        focus = state.focus
        if (key := _key(screen, due - time.monotonic())) is not None:
            press(state, key)
        if time.monotonic() >= due or state.focus != focus:
            began = time.monotonic()
            _refresh(daemon, state)
            took = time.monotonic() - began
            due = began + took + max(pause - took, PAUSE_PER_REQUEST_TIME * took)


def _refresh(daemon: Daemon, state: State) -> None:
    """Request new numbers. If the daemon is away, waits for it, and the last numbers stay."""
    try:
        state.take(_ask(daemon, state))
    except CliError as err:
        if err.code == NOT_FOUND and state.focus:
            state.focus_on("")
        state.fault = err.message


def _ask(daemon: Daemon, state: State) -> Json:
    query: Json = {"service": state.focus} if state.focus else {"backends": 0}
    return daemon.get_query("stats", urlencode(query))


def _key(screen: curses.window, timeout: float) -> str | None:
    """The next key; None if there was none in time, or the size has changed."""
    began = time.monotonic()
    screen.timeout(max(int(timeout * 1000), 0))
    try:
        pressed = screen.get_wch()
    except curses.error:
        if time.monotonic() - began < timeout / 2:
            time.sleep(GONE_SECONDS)
        return None
    if isinstance(pressed, str):
        return _KEYS.get(ord(pressed), pressed)
    return _KEYS.get(pressed)


def _draw(screen: curses.window, state: State) -> None:
    height, width = screen.getmaxyx()
    screen.erase()
    for number, line in enumerate(frame(state, width, height)):
        text = one_line(line.text).encode(screen.encoding, "replace").decode(screen.encoding)
        # The last column of the last line cannot be written without an error, and the line is there then.
        with contextlib.suppress(curses.error):
            screen.addnstr(number, 0, text, width, _STYLES.get(line.style, curses.A_NORMAL))
    screen.refresh()


@contextlib.contextmanager
def _screen() -> Iterator[curses.window]:
    """The terminal in curses mode until the end; then restores it."""
    try:
        screen = curses.initscr()
    except curses.error as err:
        name = os.environ.get("TERM", "")
        raise CliError(
            f"this terminal cannot be used: TERM={name}", str(err), "TERM=xterm vipctl top"
        ) from None
    try:
        curses.noecho()
        curses.cbreak()
        screen.keypad(True)
        curses.set_escdelay(25)
        with contextlib.suppress(curses.error):  # a terminal that cannot hide its cursor shows it
            curses.curs_set(0)
        yield screen
    finally:
        screen.keypad(False)
        curses.endwin()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    def end(number: int, _: FrameType | None) -> None:
        raise _EndedError(number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
