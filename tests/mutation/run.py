"""Runs tests against mutants, several at once, each in a copy of the tree.

A process that has loaded the libraries forks for each mutant: it costs only the import of vipd and its tests.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import multiprocessing.connection
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest

from tests.mutation.mutants import Mutant, Seam
from tests.mutation.targets import ROOT, Target

LIBRARIES = ("aiohttp.web", "hypothesis", "prometheus_client", "pydantic_settings", "re2", "yaml")
MAX_MEMORY = 4 << 30
"""Bytes of address space: a mutant may build a list without end."""
MIN_LIMIT_SECONDS = 60.0
TIMES_BASELINE = 8.0
"""A mutant may take so many times as long as the tests take without one; the machine may be busy."""
NOT_RUN = 99
"""Exit code when pytest did not get to run."""
_OPTIONS = (
    *("-x", "-q", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-profile=no-shrinking"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")


class Outcome(StrEnum):
    CAUGHT = "caught"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"
    BROKEN = "tests could not run"


@dataclass
class Job:
    """Tests to run against one mutant, or none."""

    target: Target
    mutant: Mutant | Seam | None
    limit: float
    outcome: Outcome = Outcome.BROKEN
    seconds: float = 0.0
    output: str = ""


@dataclass
class _Copy:
    path: Path
    job: Job | None = None
    process: multiprocessing.process.BaseProcess | None = None
    started: float = 0.0
    _original: Path | None = None

    @property
    def overdue(self) -> bool:
        return self.job is not None and time.monotonic() - self.started > self.job.limit

    def start(self, job: Job) -> None:
        self.job, self.started = job, time.monotonic()
        if job.mutant:
            file = self.path / job.mutant.path
            self._original = file.rename(file.with_suffix(".original"))
            # Else this mutant, of the same size and second, would be run as the one before it.
            for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
                compiled.unlink()
            file.write_text(job.mutant.changed(self._original.read_text()))
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=_run_tests, args=(self.path, job.target))
        self.process.start()

    def stop(self) -> None:
        if self.process and self.process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.join()

    def finish(self, late: bool) -> Job:
        assert self.job
        assert self.process
        job = self.job
        if not late:
            self.process.join()
        self.stop()
        if self._original:
            # With its old time: what Python compiled of the mutant is not taken for it.
            self._original.rename(self._original.with_suffix(".py"))
            self._original = None
        job.seconds = time.monotonic() - self.started
        job.output = (self.path / "output").read_text(errors="replace")[-3000:]
        code = self.process.exitcode
        if late:
            job.outcome = Outcome.TIMED_OUT
        elif code == pytest.ExitCode.OK:
            job.outcome = Outcome.SURVIVED
        elif code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED, NOT_RUN):
            job.outcome = Outcome.BROKEN
        else:
            job.outcome = Outcome.CAUGHT
        self.job = self.process = None
        return job


def run_baselines(jobs: Sequence[Job], tree: Path) -> Iterator[Job]:
    """Each job when it is done. Makes a copy of the tree, where Python leaves what it compiles."""
    for library in LIBRARIES:
        importlib.import_module(library)
    shutil.copytree(ROOT, tree, ignore=_NOT_COPIED)
    yield from _run(jobs, [_Copy(tree)])


def run(jobs: Sequence[Job], tree: Path) -> Iterator[Job]:
    """Each job when it is done. `tree`: that of the baselines, which is copied for a second process."""
    other = tree.with_name("other-tree")
    shutil.copytree(tree, other)
    yield from _run(jobs, [_Copy(tree), _Copy(other)])


def _run(jobs: Sequence[Job], copies: Sequence[_Copy]) -> Iterator[Job]:
    try:
        yield from _done(jobs, copies)
    finally:
        for copy in copies:
            copy.stop()


def _done(jobs: Sequence[Job], copies: Sequence[_Copy]) -> Iterator[Job]:
    waiting = list(reversed(jobs))
    while waiting or any(copy.job for copy in copies):
        for copy in copies:
            if waiting and not copy.job:
                copy.start(waiting.pop())
        running = [copy for copy in copies if copy.process]
        ready = multiprocessing.connection.wait(
            [c.process.sentinel for c in running if c.process], timeout=1.0
        )
        for copy in running:
            if copy.process and copy.process.sentinel in ready:
                yield copy.finish(late=False)
            elif copy.overdue:
                yield copy.finish(late=True)


def _run_tests(tree: Path, target: Target) -> None:
    os.setsid()
    if target.marks:  # daemons and etcd need more address space
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    os.chdir(tree)
    with Path("output").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # Those of the checkout must not be taken for those of the copy.
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "vipd")]:
        del sys.modules[name]
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = str(tree)
    code = NOT_RUN
    try:
        code = int(pytest.main([*_OPTIONS, "-m", target.marks, *target.tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
