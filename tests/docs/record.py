"""Writes what the commands of pages print now into the pages, where it differs from what they show:

    sudo .venv/bin/python -m tests.docs.record docs/guide.md ...

For whoever has changed a message on purpose. What is shown with `...` comes back whole: read the difference
before it is kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.docs.page_lab import PageLab
from tests.docs.script import Commands, File, script_of
from tests.docs.transcript import Step, mismatch


def record(page: Path) -> int:
    """Run a page and rewrite its outputs; how many were rewritten."""
    lines = page.read_text(encoding="utf-8").splitlines()
    new: list[tuple[Step, str]] = []
    with PageLab() as lab:
        for action in script_of(page):
            if isinstance(action, File):
                lab.write(action)
            elif isinstance(action, Commands):
                for step in action.steps:
                    _, printed = lab.run(step)
                    if action.shown and mismatch(step.expected, printed, action.varies):
                        new.append((step, printed))
    # From the end on, so that the lines above keep their numbers.
    for step, printed in reversed(new):
        start = int(step.place.rpartition(":")[2]) + step.command.count("\n")
        lines[start : start + len(step.expected)] = [line.rstrip() for line in printed.splitlines()]
    page.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return len(new)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {record(Path(name).resolve())} outputs rewritten")
