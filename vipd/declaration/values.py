"""Values of a declaration: how each kind is read, what it is in words, and its JSON Schema. Pure.

A *value* is what a text has in one place, as `yaml_text` reads it: None, a boolean, an integer, text, a
list, a mapping. A *kind* says which values are possible there. Reading never raises: what is wrong becomes a
*fault* at the value's *path*, and the result is `INVALID`. Lines are found later, for paths of faults alone.
"""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from vipd.declaration.ipv6_quotes import hint_for_key, hint_for_value
from vipd.declaration.problems import PLEASE_REPORT, internal_error
from vipd.declaration.syntax import InvalidTextError, quoted
from vipd.declaration.yaml_text import UNREADABLE, meaning_of
from vipd.model import limits
from vipd.model.text import is_encodable

T = TypeVar("T")
Path: TypeAlias = tuple[str | int, ...]
Schema: TypeAlias = Mapping[str, Any]

INVALID: Any = object()
"""Stands for a value that has a fault."""


class Fault(NamedTuple):
    """A problem before its line is known."""

    path: Path
    what: str
    hint: str = ""
    key: str | None = None
    """It is about this key of the mapping at `path`, and stands on the key's line."""
    other: Path | None = None
    """`what` ends in this place, with its line if that is another one."""
    whole: bool = False
    """It is about all that is at `path`, which is not shown."""
    by_line: bool = False
    """`what` ends in the line of `other` alone."""
    trace: str = ""
    """The traceback of an unexpected exception."""


class Located(NamedTuple, Generic[T]):
    """A value with its path."""

    value: T
    path: Path


class Faults:
    """The faults and notes of one text: the first ones, and the number of further ones."""

    def __init__(self, accepted: bool = False, most: int = limits.PROBLEMS) -> None:
        """`accepted`: an earlier run accepted the text, and what later rules forbid may stay."""
        self.accepted, self._most = accepted, most
        self.kept: dict[Fault, None] = {}
        self.more = 0
        self.notes: dict[tuple[Path, str], None] = {}
        self.more_notes = 0
        self.size = 0
        """Of the services read, in the units of `vipd.model.limits.declared_size`."""
        self._whole: Faults | None = None

    @property
    def full(self) -> bool:
        """Whether further faults are only counted, and need no hint."""
        return len(self.kept) >= self._most

    def part(self, most: int) -> Faults:
        """Those of a part of the text that is judged by itself. Its notes are those of the text."""
        part = Faults(self.accepted, most)
        part._whole = self._whole or self
        return part

    def add(self, path: Path, what: str, hint: str = "", **more: Any) -> None:
        """One more; `more`: further fields of `Fault`."""
        fault = Fault(path, what, hint, **more)
        if self.full and fault not in self.kept:
            self.more += 1
        else:
            self.kept.setdefault(fault)

    def refuse(self, path: Path, what: str, hint: str = "") -> Any:
        """As `add`; the result of the value is INVALID."""
        self.add(path, what, hint)
        return INVALID

    def wrong_type(self, value: Any, path: Path, wanted: str, hint: str = "") -> Any:
        """The value is of another type than `wanted`."""
        if value is not UNREADABLE:
            self.add(path, f"must be {wanted}, not {shown(value)}", hint_for_value(value) or hint)
        return INVALID

    def note(self, path: Path, text: str) -> None:
        """Add a note, which is no fault."""
        whole = self._whole or self
        if len(whole.notes) < limits.NOTES:
            whole.notes[path, text] = None
        else:
            whole.more_notes += 1

    @contextmanager
    def contain(self, path: Path, doing: str) -> Iterator[None]:
        """An unexpected exception in the block becomes a fault: "internal error while {doing}"."""
        try:
            yield
        except Exception as error:
            self.unexpected(error, path, doing)

    def unexpected(self, error: Exception, path: Path, doing: str) -> None:
        """An exception that nothing should raise."""
        trace = "".join(traceback.format_exception(error))
        self.add(path, internal_error(error, doing), PLEASE_REPORT, whole=True, trace=trace)


def shown(value: Any) -> str:
    """A value in messages: `a list`, `null`, `5 (an integer)`, `"tpc"`."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "null"
    meaning = meaning_of(value)
    text = quoted(text_of_scalar(value))
    return f"{text[1:-1]} ({meaning})" if meaning else text


def text_of_scalar(value: Any) -> str:
    """The text that a value without parts was written as."""
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


Read: TypeAlias = Callable[[Any, Path, Faults], Any]
"""Reads a value: as the model has it, or INVALID, with the faults."""


def _as_it_is(value: Any, path: Path, faults: Faults) -> Any:
    del path, faults
    return value


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of values. `words`: what it may be, for docs, where backquotes mark what is literal."""

    words: str
    schema: Schema
    read: Read = _as_it_is
    written: Callable[[Any], object] = lambda value: value
    """The shortest value that is read as this one."""


def number(low: int, high: int) -> Kind:
    """A plain decimal integer in a range."""
    wanted = f"an integer from {low} to {high}"

    def read(value: Any, path: Path, faults: Faults) -> Any:
        if type(value) is not int:
            return faults.wrong_type(value, path, wanted, _number_hint(value))
        if low <= value <= high:
            return value
        return faults.refuse(path, f"{value} is out of range", f"write {wanted}")

    return Kind(f"{low} to {high}", {"type": "integer", "minimum": low, "maximum": high}, read)


def _number_hint(value: Any) -> str:
    if value is None or isinstance(value, dict | list):
        return ""
    if type(value) is str and _DECIMAL.fullmatch(value):
        return f"write {value} without quotes"
    return "write it in plain decimal"


_DECIMAL = re.compile(r"-?(?:0|[1-9][0-9]{0,18})")
_BOOLEANS = {"true": True, "false": False}


def choice(choices: Mapping[str, Any] | Iterable[str], *synonyms: str, words: str = "") -> Kind:
    """One of a few words, each with what it stands for; `synonyms` are accepted by editors, too."""
    known = dict(choices) if isinstance(choices, Mapping) else {str(word): word for word in choices}
    listed = [word for word in known if word not in synonyms]
    schema = {"enum": list(dict.fromkeys([*listed, *synonyms]))}
    return Kind(words or alternatives(listed), schema, reader_of_words(known), writer_of_words(known))


def reader_of_words(choices: Mapping[str, Any]) -> Read:
    """Reads one of these words as what it stands for; `true` and `false` only without quotes."""
    wanted = f"one of {', '.join(choices)}"

    def read(value: Any, path: Path, faults: Faults) -> Any:
        if type(value) is str and value in choices and value not in _BOOLEANS:
            return choices[value]
        text = scalar_text(value, path, faults, wanted)
        if text is INVALID:
            return INVALID
        if text not in choices:
            hint = "" if faults.full else _choice_hint(text, choices)
            return faults.refuse(path, f"must be {wanted}, not {shown(value)}", hint)
        if type(value) is str and text in _BOOLEANS:
            return faults.wrong_type(value, path, wanted, f"write {text} without quotes")
        return choices[text]

    return read


def writer_of_words(choices: Mapping[str, Any]) -> Callable[[Any], object]:
    """The first word for a value."""
    return lambda value: next(word for word, meaning in choices.items() if meaning == value)


def alternatives(words: Iterable[str]) -> str:
    """`a`, `b` or `c`."""
    *others, last = (f"`{word}`" for word in words)
    return f"{', '.join(others)} or {last}" if others else last


FLAG = Kind("`true` or `false`", {"type": "boolean"}, reader_of_words(_BOOLEANS))

_TRUE_WORDS, _FALSE_WORDS = ("yes", "on", "true", "y", "1"), ("no", "off", "false", "n", "0")


def _choice_hint(text: str, choices: Collection[str]) -> str:
    if "true" in choices and text.lower() in (*_TRUE_WORDS, *_FALSE_WORDS):
        return f"write {'true' if text.lower() in _TRUE_WORDS else 'false'}"
    close = nearest(text, choices)
    return f'did you mean "{close}"?' if close else ""


def nearest(text: str, known: Collection[str]) -> str:
    """The known word that a text is nearest to; empty: none is near."""
    return next(iter(difflib.get_close_matches(text.lower()[:64], known, 1)), "")


def scalar_text(value: Any, path: Path, faults: Faults, wanted: str) -> Any:
    """The text of a value without parts, whatever else it means in YAML."""
    if isinstance(value, dict | list) or value is UNREADABLE:
        return faults.wrong_type(value, path, wanted)
    if value is None:
        return faults.refuse(path, "has no value", f"write {wanted}, or remove the key")
    text = text_of_scalar(value)
    if len(text) <= limits.TEXT:
        return text
    what = f"has {len(text)} characters, of which {limits.TEXT} are the most"
    return faults.refuse(path, what, "no text of a declaration is as long")


def read_text(value: Any, path: Path, faults: Faults, wanted: str = "text", *, numbers: bool = False) -> Any:
    """Text that every reader of YAML takes as text; `numbers`: a plain integer is text, too."""
    if numbers and type(value) is int:
        value = str(value)
    if type(value) is str and value.isascii() and len(value) <= limits.TEXT:
        return value
    text = scalar_text(value, path, faults, wanted)
    if text is INVALID:
        return INVALID
    if type(value) is not str:
        return faults.wrong_type(value, path, wanted, f"if text is meant, put it in quotes: {quoted(text)}")
    if not is_encodable(text):
        return faults.refuse(path, f"{quoted(text)} is no text", "it holds half of a surrogate pair")
    return text


def any_text(words: str, schema: Schema, wanted: str) -> Kind:
    """Any text. `wanted`: what a message calls it, such as `a name`."""
    return Kind(words, schema, partial(read_text, wanted=wanted))


def text_like(
    words: str, pattern: str, hint: str, *, wanted: str = "", noun: str = "", schema_hint: str = ""
) -> Kind:
    """Text that a whole pattern matches; `hint` says which, as `schema_hint` or else it does in editors.
    `wanted`: what is asked for in place of no text, if not the words; `noun`: what a text is not, if not
    that."""
    right, wanted = re.compile(pattern).fullmatch, wanted or words

    def read(value: Any, path: Path, faults: Faults) -> Any:
        text = read_text(value, path, faults, wanted)
        if text is INVALID or right(text):
            return text
        return faults.refuse(path, f"{quoted(text)} is not {noun or wanted}", hint)

    return Kind(words, matching(pattern, schema_hint or hint), read)


def matching(pattern: str, wanted: str, type_: str | list[str] = "string") -> Schema:
    """A schema of text that a whole pattern matches; an editor says that it must be `wanted`."""
    return {"type": type_, "pattern": f"^(?:{pattern})$", "patternErrorMessage": f"must be {wanted}"}


def reader_of_short_form(
    parse: Callable[[str], Any],
    wanted: str,
    low: float = float("-inf"),
    high: float = float("inf"),
    range_words: str = "",
) -> Read:
    """Reads text or a number by a function that raises InvalidTextError. `range_words`: from where to where,
    for a hint."""

    def read(value: Any, path: Path, faults: Faults) -> Any:
        text = value
        if type(value) is not str or len(value) > limits.TEXT:
            text = scalar_text(value, path, faults, wanted)
        if text is INVALID:
            return INVALID
        try:
            parsed = parse(text)
        except InvalidTextError as error:
            if meaning_of(value) not in ("", "an integer"):
                return faults.wrong_type(value, path, wanted, error.hint)
            return faults.refuse(path, error.what, error.hint)
        if range_words and not low <= parsed <= high:
            return faults.refuse(path, f"{quoted(text)} is out of range", range_words)
        return parsed

    return read


def items_of(value: Any, path: Path) -> Iterable[Located[Any]]:
    """The items of a list, or the value itself where it is a single one."""
    if type(value) is not list:
        return (Located(value, path),)
    return [Located(item, (*path, index)) for index, item in enumerate(value)]


def one_or_list(values: Sequence[object]) -> object:
    """A single value alone, several as a list."""
    return values[0] if len(values) == 1 else list(values)


def reader_of_items(item: Read, *empty: str) -> Read:
    """Reads one value or a list of them as a list of `Located`; `empty`: the fault of an empty list."""

    def read(value: Any, path: Path, faults: Faults) -> Any:
        if type(value) is list and not value and empty:
            faults.add(path, *empty)
        right = []
        for each, at in items_of(value, path):
            result = item(each, at, faults)
            if result is not INVALID:
                right.append(Located(result, at))
        return right

    return read


def one_or_more(words: str, item: Kind, *empty: str, **keywords: Any) -> Kind:
    """An item or a list. `empty`: the fault of an empty list; `keywords`: of the list's schema."""
    schema = list_or(item.schema, minItems=1, **keywords)
    written = item.written
    return Kind(
        words, schema, reader_of_items(item.read, *empty), lambda values: one_or_list([*map(written, values)])
    )


def list_or(
    single: Schema, items: Schema | list[Schema] | None = None, *, null: bool = False, **keywords: Any
) -> Schema:
    """The schema of a single value or a list, whose items are as it if nothing else is said. `keywords`:
    of the list, for which null may stand, too."""
    then = {"items": single if items is None else items, **keywords}
    # Says of a bad value what an item must be; `anyOf` would say only that no alternative fits.
    return {"if": {"type": ["array", "null"] if null else "array"}, "then": then, "else": single}


class Key(NamedTuple):
    """One key of a mapping: its values and its meaning, for docs, which ends in its default."""

    kind: Kind
    meaning: str
    field: str = ""
    """The field of the model that is its value; empty: it takes more than one, or a part of one."""

    @property
    def required(self) -> bool:
        """Whether its mapping must have it."""
        return self.meaning.startswith("Required")


@dataclass(frozen=True, slots=True)
class Table(Kind):
    """A mapping. `title`: its heading in docs; `short`: the schema of a short form in its place."""

    title: str = ""
    keys: Mapping[str, Key] = field(default_factory=dict)
    short: Schema = field(default_factory=dict)


def table(
    words: str, schema: Schema, title: str, keys: Mapping[str, Key], short: Schema | None = None
) -> Table:
    """A mapping with these keys. The right values of known ones are read, in written order."""
    readers = {name: key.kind.read for name, key in keys.items()}

    def read(value: Any, path: Path, faults: Faults) -> Any:
        if type(value) is not dict:
            return faults.wrong_type(value, path, f"a mapping with the keys {', '.join(keys)}")
        right: dict[str, Any] = {}
        for name, item in value.items():
            reader = readers.get(name)
            if reader is None:
                unknown_key(name, path, faults, keys)
                continue
            result = reader(item, (*path, name), faults)
            if result is not INVALID:
                right[name] = result
        return right

    return Table(words, schema, read, title=title, keys=keys, short=short or {})


def unknown_key(name: str, path: Path, faults: Faults, known: Collection[str]) -> None:
    """A key that no mapping there has; one that begins with `x-` holds values for anchors."""
    if name.startswith("x-"):
        return
    if faults.full:
        faults.more += 1
        return
    faults.add(path, f"unknown key {quoted(name)}", hint_for_key(name) or did_you_mean(name, known), key=name)


def did_you_mean(key: str, known: Collection[str]) -> str:
    """A hint that names the known key that an unknown one means or is nearest to, else all of them."""
    close = key_meant(key, known)
    return f'did you mean "{close}"?' if close else f"known: {', '.join(known)}"


def misspelt(value: Mapping[str, Any], known: Collection[str], faults: Faults) -> Collection[str]:
    """The known keys that a mapping's unknown ones mean: they are present, but misspelt. Where faults are
    only counted, every key: nothing more is said to be missing."""
    if faults.full:
        return known  # comparing words takes a tenth of a millisecond for each key
    unknown = [key for key in value if key not in known and not key.startswith("x-")]
    # In a mapping full of unknown keys most are no misspelt known ones.
    return {key_meant(key, known) for key in unknown[: 2 * len(known)]} if unknown else set()


_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def key_meant(key: str, known: Collection[str]) -> str:
    """The known key that an unknown one means, in the spelling of Kubernetes, too; empty if none is."""
    word = _CAPITAL.sub("_", key[:64]).lower().replace("-", "_")
    meant = (name for name, words in SYNONYMS.items() if word in words and name in known)
    return next(meant, "") or nearest(key, known)


SYNONYMS = {
    "address": (
        *("vip", "vips", "virtual_ip", "cluster_ip", "cluster_ips", "ip", "ips", "addr"),
        *("host", "hostname", "server", "listen", "bind"),
    ),
    "backends": (
        *("servers", "server", "real_servers", "real_server", "upstream", "upstreams", "members", "member"),
        *("nodes", "pool", "hosts", "endpoints", "targets"),
    ),
    "target": ("target_port", "backend_port", "container_port", "to"),
    "port": ("target_port", "backend_port"),
    "state": ("status", "enabled", "disabled", "admin_state"),
    "max_connections": ("maxconn", "max_conns", "max_conn", "connection_limit", "uthreshold"),
    "backup": ("standby", "spare"),
    "affinity": ("sticky", "persistence", "persistence_timeout", "session_affinity", "stickiness"),
    "balance": ("algorithm", "scheduler", "lb_algo", "lb_method", "load_balancing", "method"),
    "check": ("healthcheck", "health_check", "health", "monitor", "probe"),
    "masquerade": ("masq", "snat", "nat"),
    "external_addresses": ("external_ips", "external_ip"),
    "load_balancer_addresses": ("load_balancer_ip", "load_balancer_ips"),
    "allow_from": ("load_balancer_source_ranges", "source_ranges", "allow", "allowed", "whitelist"),
    "traffic_policy": ("external_traffic_policy", "internal_traffic_policy"),
    "on_remove": ("on_delete",),
    "path": ("uri", "url"),
    "interval": ("every", "period", "inter", "period_seconds"),
    "fall": ("retries", "failure_threshold", "unhealthy_threshold"),
    "rise": ("success_threshold", "healthy_threshold"),
    "status": ("code", "codes", "expected_status", "expect_status", "status_code"),
    "command": ("cmd", "exec", "script", "program"),
    "server_name": ("sni",),
    "services": ("vips", "virtual_services", "virtual_servers", "frontends", "listeners"),
}
"""Words of other load balancers for a key. Of several keys the first that a mapping may have is meant."""
