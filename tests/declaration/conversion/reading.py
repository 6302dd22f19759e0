"""Converts a text, and holds the result to what every conversion promises."""

from __future__ import annotations

from textwrap import dedent

from vipd.declaration.conversion.formats import convert_text, format_of
from vipd.declaration.native import format_declaration, parse_declaration
from vipd.declaration.problems import PLEASE_REPORT, Declaration
from vipd.model.service import Service


def convert(text: str, *addresses: str, form: str = "") -> Declaration:
    """The conversion of a text in the format that it is recognised as. What it prints is read back equal."""
    text = dedent(text).lstrip("\n")
    recognised = format_of(text)
    assert form in ("", recognised)
    found = convert_text(text, "a", recognised, addresses)
    again = parse_declaration(format_declaration(found.services), "printed")
    assert (again.services, again.problems) == (found.services, ())
    assert not [each for each in found.problems if each.hint == PLEASE_REPORT]
    return found


def only(found: Declaration) -> Service:
    """The only service of a conversion that lost nothing."""
    assert found.problems == ()
    (service,) = found.services
    return service


def lost(found: Declaration) -> list[tuple[int, str]]:
    """Line and name of each part that was lost."""
    return [(each.line, each.path) for each in found.problems]


def noted(found: Declaration) -> list[tuple[int, str]]:
    """The same of the notes, up to their first colon."""
    return [(each.line, each.text.partition(":")[0]) for each in found.notes]
