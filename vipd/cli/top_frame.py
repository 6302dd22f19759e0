"""The content and the keys of `vipctl top`. Pure: answers and keys in, lines out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vipd.cli.output import truncate_middle
from vipd.cli.rates import Key, Rates, key_of
from vipd.model.formatting import counted, per_second, size, thousands
from vipd.observe.api_client import Json

PLAIN, BOLD, TITLES, CHOSEN = "", "bold", "titles", "chosen"

MIN_NAME_WIDTH = 12
HELP = "q quit  s sort  r reverse  / filter  b bits  Enter backends  P new/s  M flows  N name"
HELP_BACKENDS = "q quit  s sort  r reverse  / filter  b bits  Esc services  P new/s  M flows  N name"
HELP_FILTER = "Enter keep  Esc no filter"


class Line(NamedTuple):
    """A line of the screen and its style."""

    text: str
    style: str = PLAIN


class Field(NamedTuple):
    """A column."""

    title: str
    width: int
    key: str
    """The key that sorts by it."""
    show: Callable[[float], str]


FIELDS = {
    "ready": Field("READY", 9, "Y", lambda number: f"{number:.0f}"),
    "new": Field("NEW/S", 7, "P", per_second),
    "refused": Field("REF/S", 7, "F", per_second),
    "total": Field("NEW", 11, "T", lambda number: f"{number:.0f}"),
    "flows": Field("FLOWS", 8, "M", lambda number: f"{number:.0f}"),
    "in": Field("IN/S", 7, "I", size),
    "out": Field("OUT/S", 7, "O", size),
    "packets": Field("PKT/S", 7, "K", thousands),
}
_OF_TRAFFIC = ("in", "out", "packets")
_BITS = {
    "in": Field("IN b/s", 7, "I", lambda number: thousands(8 * number)),
    "out": Field("OUT b/s", 7, "O", lambda number: thousands(8 * number)),
}
"""In place of bytes, with units of 1,000 as links have them."""
_SORT_KEYS = {of.key: name for name, of in FIELDS.items()} | {"N": "name"}
SORTS = ("new", "flows", "total", "in", "out", "packets", "ready", "name")


@dataclass(slots=True)
class Row:
    """A service or a backend; an unknown number is None."""

    name: str
    ready: str
    """`2/3`: of a service's backends those that take new flows; for a backend `yes`, `unchecked` or `no`."""
    numbers: dict[str, float | None]
    """By field; `ready`: the number of backends that are not."""
    key: Key


@dataclass(slots=True)
class State:
    """All that the screen depends on."""

    sort: str = "new"
    reverse: bool = False
    bits: bool = False
    """Traffic is shown in bits, not bytes."""
    filter: str = ""
    typing: bool = False
    """Keys are added to the filter."""
    focus: str = ""
    """The service whose backends are shown; empty: all services."""
    chosen: Key = ()
    first: int = 0
    """The first row on the screen."""
    page: int = 10
    fault: str = ""
    answer: Json = field(default_factory=dict)
    rates: Rates = field(default_factory=Rates)
    quitting: bool = False

    def take(self, answer: Json) -> None:
        """Show another answer to `/v1/stats`."""
        self.answer, self.fault = answer, ""
        self.rates.take(answer)

    def focus_on(self, service: str) -> None:
        """Show the backends of a service, or all services."""
        self.focus, self.first, self.filter = service, 0, ""
        self.chosen = () if service else self.chosen[:1]
        self.answer, self.rates = {}, Rates()

    def rows(self) -> list[Row]:
        """The visible rows, in order."""
        found = [row for row in self._all() if self.filter.lower() in row.name.lower()]
        if self.sort == "name":
            return sorted(found, key=lambda row: row.name, reverse=self.reverse)
        found.sort(key=lambda row: row.name)
        found.sort(key=self._weight, reverse=not self.reverse)
        return found

    def _weight(self, row: Row) -> float:
        number = row.numbers[self.sort]
        return -1.0 if number is None else number

    def _all(self) -> list[Row]:
        services = self.answer.get("services", ())
        if not self.focus:
            return [self._row(str(s["name"]), (str(s["name"]),), s) for s in services]
        return [
            self._row(f"{b['endpoint']}/{b['protocol']}{'+' if b['gone'] else ''}", key_of(self.focus, b), b)
            for service in services
            for b in service.get("backends", ())
        ]

    def _row(self, name: str, key: Key, told: Json) -> Row:
        rates = self.rates.of(key)
        ready, missing = _readiness(told)
        both = rates["packets_in"], rates["packets_out"]
        numbers: dict[str, Any] = {
            "ready": missing,
            "new": rates["new_flows"],
            "refused": rates["refused_flows"],
            "total": told["new_flows"],
            "flows": told["flows"],
            "in": rates["bytes_in"],
            "out": rates["bytes_out"],
            "packets": None if None in both else sum(filter(None, both)),
        }
        return Row(name, ready, numbers, key)


def _readiness(told: Json) -> tuple[str, float | None]:
    """As text, and the number of backends that take no new flows."""
    ready = told.get("ready")
    if ready is None:  # a daemon of an earlier version
        return "-", None
    if "declared" in told:
        return f"{ready}/{told['declared']}", float(told["declared"] - ready)
    unchecked = ready and told.get("health") == "unchecked"
    return "unchecked" if unchecked else "yes" if ready else "no", float(not ready)


def press(state: State, key: str) -> None:
    """A key was pressed: a character, or a name such as `UP`, `ENTER`, `ESC`."""
    if state.typing:
        _type(state, key)
    elif key in ("q", "Q"):
        state.quitting = True
    elif key in _SWITCHES:
        _SWITCHES[key](state)
    elif key in ("ENTER", "ESC"):
        _enter(state, key)
    elif key.upper() in _SORT_KEYS:
        state.sort = _SORT_KEYS[key.upper()]
    else:
        _move(state, key)


def _next_sort(state: State) -> None:
    state.sort = SORTS[(SORTS.index(state.sort) + 1) % len(SORTS)]


def _reverse(state: State) -> None:
    state.reverse = not state.reverse


def _toggle_bits(state: State) -> None:
    state.bits = not state.bits


def _begin_filter(state: State) -> None:
    state.typing = True


_SWITCHES: dict[str, Callable[[State], None]] = {
    "s": _next_sort,
    "r": _reverse,
    "b": _toggle_bits,
    "/": _begin_filter,
}


def frame(state: State, width: int, height: int) -> list[Line]:
    """The screen, `height` lines of at most `width` columns."""
    rows = state.rows()
    state.page = max(height - 4, 1)
    at = _chosen_at(state, rows)
    state.first = max(min(state.first, at, max(len(rows) - state.page, 0)), at - state.page + 1)
    shown = rows[state.first : state.first + state.page]
    lines = [
        Line(_summary(state, len(rows)), BOLD),
        Line(_situation(state)),
        *_table(state, shown, width),
    ]
    lines = lines[: max(height - 1, 0)]
    lines += [Line("")] * (height - 1 - len(lines))
    lines.append(Line(HELP_FILTER if state.typing else HELP_BACKENDS if state.focus else HELP))
    return [Line(line.text[:width], line.style) for line in lines[-height:]]


def batch(state: State, width: int) -> str:
    """All rows as text, for a file or a program; `width` 0: no name is cut."""
    rows = state.rows()
    fields = _shown_fields(state)
    longest = max((len(row.name) for row in rows), default=0)
    width = width or max(longest, MIN_NAME_WIDTH) + sum(of.width + 1 for of in fields.values())
    lines = [
        f"{_summary(state, len(rows))}; {state.answer.get('at', '')}",
        _situation(state),
        *(line.text for line in _table(state, rows, width)),
    ]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _table(state: State, rows: Sequence[Row], width: int) -> list[Line]:
    """The titles, and a line for each row."""
    fields = _fitting(state, width)
    return [
        Line(_titles(state, fields, width), TITLES),
        *(Line(_cells(row, fields, width), CHOSEN if row.key == state.chosen else PLAIN) for row in rows),
    ]


def _type(state: State, key: str) -> None:
    if key in ("ENTER", "ESC"):
        state.typing = False
        state.filter = state.filter if key == "ENTER" else ""
    elif key == "BACKSPACE":
        state.filter = state.filter[:-1]
    elif len(key) == 1 and key.isprintable():
        state.filter += key


def _enter(state: State, key: str) -> None:
    if key == "ENTER" and not state.focus and state.chosen:
        state.focus_on(state.chosen[0])
    elif key == "ESC" and state.filter:
        state.filter = ""
    elif state.focus:
        service = state.focus
        state.focus_on("")
        state.chosen = (service,)


def _move(state: State, key: str) -> None:
    rows = state.rows()
    steps = {"UP": -1, "DOWN": 1, "PAGEUP": -state.page, "PAGEDOWN": state.page}
    steps |= {"HOME": -len(rows), "END": len(rows)}
    if rows and key in steps:
        at = _chosen_at(state, rows) + steps[key]
        state.chosen = rows[min(max(at, 0), len(rows) - 1)].key


def _chosen_at(state: State, rows: Sequence[Row]) -> int:
    """Index of the chosen row; the first if none is chosen, or it is gone."""
    for at, row in enumerate(rows):
        if row.key == state.chosen:
            return at
    state.chosen = rows[0].key if rows else state.chosen
    return 0


def _summary(state: State, shown: int) -> str:
    services = state.answer.get("services", ())
    table = state.answer.get("conntrack", {})
    flows = sum(service["flows"] or 0 for service in services)
    what = counted(shown, "backend" if state.focus else "service")
    what += f" of {state.focus}" if state.focus else ""
    unchecked = sum(service.get("unchecked", 0) for service in services)
    what += f", {counted(unchecked, 'unchecked backend')}" if unchecked else ""
    of = f" of {table['max']}" if table.get("max") else ""
    text = f"vipctl top: {what}, {counted(flows, 'flow')}"
    return (
        f"{text}; tracked on this host {table['entries']}{of}" if table.get("entries") is not None else text
    )


def _situation(state: State) -> str:
    if state.typing:
        return f"filter: {state.filter}_"
    if state.fault:
        return state.fault
    title = "NAME" if state.sort == "name" else FIELDS[state.sort].title
    text = f"sorted by {title}{', reversed' if state.reverse else ''}"
    text += f"; filter: {state.filter}" if state.filter else ""
    if hint := state.answer.get("traffic", {}).get("hint"):
        text += f"; bytes: {hint}"
    return text


def _fitting(state: State, width: int) -> dict[str, Field]:
    """The columns that there is room for."""
    fields = _shown_fields(state)
    while fields and _room(fields, width) < MIN_NAME_WIDTH:
        fields.popitem()
    return fields


def _shown_fields(state: State) -> dict[str, Field]:
    """The columns that there are numbers for. A limit is a service's, not a backend's."""
    unknown: tuple[str, ...] = ()
    if not state.answer.get("traffic", {}).get("counted"):
        unknown += _OF_TRAFFIC
    if state.focus or not any("refused" in service for service in state.answer.get("services", ())):
        unknown += ("refused",)
    fields = FIELDS | _BITS if state.bits else FIELDS
    return {name: of for name, of in fields.items() if name not in unknown}


def _room(fields: dict[str, Field], width: int) -> int:
    return width - sum(of.width + 1 for of in fields.values())


def _titles(state: State, fields: dict[str, Field], width: int) -> str:
    name = f"{'BACKEND' if state.focus else 'SERVICE':<{_room(fields, width)}}"
    return (name + "".join(f" {of.title:>{of.width}}" for of in fields.values())).ljust(width)


def _cells(row: Row, fields: dict[str, Field], width: int) -> str:
    room = _room(fields, width)
    text = f"{truncate_middle(row.name, max(room, 2)):<{room}}"
    for name, of in fields.items():
        number = row.numbers[name]
        shown = row.ready if name == "ready" else "-" if number is None else of.show(number)
        text += f" {shown:>{of.width}}"
    return text.ljust(width)
