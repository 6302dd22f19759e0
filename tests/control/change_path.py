"""Which functions of vipd a change goes through, from a saved file to the text for the kernel's programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import vipd

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
