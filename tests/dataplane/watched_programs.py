"""How a dataplane's programs are run, looked on and disturbed: `synced(..., through=WatchedPrograms())`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tests.lab.inside import ProgramResult, Runner

Instead = Callable[[Sequence[str], str], ProgramResult | None]
"""What a program answers to its input in place of its work; None: it works."""


class WatchedPrograms:
    """Every program that is run, and what is done in its place."""

    def __init__(self, instead: Instead = lambda argv, stdin: None) -> None:
        self.instead = instead
        self.before: Callable[[str], str] = lambda stdin: stdin
        """What a program is given for its input."""
        self.after: Callable[[Sequence[str]], None] = lambda argv: None
        """Called when a program has ended."""
        self.started: list[tuple[str, ...]] = []
        self.written: list[str] = []
        """The input of each that had one, but for mere checks."""

    def __call__(self, run: Runner) -> Runner:
        async def watched(argv: Sequence[str], stdin: str) -> ProgramResult:
            self.started.append(tuple(argv))
            if (answer := self.instead(argv, stdin)) is not None:
                return answer
            if stdin and "--check" not in argv:
                self.written.append(stdin)
            finished = await run(argv, self.before(stdin))
            self.after(argv)
            await asyncio.sleep(0)  # here it may be cancelled
            return finished

        return watched


def refusing(text: str, *, words: str = "is refused by the test", checks: bool = True) -> Instead:
    """No program takes rules with this text, and it names the line; `checks`: nor do mere checks."""

    def refuse(argv: Sequence[str], stdin: str) -> ProgramResult | None:
        if text not in stdin or ("--check" in argv and not checks):
            return None
        number = next(n for n, line in enumerate(stdin.splitlines(), 1) if text in line)
        if argv[0] == "nft":
            return ProgramResult(1, "", f"/dev/stdin:{number}:1-2: Error: Could not process rule: {words}\n")
        return ProgramResult(1, "", f"{argv[0]}: line {number} failed: {words}\n")

    return refuse


def failing(words: str = "Permission denied") -> Instead:
    """Nothing can be written, which no rule is to blame for."""

    def fail(argv: Sequence[str], stdin: str) -> ProgramResult | None:
        return ProgramResult(1, "", f"{argv[0]}: {words}\n") if stdin else None

    return fail


def raising(error: Exception) -> Instead:
    """No program can be run."""

    def fail(argv: Sequence[str], stdin: str) -> ProgramResult | None:
        raise error

    return fail
