"""History, rollback and confirmation over the API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.api.serving import DNS, WEB, Answer, Api, served
from tests.model.samples import block
from tests.sources.store_machine import Machine, full_disk
from vipd.api.peers import Peer, Permission
from vipd.sources import history

CHANGED_WEB = {**WEB, "backends": ["10.244.0.7", "10.244.0.8"]}


def at(machine: Machine, story: Callable[[Api], Awaitable[None]]) -> None:
    """Run a story on a machine whose clocks are set."""

    def prepare(api: Api) -> None:
        api.clocks = machine.clocks

    served(story, prepare)


async def apply(api: Api, *specs: object, query: str = "", prune: bool = False) -> Answer:
    return await api.ask("POST", f"/v1/apply{query}", {"services": list(specs), "prune": prune})


async def rollback(api: Api, revision: int | None = None, query: str = "") -> Answer:
    body = {} if revision is None else {"revision": revision}
    return await api.ask("POST", f"/v1/rollback{query}", body)


def actions(answer: Answer) -> dict[str, str]:
    assert answer.status == 200, answer.body
    return {result["name"]: result["action"] for result in answer.body["results"]}


async def held(api: Api) -> dict[str, list[str]]:
    """Each service that serves, with its backends."""
    services = (await api.ask("GET", "/v1/export")).body["services"]
    return {spec["name"]: spec["backends"] for spec in services}


def test_the_history_is_listed_the_newest_first_with_who_and_what() -> None:
    async def story(api: Api) -> None:
        empty = (await api.ask("GET", "/v1/history")).body
        assert (empty["entries"], empty["confirmation"], empty["oldest"]) == ([], None, 0)
        await apply(api, WEB, DNS)
        await apply(api, CHANGED_WEB, prune=True)
        newest, oldest = (await api.ask("GET", "/v1/history")).body["entries"]
        assert (newest["revision"], newest["actions"]) == (2, {"removed": 1, "changed": 1})
        assert newest["services"] == [
            {"name": "kube-system/kube-dns", "action": "removed"},
            {"name": "web", "action": "changed"},
        ]
        assert newest["by"].startswith("root (pid ") or newest["by"].startswith("uid ")
        assert (oldest["revision"], oldest["actions"], oldest["reason"]) == (1, {"created": 2}, "")

    served(story)


def test_one_change_is_shown_with_each_service_before_and_after() -> None:
    async def story(api: Api) -> None:
        await apply(api, WEB, DNS)
        await apply(api, CHANGED_WEB, prune=True)
        entry = (await api.ask("GET", "/v1/history/2")).body["entry"]
        dns, web = entry["services"]
        assert (dns["before"]["backends"], dns["after"]) == (
            [*map(str, ["10.244.0.5"]), {"address": "10.244.0.6", "weight": 2}, "fd01::5"],
            None,
        )
        assert (web["before"]["backends"], web["after"]["backends"]) == (
            ["10.244.0.7"],
            ["10.244.0.7", "10.244.0.8"],
        )
        for missing in ("3", "0", "-1", "x", "%ff", "9" * 99):
            assert (await api.ask("GET", f"/v1/history/{missing}")).kind == "not-found"

    served(story)


def test_a_rollback_goes_to_any_revision_and_is_one_itself() -> None:
    async def story(api: Api) -> None:
        await apply(api, WEB)
        await apply(api, CHANGED_WEB, DNS)
        await apply(api, prune=True)
        assert actions(await rollback(api, 1, "?dry_run=1")) == {"web": "created"}
        assert await held(api) == {}
        assert actions(await rollback(api, 1)) == {"web": "created"}
        assert await held(api) == {"web": ["10.244.0.7"]}
        assert api.stored() == {"web"}
        assert actions(await rollback(api)) == {"web": "removed"}
        assert actions(await rollback(api, 2)) == {"web": "created", "kube-system/kube-dns": "created"}
        assert actions(await rollback(api, 0)) == {"web": "removed", "kube-system/kube-dns": "removed"}
        entries = (await api.ask("GET", "/v1/history")).body["entries"]
        assert [entry["reason"] for entry in entries] == [
            "rollback to 0", "rollback to 2", "rollback to 3", "rollback to 1", "", "", "",
        ]  # fmt: skip

    served(story)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"revision": 3}, "not-found"),
        ({"revision": -1}, "not-found"),
        ({"revision": "1"}, "malformed"),
        ({"revision": True}, "malformed"),
        ({"revision": 1.5}, "malformed"),
        ({"other": 1}, "malformed"),
    ],
)
def test_a_revision_that_is_none_is_refused(body: object, kind: str) -> None:
    async def story(api: Api) -> None:
        assert (await rollback(api)).kind == "not-found", "there is no history yet"
        await apply(api, WEB)
        await apply(api, DNS)
        assert (await api.ask("POST", "/v1/rollback", body)).kind == kind
        assert set(await held(api)) == {"web", "kube-system/kube-dns"}

    served(story)


def test_a_revision_that_the_history_no_longer_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_ENTRIES", 1)

    async def story(api: Api) -> None:
        await apply(api, WEB)
        await apply(api, DNS)
        refused = (await rollback(api, 0)).body["error"]
        assert (refused["what"], refused["why"]) == ("no revision 0", "the history reaches from 1 to 2")
        assert actions(await rollback(api, 1)) == {"kube-system/kube-dns": "removed"}

    served(story)


def test_a_rollback_takes_nothing_from_a_file() -> None:
    async def story(api: Api) -> None:
        await apply(api, WEB)
        await api.ask("DELETE", "/v1/services/web")
        api.declare("other.yaml", block("10.96.0.11", "other", "10.244.0.9").replace("53/udp", "80/tcp"))
        await api.rescan()
        await api.reconciler.wait_synced(api.reconciler.request_sync(), 60)
        refused = await rollback(api)
        assert refused.kind == "conflict"
        assert "already belongs to other" in refused.body["error"]["what"]
        assert set(await held(api)) == {"other"}

    served(story)


def test_nothing_else_is_changed_while_a_change_waits_for_its_confirmation() -> None:
    async def story(api: Api) -> None:
        given = await apply(api, WEB, query="?confirm=60")
        view = {"revision": 1, "until": "2026-01-01T00:01:00Z", "seconds_left": 60}
        assert given.body["confirmation"] == view
        refusals = [
            await api.add(DNS),
            await apply(api, DNS),
            await api.ask("DELETE", "/v1/services/web"),
            await api.ask("PATCH", "/v1/services/web", {"service": {"affinity": "client-ip"}}),
        ]
        assert {answer.kind for answer in refusals} == {"conflict"}
        error = refusals[0].body["error"]
        assert error["what"] == "revision 1 waits for its confirmation until 2026-01-01T00:01:00Z"
        assert error["hint"] == "vipctl confirm keeps it, vipctl rollback takes it back"
        assert (await apply(api, DNS, query="?dry_run=1")).status == 200, "as vipctl diff asks"
        assert (await apply(api, WEB)).status == 200, "it is there already"
        assert (await api.ask("GET", "/v1/status")).body["confirmation"] == view
        assert (await api.ask("GET", "/v1/services/web")).body["service"]["confirmation"] == view
        assert (await api.ask("GET", "/v1/history")).body["confirmation"] == view
        confirmed = await api.ask("POST", "/v1/confirm")
        assert confirmed.body["entry"]["revision"] == 1
        assert "confirmation" not in (await api.ask("GET", "/v1/status")).body
        assert "confirmation" not in (await api.ask("GET", "/v1/services/web")).body["service"]
        assert actions(await apply(api, DNS)) == {"kube-system/kube-dns": "created"}

    at(Machine(), story)


def test_nothing_waits_where_nothing_changed_or_nobody_asked() -> None:
    async def story(api: Api) -> None:
        assert "confirmation" not in (await apply(api, WEB)).body
        assert "confirmation" not in (await apply(api, WEB, query="?confirm=60")).body
        assert "confirmation" not in (await apply(api, DNS, query="?confirm=60&dry_run=1")).body
        refused = await api.ask("POST", "/v1/confirm")
        assert (refused.kind, refused.body["error"]["what"]) == (
            "conflict",
            "no change waits for a confirmation",
        )
        assert (await api.add(DNS)).status == 200

    served(story)


@pytest.mark.parametrize("word", ["", "0", "-1", "86401", "60s", "1e3", "%C2%B2", "9" * 5000])
def test_a_time_that_is_none_is_refused(word: str) -> None:
    async def story(api: Api) -> None:
        refused = await apply(api, WEB, query=f"?confirm={word}")
        assert refused.kind == "malformed"
        assert await held(api) == {}

    served(story)


def test_a_confirmation_that_comes_too_late_is_refused_with_the_reason() -> None:
    machine = Machine()

    async def story(api: Api) -> None:
        await apply(api, WEB, query="?confirm=60")
        machine.wait(60)
        late = (await api.ask("POST", "/v1/confirm")).body["error"]
        assert late["why"] == "the time to confirm is over: the last change is being taken back"
        api.store.take_back_due()
        late = (await api.ask("POST", "/v1/confirm")).body["error"]
        assert late["why"] == "revision 2 takes back 1: not confirmed within 1m, at 2026-01-01T00:01:00Z"

    at(machine, story)


@pytest.mark.parametrize("revision", [None, 1])
def test_a_rollback_takes_back_at_once_what_is_not_confirmed(revision: int | None) -> None:
    async def story(api: Api) -> None:
        await apply(api, WEB)
        await apply(api, CHANGED_WEB, DNS, query="?confirm=60")
        assert (await rollback(api, 0)).kind == "conflict", "another revision is another change"
        assert (await rollback(api, revision, "?confirm=60")).kind == "invalid"
        assert actions(await rollback(api, revision, "?dry_run=1"))
        assert actions(await rollback(api, revision)) == {"web": "changed", "kube-system/kube-dns": "removed"}
        assert await held(api) == {"web": ["10.244.0.7"]}
        assert api.stored() == {"web"}
        (newest, *_) = (await api.ask("GET", "/v1/history")).body["entries"]
        assert newest["reason"] == "takes back 2: before it was confirmed"
        assert (await api.ask("GET", "/v1/history")).body["confirmation"] is None
        assert (await api.add(DNS)).status == 200

    served(story)


def test_a_rollback_can_wait_for_a_confirmation_too() -> None:
    async def story(api: Api) -> None:
        await apply(api, WEB)
        assert (await rollback(api, 0, "?confirm=60")).body["confirmation"]["revision"] == 2
        assert await held(api) == {}
        await rollback(api)
        assert set(await held(api)) == {"web"}

    served(story)


def test_the_weight_in_a_file_is_an_order_that_cannot_be_confirmed() -> None:
    async def story(api: Api) -> None:
        api.declare("dns.yaml", block("10.96.0.10", "dns", "10.244.0.5"))
        await api.rescan()
        await api.reconciler.wait_synced(api.reconciler.request_sync(), 60)
        path = "/v1/services/dns/backends/10.244.0.5?confirm=60"
        assert (await api.ask("PATCH", path, {"weight": 3})).kind == "invalid"
        assert (await api.ask("GET", "/v1/overrides")).body["overrides"] == []

    served(story)


def test_etcd_is_refused_rather_than_changed_without_a_way_back() -> None:
    async def story(api: Api) -> None:
        for method, path in (("GET", "history"), ("POST", "confirm"), ("POST", "rollback")):
            assert (await api.ask(method, f"/v1/{path}?store=etcd")).kind == "invalid"

    served(story)


def test_readers_may_see_the_history_and_not_confirm(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(api: Api) -> None:
        await apply(api, WEB, query="?confirm=60")

        async def never(_: Permission, __: Peer) -> bool:
            return False

        monkeypatch.setattr(Permission, "may_change", never)
        assert (await api.ask("GET", "/v1/history")).status == 200
        assert (await api.ask("GET", "/v1/history/1")).status == 200
        assert (await api.ask("POST", "/v1/confirm")).kind == "forbidden"
        assert (await rollback(api)).kind == "forbidden"
        assert api.store.seconds_to_confirm()

    served(story)


def test_a_change_that_the_disk_cannot_take_back_is_taken_back_in_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(api: Api) -> None:
        await apply(api, WEB, query="?confirm=60")
        full = full_disk(monkeypatch, "history.jsonl")
        refused = (await rollback(api)).body["error"]
        assert "No space left" in refused["what"]
        assert "the change is taken back, but would be again after a restart" in refused["what"]
        await api.until(lambda: not api.reconciler.services)
        assert (await api.add(DNS)).kind == "internal"
        full.clear()
        assert (await api.add(DNS)).status == 200
        assert api.stored() == {"kube-system/kube-dns"}

    served(story)
