"""A diagnosis as lines for a screen. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import groupby
from textwrap import wrap

from vipd.model.text import one_line
from vipd.observe.doctor.diagnosis import Diagnosis
from vipd.observe.doctor.finding import Finding, Severity

Paint = Callable[[str, str], str]
"""A text in a colour."""

NARROWEST, WIDEST = 40, 80
HEADS = {
    Severity.PROBLEM: ("Problems", "red"),
    Severity.WARNING: ("Warnings", "yellow"),
    Severity.UNCHECKED: ("Not checked", "dim"),
    Severity.OK: ("In order", "green"),
}
_INDENT, _DEEPER = "  ", "      "
_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"(?:[^"\\]|\\.)*")+""")


def lines_of(
    diagnosis: Diagnosis, paint: Paint, width: int, *, quiet: bool = False, everything: bool = False
) -> Iterator[str]:
    """The findings, the worst first, grouped by kind. `quiet` leaves out those without fault, and the
    sum; without `everything` they are only counted."""
    width = max(NARROWEST, min(width, WIDEST))
    shown = [s for s in Severity if (s is not Severity.OK or (everything and not quiet)) and diagnosis.of(s)]
    for severity in shown:
        head, colour = HEADS[severity]
        yield paint(head, colour)
        by_group = sorted(diagnosis.of(severity), key=lambda finding: _order(finding, diagnosis))
        for group, findings in groupby(by_group, key=lambda finding: finding.group):
            yield paint(f"{_INDENT}{group}", "bold")
            for finding in findings:
                yield from _finding_lines(finding, paint, width)
        yield ""
    if not quiet:
        yield from wrap(_sum(diagnosis, everything), width)


def _order(finding: Finding, diagnosis: Diagnosis) -> int:
    """Groups in the order of the worst finding of each."""
    return [each.group for each in diagnosis.findings].index(finding.group)


def _finding_lines(finding: Finding, paint: Paint, width: int) -> Iterator[str]:
    judgement = finding.result
    text = one_line(f"{judgement.title} [{finding.id}]")
    yield from wrap(text, width, initial_indent=" " * 4, subsequent_indent=_DEEPER, break_on_hyphens=False)
    yield from _deeper(judgement.cause, width)
    for command in judgement.fix:
        for number, line in enumerate(folded(one_line(command), width - 12)):
            yield _DEEPER + paint(f"{'# ' if not number else '    '}{line}", "bold")
    yield from _deeper(judgement.hint and f"hint: {judgement.hint}", width)


def _deeper(text: str, width: int) -> list[str]:
    return wrap(
        one_line(text), width, initial_indent=_DEEPER, subsequent_indent=_DEEPER, break_on_hyphens=False
    )


def folded(command: str, width: int) -> list[str]:
    """A command in lines that a shell joins; it can be folded only at spaces outside of quotes."""
    lines = [""]
    for word in _WORD.findall(command):
        longer = f"{lines[-1]} {word}".lstrip()
        if len(longer) > width and lines[-1]:
            lines[-1] += " \\"
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _sum(diagnosis: Diagnosis, everything: bool) -> str:
    names = {Severity.PROBLEM: "problem", Severity.WARNING: "warning"}
    counts = [(len(diagnosis.of(severity)), name) for severity, name in names.items()]
    parts = [f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts]
    unchecked = len(diagnosis.of(Severity.UNCHECKED))
    parts += [f"{unchecked} not checked"] if unchecked else []
    hint = "" if everything else " (--all lists them)"
    return f"{', '.join(parts)}, {len(diagnosis.of(Severity.OK))} in order{hint}"
