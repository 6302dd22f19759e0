"""Converts a text, and holds the result to what every conversion promises."""

from __future__ import annotations

from textwrap import dedent

from tests.lab.inside import Declared, declare, written
from vipd.model.service import Service


def convert(text: str, *addresses: str, form: str = "") -> Declared:
    """The conversion of a text in the format that it is recognised as. What it prints is read back equal."""
    text = dedent(text).lstrip("\n")
    found = declare(text, "a", form="auto", addresses=addresses)
    assert not form or found == declare(text, "a", form=form, addresses=addresses)
    again = declare(written(found.services), "printed")
    assert (again.services, again.problems) == (found.services, ())
    assert not [each for each in found.problems if each.internal]
    return found


def only(found: Declared) -> Service:
    """The only service of a conversion that lost nothing."""
    assert found.problems == ()
    (service,) = found.services
    return service


def lost(found: Declared) -> list[tuple[int, str]]:
    """Line and name of each part that was lost."""
    return [(each.line, each.path) for each in found.problems]


def noted(found: Declared) -> list[tuple[int, str]]:
    """The same of the notes, up to their first colon."""
    return [(each.line, each.text.partition(":")[0]) for each in found.notes]
