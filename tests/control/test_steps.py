"""What vipd writes to the kernel after a change, and what not."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.api.specs import WEB, stored
from tests.lab.inside import Vipd, running
from tests.model.samples import block

DNS = block("10.96.0.10", "dns", "10.244.0.5")


def many(**changed: str) -> list[str]:
    """Services of a file; some have other backends, those with an empty one are missing."""
    backends = {f"s{n}": "10.244.0.5" for n in range(1, 200)} | changed
    return [block(f"10.97.0.{name[1:]}", name, backend) for name, backend in backends.items() if backend]


def touched(vipd: Vipd) -> list[set[str]]:
    """The services of each write."""
    return [{key.service for key in write} for write in vipd.kernel.writes]


def test_only_what_changes_is_written() -> None:
    async def story(vipd: Vipd) -> None:
        vipd.declare(*many(s7="10.244.9.9", s9=""))
        await vipd.reload()
        assert touched(vipd)[1:] == [{"s7", "s9"}]
        assert "s9" not in vipd.kernel.names()
        vipd.declare("# a comment\n", *many(s7="10.244.9.9", s9=""))
        for _ in range(3):
            assert (await vipd.reload()).body["applied"]
        assert len(vipd.kernel.writes) == (await vipd.status())["applies"] == 2
        assert (await vipd.service("s1"))["origin"]["line"] == 4, "it has moved to another line"

    running(story, lambda vipd: vipd.declare(*many()))


def test_a_hundred_changes_during_a_write_cost_one_more_write() -> None:
    async def story(vipd: Vipd) -> None:
        vipd.kernel.gate.clear()
        vipd.kernel.writing.clear()
        adding = [asyncio.create_task(vipd.add(WEB))]
        await vipd.kernel.writing.wait()
        for number in range(60):
            spec = {**WEB, "name": f"w{number}", "address": f"10.96.1.{number}"}
            adding.append(asyncio.create_task(vipd.add(spec)))
        await vipd.until(lambda: len(stored(vipd)) == 61)
        assert (await vipd.status())["state"] == "pending"
        assert not any(task.done() for task in adding)
        vipd.kernel.gate.set()
        assert all([(await task).body["applied"] for task in adding])
        first, *others = touched(vipd)[1:]
        assert first == {"web"}
        assert set().union(*others) == {f"w{n}" for n in range(60)}
        assert len(others) <= 2, "the store has the last one a moment before the write can take it"

    running(story, lambda vipd: vipd.declare(DNS))


def test_a_change_that_comes_during_a_write_is_not_called_applied_by_it() -> None:
    async def story(vipd: Vipd) -> None:
        vipd.kernel.gate.clear()
        vipd.kernel.writing.clear()
        first = asyncio.create_task(vipd.add(WEB))
        await vipd.kernel.writing.wait()
        second = asyncio.create_task(vipd.ask("PATCH", "/v1/services/web", {"service": {"backends": []}}))
        await asyncio.sleep(0.05)
        vipd.kernel.refuses = lambda forwarding: "" if forwarding.endpoints else "not without backends"
        vipd.kernel.gate.set()
        assert (await first).body["applied"] is True
        assert "not without backends" in str((await second).body)

    running(story)


def test_what_is_accepted_is_kept_before_the_kernel_is_written(tmp_path: Path) -> None:
    def hanging(vipd: Vipd) -> None:
        vipd.declare(DNS)
        vipd.kernel.gate.clear()

    async def killed(vipd: Vipd) -> None:
        assert vipd.kernel.rules == {}

    async def again(vipd: Vipd) -> None:
        assert vipd.kernel.names() == {"dns"}

    running(killed, hanging, tmp_path, simulated=True)
    running(again, lambda vipd: vipd.declare("  - {address: 10.96.0.300}\n"), tmp_path)


def test_bad_input_leaves_the_kernel_as_it_is_and_is_logged_once() -> None:
    async def story(vipd: Vipd) -> None:
        def logged() -> int:
            return sum("10.96.0.300" in record.getMessage() for record in vipd.journal)

        vipd.declare("  - {address: 10.96.0.300}\n")
        answer = await vipd.reload()
        assert (answer.status, answer.kind) == (422, "invalid")
        assert "services.yaml:3" in str(answer.body["error"]["problems"])
        assert (vipd.kernel.names(), len(vipd.kernel.writes)) == ({"dns"}, 1)
        before = logged()
        assert before
        for number in range(5):
            assert (await vipd.add({**WEB, "backends": [f"10.244.1.{number}"]})).status in (200, 409)
        assert logged() == before

    running(story, lambda vipd: vipd.declare(DNS))


def test_differences_that_are_asked_for_meanwhile_hold_up_no_write() -> None:
    async def story(vipd: Vipd) -> None:
        async def difference() -> tuple[bool, str]:
            body = (await vipd.ask("GET", "/v1/diff")).body
            return body["in_sync"], body["diff"]

        asked = [asyncio.create_task(difference()) for _ in range(20)]
        for number in range(20):
            added = await vipd.add({**WEB, "name": f"w{number}", "address": f"10.96.1.{number}"})
            assert added.body["applied"]
            asked.append(asyncio.create_task(difference()))
        assert {await task for task in asked} == {(True, "")}
        vipd.kernel.unreadable = "iptables-save: out of memory"
        answer = await vipd.ask("GET", "/v1/diff")
        assert "out of memory" in str(answer.body["error"])

    running(story)
