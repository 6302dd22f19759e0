"""Parses YAML text to a light tree whose nodes know their line, with a `Problem` for anything but plain YAML.

The tree is built from the parser's events and not by PyYAML's `compose`: that recurses in C, so that 100,000
brackets crash the process, and no limit can be checked before all nodes exist. Nor is it faster: the tree of
10,000 services takes four fifths of the time of `compose` with the C loader, half of it for the events.
Rejected: tags, merge keys, duplicate keys, keys that are not text, endless or exploding aliases, and input
beyond `vipd.model.limits`. The parser reads the text in pieces, so that other threads run in between. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from vipd.declaration.ipv6_quotes import hint_for_line
from vipd.declaration.nodes import Mapping, Node, Scalar, Sequence, Unreadable, is_null, release_trees
from vipd.declaration.pieces import CHUNK_BYTES, Utf8, chunks, lines_before
from vipd.declaration.problems import Problem, ProblemList
from vipd.declaration.syntax import quoted
from vipd.model import limits
from vipd.model.text import join_surrogate_pairs

_LARGEST_JSON = 2**20
_LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# The characters that YAML allows in a stream (YAML 1.2, production 1); all others are rejected.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_PLAIN = bytes((*b"\t\n\r", *range(0x20, 0x7F)))
"""Those of them that are ASCII."""
_MAX_LINE_LENGTH = 2**13
"""Bytes of a line that are searched for the cause of a problem."""

_TABS = r"'\\t'|tab character|cannot start any token"

KNOWN_API_VERSIONS = frozenset({"vipd/v1", "v1", "discovery.k8s.io/v1"})
"""The values of `apiVersion` that mark a document as one for vipd."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The non-empty documents of one text, and every problem of its YAML in line order."""

    documents: tuple[Node, ...] = ()
    problems: tuple[Problem, ...] = ()


def read_tree(text: str | Utf8, path: str, quotes: bool = True) -> Tree:
    """Read every document of `text`; `path` names the file in problems. Never raises. A large one should be
    UTF-8, which is not copied.

    After a syntax error the documents before it are still returned. Without `quotes`, problems quote
    the text only after an `apiVersion` that marks it as a declaration.
    """
    text = _without_pairs(text)
    forbidden = _forbidden_in(text)
    if forbidden is not None:
        return Tree(problems=(_forbidden_character(*forbidden, path),))
    text = text.encode() if isinstance(text, str) else text
    builder = _Builder(path, quotes)
    try:
        builder.build(text)
    except _StopReadingError as stop:
        builder.problem(stop.line, stop.what, stop.hint)
    except yaml.MarkedYAMLError as error:
        builder.problem(*_syntax_error(error))
    except (yaml.YAMLError, UnicodeError) as error:
        why = f": {' '.join(str(error).split())}" if builder.may_quote else ""
        builder.problem(0, f"this is not YAML{why}")
    problems = builder.problems.by_line()
    if problems and builder.may_quote:
        problems = _with_ipv6_hints(problems, text)
    release_trees(builder.stack[:1])  # left open by a fault
    return Tree(tuple(builder.documents), problems)


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


def _with_ipv6_hints(problems: tuple[Problem, ...], text: Utf8) -> tuple[Problem, ...]:
    """The problems; those on a line with an IPv6 address that is no YAML get a hint at that."""
    lines = _lines(text, {problem.line for problem in problems})
    hints = [hint_for_line(lines.get(problem.line, "")) for problem in problems]
    return tuple(replace(p, hint=hint or p.hint) for p, hint in zip(problems, hints, strict=True))


def _lines(text: Utf8, numbers: set[int]) -> dict[int, str]:
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


class _StopReadingError(Exception):
    """Reading on would be unsafe or pointless."""

    def __init__(self, line: int, what: str, hint: str) -> None:
        super().__init__(what)
        self.line = line
        self.what = what
        self.hint = hint


@dataclass(slots=True)
class _Anchors:
    """The anchors of one document, with the number of nodes that each expands to."""

    nodes: dict[str, Node] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    open: list[tuple[str, int, int]] = field(default_factory=list)
    """Anchored collections not yet closed: name, depth, node count at their start."""


@dataclass(slots=True)
class _Builder:
    """Events in, documents out. `stack` holds the open collections, `keys` the pending key of each."""

    path: str
    quotes: bool = True
    problems: ProblemList = field(default_factory=ProblemList)
    documents: list[Node] = field(default_factory=list)
    stack: list[Sequence | Mapping] = field(default_factory=list)
    keys: list[tuple[str, int] | None] = field(default_factory=list)
    root: Node | None = None
    anchors: _Anchors = field(default_factory=_Anchors)
    count: int = 0
    aliased: int = 0

    @property
    def may_quote(self) -> bool:
        """Whether the text may be quoted: the target of a link may have any owner, and be secret."""
        return self.quotes or any(_is_ours(node) for node in (*self.documents, *self.stack[:1]))

    def problem(self, line: int, what: str, hint: str = "") -> None:
        self.problems.add(Problem(self.path, line, "", what, hint))

    def build(self, text: Utf8) -> None:
        """Read all of a text. Raises _StopReadingError and YAMLError."""
        pieces = _Pieces(text, self)
        try:
            self._build(pieces)
        except yaml.MarkedYAMLError:
            if pieces.stop is None:
                raise
        if pieces.stop is not None:
            release_trees(self.documents[-1:])
            del self.documents[-1:]
            raise pieces.stop

    def _build(self, pieces: _Pieces) -> None:
        scalar_event, alias = yaml.ScalarEvent, yaml.AliasEvent
        starts = {yaml.MappingStartEvent: Mapping, yaml.SequenceStartEvent: Sequence}
        ends = (yaml.MappingEndEvent, yaml.SequenceEndEvent)
        # `yaml.parse` would call twice for each event. The last one ends the stream.
        for event in iter(_LOADER(pieces).get_event, None):
            kind = type(event)
            if kind is scalar_event:
                self.scalar(event)
            elif kind in starts:
                self.open(starts[kind](event.start_mark.line + 1), event)
            elif kind in ends:
                self.close()
            elif kind is alias:
                self.attach(self.resolve(event.anchor, event.start_mark.line + 1))
            elif kind is yaml.DocumentEndEvent:
                self.end_document()

    def end_document(self) -> None:
        """Keep the complete document: a part of one would only cause misleading problems."""
        self.anchors = _Anchors()
        if self.root is not None and not is_null(self.root):
            self.documents.append(self.root)
        self.root = None

    def scalar(self, event: Any) -> None:
        """Most of a file: a text that is only a key becomes no node."""
        line, text = event.start_mark.line + 1, event.value
        if event.anchor is not None or event.tag is not None:
            self.add(Scalar(line, text, not event.style), event)
            return
        self.count += 1
        if self.keys and self.keys[-1] is None and type(self.stack[-1]) is Mapping and text != "<<":
            self.keys[-1] = text, line
        else:
            self.attach(Scalar(line, text, not event.style))

    def add(self, node: Node, event: Any) -> None:
        self.count += 1
        anchor = event.anchor
        if anchor is not None:
            self.anchors.nodes[anchor] = node
            if type(node) is Scalar:
                self.anchors.sizes[anchor] = 1
            else:
                self.anchors.sizes.pop(anchor, None)
                self.anchors.open.append((anchor, len(self.stack), self.count - 1))
        if event.tag is not None:
            self.refuse_tag(node.line, event)
        self.attach(node)

    def refuse_tag(self, line: int, event: Any) -> None:
        tag = quoted(str(event.tag).replace("tag:yaml.org,2002:", "!!"))
        what = f"the YAML tag {tag} is not accepted" if self.may_quote else "YAML tags are not accepted"
        self.problem(line, what, "write the value without a tag")

    def open(self, node: Sequence | Mapping, event: Any) -> None:
        if len(self.stack) >= limits.YAML_DEPTH:
            raise _StopReadingError(node.line, *_too_deep())
        self.add(node, event)
        self.stack.append(node)
        self.keys.append(None)

    def close(self) -> None:
        self.stack.pop()
        self.keys.pop()
        if self.anchors.open and self.anchors.open[-1][1] == len(self.stack):
            anchor, _, start = self.anchors.open.pop()
            self.anchors.sizes[anchor] = self.count - start

    def attach(self, node: Node) -> None:
        """Add a finished or just opened node to the collection around it."""
        if not self.stack:
            self.root = node
            return
        parent = self.stack[-1]
        if type(parent) is Sequence:
            parent.items.append(node)
            return
        key = self.keys[-1]
        if key is None:
            self.keys[-1] = self.key(node)
            return
        self.keys[-1] = None
        self.enter(parent, key, node)  # type: ignore[arg-type]

    def key(self, node: Node) -> tuple[str, int]:
        if type(node) is Scalar:
            if node.text == "<<" and node.plain:
                self.problem(node.line, "the merge key << is not accepted", "repeat the keys it would merge")
                return "", -1
            return node.text, node.line
        if type(node) is not Unreadable:
            self.problem(node.line, "a key must be text", "write `key: value`")
        return "", -1

    def enter(self, parent: Mapping, key: tuple[str, int], node: Node) -> None:
        text, line = key
        if line < 0:
            return
        if text in parent.items:
            key_shown = f"the key {quoted(text)}" if self.may_quote else "a key"
            what = f"{key_shown} stands twice in one mapping, first on line {parent.key_lines[text]}"
            self.problem(line, what, "remove one of them")
            return
        parent.items[text] = node
        parent.key_lines[text] = line

    def resolve(self, anchor: str, line: int) -> Node:
        size = self.anchors.sizes.get(anchor)
        name = quoted(anchor)[1:-1] if self.may_quote else ""
        if size is None and anchor in self.anchors.nodes:
            what = f"the alias *{name} contains itself" if name else "an alias contains itself"
            raise _StopReadingError(line, what, "write the value out")
        if size is None:
            what = f"the alias *{name} has no anchor &{name} before it" if name else "an alias has no anchor"
            self.problem(line, what, "write the value out")
            return Unreadable(line)
        self.count += size
        self.aliased += size
        if self.aliased > limits.YAML_ALIASED:
            what = f"the aliases stand for more than {limits.YAML_ALIASED} values"
            raise _StopReadingError(line, what, "write the values out")
        return self.anchors.nodes[anchor]


class _Pieces:
    """The text for the parser, a piece at a time. Each piece is checked against the limits: `stop` is
    why the text was cut off."""

    def __init__(self, text: Utf8, builder: _Builder) -> None:
        self._data, self._builder = text, builder
        self._at = self._value_at = self._values = 0
        self.stop: _StopReadingError | None = None

    def read(self, size: int) -> bytes:
        """The next bytes; empty at the end."""
        values, limit = self._builder.count, limits.YAML_VALUE_BYTES
        if values != self._values:
            self._values, self._value_at = values, self._at
        elif self._at - self._value_at > limit:
            what = f"a value, or the comments before it, has more than {limit} bytes"
            return self._cut(self._value_at, what, "nothing that vipd reads is as long")
        if values > limits.YAML_VALUES:
            what = f"the file has more than {limits.YAML_VALUES} values"
            return self._cut(self._at, what, "divide it into several files")
        if any(map(_crowded, self._builder.stack, range(limits.YAML_DEPTH))):
            what = f"a mapping or a list has more than {limits.YAML_ENTRIES} entries"
            return self._cut(self._at, what, "nothing that vipd reads has as many")
        start, self._at = self._at, self._at + size
        return bytes(self._data[start : self._at])

    def _cut(self, at: int, what: str, hint: str) -> bytes:
        self.stop = self.stop or _StopReadingError(lines_before(self._data, at) + 1, what, hint)
        return b""


def _crowded(node: Sequence | Mapping, depth: int) -> bool:
    """Whether a collection has more entries than any valid one: its tree would be freed
    in one step. Lists of services, and of objects of Kubernetes, are freed one by one."""
    return len(node.items) > limits.YAML_ENTRIES and (depth > 1 or isinstance(node, Mapping))


def _is_ours(node: Node) -> bool:
    version = node.items.get("apiVersion") if isinstance(node, Mapping) else None
    return isinstance(version, Scalar) and version.text in KNOWN_API_VERSIONS


def _forbidden_character(line: int, code: int, path: str) -> Problem:
    if 0xDC80 <= code <= 0xDCFF:  # Python's "surrogateescape" for a byte that it could not decode
        what = f"the byte 0x{code - 0xDC00:02x} is not UTF-8 text"
        return Problem(path, line, "", what, "save the file as UTF-8")
    return Problem(path, line, "", f"the character U+{code:04X} is not allowed in YAML", "remove it")


def _syntax_error(error: yaml.MarkedYAMLError) -> tuple[int, str, str]:
    line = _line_of(error)
    if "nesting depth" in str(error.problem):  # libyaml 0.2.6 gives up before it has told of any level
        return line, *_too_deep()
    what = f"YAML syntax: {error.problem or error.context}"
    if error.context and error.problem:
        began = error.context_mark
        since = f" begun on line {began.line + 1}" if began and began.line + 1 != line else ""
        what += f" ({error.context}{since})"
    hint = "indent with spaces, not tabs" if re.search(_TABS, what) else ""
    return line, what, hint


def _too_deep() -> tuple[str, str]:
    """What is wrong, and a hint."""
    return f"nested more than {limits.YAML_DEPTH} levels deep", "write it flatter"


def _line_of(error: yaml.MarkedYAMLError) -> int:
    mark = error.problem_mark or error.context_mark
    return mark.line + 1 if mark else 0
