"""What single files and services may have but all together may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.inside import Vipd, running
from vipd.model import limits


def item(number: int, backends: int, ports: int = 1) -> str:
    """One service. Its size is its ports times one more than its backends."""
    servers = ", ".join(f"172.16.{i >> 8}.{i & 255}" for i in range(backends))
    listed = ", ".join(str(80 + port) for port in range(ports))
    return f"  - {{name: s{number}, address: 10.96.0.{number}, ports: [{listed}], backends: [{servers}]}}\n"


async def problems(vipd: Vipd) -> str:
    answer = await vipd.reload()
    return "\n".join(answer.body["error"]["problems"]) if answer.status == 422 else ""


def test_endpoints_of_all_files_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_TOTAL_SIZE", 100)

    def prepare(vipd: Vipd) -> None:
        vipd.declare(item(1, 49), name="b.yaml")
        vipd.declare(item(2, 49), name="c.yaml")

    async def story(vipd: Vipd) -> None:
        assert vipd.kernel.names() == {"s1", "s2"}
        vipd.declare(item(3, 0), name="a.yaml")
        refused = await problems(vipd)
        assert "a.yaml: its services have 1 endpoints, and there is room for 0 beside all others" in refused
        assert "b.yaml" not in refused
        assert vipd.kernel.names() == {"s1", "s2"}, "what serves goes on serving"
        # One that grows keeps what it had, and one that shrinks makes room, without being asked for.
        vipd.declare(item(2, 50), name="c.yaml")
        assert "room for 50" in await problems(vipd)
        assert len(vipd.kernel.serving()["s2 10.96.0.2:80/tcp"]) == 49
        (vipd.services_dir / "b.yaml").unlink()
        assert await problems(vipd) == ""
        assert vipd.kernel.names() == {"s2", "s3"}

    running(story, prepare)


def test_files_of_a_time_without_limits_are_bounded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serving(vipd: Vipd) -> int:
        return len(vipd.kernel.names())

    def prepare(vipd: Vipd) -> None:
        for number in range(1, 6):
            vipd.declare(item(number, 59), name=f"{number}.yaml")

    assert running(serving, prepare, tmp_path) == 5
    monkeypatch.setattr(limits, "MAX_TOTAL_SIZE", 100)
    assert running(serving, root=tmp_path) == 3


def test_problems_of_all_files_in_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vipd.declaration.problems.ALL_PROBLEMS", 3)

    async def story(vipd: Vipd) -> None:
        for number in range(5):
            (vipd.services_dir / f"{number}.yaml").write_text("a\n")
        found = (await problems(vipd)).splitlines()
        assert (len(found), found[3]) == (4, "and 2 more problems")

    running(story)


@pytest.mark.parametrize(
    ("name", "most", "words"),
    [
        ("SERVICES", 1, "services: 1 are the most"),
        ("MAX_UNIT_SIZE", 5, "endpoints: 5 are the most"),
    ],
)
def test_the_store_takes_no_more_than_it_can_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int, words: str
) -> None:
    def spec(number: int, backends: int) -> dict[str, object]:
        servers = [f"172.16.0.{i}" for i in range(1, backends + 1)]
        return {
            "name": f"s{number}",
            "address": f"10.96.0.{number}",
            "ports": ["80/tcp"],
            "backends": servers,
        }

    async def story(vipd: Vipd) -> None:
        assert (await vipd.add(spec(1, 4))).status == 200
        answer = await vipd.add(spec(2, 4))
        assert answer.status != 200, answer
        assert words in str(answer.body["error"])
        assert vipd.kernel.names() == {"s1"}

    async def again(vipd: Vipd) -> None:
        assert vipd.kernel.names() == {"s1"}

    monkeypatch.setattr(limits, name, most)
    running(story, root=tmp_path)
    running(again, root=tmp_path)
