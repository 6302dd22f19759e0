"""YAML text in, a light tree out whose nodes know their line, and a `Problem` for whatever is not plain YAML.

The tree is built from the parser's events: composing nodes with PyYAML takes ten times as long, and its
constructors forget lines and guess types.
Refused: tags, merge keys, duplicate keys, keys that are not text, endless or exploding aliases. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from vipd.declaration.ipv6_quotes import hint_for_line
from vipd.declaration.nodes import MAX_DEPTH, Mapping, Node, Scalar, Sequence, Unreadable, null
from vipd.declaration.notation import shown
from vipd.declaration.problems import Problem
from vipd.text import joined_pairs

MAX_ALIASED_NODES = 100_000
"""Most nodes that all aliases of a file together may stand for: the end of "billion laughs"."""

_LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# The characters that YAML allows in a stream (YAML 1.2, production 1); everything else is refused.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_TABS = r"'\\t'|tab character|cannot start any token"


@dataclass(frozen=True, slots=True)
class Tree:
    """The non-empty documents of one text, and every problem of its YAML in line order."""

    documents: tuple[Node, ...] = ()
    problems: tuple[Problem, ...] = ()


def read_tree(text: str, path: str) -> Tree:
    """Read every document of `text`; `path` names the file in problems. Never raises.

    After a syntax error the documents before it are still returned.
    """
    text = _without_pairs(text)
    forbidden = _FORBIDDEN.search(text)
    if forbidden:
        return Tree(problems=(_forbidden_character(text, forbidden.start(), path),))
    builder = _Builder(path)
    try:
        builder.build(text)
    except _StopReadingError as stop:
        builder.problem(stop.line, stop.what, stop.hint)
    except yaml.MarkedYAMLError as error:
        builder.problem(*_syntax_error(error))
    except (yaml.YAMLError, UnicodeError) as error:
        builder.problem(0, f"this is not YAML: {' '.join(str(error).split())}")
    problems = sorted(builder.problems, key=lambda problem: problem.line)
    return Tree(tuple(builder.documents), _with_ipv6_hints(problems, text))


def _without_pairs(text: str) -> str:
    """JSON with its surrogate pairs joined, which no reader of YAML does; any other text as it is."""
    joined = joined_pairs(text) if text.lstrip()[:1] in ("{", "[") else text
    if joined is not text:
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return text
    return joined


def _with_ipv6_hints(problems: list[Problem], text: str) -> tuple[Problem, ...]:
    """The problems, those on a line with an IPv6 address that is no YAML with a hint at that."""
    if not problems:
        return ()
    lines = text.splitlines()
    hints = [hint_for_line(lines[p.line - 1]) if 0 < p.line <= len(lines) else "" for p in problems]
    return tuple(replace(p, hint=hint or p.hint) for p, hint in zip(problems, hints, strict=True))


class _StopReadingError(Exception):
    """Reading on would be unsafe or pointless."""

    def __init__(self, line: int, what: str, hint: str) -> None:
        super().__init__(what)
        self.line = line
        self.what = what
        self.hint = hint


@dataclass(slots=True)
class _Anchors:
    """The anchors of one document, with how many nodes each stands for."""

    nodes: dict[str, Node] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    open: list[tuple[str, int, int]] = field(default_factory=list)
    """Anchored collections not yet closed: name, depth, node count at their start."""


@dataclass(slots=True)
class _Builder:
    """Events in, documents out. `stack` holds the open collections, `keys` the pending key of each."""

    path: str
    problems: list[Problem] = field(default_factory=list)
    documents: list[Node] = field(default_factory=list)
    stack: list[Sequence | Mapping] = field(default_factory=list)
    keys: list[tuple[str, int] | None] = field(default_factory=list)
    root: Node | None = None
    anchors: _Anchors = field(default_factory=_Anchors)
    count: int = 0
    aliased: int = 0

    def problem(self, line: int, what: str, hint: str = "") -> None:
        self.problems.append(Problem(self.path, line, "", what, hint))

    def build(self, text: str) -> None:
        scalar, alias = yaml.ScalarEvent, yaml.AliasEvent
        starts = {yaml.MappingStartEvent: Mapping, yaml.SequenceStartEvent: Sequence}
        ends = (yaml.MappingEndEvent, yaml.SequenceEndEvent)
        for event in _events(text):
            kind = type(event)
            if kind is scalar:
                self.add(Scalar(event.start_mark.line + 1, event.value, not event.style), event)
            elif kind in starts:
                self.open(starts[kind](event.start_mark.line + 1), event)
            elif kind in ends:
                self.close()
            elif kind is alias:
                self.attach(self.resolve(event.anchor, event.start_mark.line + 1))
            elif kind is yaml.DocumentEndEvent:
                self.end_document()

    def end_document(self) -> None:
        """Keep the document now that it is whole: half of one would only give problems that mislead."""
        self.anchors = _Anchors()
        if self.root is not None and not null(self.root):
            self.documents.append(self.root)
        self.root = None

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
        tag = shown(str(event.tag).replace("tag:yaml.org,2002:", "!!"))
        self.problem(line, f"the YAML tag {tag} is not accepted", "write the value without a tag")

    def open(self, node: Sequence | Mapping, event: Any) -> None:
        if len(self.stack) >= MAX_DEPTH:
            raise _StopReadingError(
                node.line, f"nested more than {MAX_DEPTH} levels deep", "write it flatter"
            )
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
        """Put a finished or just opened node into the collection around it."""
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
            self.problem(
                line,
                f"the key {shown(text)} stands twice in one mapping, first on line {parent.key_lines[text]}",
                "remove one of them",
            )
            return
        parent.items[text] = node
        parent.key_lines[text] = line

    def resolve(self, anchor: str, line: int) -> Node:
        size = self.anchors.sizes.get(anchor)
        if size is None and anchor in self.anchors.nodes:
            raise _StopReadingError(line, f"the alias *{anchor} contains itself", "write the value out")
        if size is None:
            self.problem(
                line, f"the alias *{anchor} has no anchor &{anchor} before it", "write the value out"
            )
            return Unreadable(line)
        self.count += size
        self.aliased += size
        if self.aliased > MAX_ALIASED_NODES:
            raise _StopReadingError(
                line, f"the aliases stand for more than {MAX_ALIASED_NODES} values", "write the values out"
            )
        return self.anchors.nodes[anchor]


def _events(text: str) -> Iterator[Any]:
    """The parser's events, the last one ending the stream. `yaml.parse` would ask twice for each."""
    return iter(_LOADER(text).get_event, None)


def _forbidden_character(text: str, position: int, path: str) -> Problem:
    code = ord(text[position])
    line = text.count("\n", 0, position) + 1
    if 0xDC80 <= code <= 0xDCFF:  # what Python's "surrogateescape" leaves of a byte it could not decode
        what = f"the byte 0x{code - 0xDC00:02x} is not UTF-8 text"
        return Problem(path, line, "", what, "save the file as UTF-8")
    return Problem(path, line, "", f"the character U+{code:04X} is not allowed in YAML", "remove it")


def _syntax_error(error: yaml.MarkedYAMLError) -> tuple[int, str, str]:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 0
    what = f"YAML syntax: {error.problem or error.context}"
    if error.context and error.problem:
        began = error.context_mark
        since = f" begun on line {began.line + 1}" if began and began.line + 1 != line else ""
        what += f" ({error.context}{since})"
    hint = "indent with spaces, not tabs" if re.search(_TABS, what) else ""
    return line, what, hint
