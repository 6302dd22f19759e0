"""A console block as steps: who types what on which machine, and what is printed. Pure: nothing is run here.

    # vipctl list          root, on the host
    $ vipctl check FILE    a user without privileges, on the host
    client$ curl ...       the same on another machine, `client#` as its root

A command goes on in the next line after a backslash. What follows up to the next prompt is what it prints,
all of it; nothing there means that it prints nothing. A line `...` stands for any lines, `...` within a line
for any text. What differs from run to run (VARIES, and what the page says) matches anything of its own form.
Runs of spaces count as two: tables are as wide as what stands in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import ndiff

from tests.docs.markdown import Block, name_of

PROMPT = re.compile(r"(?P<machine>[a-z][a-z0-9]*)?(?P<sign>[#$]) (?P<command>\S.*)")

HOST = "host"

VARIES = (
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ",
    r"\((?:\d+[dhms])+ ago\)",
    r"\bpid \d+",
    r"\b[0-9a-f]{2}(?::[0-9a-f]{2}){5}\b",
    r"\btook \d+ ms",
    r"\bv\d+\.\d+\.\d+ \((?:nf_tables|legacy)\)",
    r"\bafter \d+ m(?:illi)?s(?:econds)?\b",
)
"""Moments, durations, link addresses and versions of tools are nowhere the same twice."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command; `place` is where it stands, `machine` the name before the prompt."""

    place: str
    machine: str
    root: bool
    command: str
    expected: tuple[str, ...]


def steps_of(block: Block) -> Iterator[Step]:
    """The commands of a block in their order. Raises ValueError when it does not begin with a prompt."""
    lines = block.text.splitlines()
    starts = [number for number, line in enumerate(lines) if PROMPT.fullmatch(line)]
    if not starts or starts[0] != 0:
        raise ValueError(f"{block}: a block of commands begins with a prompt: `# `, `$ ` or `client$ `")
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        found = PROMPT.fullmatch(lines[start])
        assert found is not None
        command = [found["command"]]
        while command[-1].endswith("\\") and start + len(command) < end:
            command.append(lines[start + len(command)])
        yield Step(
            f"{name_of(block.page)}:{block.line + start}",
            found["machine"] or HOST,
            found["sign"] == "#",
            "\n".join(command),
            tuple(lines[start + len(command) : end]),
        )


def mismatch(expected: Sequence[str], printed: str, varies: Sequence[str] = ()) -> str:
    """What is shown against what was printed, as lines with `-` and `+`; empty when they agree."""
    lines = [line.rstrip() for line in printed.splitlines()]
    forms = (*VARIES, *varies)
    pattern = "".join(_line_pattern(line.rstrip(), forms) for line in expected)
    if re.fullmatch(pattern, "".join(f"{_squeezed(line)}\n" for line in lines)):
        return ""
    return "\n".join(line for line in ndiff(list(expected), lines) if not line.startswith("?"))


def _line_pattern(line: str, forms: Sequence[str]) -> str:
    if line.strip() == "...":
        return r"(?:[^\n]*\n)*?"
    parts, end = [], 0
    line = _squeezed(line)
    for found in re.finditer("|".join(f"({form})" for form in (r"\.\.\.", *forms)), line):
        form = ("[^\n]*?", *forms)[(found.lastindex or 1) - 1]
        parts += [re.escape(line[end : found.start()]), f"(?:{form})"]
        end = found.end()
    return "".join([*parts, re.escape(line[end:]), r"\n"])


def _squeezed(line: str) -> str:
    return re.sub(" {2,}", "  ", line)
