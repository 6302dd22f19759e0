"""What is wrong with a setting's value, in our words instead of the validating library's. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vipd.declaration import nodes
from vipd.declaration.nodes import Node
from vipd.declaration.yaml_tree import read_tree

MANUAL_HINT = "man vipd.yaml tells them all"

_WANTED = {
    "bool": "true or false",
    "int": "a whole number",
    "string": "text",
    "path": "a path",
    "tuple": "a list",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}
"""By the first part of pydantic's type of error."""


def fault_text(error: Mapping[str, object], known: tuple[str, ...]) -> str:
    """`what; hint: ...` for one of pydantic's errors; lines of their own where our validators told several.

    `known` are the names that settings have.
    """
    kind = str(error["type"])
    if kind == "extra_forbidden":
        name = str(_listed(error["loc"])[-1])
        close = difflib.get_close_matches(name.lower(), known, 1)
        return f"unknown setting; hint: {f'did you mean {close[0]}?' if close else MANUAL_HINT}"
    given = _given(error["input"])
    if kind == "literal_error":
        return _no_choice(given, error)
    if kind == "string_pattern_mismatch":
        return f"{given} is not in the form wanted; hint: man vipd.yaml"
    for start, wanted in _WANTED.items():
        if kind.startswith(start):
            return f"must be {wanted.format_map(_context(error))}, not {given}"
    return re.sub(r"^Value error, ", "", str(error["msg"]))


def syntax_faults(text: str, place: str, error: Exception) -> list[str]:
    """`file:line: what; hint: ...` for each fault of a text that PyYAML refuses to read with `error`."""
    tree = read_tree(text, place)
    if not tree.problems:
        what = " ".join(str(error).split())
        what = "more than one document; hint: keep one" if len(tree.documents) > 1 else f"is not YAML: {what}"
        return [f"{place}: {what}"]
    faults = []
    for problem in tree.problems:
        hint = f"; hint: {problem.hint}" if problem.hint else ""
        # What stands on a command line has no lines.
        line = problem.line if "\n" in text else 0
        faults.append(f"{replace(problem, line=line, hint='')}{hint}")
    return faults


def line_of(tree: Node | None, location: Sequence[str]) -> int:
    """The line of a value, by keys and numbers of items, or of what is nearest around it; 0: not known."""
    line, node = 0, tree
    for part in location:
        if isinstance(node, nodes.Mapping) and part in node.items:
            line, node = node.key_lines[part], node.items[part]
        elif isinstance(node, nodes.Sequence) and part.isdecimal() and int(part) < len(node.items):
            node = node.items[int(part)]
            line = node.line
        else:
            break
    return line


def _no_choice(given: str, error: Mapping[str, object]) -> str:
    words = re.findall(r"'([^']*)'", str(_context(error).get("expected", "")))
    close = difflib.get_close_matches(given.strip('"').lower(), words, 1)
    hint = f"; hint: did you mean {close[0]}?" if close else ""
    return f"must be one of {', '.join(words)}, not {given}{hint}"


def _given(value: object) -> str:
    """A value as its author may have written it."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "a mapping"
    return (
        "a list"
        if isinstance(value, (list, tuple))
        else f'"{value}"'
        if isinstance(value, str)
        else str(value)
    )


def _context(error: Mapping[str, object]) -> Mapping[str, object]:
    found = error.get("ctx")
    return found if isinstance(found, Mapping) else {}


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
