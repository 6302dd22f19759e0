"""A real, empty network namespace, and programs and sockets in one."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TypeVar

from tests.lab.inside import ProgramResult
from tests.lab.namespace_names import new_prefix
from tests.lab.namespace_programs import run_in_namespace

T = TypeVar("T")


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
        return await run_in_namespace(self.name, argv, stdin)

    def do(self, *argv: str, text: str | None = None) -> str:
        """What a program prints that another administrator runs inside. CalledProcessError when it fails."""
        command = ["ip", "netns", "exec", self.name, *argv]
        return subprocess.run(command, input=text, text=True, check=True, stdout=subprocess.PIPE).stdout


def inside(namespace: Namespace | str, make: Callable[[], T]) -> T:
    """What `make` returns when called in the namespace, in a thread that ends with the call: a socket
    stays in the namespace where its thread was."""
    from pyroute2 import netns

    made: Future[T] = Future()

    def work() -> None:
        try:
            netns.setns(namespace if isinstance(namespace, str) else namespace.name)
            made.set_result(make())
        except BaseException as error:  # handed to the caller
            made.set_exception(error)

    thread = threading.Thread(target=work, name="namespace")
    thread.start()
    thread.join()
    return made.result()
