"""`vipctl events`: events with cause and reason; and the last part of `vipctl describe`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

import click

from vipd.cli.argument_types import TARGET
from vipd.cli.connection import Daemon, connect
from vipd.cli.errors import INTERRUPTED, OK, UNREACHABLE, CliError
from vipd.cli.output import Screen, document, output_option, screen, socket_option, truncate_end
from vipd.cli.words import seconds
from vipd.model.formatting import duration
from vipd.model.text import display_width as width_of
from vipd.observe.api_client import Json

DEFAULT_LIMIT = 50
DEFAULT_FOLLOW_LIMIT = 10
DESCRIBE_LIMIT = 5

SILENCE_SECONDS = 45.0
"""The daemon sends something every 15 s to every follower."""
RETRY_SECONDS = 0.5
_EVENT_WIDTH = 20
_MIN_REASON_WIDTH = 12
_COLOURS = {"warning": "yellow", "error": "red"}


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on with events as they happen, until ctrl-C.")
@click.option(
    "--service",
    metavar="TARGET",
    type=TARGET,
    default="",
    help="Those of one service, also one that is gone.",
)
@click.option("--since", metavar="TIME", help="Those of this time until now, as 10m.")
@click.option(
    "-n", "--lines", metavar="N", type=click.IntRange(min=0), help="At most so many: 50, or 10 with -f."
)
@output_option("text", "json")
@socket_option
def events(*, follow: bool, service: str, since: str | None, lines: int | None, form: str) -> int:
    """Show what has happened: when, what, to which service or backend, why, and who or what was behind it.

    What repeats itself is one line, as x17. On a terminal long lines are cut; -o json has all of it, with -f
    an object a line.

    \b
    vipctl events --service dns --since 2h
    vipctl events -f
    """
    query: dict[str, str | int] = {"limit": _limit(lines, follow, since)}
    if service:
        query["service"] = service
    if since is not None:
        began = datetime.now(UTC) - timedelta(seconds=seconds(since))
        query["since"] = began.isoformat(timespec="seconds")
    if follow:
        return _follow(query, form)
    found = connect().get_query("events", urlencode(query))["events"]
    if form == "json":
        print(document({"events": found}, form))
        return OK
    terminal = screen()
    for event in found:
        print(event_line(event, terminal))
    if not found:
        print("no events", file=sys.stderr)
    return OK


def last_events(daemon: Daemon, service: str, terminal: Screen) -> Iterator[str]:
    """Lines about the last events of a service: its age, what and why. Empty if the daemon stores no
    events."""
    query = urlencode({"service": service, "limit": DESCRIBE_LIMIT})
    try:
        found = daemon.get_query("events", query)["events"]
    except CliError as err:
        if err.code == UNREACHABLE:
            raise
        return
    ages = [duration(_age(event)) for event in found]
    width = max(map(len, ages), default=0)
    if found:
        yield terminal.paint("Events", "bold")
    for age, event in zip(ages, found, strict=True):
        yield _fitted(f"  {age:<{width}}  ", event, terminal, _backends(event))


def event_line(event: Json, terminal: Screen) -> str:
    """An event as a line: its local time, what, its object, why, and its cause."""
    return _fitted(f"{_moment(event)}  ", event, terminal, _about(event))


def _limit(lines: int | None, follow: bool, since: str | None) -> int:
    if lines is not None:
        return lines
    return DEFAULT_FOLLOW_LIMIT if follow and since is None else DEFAULT_LIMIT


def _follow(query: dict[str, str | int], form: str) -> int:
    """Print events as they arrive. If the daemon stops, waits for it, provided that it answered once."""
    following = _EventStream(connect(SILENCE_SECONDS), query)
    try:
        for event in following.events():
            print(json.dumps(event) if form == "json" else event_line(event, screen()), flush=True)
    except KeyboardInterrupt:
        return INTERRUPTED
    return OK


class _EventStream:
    """The stream of events, resumed where it broke off."""

    def __init__(self, daemon: Daemon, query: dict[str, str | int]) -> None:
        self._daemon, self._query = daemon, query
        self._service = {key: query[key] for key in ("service",) if key in query}
        self._last: int | None = None
        """Events up to this id are known; None: the daemon has not answered yet."""

    def events(self) -> Iterator[Json]:
        """For ever. Raises CliError if the daemon is unreachable at first, or refuses."""
        away = False
        while True:
            query = self._query if self._last is None else self._service | {"after": self._last}
            try:
                for told in self._daemon.stream("events", urlencode(query | {"follow": 1})):
                    away = False
                    yield from self._taken(told)
            except CliError as err:
                if self._last is None or err.code != UNREACHABLE:
                    raise
                if not away:
                    print("vipctl: vipd is away; waiting for it", file=sys.stderr, flush=True)
                away = True
            time.sleep(RETRY_SECONDS)

    def _taken(self, told: Json) -> Iterator[Json]:
        if event := told.get("event"):
            yield event
            self._last = event["id"]
        elif self._last is None:
            self._last = told.get("last", 0)


def _fitted(head: str, event: Json, terminal: Screen, about: str) -> str:
    """The line from `head` on; on a terminal the reason is cut so that the cause can still be read."""
    kind = terminal.paint(event["event"], _COLOURS.get(event["level"], ""))
    kind += " " * (_EVENT_WIDTH - len(event["event"]))
    count = f" (x{event['count']})" if event["count"] > 1 else ""
    reason = f"{about}: {event['reason']}" if about and event["reason"] else about or str(event["reason"])
    cause = _cause(event, terminal)
    if terminal.width is not None:
        room = terminal.width - len(head) - _EVENT_WIDTH - 2 - len(count)
        if cause and room - width_of(cause) < _MIN_REASON_WIDTH:
            cause = _cut(cause, max(room - _MIN_REASON_WIDTH, 0))
        reason = _cut(reason, max(room - width_of(cause), 0))
    return f"{head}{kind}  {reason}{count}{cause}"


def _cause(event: Json, terminal: Screen) -> str:
    cause = str(event["cause"])
    kind, _, rest = cause.partition(" ")
    if terminal.width is not None and kind == "file" and "," not in rest:
        cause = f"file {rest.rpartition('/')[2]}"
    return f"; by {cause}" if cause else ""


def _cut(text: str, width: int) -> str:
    return text if width_of(text) <= width else truncate_end(text, max(width - 1, 0)) + "…"


def _about(event: Json) -> str:
    """`web`, `web/10.244.0.11`, or the backend and the number of its services."""
    services, backends = event["services"], _backends(event)
    if not backends:
        return _several(services, "services")
    if len(services) == 1:
        return f"{services[0]}/{backends}"
    return f"{backends} in {len(services)} services" if services else backends


def _backends(event: Json) -> str:
    # The reason of a change of a service names the backends concerned.
    of_service = str(event["event"]).startswith("service")
    return "" if of_service else _several(event["backends"], "backends")


def _several(names: Sequence[str], what: str) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{len(names)} {what}"


def _moment(event: Json) -> str:
    then = datetime.fromisoformat(event["time"]).astimezone()
    return then.strftime("%b %d %H:%M:%S")


def _age(event: Json) -> float:
    return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(event["time"])).total_seconds())
