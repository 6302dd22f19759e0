"""Running graphviz."""

from __future__ import annotations

from vipd.host.process import ProgramTimeoutError, Runner


class DrawingError(RuntimeError):
    """A drawing could not be made: what, why, hint."""

    def __init__(self, what: str, why: str, hint: str = "") -> None:
        super().__init__(f"{what}: {why}" + (f"; hint: {hint}" if hint else ""))
        self.what, self.why, self.hint = what, why, hint


async def draw(text: str, run: Runner) -> str:
    """The SVG that graphviz makes of a text in its language. Raises DrawingError."""
    try:
        finished = await run(["dot", "-Tsvg"], text)
    except FileNotFoundError:
        hint = "apt install graphviz, or --format mermaid, which needs no program"
        raise DrawingError("cannot draw", "there is no program dot", hint) from None
    except OSError as error:
        raise DrawingError("cannot draw", f"dot cannot be run: {error.strerror or error}") from None
    except ProgramTimeoutError as error:
        raise DrawingError("cannot draw", str(error), "name one service") from None
    if finished.code or not finished.output:
        raise DrawingError("cannot draw", " ".join(finished.errors.split()) or f"exit code {finished.code}")
    return finished.output
