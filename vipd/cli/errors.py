"""The end of a verb: its exit codes, and the one kind of error that it may raise."""

from __future__ import annotations

from collections.abc import Sequence

import click

OK = 0
FAILED = 1
"""It failed or was refused."""
USAGE = 2
NOT_FOUND = 3
UNREACHABLE = 4
"""The daemon cannot be reached, or does not permit the request to this user."""
TIMED_OUT = 5
"""A wait ended without success."""
DEGRADED = 6
"""The kernel is in sync, and a service does not serve as declared: of `vipctl status --exit-code` alone."""
INTERRUPTED = 130


class CliError(click.ClickException):
    """Ends a verb. Its text is `what: why; hint: ...`; `details` are whole lines before it."""

    def __init__(
        self, what: str, why: str = "", hint: str = "", *, code: int = FAILED, details: tuple[str, ...] = ()
    ) -> None:
        text = f"{what}: {why}" if why else what
        super().__init__(f"{text}; hint: {hint}" if hint else text)
        self.code = code
        self.details = details

    def lines(self) -> tuple[str, ...]:
        """The lines to print, `details` first."""
        return (*self.details, f"vipctl: {self.message}")


def combine_errors(errors: Sequence[CliError]) -> CliError:
    """Merges errors, at least one; the code is the last one's."""
    *others, last = errors
    last.details = (*(line for err in others for line in err.lines()), *last.details)
    return last
