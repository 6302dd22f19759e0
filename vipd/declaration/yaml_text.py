"""YAML: text to plain values (None, bool, int, str, list, dict), by libyaml's events; and paths to lines.

No value keeps its line: only when there is a fault the text is read again, for the lines of the paths that
faults name. A plain text that some readers of YAML take for something else is `Ambiguous`, so that messages
can explain it. Refused: tags, merge keys, keys that stand twice or are no text, aliases without end, and
input beyond `vipd.model.limits`. The parser reads the text in pieces, so that other threads run in between.
Pure.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import yaml

from vipd.declaration.pieces import CHUNK_BYTES, Utf8, chunks, lines_before
from vipd.declaration.syntax import quoted
from vipd.model import limits
from vipd.model.text import join_surrogate_pairs, lines

_LARGEST_JSON = 2**20
_LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# The characters that YAML allows in a stream (YAML 1.2, production 1); all others are rejected.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PLAIN = bytes((*b"\t\n\r", *range(0x20, 0x7F)))
"""Those of them that are ASCII."""
_MAX_LINE_LENGTH = 2**13
"""Bytes of a line that are searched for the cause of a problem."""

KNOWN_API_VERSIONS = frozenset({"vipd/v1", "v1", "discovery.k8s.io/v1"})
"""The values of `apiVersion` that mark a document as one for vipd."""


Path: TypeAlias = tuple[Any, ...]
"""The steps to a value: the number of its document, then keys and indexes."""


class Ambiguous(str):
    """Plain text that readers of YAML take for something else than text, or for other things."""

    __slots__ = ()


UNREADABLE: Any = object()
"""Stands for a value whose fault is already known; readers pass over it in silence."""

_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    "true": True,
    "false": False,
}
_BOOLEANS = frozenset({"true", "false", "yes", "no", "on", "off"})
_NUMBERS_BEGIN = frozenset("+-.0123456789")
_DECIMAL = re.compile(r"-?(?:0|[1-9][0-9]{0,18})")
_MAX_NUMBER_LENGTH = 64
_MEANINGS = tuple(
    (re.compile(pattern), meaning)
    for pattern, meaning in (
        (r"-?(?:0|[1-9][0-9]*)", "an integer"),
        (r"true|True|TRUE|false|False|FALSE", "a boolean"),
        (r"(?:yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF)", "a boolean in YAML 1.1"),
        (r"[-+]?0o?[0-7_]+", "an octal number in YAML"),
        (r"[-+]?0[0-9]+", "a number with a leading zero"),
        (r"[-+]?0x[0-9a-fA-F_]+", "a hexadecimal number in YAML"),
        (r"[-+]?0b[01_]+", "a binary number in YAML 1.1"),
        (r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?", "a base-60 number in YAML 1.1"),
        (r"[-+]?[0-9]+_[0-9_]*", "a number with digit groups in YAML 1.1"),
        (r"\+[0-9]+", "a number with a plus sign in YAML"),
        (r"[-+]?(?:[0-9][0-9_]*)?\.?[0-9]+(?:[eE][-+]?[0-9]+)?", "a floating-point number in YAML"),
        (r"[-+]?[0-9][0-9_]*\.(?:[eE][-+]?[0-9]+)?", "a floating-point number in YAML"),
        (r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "a floating-point number in YAML"),
        (r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt \t].*)?", "a date in YAML 1.1"),
    )
)


def meaning_of(value: Any) -> str:
    """What a value is for readers of YAML if not text: "a boolean in YAML 1.1". Empty for text."""
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "an integer"
    return _other_meaning(value) if type(value) is Ambiguous else ""


def _other_meaning(text: str) -> str:
    # Only the first pattern is safe from slow matching on long text.
    patterns = _MEANINGS if len(text) <= _MAX_NUMBER_LENGTH else _MEANINGS[:1]
    return next((meaning for pattern, meaning in patterns if pattern.fullmatch(text)), "")


def plain_value(text: str) -> Any:
    """The value of text without quotes."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] in _NUMBERS_BEGIN:
        # An IPv4 address, a port with its protocol or a duration, as most such texts are, is none of these.
        if "/" in text or text[-1] in "smh%" or text.count(".") >= 3:
            return text
        if _DECIMAL.fullmatch(text):
            return int(text)
        return Ambiguous(text) if _other_meaning(text) else text
    return Ambiguous(text) if len(text) < 6 and text.lower() in _BOOLEANS else text


def json_values(value: Any, depth: int = limits.YAML_DEPTH) -> Any:
    """Decoded JSON as values. What lies deeper than `depth` is cut off: no declaration reaches there without
    a fault higher up."""
    if depth == 0:
        return UNREADABLE
    if isinstance(value, dict):
        return {str(key): json_values(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(item, depth - 1) for item in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return Ambiguous(hex(value))  # int to decimal text raises beyond 4300 digits
    # JSON's decoder accepts Infinity and NaN; these are their YAML names.
    return plain_value(str(value).replace("inf", ".inf").replace("nan", ".nan"))


class YamlFault(NamedTuple):
    """What is wrong with a text as YAML."""

    line: int
    what: str
    hint: str = ""
    first: Path | None = None
    """`what` ends in the line of the key at this path."""


@dataclass(slots=True)
class YamlText:
    """The documents of a text that are not empty, and what is wrong with it."""

    documents: list[Any] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """The number of each of them among all, as paths begin with it."""
    lines: list[int] = field(default_factory=list)
    """The line of each."""
    starts: dict[int, list[int]] = field(default_factory=dict)
    """The lines of the items of a document's lists, by the list's id."""
    faults: list[YamlFault] = field(default_factory=list)
    may_quote: bool = True
    data: Utf8 = b""
    """The text as it was read, in UTF-8."""


class Lines(NamedTuple):
    """Where a value stands, and its key; 0: there is none."""

    value: int
    key: int = 0


class _StopError(Exception):
    """Reading on would be unsafe or pointless."""

    def __init__(self, line: int, what: str, hint: str) -> None:
        super().__init__(what)
        self.fault = YamlFault(line, what, hint)


def read_values(text: str | Utf8, quotes: bool = True) -> YamlText:
    """Read every document. Never raises. After a syntax error the documents before it are still there.

    A large text should be UTF-8, which is not copied. Without `quotes` faults quote the text only after an
    `apiVersion` that marks it as a declaration: the target of a link may have any owner, and be secret.
    """
    text = _without_pairs(text)
    read = YamlText(may_quote=quotes)
    forbidden = _forbidden_in(text)
    if forbidden is not None:
        read.faults.append(_forbidden_character(*forbidden))
        return read
    read.data = text.encode() if isinstance(text, str) else text
    reader = _Reader(read.data, read)
    try:
        reader.run()
    except _StopError as stop:
        read.faults.append(stop.fault)
    except yaml.MarkedYAMLError as error:
        if reader.stop is None:
            read.faults.append(_syntax_fault(error))
    except (yaml.YAMLError, UnicodeError) as error:
        why = f": {' '.join(str(error).split())}" if reader.may_quote() else ""
        read.faults.append(YamlFault(0, f"this is not YAML{why}"))
    if reader.stop is not None:
        # A part of a document would only cause misleading faults.
        del read.documents[reader.ended :], read.numbers[reader.ended :], read.lines[reader.ended :]
        read.faults.append(reader.stop.fault)
    read.may_quote = reader.may_quote()
    return read


def lines_of(text: Utf8, wanted: Collection[Path]) -> dict[Path, Lines]:
    """The lines of the values at these paths, which begin with the document's number. What an alias stands
    for is where its anchor is."""
    found: dict[Path, Lines] = {}
    sought, original = set(wanted), {path: path for path in wanted}
    for _ in range(limits.YAML_DEPTH):
        reader = _Reader(text, YamlText(), sought)
        with contextlib.suppress(_StopError, yaml.YAMLError, UnicodeError):  # told already
            reader.run()
        for path, place in reader.found.items():
            found.setdefault(original[path], place)
        # A path that leads through an alias goes on at its anchor.
        further = {
            (*reader.aliases[path[:end]], *path[end:]): original[path]
            for path in sought
            for end in range(len(path) - 1, 0, -1)
            if path[:end] in reader.aliases
        }
        sought = {path for path in further if further[path] not in found}
        original = further
        if not sought:
            break
    return found


class _Reader:
    """Events in, values out. Keeps lines for `wanted` paths alone."""

    def __init__(self, text: Utf8, read: YamlText, wanted: Collection[Path] | None = None) -> None:
        self._data, self._read, self._wanted = text, read, wanted
        self._around = {path[:end] for path in wanted or () for end in range(1, len(path))}
        """The collections around wanted values."""
        self.found: dict[Path, Lines] = {}
        self.aliases: dict[Path, Path] = {}
        """Where aliases are, each with the path of its anchor."""
        self.stop: _StopError | None = None
        self.ended = 0
        """Documents that ended before a limit was met."""
        self.stack: list[Any] = []
        """The open collections."""
        self._keys: list[Any] = []
        """The pending key of each."""
        self._path: list[Any] = [0]
        """The number of the document, and the steps to the open collection."""
        self._live = [wanted is not None]
        """Whether wanted paths lead into each open collection."""
        self._key_line = self._root_line = self._aliased = self._count = 0
        self._root: Any = None
        self._anchors: dict[str, _Anchor] = {}
        self._at = self._value_at = self._values = 0

    def may_quote(self) -> bool:
        """Whether the text may be quoted."""
        read = self._read
        return read.may_quote or any(map(_is_ours, (*read.documents, *self.stack[:1])))

    def read(self, size: int) -> bytes:
        """The next bytes for the parser, each piece checked against the limits; empty at the end."""
        limit = limits.YAML_VALUE_BYTES
        if self._count != self._values:
            self._values, self._value_at = self._count, self._at
        elif self._at - self._value_at > limit:
            what = f"a value, or the comments before it, has more than {limit} bytes"
            return self._cut(self._value_at, what, "nothing that vipd reads is as long")
        if self._count > limits.YAML_VALUES:
            what = f"the file has more than {limits.YAML_VALUES} values"
            return self._cut(self._at, what, "divide it into several files")
        if any(map(_crowded, self.stack, range(limits.YAML_DEPTH))):
            what = f"a mapping or a list has more than {limits.YAML_ENTRIES} entries"
            return self._cut(self._at, what, "nothing that vipd reads has as many")
        start, self._at = self._at, self._at + size
        return bytes(self._data[start : self._at])

    def _cut(self, at: int, what: str, hint: str) -> bytes:
        if self.stop is None:
            self.stop = _StopError(lines_before(self._data, at) + 1, what, hint)
            self.ended = len(self._read.documents)
        return b""

    def run(self) -> None:  # noqa: C901, PLR0912, PLR0915 (a call for each event would take as long as all the rest)
        """Read all of the text. Raises _StopError and YAMLError."""
        stack, keys, live, path = self.stack, self._keys, self._live, self._path
        scalar, alias, document_end = yaml.ScalarEvent, yaml.AliasEvent, yaml.DocumentEndEvent
        starts = {yaml.MappingStartEvent: dict, yaml.SequenceStartEvent: list}
        ends = (yaml.MappingEndEvent, yaml.SequenceEndEvent)
        parent: Any
        get = _LOADER(self).get_event
        while (event := get()) is not None:
            kind = type(event)
            if kind is scalar:
                self._count += 1
                text, parent = event.value, stack[-1] if stack else None
                # Most of a file: neither anchor nor tag, which are both None.
                simple = not live[-1] and event.anchor is event.tag
                if simple and type(parent) is list and len(stack) > 2:
                    parent.append(text if event.style else plain_value(text))
                elif type(parent) is dict and keys[-1] is _NONE:
                    if simple and text not in parent and text != "<<":
                        keys[-1] = text
                    else:
                        self._key(text, event)
                elif simple and type(parent) is dict and keys[-1] is not _DROPPED:
                    parent[keys[-1]] = text if event.style else plain_value(text)
                    keys[-1] = _NONE
                else:
                    self._attach(text if event.style else plain_value(text), event)
            elif kind in starts:
                self._count += 1
                new, depth = starts[kind](), len(stack)
                if live[-1] or event.anchor is not event.tag or not 2 < depth < limits.YAML_DEPTH:
                    self._open(new, event)
                    continue
                parent, step = stack[-1], keys[-1]
                if type(parent) is list:
                    path.append(len(parent))
                    parent.append(new)
                elif step is _NONE or step is _DROPPED:
                    self._open(new, event)
                    continue
                else:
                    path.append(step)
                    parent[step] = new
                    keys[-1] = _NONE
                stack.append(new)
                keys.append(_NONE)
                live.append(False)
            elif kind in ends:
                self._close()
            elif kind is alias:
                self._alias(event)
            elif kind is document_end:
                self._end_document()

    def _attach(self, new: Any, event: Any) -> Any:  # noqa: C901 (the places that a value may have)
        """Enter a value into the collection around it; returns the key or the index. `event` begins it."""
        step: Any = None
        if getattr(event, "tag", None) is not None:
            self._refuse_tag(event)
        if not self.stack:
            self._root, self._root_line = new, event.start_mark.line + 1
        elif type(parent := self.stack[-1]) is list:
            step = len(parent)
            parent.append(new)
            if len(self.stack) == 2:
                self._read.starts.setdefault(id(parent), []).append(event.start_mark.line + 1)
        elif (step := self._keys[-1]) is _NONE:
            if new is not UNREADABLE:
                fault = YamlFault(event.start_mark.line + 1, "a key must be text", "write `key: value`")
                self._read.faults.append(fault)
            self._keys[-1] = step = _DROPPED  # a collection is read, and dropped with its value
        else:
            if step is not _DROPPED:
                parent[step] = new
            self._keys[-1] = _NONE
        if self._live[-1] or event.anchor is not None:
            self._note_line(new, step, event)
        return step

    def _note_line(self, new: Any, step: Any, event: Any) -> None:
        """Keep an anchor; and the line of a value, if it is wanted. That of an alias is its anchor's."""
        here, line = (*self._path, *(() if step is None else (step,))), event.start_mark.line + 1
        if type(event) is yaml.AliasEvent:
            anchor = self._anchors.get(event.anchor or "")
            line = anchor.line if anchor else line
            if anchor:
                self.aliases[here] = anchor.path
        elif event.anchor is not None:
            self._anchors[event.anchor] = _Anchor(new, line, here, 1)
        if self._wanted and here in self._wanted:
            self.found.setdefault(here, Lines(line, self._key_line if type(step) is str else 0))

    def _open(self, new: Any, event: Any) -> None:
        if len(self.stack) >= limits.YAML_DEPTH:
            raise _StopError(event.start_mark.line + 1, *_too_deep())
        step = self._attach(new, event)
        if event.anchor is not None:
            started = self._anchors[event.anchor]._replace(size=-self._count)
            self._anchors[event.anchor] = started
        if self.stack:
            self._path.append(step)
        self.stack.append(new)
        self._keys.append(_NONE)
        self._live.append(self._live[-1] and tuple(self._path) in self._around)

    def _close(self) -> None:
        done = self.stack.pop()
        self._keys.pop()
        self._live.pop()
        if self.stack:
            self._path.pop()
        if not self._anchors:
            return
        for name, anchor in self._anchors.items():
            if anchor.value is done and anchor.size < 0:
                self._anchors[name] = anchor._replace(size=self._count + anchor.size + 1)
                break

    def _end_document(self) -> None:
        if self._root is not None:
            self._read.documents.append(self._root)
            self._read.numbers.append(self._path[0])
            self._read.lines.append(self._root_line)
        self._anchors, self._root = {}, None
        self._path[:] = [self._path[0] + 1]

    def _key(self, text: str, event: Any) -> None:
        """Take the key of the next value, or the mark for one that is dropped with its value."""
        self._key_line, faults = event.start_mark.line + 1, self._read.faults
        if event.anchor is not None and type(event) is yaml.ScalarEvent:
            self._anchors[event.anchor] = _Anchor(text, self._key_line, tuple(self._path), 1)
        if getattr(event, "tag", None) is not None:
            self._refuse_tag(event)
        self._keys[-1] = text
        if text == "<<" and not getattr(event, "style", None):
            what, hint = "the merge key << is not accepted", "repeat the keys it would merge"
            faults.append(YamlFault(self._key_line, what, hint))
            self._keys[-1] = _DROPPED
        elif text in self.stack[-1]:
            key = f"the key {quoted(text)}" if self.may_quote() else "a key"
            what = f"{key} stands twice in one mapping, first on line"
            faults.append(YamlFault(self._key_line, what, "remove one of them", (*self._path, text)))
            self._keys[-1] = _DROPPED

    def _alias(self, event: Any) -> None:
        anchor, line = self._anchors.get(event.anchor), event.start_mark.line + 1
        name = quoted(event.anchor)[1:-1] if self.may_quote() else ""
        if anchor and anchor.size < 0:
            what = f"the alias *{name} contains itself" if name else "an alias contains itself"
            raise _StopError(line, what, "write the value out")
        if anchor is None:
            what = f"the alias *{name} has no anchor &{name} before it" if name else "an alias has no anchor"
            self._read.faults.append(YamlFault(line, what, "write the value out"))
        size = anchor.size if anchor else 0
        self._count += size
        self._aliased += size
        if self._aliased > limits.YAML_ALIASED:
            what = f"the aliases stand for more than {limits.YAML_ALIASED} values"
            raise _StopError(line, what, "write the values out")
        as_key = self.stack and type(self.stack[-1]) is dict and self._keys[-1] is _NONE
        if anchor and as_key and isinstance(anchor.value, str):
            self._key(anchor.value, event)
        else:
            self._attach(anchor.value if anchor else UNREADABLE, event)

    def _refuse_tag(self, event: Any) -> None:
        tag = quoted(str(event.tag).replace("tag:yaml.org,2002:", "!!"))
        what = f"the YAML tag {tag} is not accepted" if self.may_quote() else "YAML tags are not accepted"
        line = event.start_mark.line + 1
        self._read.faults.append(YamlFault(line, what, "write the value without a tag"))


class _Anchor(NamedTuple):
    """A value that aliases may stand for."""

    value: Any
    line: int
    path: Path
    size: int
    """How many values it has; below 0 while it is open."""


class _Mark:
    """A key that is none."""


_NONE, _DROPPED = _Mark(), _Mark()


def _crowded(value: Any, depth: int) -> bool:
    """Whether a collection has more entries than any valid one. Lists of services, and of objects of
    Kubernetes, are freed one by one."""
    return len(value) > limits.YAML_ENTRIES and (depth > 1 or type(value) is dict)


def _is_ours(document: Any) -> bool:
    version = document.get("apiVersion") if type(document) is dict else None
    return isinstance(version, str) and version in KNOWN_API_VERSIONS


def _syntax_fault(error: yaml.MarkedYAMLError) -> YamlFault:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 0
    if "nesting depth" in str(error.problem):  # libyaml 0.2.6 gives up before it has told of any level
        return YamlFault(line, *_too_deep())
    what = f"YAML syntax: {error.problem or error.context}"
    if error.context and error.problem:
        began = error.context_mark
        since = f" begun on line {began.line + 1}" if began and began.line + 1 != line else ""
        what += f" ({error.context}{since})"
    hint = "indent with spaces, not tabs" if re.search(_TABS, what) else ""
    return YamlFault(line, what, hint)


_TABS = r"'\\t'|tab character|cannot start any token"


def _too_deep() -> tuple[str, str]:
    return f"nested more than {limits.YAML_DEPTH} levels deep", "write it flatter"


def _without_pairs(text: str | Utf8) -> str | Utf8:
    """JSON with its surrogate pairs joined, which no reader of YAML does; any other text unchanged.

    A large text is unchanged too: to detect JSON takes long, and no other thread runs meanwhile."""
    if len(text) > _LARGEST_JSON:
        return text
    text = text if isinstance(text, str) else text.decode(errors="surrogateescape")
    joined = join_surrogate_pairs(text) if text.lstrip()[:1] in ("{", "[") else text
    if joined is not text:
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return text
    return joined


def _forbidden_in(text: str | Utf8) -> tuple[int, int] | None:
    """The first character that YAML does not allow, after its line."""
    lines = 1
    for piece in _characters(text):
        found = _FORBIDDEN.search(piece)
        if found:
            return lines + piece.count("\n", 0, found.start()), ord(found[0])
        lines += piece.count("\n")
    return None


def _characters(text: str | Utf8) -> Iterator[str]:
    if isinstance(text, str):
        yield from (text[start : start + CHUNK_BYTES] for start in range(0, len(text), CHUNK_BYTES))
    else:
        for _, piece in chunks(text):
            # For most pieces this is enough, and takes a tenth of the time.
            plain = piece.isascii() and not piece.translate(None, _PLAIN)
            yield "\n" * piece.count(b"\n") if plain else piece.decode(errors="surrogateescape")


def numbered_lines(text: Utf8, numbers: set[int]) -> dict[int, str]:
    """Some lines of a text, by their number; long ones are truncated."""
    found: dict[int, str] = {}
    last, start, number = max(numbers, default=0), 0, 0
    while number < last and start <= len(text):
        number += 1
        end = text.find(b"\n", start)
        end = len(text) if end < 0 else end
        if number in numbers:
            found[number] = text[start : min(end, start + _MAX_LINE_LENGTH)].decode(errors="replace")
        start = end + 1
    return found


def _forbidden_character(line: int, code: int) -> YamlFault:
    if 0xDC80 <= code <= 0xDCFF:  # Python's "surrogateescape" for a byte that it could not decode
        what = f"the byte 0x{code - 0xDC00:02x} is not UTF-8 text"
        return YamlFault(line, what, "save the file as UTF-8")
    return YamlFault(line, f"the character U+{code:04X} is not allowed in YAML", "remove it")


class _Dumper(yaml.SafeDumper):
    """PyYAML's, but it quotes every text that might be something else, and writes no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        """Always true: a value that occurs twice is written twice."""
        del data
        return True


def _represented(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    plain = text.isprintable() and type(plain_value(text)) is str
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _represented)


def dump_yaml(value: object) -> str:
    """A value of JSON types as YAML, keys in their order; unprintable characters are escaped."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None)
    # PyYAML leaves some such characters unchanged; they are in double quotes, as described above.
    return lines(text)
