"""One changed service in a saved file reaches the kernel through few functions.

Run it with -s to see the list.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.control.change_path import Function, Trace
from tests.dataplane.iptables.watch.inside import inside
from tests.dataplane.namespace import Namespace
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


class Most(NamedTuple):
    """The most functions and modules that may be counted."""

    path: int
    path_modules: int
    called: int
    called_modules: int


MOST = {"iptables": Most(39, 20, 510, 92), "nftables": Most(40, 20, 487, 91)}
"""As counted with Python 3.11."""


async def traced(settings: Settings, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
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

    monkeypatch.setattr(wiring, "rule_programs", lambda *_: run)
    text = many_declared(SERVICES)
    save(directory, text)
    trace = Trace(STOPS)
    asyncio.get_running_loop().set_default_executor(trace.executor)
    parts = await wiring.wire(settings)
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


@pytest.mark.root
@pytest.mark.parametrize("dataplane", MOST)
def test_a_change_reaches_the_kernel_through_few_functions(
    dataplane: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "services.d"
    directory.mkdir()
    settings = Settings(state_dir=tmp_path / "state", services_dir=directory, dataplane=dataplane)
    with Namespace() as namespace:
        trace = inside(namespace, lambda: asyncio.run(traced(settings, directory, monkeypatch)))
    print(f"{dataplane}:", *trace.path, sep="\n  ")
    counted = Most(
        len(trace.path), len(modules_of(trace.path)), len(trace.called), len(modules_of(trace.called))
    )
    print(counted)
    assert all(found <= most for found, most in zip(counted, MOST[dataplane], strict=True)), counted


def modules_of(functions: Iterable[Function]) -> set[str]:
    """The modules of some functions."""
    return {function.module for function in functions}
