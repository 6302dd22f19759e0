"""A page as a script: its console blocks, the files it shows, and what its HTML comments say of them.

    <!-- not run here: REASON -->     before a console block that no lab can run; the reason is obligatory
    <!-- varies: REGEX -->            before a block: such text differs from run to run
    <!-- lab                          unseen by the reader, run at this place: what makes a symptom appear,
    b2# kill $(cat $LAB/b2.pid)       or waits for something; printed text is not compared
    -->

A block of YAML, or of no language, whose first line is `# /etc/...` is a file, written when its turn comes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.markdown import Block, Line, parts
from tests.docs.transcript import Step, steps_of

COMMANDS = "console"
PROGRAMS = ("vipctl", "vipd", "curl", "dig", "ip", "apt", "systemctl", "kubectl", "iptables", "nft", "sudo")

_FILE = re.compile(r"# (/etc/\S+)\n")
_NOTE = re.compile(r"<!--\s*(not run here|varies|lab)\b:?\s*(.*?)\s*-->", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Commands:
    """Commands to run. `shown` ones must print what the page says."""

    steps: tuple[Step, ...]
    varies: tuple[str, ...] = ()
    shown: bool = True


@dataclass(frozen=True, slots=True)
class File:
    """A file to write."""

    path: Path
    text: str


@dataclass(frozen=True, slots=True)
class NotRun:
    """A block that is left out, and why."""

    block: Block
    reason: str


Action = Commands | File | NotRun


def script_of(page: Path) -> Iterator[Action]:
    """What the page does, from its top to its end. Raises ValueError for a block that cannot be read."""
    notes: dict[str, str] = {}
    for part in _joined(page):
        if isinstance(part, Block):
            yield from _block_actions(part, notes)
            notes = {}
            continue
        for kind, text in _NOTE.findall(part.text):
            if kind == "lab":
                yield Commands(tuple(steps_of(Block(page, part.number + 1, COMMANDS, text))), shown=False)
            else:
                notes[kind] = text
        if part.text.strip() and not _NOTE.search(part.text):
            notes = {}


def stray_commands(page: Path) -> list[str]:
    """Blocks that hold commands without being console blocks, so that nobody would run them."""
    found = []
    for part in parts(page):
        if isinstance(part, Block) and part.language in ("sh", "bash", "shell"):
            found.append(f"{part}: write commands as ```{COMMANDS}, with a prompt")
        elif isinstance(part, Block) and not part.language and part.text.split()[0] in PROGRAMS:
            found.append(f"{part}: begins like a command; write ```{COMMANDS}, with a prompt")
    return found


def _block_actions(block: Block, notes: dict[str, str]) -> Iterator[Action]:
    if block.language == COMMANDS and "not run here" in notes:
        yield NotRun(block, " ".join(notes["not run here"].split()))
    elif block.language == COMMANDS:
        yield Commands(tuple(steps_of(block)), tuple(filter(None, [notes.get("varies")])))
    elif block.language in ("yaml", "") and (found := _FILE.match(block.text)):
        yield File(Path(found[1]), block.text)


def _joined(page: Path) -> Iterator[Block | Line]:
    """The parts of a page, with each comment that goes over several lines as one."""
    open_line: Line | None = None
    for part in parts(page):
        if open_line is not None and isinstance(part, Line):
            open_line = Line(page, open_line.number, f"{open_line.text}\n{part.text}")
        elif isinstance(part, Line) and "<!--" in part.text:
            open_line = part
        else:
            yield part
        if open_line is not None and "-->" in open_line.text:
            yield open_line
            open_line = None
    if open_line is not None:
        raise ValueError(f"{open_line}: this comment does not end")
