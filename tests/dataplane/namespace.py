"""A real, empty network namespace whose iptables programs are run through the seam that vipd uses."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from types import TracebackType

from tests.lab.namespace_names import new_prefix
from vipd.host.process import ProgramResult
from vipd.host.process import run as run_process


class Namespace:
    """Exists while it is entered."""

    def __init__(self) -> None:
        self.name = f"{new_prefix()}-rules"

    def __enter__(self) -> Namespace:
        subprocess.run(["ip", "netns", "add", self.name], check=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run(["ip", "netns", "delete", self.name], check=True)

    async def run(self, argv: Sequence[str], stdin: str) -> ProgramResult:
        """Run a program inside. FileNotFoundError when there is none."""
        finished = await run_process(["ip", "netns", "exec", self.name, *argv], stdin)
        if finished.exit_code == 255 and "No such file" in finished.stderr:
            raise FileNotFoundError(argv[0])
        return finished
