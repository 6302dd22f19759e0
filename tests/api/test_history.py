"""History, rollback and confirmation over the API."""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.api.specs import DNS, WEB, actions, asked_as, stored
from tests.lab.inside import Answer, Vipd, running
from tests.lab.stories import story_of
from tests.model.samples import block

CHANGED_WEB = {**WEB, "backends": ["10.244.0.7", "10.244.0.8"]}
OTHER = block("10.96.0.11", "other", "10.244.0.9").replace("53/udp", "80/tcp")


async def apply(vipd: Vipd, *specs: object, query: str = "", prune: bool = False) -> Answer:
    return await vipd.ask("POST", f"/v1/apply{query}", {"services": list(specs), "prune": prune})


async def rollback(vipd: Vipd, revision: int | None = None, query: str = "") -> Answer:
    return await vipd.ask("POST", f"/v1/rollback{query}", {} if revision is None else {"revision": revision})


async def held(vipd: Vipd) -> dict[str, list[str]]:
    """Each service that serves, with its backends."""
    services = (await vipd.ask("GET", "/v1/export")).body["services"]
    return {spec["name"]: spec["backends"] for spec in services}


@story_of(running)
async def test_the_history_is_listed_the_newest_first_with_who_and_what(vipd: Vipd) -> None:
    empty = (await vipd.ask("GET", "/v1/history")).body
    assert (empty["entries"], empty["confirmation"], empty["oldest"]) == ([], None, 0)
    assert (await rollback(vipd)).kind == "not-found", "there is no history yet"
    await apply(vipd, WEB, DNS)
    await apply(vipd, CHANGED_WEB, prune=True)
    second, first = (await vipd.ask("GET", "/v1/history")).body["entries"]
    assert (second["revision"], second["actions"]) == (2, {"removed": 1, "changed": 1})
    assert second["services"] == [
        {"name": "kube-system/kube-dns", "action": "removed"},
        {"name": "web", "action": "changed"},
    ]
    assert f"(pid {os.getpid()})" in second["by"], "the kernel tells it"
    assert (first["revision"], first["actions"], first["reason"]) == (1, {"created": 2}, "")
    dns, web = (await vipd.ask("GET", "/v1/history/2")).body["entry"]["services"]
    assert (dns["before"]["backends"], dns["after"]) == (DNS["backends"], None)
    assert (web["before"]["backends"], web["after"]["backends"]) == (WEB["backends"], CHANGED_WEB["backends"])
    for missing in ("3", "0", "-1", "x", "%ff", "9" * 99):
        assert (await vipd.ask("GET", f"/v1/history/{missing}")).kind == "not-found"


@story_of(running)
async def test_a_rollback_goes_to_any_revision_and_is_one_itself(vipd: Vipd) -> None:
    await apply(vipd, WEB)
    await apply(vipd, CHANGED_WEB, DNS)
    await apply(vipd, prune=True)
    assert actions(await rollback(vipd, 1, "?dry_run=1")) == {"web": "created"}
    assert await held(vipd) == {}
    assert actions(await rollback(vipd, 1)) == {"web": "created"}
    assert await held(vipd) == {"web": ["10.244.0.7"]}
    assert stored(vipd) == {"web"}
    assert actions(await rollback(vipd)) == {"web": "removed"}
    assert actions(await rollback(vipd, 2)) == {"web": "created", "kube-system/kube-dns": "created"}
    assert actions(await rollback(vipd, 0)) == {"web": "removed", "kube-system/kube-dns": "removed"}
    entries = (await vipd.ask("GET", "/v1/history")).body["entries"]
    assert [entry["reason"] for entry in entries] == [
        "rollback to 0", "rollback to 2", "rollback to 3", "rollback to 1", "", "", "",
    ]  # fmt: skip
    for body, kind in (
        ({"revision": 9}, "not-found"),
        ({"revision": -1}, "not-found"),
        ({"revision": "1"}, "malformed"),
        ({"revision": True}, "malformed"),
        ({"revision": 1.5}, "malformed"),
        ({"other": 1}, "malformed"),
    ):
        assert (await vipd.ask("POST", "/v1/rollback", body)).kind == kind, body
    assert await held(vipd) == {}
    for method, path in (("GET", "history"), ("POST", "confirm"), ("POST", "rollback")):
        refused = await vipd.ask(method, f"/v1/{path}?store=etcd")
        assert refused.kind == "invalid", "nothing in etcd is changed without a way back"


@story_of(running)
async def test_a_revision_that_the_history_no_longer_has_is_refused(vipd: Vipd) -> None:
    for number in range(103):
        await apply(vipd, {**WEB, "backends": [f"10.244.1.{number}"]})
    assert (await vipd.ask("GET", "/v1/history")).body["oldest"] == 3
    refused = (await rollback(vipd, 2)).body["error"]
    assert (refused["what"], refused["why"]) == ("no revision 2", "the history reaches from 3 to 103")
    assert actions(await rollback(vipd, 3)) == {"web": "changed"}
    assert await held(vipd) == {"web": ["10.244.1.2"]}


@story_of(running)
async def test_a_rollback_takes_nothing_from_a_file(vipd: Vipd) -> None:
    await apply(vipd, WEB)
    await vipd.ask("DELETE", "/v1/services/web")
    vipd.declare(OTHER)
    await vipd.reload()
    refused = await rollback(vipd)
    assert refused.kind == "conflict"
    assert "already belongs to other" in refused.body["error"]["what"]
    assert set(await held(vipd)) == {"other"}
    weight = await vipd.ask("PATCH", "/v1/services/other/backends/10.244.0.9?confirm=60", {"weight": 3})
    assert weight.kind == "invalid", "that is an order, and cannot be confirmed"
    assert (await vipd.ask("GET", "/v1/overrides")).body["overrides"] == []


@story_of(running, simulated=True)
async def test_nothing_else_is_changed_while_a_change_waits_for_its_confirmation(vipd: Vipd) -> None:
    view = (await apply(vipd, WEB, query="?confirm=60")).body["confirmation"]
    assert view == {"revision": 1, "until": "2027-01-15T00:01:00Z", "seconds_left": 60}
    refusals = [
        await vipd.add(DNS),
        await apply(vipd, DNS),
        await vipd.ask("DELETE", "/v1/services/web"),
        await vipd.ask("PATCH", "/v1/services/web", {"service": {"affinity": "client-ip"}}),
    ]
    assert {answer.kind for answer in refusals} == {"conflict"}
    error = refusals[0].body["error"]
    assert error["what"] == "revision 1 waits for its confirmation until 2027-01-15T00:01:00Z"
    assert error["hint"] == "vipctl confirm keeps it, vipctl rollback takes it back"
    assert (await apply(vipd, DNS, query="?dry_run=1")).status == 200, "as vipctl diff asks"
    assert (await apply(vipd, WEB)).status == 200, "it is there already"
    assert (await vipd.status())["confirmation"] == view
    assert (await vipd.service("web"))["confirmation"] == view
    assert (await vipd.ask("GET", "/v1/history")).body["confirmation"] == view
    confirmed = await vipd.ask("POST", "/v1/confirm")
    assert confirmed.body["entry"]["revision"] == 1
    assert "confirmation" not in await vipd.status()
    assert "confirmation" not in await vipd.service("web")
    assert actions(await apply(vipd, DNS)) == {"kube-system/kube-dns": "created"}
    await asyncio.sleep(120)
    assert set(await held(vipd)) == vipd.kernel.names() == {"web", "kube-system/kube-dns"}


@story_of(running)
async def test_nothing_waits_where_nothing_changed_or_nobody_asked(vipd: Vipd) -> None:
    assert "confirmation" not in (await apply(vipd, WEB)).body
    assert "confirmation" not in (await apply(vipd, WEB, query="?confirm=60")).body
    assert "confirmation" not in (await apply(vipd, DNS, query="?confirm=60&dry_run=1")).body
    refused = await vipd.ask("POST", "/v1/confirm")
    assert refused.kind == "conflict"
    assert refused.body["error"]["what"] == "no change waits for a confirmation"
    for word in ("", "0", "-1", "86401", "60s", "1e3", "%C2%B2", "9" * 5000):
        assert (await apply(vipd, DNS, query=f"?confirm={word}")).kind == "malformed", word
    assert set(await held(vipd)) == {"web"}
    assert (await vipd.add(DNS)).status == 200


@pytest.mark.parametrize("fault", ["", "state.db"])
@story_of(running, simulated=True)
async def test_what_nobody_confirms_is_taken_back_whatever_the_disk(vipd: Vipd, *, fault: str) -> None:
    await apply(vipd, WEB)
    await apply(vipd, CHANGED_WEB, DNS, query="?confirm=60")
    if fault:  # a directory in its place: it cannot be written
        (vipd.state_dir / fault).unlink()
        (vipd.state_dir / fault / "x").mkdir(parents=True)
    await asyncio.sleep(59)
    assert vipd.kernel.names() == {"web", "kube-system/kube-dns"}
    await asyncio.sleep(2)
    assert vipd.kernel.serving() == {"web 10.96.0.11:80/tcp": {"10.244.0.7:80": 1}}
    why = (await vipd.ask("POST", "/v1/confirm")).body["error"]["why"]
    assert why == "revision 3 takes back 2: not confirmed within 1m, at 2027-01-15T00:01:00Z"
    events = (await vipd.ask("GET", "/v1/events")).body["events"]
    (back,) = [each for each in events if each["event"] == "change-taken-back"]
    assert (back["level"], back["cause"]) == ("warning", "time limit")
    assert any(
        "taking back unconfirmed changes" in warning for warning in (await vipd.status())["warnings"]
    ) is bool(fault)
    if fault:
        assert (await vipd.add({**WEB, "name": "late", "address": "10.96.0.12"})).kind == "internal"
        assert vipd.kernel.names() == {"web"}


@pytest.mark.parametrize("revision", [None, 1])
@story_of(running)
async def test_a_rollback_takes_back_what_is_not_confirmed(vipd: Vipd, *, revision: int | None) -> None:
    await apply(vipd, WEB)
    await apply(vipd, CHANGED_WEB, DNS, query="?confirm=60")
    assert (await rollback(vipd, 0)).kind == "conflict", "another revision is another change"
    assert (await rollback(vipd, revision, "?confirm=60")).kind == "invalid"
    assert actions(await rollback(vipd, revision, "?dry_run=1"))
    assert actions(await rollback(vipd, revision)) == {"web": "changed", "kube-system/kube-dns": "removed"}
    assert await held(vipd) == {"web": ["10.244.0.7"]}
    assert stored(vipd) == {"web"}
    known = (await vipd.ask("GET", "/v1/history")).body
    assert known["entries"][0]["reason"] == "takes back 2: before it was confirmed"
    assert known["confirmation"] is None
    assert (await rollback(vipd, 0, "?confirm=60")).body["confirmation"]["revision"] == 4
    assert await held(vipd) == {}
    await rollback(vipd)
    assert set(await held(vipd)) == {"web"}


@pytest.mark.root
@story_of(running)
async def test_readers_may_see_the_history_and_not_confirm(vipd: Vipd) -> None:
    await apply(vipd, WEB, query="?confirm=60")
    changes: list[tuple[str, str, object]] = [("POST", "/v1/confirm", None), ("POST", "/v1/rollback", {})]
    answers = await asked_as(vipd, ("GET", "/v1/history", None), ("GET", "/v1/history/1", None), *changes)
    assert [answer.status for answer in answers] == [200, 200, 403, 403]
    assert (await vipd.status())["confirmation"]["revision"] == 1


@story_of(running)
async def test_a_change_that_the_disk_cannot_take_back_is_taken_back_in_the_kernel(vipd: Vipd) -> None:
    await apply(vipd, WEB, query="?confirm=60")
    database = vipd.state_dir / "state.db"
    database.unlink()
    database.mkdir()
    refused = (await rollback(vipd)).body["error"]["what"]
    assert "state.db" in refused
    assert "the change is taken back, but would be again after a restart" in refused
    await vipd.until(lambda: not vipd.kernel.rules)
    assert (await vipd.add(DNS)).kind == "internal"
    database.rmdir()
    assert (await vipd.add(DNS)).status == 200
    assert stored(vipd) == {"kube-system/kube-dns"}
