"""What this host lacks for checks: asked in threads, and whatever hangs there holds up nobody else."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.health.stories import service
from tests.lab.inside import Vipd, running

UNANSWERED = "this host does not tell whether it can make this check; a name service or file system hangs"
PATIENCE = 60.0


class Slow:
    """Programs below a directory on a file system that does not answer until it is released."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released, self.asked = threading.Event(), list[Path]()
        self._directory, stat = directory, Path.stat

        def slow(path: Path, **options: bool) -> os.stat_result:
            if directory in path.parents:
                self.asked.append(path)
                self.released.wait(PATIENCE)
            return stat(path, **options)

        monkeypatch.setattr(Path, "stat", slow)

    def check(self, number: int) -> str:
        """A check by a program there."""
        return f"type: exec, command: [{self._directory}/check, '{number}'], interval: 60m"


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    (tmp_path / "hangs").mkdir()
    made = Slow(tmp_path / "hangs", monkeypatch)
    yield made
    made.released.set()


def problems(status: dict[str, object]) -> str:
    return str([source["problems"] for source in status["sources"]])  # type: ignore[attr-defined]


def test_what_hangs_is_a_problem_of_its_own_and_asked_once(slow: Slow) -> None:
    async def story(vipd: Vipd) -> None:
        assert vipd.kernel.names() == {"other"}
        assert UNANSWERED in problems(await vipd.status())
        for number in range(3):
            more = service(f"more{number}", "10.244.0.1", number=9)
            vipd.declare(service("other", "10.244.0.1"), more, name="b.yaml")
            await vipd.reload()
            assert vipd.kernel.names() == {"other", f"more{number}"}
        assert len(slow.asked) == 1, "no further thread hangs"
        slow.released.set()
        status = await vipd.until_status(lambda status: UNANSWERED not in problems(status))
        assert "/check: no such file" in problems(status)

    def prepare(vipd: Vipd) -> None:
        vipd.declare(service("hangs", "10.244.0.1", check=slow.check(0), number=2), name="a.yaml")
        vipd.declare(service("other", "10.244.0.1"), name="b.yaml")

    running(story, prepare)


def test_any_number_of_questions_that_hang_leaves_a_bounded_number_of_threads(slow: Slow) -> None:
    async def story(vipd: Vipd) -> None:
        before = threading.active_count()
        for number in range(200):
            block = service(f"hangs{number}", "10.244.0.1", check=slow.check(number), number=number + 2)
            vipd.declare(block, name=f"{number}.yaml")
        await vipd.reload()
        assert vipd.kernel.names() == {"other"}
        assert threading.active_count() - before <= 20
        assert len(slow.asked) <= 16
        await asyncio.sleep(0)
        slow.released.set()

    running(story, lambda vipd: vipd.declare(service("other", "10.244.0.1")))
