"""`vipctl register` as processes of their own: what etcd makes of them is on their standard error."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.lab.flow import finish
from tests.lab.fork_server import fork_server
from tests.lab.waiting import wait_until

BACKEND = "10.0.0.5:80"


class Registering:
    """One that runs until the end of the test."""

    def __init__(self, log: Path, options: Sequence[str], service: str, backend: str) -> None:
        self._log = log
        command = [sys.executable, "-m", "vipd.cli.main", "register", service, backend, *options]
        with log.open("wb") as file:
            self._process = fork_server(command[2]).start(
                "", command, {}, stdout=file.fileno(), stderr=file.fileno()
            )

    @property
    def said(self) -> str:
        """What it said so far."""
        return self._log.read_text()

    def until_said(self, words: str) -> None:
        """Wait until it has said something."""
        wait_until(lambda: words in self.said, lambda: f"{words!r} not said: {self.said!r}")

    def peak_memory(self) -> int:
        """The most memory that it has had, in bytes."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        finish(self._process)

    def stop(self) -> int:
        """End it by SIGTERM; its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)


@contextmanager
def registering(
    directory: Path, *options: str, service: str = "web", backend: str = BACKEND
) -> Iterator[Registering]:
    """One `vipctl register web 10.0.0.5:80` with these options, killed at the end."""
    made = Registering(directory / f"register-{len(list(directory.iterdir()))}", options, service, backend)
    try:
        yield made
    finally:
        made.kill()


def all_say(directory: Path, cases: dict[str, tuple[Sequence[str], str]]) -> None:
    """Run one with the options of each case at the same time, and wait until each has said its words."""
    with ExitStack() as stack:
        started = {
            case: (stack.enter_context(registering(directory, *options)), words)
            for case, (options, words) in cases.items()
        }
        said: dict[str, str] = {}

        def done() -> bool:
            said.update({case: each.said for case, (each, _) in started.items()})
            return all(words in said[case] for case, (_, words) in started.items())

        def missing() -> str:
            return str({case: said[case] for case, (_, words) in started.items() if words not in said[case]})

        wait_until(done, missing)
        assert not any("Traceback" in text or "internal error" in text for text in said.values()), said
