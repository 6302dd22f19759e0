"""Reads fields of Kubernetes objects: a place in the tree, empty if the field is missing. Pure.

Fields that are not requested are never read, so objects as `kubectl` prints them need no trimming. A value
of the wrong kind is reported and counts as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from vipd.declaration import nodes
from vipd.declaration.fields import Located, Report, read_integer, read_short_form, read_text
from vipd.declaration.nodes import Node, Scalar, Sequence
from vipd.declaration.syntax import MAX_PORT, parse_address, quoted

T = TypeVar("T")

_BOOLEANS = {"true": True, "false": False}


class FieldCursor(NamedTuple):
    """One place of an object. `node` is None if it is missing or null; `line` is then its parent's."""

    report: Report
    node: Node | None
    line: int
    path: str

    def at(self, *keys: str) -> FieldCursor:
        """The place below by these keys."""
        place = self
        for key in keys:
            place = place._child(key)
        return place

    def _child(self, key: str) -> FieldCursor:
        path = f"{self.path}.{key}" if self.path else key
        if self.node is not None and not isinstance(self.node, nodes.Mapping):
            self.report.wrong_type(self.node, self.path, "a mapping")
            return FieldCursor(self.report, None, self.line, path)
        found = self.node.items.get(key) if self.node is not None else None
        if found is None or nodes.is_null(found):
            return FieldCursor(self.report, None, self.line, path)
        return FieldCursor(self.report, found, found.line, path)

    def has(self, key: str) -> bool:
        """Whether this key has a value other than null."""
        return self._child(key).node is not None

    def items(self) -> Iterator[FieldCursor]:
        """The places of a list; none if there is no value."""
        if self.node is None:
            return
        if not isinstance(self.node, Sequence):
            self.report.wrong_type(self.node, self.path, "a list")
            return
        for index, item in enumerate(self.node.items):
            yield FieldCursor(
                self.report, None if nodes.is_null(item) else item, item.line, f"{self.path}[{index}]"
            )

    def text(self, default: str = "") -> str:
        """Text; the default if there is no value, or the empty text."""
        if self.node is None:
            return default
        return read_text(self.report, self.node, self.path) or default

    def choice(self, choices: dict[str, T], default: T) -> T:
        """The value of one of a few words."""
        text = self.text()
        if text and text not in choices:
            self.problem(f"must be one of {', '.join(choices)}, not {quoted(text)}")
        return choices.get(text, default)

    def integer(self, low: int, high: int) -> int | None:
        """An integer in that range; None if there is no value."""
        return None if self.node is None else read_integer(self.report, self.node, self.path, low, high)

    def port(self) -> int | None:
        """A port; None for 0, which Kubernetes also writes for none."""
        return self.integer(0, MAX_PORT) or None

    def boolean(self) -> bool | None:
        """True or false; None if there is no value."""
        if self.node is None:
            return None
        if isinstance(self.node, Scalar) and self.node.plain and self.node.text.lower() in _BOOLEANS:
            return _BOOLEANS[self.node.text.lower()]
        self.report.wrong_type(self.node, self.path, "true or false")
        return None

    def short_form(self, parse: Callable[[str], T], wanted: str) -> T | None:
        """A value in one of the forms of `vipd.declaration.syntax`; None if there is no value."""
        return (
            None if self.node is None else read_short_form(self.report, self.node, self.path, parse, wanted)
        )

    def address(self) -> Located[str] | None:
        """An IP address; None if there is no value, or an invalid one."""
        address = self.short_form(parse_address, "an IP address")
        return None if address is None else Located(address, self.line, self.path)

    def problem(self, what: str, hint: str = "") -> None:
        """Report a fault of this place."""
        self.report.add(self.line, self.path, what, hint)

    def note(self, text: str) -> None:
        """Add a note about this place, which is no fault."""
        self.report.note(self.line, text)
