"""The tree from which declarations are read: nodes that know their line, of a text or of JSON.

A scalar stays text; this module interprets a plain one, by the decimal and lower-case rules that all YAML
readers share. A text that some of them interpret differently has a name, so that messages can explain it.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from vipd.model.limits import YAML_DEPTH


@dataclass(slots=True, eq=False)
class Node:
    """A value at a 1-based line (0: the value has no line)."""

    line: int


@dataclass(slots=True, eq=False)
class Scalar(Node):
    """Text as written; `plain` if without quotes, so that it may be a number, a boolean or null."""

    text: str
    plain: bool


@dataclass(slots=True, eq=False)
class Sequence(Node):
    """A list."""

    items: list[Node] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Mapping(Node):
    """Keys and values in written order, each key once, with the line of each key."""

    items: dict[str, Node] = field(default_factory=dict)
    key_lines: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Unreadable(Node):
    """Replaces a value whose problem is already reported; readers skip it silently."""


def tree_from_json(value: object, line: int = 0, depth: int = YAML_DEPTH) -> Node:
    """The same tree from decoded JSON, every node at `line`. Strings count as quoted.

    Nodes deeper than `depth` are cut off: no declaration reaches there without a problem higher up.
    """
    if depth == 0:
        return Unreadable(line)
    if isinstance(value, dict):
        items = {str(key): tree_from_json(item, line, depth - 1) for key, item in value.items()}
        return Mapping(line, items, dict.fromkeys(items, line))
    if isinstance(value, list | tuple):
        return Sequence(line, [tree_from_json(item, line, depth - 1) for item in value])
    if isinstance(value, str):
        return Scalar(line, value, plain=False)
    return Scalar(line, _plain_text(value), plain=True)


def tree_to_json(node: Node) -> object:
    """The JSON value that `tree_from_json` reads as this tree. Without its lines."""
    if isinstance(node, Mapping):
        return {key: tree_to_json(item) for key, item in node.items.items()}
    if isinstance(node, Sequence):
        return [tree_to_json(item) for item in node.items]
    if not isinstance(node, Scalar) or is_null(node):
        return None
    if node.plain and node.text in ("true", "false"):
        return node.text == "true"
    number = integer(node)
    return node.text if number is None else number


def release_trees(nodes: Iterable[Node]) -> None:
    """Free trees that are no longer needed node by node: freeing millions of them at once would block
    every other thread."""
    left = list(nodes)
    while left:
        node = left.pop()
        items = node.items if isinstance(node, Sequence | Mapping) else ()
        while items:
            item = items.pop() if isinstance(items, list) else items.popitem()[1]
            if not isinstance(item, Scalar):
                left.append(item)


def _plain_text(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return hex(value)  # int to decimal text raises beyond 4300 digits
    # JSON's decoder accepts Infinity and NaN; these are their YAML names.
    return str(value).replace("inf", ".inf").replace("nan", ".nan")


def is_null(node: Node) -> bool:
    """Whether the value is null: nothing, `~` or `null`, without quotes."""
    return isinstance(node, Scalar) and node.plain and node.text in _NULLS


def integer(scalar: Scalar) -> int | None:
    """The value of a plain decimal integer, else None."""
    if scalar.plain and _DECIMAL.fullmatch(scalar.text):
        return int(scalar.text)
    return None


def other_meaning(scalar: Scalar) -> str:
    """What YAML readers parse a plain scalar as if not text: "a boolean in YAML 1.1". "" for text."""
    if not scalar.plain:
        return ""
    if scalar.text in _NULLS:
        return "null"
    if scalar.text[0] not in _NUMBERS_BEGIN and scalar.text.lower() not in _BOOLEANS:
        return ""
    return next(
        (meaning for pattern, meaning in _patterns_of(scalar.text) if pattern.fullmatch(scalar.text)),
        "",
    )


def _patterns_of(text: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    """The patterns to try: only the first is safe from slow matching on long text."""
    return _MEANINGS if len(text) <= _MAX_NUMBER_LENGTH else _MEANINGS[:1]


_MAX_NUMBER_LENGTH = 64
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_NUMBERS_BEGIN = frozenset("+-.0123456789")
_BOOLEANS = frozenset({"true", "false", "yes", "no", "on", "off"})
_DECIMAL = re.compile(r"-?(?:0|[1-9][0-9]{0,18})")
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
