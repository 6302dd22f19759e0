"""Which functions of vipd a change goes through, from a saved file to the kernel. A report, judged by hand:

    sudo python -m tests.control.change_path

One service of fifty changes in a saved file. The path is what hands the change on; "called" is all that runs.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import vipd
from tests.dataplane.namespace import Namespace, inside
from tests.model.samples import many_declared
from vipd.daemon import wiring
from vipd.host.process import ProgramResult
from vipd.host.settings.settings import Settings

SERVICES = 50
OLD, NEW = "10.128.0.11,", "10.250.0.{},"
"""A backend of the first service, and what it becomes."""

STOPS = frozenset(
    (
        "FileSource.scan",
        "parse_declaration",
        "admit_service",
        "Catalog.merge",
        "select_backends",
        "compile_forwarding",
        "Compiler.compile",
        "make_plan",
        "restore",
        "apply_transaction",
        "ElementWriter.write",
        "ConntrackScheduler.services_changed",
        "ConntrackScheduler.applied",
    )
)
"""Where the change becomes something else, or leaves vipd."""

ROOT = f"{Path(vipd.__file__).parent}/"


class Function(NamedTuple):
    """A named function or method of vipd."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


def function_of(frame: FrameType) -> Function | None:
    """The function that runs in a frame. None: it is not vipd's, or has no name of its own (a lambda, a
    comprehension, what a dataclass makes)."""
    code = frame.f_code
    words = code.co_qualname.replace(".<locals>", "").split(".")
    if not code.co_filename.startswith(ROOT) or any(word.startswith("<") for word in words):
        return None
    module = code.co_filename.removeprefix(ROOT).removesuffix(".py").replace("/", ".")
    return Function(module, ".".join(words))


class Trace:
    """What is called while it is entered, in any thread of its executor."""

    def __init__(self, stops: frozenset[str]) -> None:
        """`stops`: the names of the functions that the change is led to."""
        self.called: dict[Function, None] = {}
        """Everything, in the order of first calls."""
        self.path: dict[Function, None] = {}
        """The stops, and what was called and had not returned when one was reached: the functions that hand
        the change on."""
        self.executor = _Executor(self)
        self._stops = stops
        self._on = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is called in this thread, and in the executor for it."""
        self._on = True
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._on = False

    def stack(self) -> list[Function] | None:
        """The functions of vipd that have not returned, the outermost first. None: nothing is recorded."""
        return _stack(sys._getframe()) if self._on else None

    def run(self, callers: list[Function] | None, work: Callable[[], Any]) -> Any:
        """Run work of `callers` in a thread of its own."""
        if callers is None:
            return work()

        def note(frame: FrameType, event: str, argument: object) -> None:
            self._note(frame, event, argument, callers)

        sys.setprofile(note)
        try:
            return work()
        finally:
            sys.setprofile(None)

    def _note(
        self, frame: FrameType, event: str, _argument: object, callers: list[Function] | None = None
    ) -> None:
        if event == "call" and (function := function_of(frame)):
            self.called.setdefault(function)
            if function.name in self._stops:
                self.path.update(dict.fromkeys((*(callers or ()), *_stack(frame))))


class _Executor(ThreadPoolExecutor):
    """Threads in which the work of a recorded caller is recorded, too."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(2)
        self._trace = trace

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        """As `ThreadPoolExecutor.submit`."""
        return super().submit(self._trace.run, self._trace.stack(), lambda: work(*args, **named))


def _stack(frame: FrameType | None) -> list[Function]:
    found: list[Function] = []
    while frame is not None:
        if known := function_of(frame):
            found.append(known)
        frame = frame.f_back
    return found[::-1]


async def traced(settings: Settings, directory: Path) -> Trace:
    """What a change of one service calls, in a daemon that has made such changes before."""
    given: list[str] = []

    async def run(argv: Sequence[str], stdin: str) -> ProgramResult:
        given.append(stdin)
        done = await asyncio.to_thread(subprocess.run, argv, input=stdin, text=True, capture_output=True)
        return ProgramResult(done.returncode, done.stdout, done.stderr)

    async def step() -> None:
        await asyncio.to_thread(parts.files.scan)
        parts.reconciler.request_sync()
        assert await parts.reconciler.step(), parts.reconciler.progress.fault

    text = many_declared(SERVICES)
    save(directory, text)
    trace = Trace(STOPS)
    asyncio.get_running_loop().set_default_executor(trace.executor)
    with mock.patch.object(wiring, "rule_programs", return_value=run):
        parts = await wiring.wire(settings, wiring.open_cache(settings))
    for last in range(3):
        await step()
        save(directory, text.replace(OLD, NEW.format(last)))
    given.clear()
    with trace.recording():
        await step()
    if settings.dataplane == "nftables":
        assert not given, "a small change needs no program"
        given += [(await run(["nft", "list", "map", "ip", "vipd", "endpoints"], "")).stdout]
    assert any(NEW.format(last).strip(",") in each for each in given), given
    return trace


def save(directory: Path, text: str) -> None:
    """Save the file as an editor does."""
    (directory / "new").write_text(text)
    (directory / "new").replace(directory / "services.yaml")


def _traced(settings: Settings, directory: Path) -> Trace:
    return asyncio.run(traced(settings, directory))


def modules_of(functions: Iterable[Function]) -> set[str]:
    """The modules of some functions."""
    return {function.module for function in functions}


def main() -> None:
    """Print the path with each dataplane, and how much is called."""
    for dataplane in ("iptables", "nftables"):
        with tempfile.TemporaryDirectory() as root, Namespace() as namespace:
            directory = Path(root) / "services.d"
            directory.mkdir()
            settings = Settings(state_dir=Path(root) / "state", services_dir=directory, dataplane=dataplane)
            trace = inside(namespace, partial(_traced, settings, directory))
        print(f"{dataplane}:", *trace.path, sep="\n  ")
        for title, functions in (("on the path", trace.path), ("called", trace.called)):
            print(f"{title}: {len(functions)} functions of {len(modules_of(functions))} modules")


if __name__ == "__main__":
    main()
