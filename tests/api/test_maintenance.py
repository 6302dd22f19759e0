"""Maintenance of a host over the API: stored before it is answered, and nothing is announced then."""

from __future__ import annotations

import asyncio
import json
import stat
from functools import partial
from pathlib import Path

import pytest

from tests.api.specs import WEB
from tests.lab.inside import Vipd, keep_overrides, running
from tests.lab.stored import overrides
from tests.lab.stories import story_of

ADDRESSES = ["203.0.113.10", "203.0.113.11"]
ANNOUNCED = {**WEB, "external_addresses": ADDRESSES, "announce": "routes"}
announcing = partial(running, announce_addresses=["203.0.113.0/24"])


async def announced(vipd: Vipd, *addresses: str) -> None:
    """Wait until these are announced."""
    await vipd.until(lambda: vipd.announced == set(addresses))


@story_of(announcing)
async def test_a_service_shows_what_is_announced_of_it(vipd: Vipd) -> None:
    assert (await vipd.add(ANNOUNCED)).status == 200
    await announced(vipd, *ADDRESSES)
    view = await vipd.service("web")
    assert [(a["address"], a["announced"], a["reason"]) for a in view["announced"]] == [
        (address, True, "served") for address in ADDRESSES
    ]
    shown = (await vipd.ask("GET", "/v1/announcements")).body
    assert (shown["maintenance"], len(shown["addresses"]), shown["faults"]) == (None, 2, {})
    assert (await vipd.status())["announcements"]["announced"] == 2


def test_maintenance_withdraws_everything_and_survives_a_restart(tmp_path: Path) -> None:
    async def before(vipd: Vipd) -> None:
        await vipd.add(ANNOUNCED)
        await announced(vipd, *ADDRESSES)
        body = {"reason": "kernel update", "for": 3600}
        dry = await vipd.ask("POST", "/v1/maintenance?dry_run=1", body)
        assert (dry.status, dry.body["applied"], dry.body["announced"]) == (200, False, 2)
        assert (await vipd.ask("GET", "/v1/maintenance")).body["maintenance"] is None
        answer = (await vipd.ask("POST", "/v1/maintenance", body)).body
        assert (answer["changed"], answer["applied"], answer["announced"]) == (True, True, 0)
        assert answer["maintenance"]["reason"] == "kernel update"
        assert vipd.announced == set()
        mode = (vipd.state_dir / "state.db").stat().st_mode
        assert stat.S_IMODE(mode) & 0o007 == 0

    async def after(vipd: Vipd) -> None:
        shown = (await vipd.ask("GET", "/v1/announcements")).body["addresses"]
        assert {each["why"] for each in shown} == {"this host is in maintenance (kernel update)"}
        ended = (await vipd.ask("DELETE", "/v1/maintenance")).body
        assert (ended["changed"], ended["announced"], ended["was"]["reason"]) == (True, 2, "kernel update")
        assert vipd.announced == set(ADDRESSES)
        assert overrides(vipd.state_dir) == []
        assert (await vipd.ask("DELETE", "/v1/maintenance")).body["changed"] is False

    announcing(before, root=tmp_path)
    announcing(after, root=tmp_path)


@story_of(announcing, simulated=True)
async def test_maintenance_ends_in_time(vipd: Vipd) -> None:
    await vipd.add(ANNOUNCED)
    await vipd.ask("POST", "/v1/maintenance", {"for": 600})
    await asyncio.sleep(590)
    assert vipd.announced == set()
    await asyncio.sleep(15)
    assert vipd.announced == set(ADDRESSES)
    assert (await vipd.ask("GET", "/v1/maintenance")).body["maintenance"] is None


@story_of(running)
async def test_what_is_no_maintenance_is_refused(vipd: Vipd) -> None:
    for body, what in (
        ({"reason": "two\nlines"}, "reason must be one line"),
        ({"for": 0}, "for must be seconds"),
        ({"for": "2h"}, "for must be seconds"),
        ({"wait": True}, 'unknown member "wait"'),
    ):
        answer = await vipd.ask("POST", "/v1/maintenance", body)
        assert answer.status in (400, 422)
        assert what in answer.body["error"]["what"]
    assert (await vipd.ask("GET", "/v1/maintenance")).body["maintenance"] is None


def test_what_cannot_be_read_counts_as_maintenance() -> None:
    for text in ("", "{", "[]", json.dumps({"by": 1, "at": "2026-01-01"}), "{" * 10_000):

        def damage(vipd: Vipd, text: str = text) -> None:
            keep_overrides(vipd.state_dir, ("this host", text))

        async def story(vipd: Vipd) -> None:
            assert (await vipd.ask("GET", "/v1/maintenance")).body["maintenance"]
            assert "vipctl host resume" in " ".join((await vipd.status())["warnings"])
            assert (await vipd.ask("DELETE", "/v1/maintenance")).body["changed"] is True
            assert (await vipd.ask("GET", "/v1/maintenance")).body["maintenance"] is None
            assert "maintenance" not in " ".join((await vipd.status())["warnings"])

        running(story, damage)


@pytest.mark.parametrize("copy", [True, False])
def test_maintenance_is_lost_only_with_every_copy(tmp_path: Path, copy: bool) -> None:
    """Without them this host announces: a fault of the disk makes no service unreachable."""

    async def before(vipd: Vipd) -> None:
        await vipd.add(WEB)
        await vipd.ask("POST", "/v1/maintenance", {"reason": "disk"})
        await vipd.ask("POST", "/v1/overrides", {"address": "10.244.0.7", "weight": 3})

    def damage(vipd: Vipd) -> None:
        (vipd.state_dir / "state.db").write_text("torn")
        if not copy:
            (vipd.state_dir / "state.db.last-good").write_text("torn")

    async def after(vipd: Vipd) -> None:
        maintenance = (await vipd.ask("GET", "/v1/maintenance")).body["maintenance"]
        assert (maintenance or {}).get("reason") == ("disk" if copy else None)
        assert len((await vipd.ask("GET", "/v1/overrides")).body["overrides"]) == copy
        assert (await vipd.ask("POST", "/v1/maintenance", {"reason": "again"})).body["changed"] is True

    running(before, root=tmp_path)
    running(after, damage, root=tmp_path)


@pytest.mark.parametrize("copy", [True, False])
def test_a_database_that_cannot_be_read_counts_as_its_copy_or_as_no_maintenance(
    tmp_path: Path, copy: bool
) -> None:
    async def before(vipd: Vipd) -> None:
        await vipd.ask("POST", "/v1/maintenance", {"reason": "disk"})

    def damage(vipd: Vipd) -> None:
        (vipd.state_dir / "state.db").rename(vipd.state_dir / "kept")
        (vipd.state_dir / "state.db").mkdir()
        if not copy:
            (vipd.state_dir / "state.db.last-good").unlink()

    async def after(vipd: Vipd) -> None:
        async def reason() -> str | None:
            maintenance = (await vipd.ask("GET", "/v1/maintenance")).body["maintenance"]
            return maintenance["reason"] if maintenance else None

        assert await reason() == ("disk" if copy else None)
        warnings = " ".join((await vipd.status())["warnings"])
        assert ("this host counts as in no maintenance" in warnings) is not copy
        assert (await vipd.ask("DELETE", "/v1/maintenance")).status == (500 if copy else 200)
        (vipd.state_dir / "state.db").rmdir()
        (vipd.state_dir / "kept").rename(vipd.state_dir / "state.db")
        await vipd.reload()
        assert await reason() == "disk"
        assert (await vipd.ask("DELETE", "/v1/maintenance")).body["changed"] is True
        assert (await vipd.status())["warnings"] == []

    running(before, root=tmp_path)
    running(after, damage, root=tmp_path)
