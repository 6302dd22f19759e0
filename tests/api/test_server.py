from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Collection

import pytest
from yarl import URL

from tests.api.serving import DNS, WEB, Answer, Api, served
from tests.dataplane.fake_dataplane import broken_tool
from tests.model.samples import block
from vipd.api import request_bodies
from vipd.control.address_policy import AddressPolicy
from vipd.control.reconciler import Reconciler

ENDLESS = 1000
"""So many failures that no retry comes through during a test."""


def actions(answer: Answer) -> dict[str, str]:
    """What a change did, by name."""
    assert answer.status == 200, answer.body
    return {result["name"]: result["action"] for result in answer.body["results"]}


def file_owned(api: Api) -> None:
    """One service that a file declares."""
    api.declare("f.yaml", block("10.96.0.20", "filed", "10.244.0.9"))


def test_a_service_lives_from_add_to_remove() -> None:
    async def story(api: Api) -> None:
        added = await api.add(DNS)
        assert actions(added) == {"kube-system/kube-dns": "created"}
        assert (added.body["changed"], added.body["applied"], added.body["message"]) == (True, True, "")
        assert added.body["stored"] == str(api.store_path)
        assert api.stored() == {"kube-system/kube-dns"}
        assert {key.service for key in api.dataplane.kernel} == {"kube-system/kube-dns"}
        again = await api.add(DNS)
        assert actions(again) == {"kube-system/kube-dns": "unchanged"}
        assert not again.body["changed"]
        target = "/v1/services/kube-system%2Fkube-dns"
        patched = await api.ask("PATCH", target, {"service": {"affinity": "client-ip"}})
        assert actions(patched) == {"kube-system/kube-dns": "changed"}
        assert actions(await api.ask("DELETE", target)) == {"kube-system/kube-dns": "removed"}
        assert api.stored() == set()
        assert api.dataplane.kernel == {}

    served(story)


def test_whoever_asks_may_say_over_which_port_he_does() -> None:
    async def story(api: Api) -> None:
        spec = {**WEB, "ports": [{"port": 80, "node_port": 22}]}
        for session, status in (("192.0.2.1:22", 422), ("[2001:db8::1]:22", 200), ("22", 400)):
            body = json.dumps({"service": spec})
            url = URL("http://vipd/v1/services", encoded=True)
            async with api.session.post(url, data=body, headers={"Vipd-Session": session}) as response:
                answer = await response.json()
            assert response.status == status, answer
        assert answer["error"]["what"] == "Vipd-Session: 22"

    served(story)


@pytest.mark.parametrize(
    "target",
    [
        "kube-system%2Fkube-dns",
        "kube-system%2fkube-dns",
        "10.96.0.10%3A53%2Fudp",
        "10.96.0.10:53%2Fudp",
        "%5Bfd00%3A0%3A10%3A%3A10%5D%3A53%2Fudp",
    ],
)
def test_targets_with_slashes_and_brackets_are_percent_encoded(target: str) -> None:
    async def story(api: Api) -> None:
        await api.add(DNS)
        found = await api.ask("GET", f"/v1/services/{target}")
        assert found.body["service"]["name"] == "kube-system/kube-dns"
        backend = "%5Bfd01%3A%3A5%5D%3A5353"
        path = f"/v1/services/{target}/backends"
        added = await api.ask("POST", path, {"backends": [{"address": "fd01::5", "port": 5353}]})
        assert actions(added) == {"kube-system/kube-dns": "changed"}
        weighted = await api.ask("PATCH", f"{path}/{backend}", {"weight": 9})
        assert actions(weighted) == {"kube-system/kube-dns": "changed"}
        assert actions(await api.ask("PATCH", f"{path}/{backend}", {"weight": 9})) == {
            "kube-system/kube-dns": "unchanged"
        }
        gone = await api.ask("DELETE", path, {"backends": ["[fd01::5]:5353", "10.244.0.5"]})
        assert actions(gone) == {"kube-system/kube-dns": "changed"}
        view = (await api.ask("GET", f"/v1/services/{target}")).body["service"]
        assert view["spec"]["backends"] == [{"address": "10.244.0.6", "weight": 2}, "fd01::5"]

    served(story)


def test_reading() -> None:
    async def story(api: Api) -> None:
        await api.add(WEB)
        await api.add(DNS)
        assert set((await api.ask("GET", "/v1/version")).body) == {"apiVersion", "version"}
        names = [s["name"] for s in (await api.ask("GET", "/v1/services")).body["services"]]
        assert names == ["filed", "kube-system/kube-dns", "web"]
        exported = (await api.ask("GET", "/v1/export")).body["services"]
        assert WEB in exported
        assert DNS in exported
        assert [s["name"] for s in exported] == names
        difference = (await api.ask("GET", "/v1/diff")).body
        assert (difference["in_sync"], difference["diff"]) == (True, "")
        api.dataplane.kernel = {}
        difference = (await api.ask("GET", "/v1/diff")).body
        assert not difference["in_sync"]
        assert "web" in difference["diff"]

    served(story, file_owned)


def test_the_status_tells_the_whole_state() -> None:
    async def story(api: Api) -> None:
        await api.add(DNS)
        status = (await api.ask("GET", "/v1/status")).body
        assert status["state"] == "in-sync"
        assert (status["services"], status["backends"], status["ready"]) == (2, 4, 4)
        assert status["applies"] == 2
        files, store = status["sources"]
        assert (files["name"], files["location"], files["services"]) == ("files", str(api.services_dir), 1)
        assert (store["name"], store["location"], store["services"]) == ("store", str(api.store_path), 1)
        assert status["dataplane"] == {"name": "iptables", "ipv4": "fake v1", "ipv6": "fake v1"}
        assert status["settings"] == {"chain_prefix": "VIPD"}
        for key in (
            "version",
            "pid",
            "started",
            "message",
            "last_apply_seconds",
            "apply_failures",
            "warnings",
        ):
            assert key in status
        assert status["last_apply"].endswith("Z")

    served(story, file_owned)


def test_apply_makes_the_store_hold_these() -> None:
    async def story(api: Api) -> None:
        await api.add(WEB)
        first = await api.ask("POST", "/v1/apply", {"services": [DNS]})
        assert actions(first) == {"kube-system/kube-dns": "created"}
        pruned = await api.ask("POST", "/v1/apply", {"services": [DNS], "prune": True})
        assert actions(pruned) == {"kube-system/kube-dns": "unchanged", "web": "removed"}
        assert api.stored() == {"kube-system/kube-dns"}
        bad = await api.ask("POST", "/v1/apply", {"services": [WEB, {"name": "x"}], "prune": True})
        assert (bad.status, bad.kind) == (422, "invalid")
        assert bad.body["error"]["problems"]
        assert api.stored() == {"kube-system/kube-dns"}

    served(story)


def test_a_dry_run_answers_the_same_and_changes_nothing() -> None:
    async def story(api: Api) -> None:
        dry = await api.ask("POST", "/v1/services?dry_run=1", {"service": WEB})
        assert actions(dry) == {"web": "created"}
        assert not api.store_path.exists()
        assert api.dataplane.kernel == {}
        assert (await api.ask("POST", "/v1/services?dry_run=1", {"service": {}})).status == 422
        assert (await api.add(WEB)).body["results"] == dry.body["results"]

    served(story)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("GET", "/v1/services/none", None, 404, "not-found"),
        ("GET", "/v1/nothing", None, 404, "not-found"),
        ("GET", "/", None, 404, "not-found"),
        ("PUT", "/v1/services", {}, 404, "not-found"),
        ("POST", "/v1/services", {}, 422, "invalid"),
        ("POST", "/v1/services", [], 400, "malformed"),
        ("POST", "/v1/services", {"service": 7}, 422, "invalid"),
        ("POST", "/v1/services", {"service": {**WEB, "ports": ["81/tcp"]}}, 409, "conflict"),
        ("POST", "/v1/services", {"service": {**WEB, "name": "other"}}, 409, "conflict"),
        ("PATCH", "/v1/services/filed", {"service": {"affinity": "client-ip"}}, 409, "owned"),
        ("DELETE", "/v1/services/filed", None, 409, "owned"),
        ("DELETE", "/v1/services/none", None, 404, "not-found"),
        ("PATCH", "/v1/services/web", {}, 400, "malformed"),
        ("PATCH", "/v1/services/web", {"service": {"colour": 1}}, 422, "invalid"),
        ("PATCH", "/v1/services/web/backends/10.244.0.7", {"weight": -1}, 422, "invalid"),
        ("PATCH", "/v1/services/web/backends/10.244.0.7", {}, 422, "invalid"),
        ("PATCH", "/v1/services/web/backends/10.9.9.9", {"weight": 1}, 404, "not-found"),
        ("PATCH", "/v1/services/web/backends/x", {"weight": 1}, 422, "invalid"),
        ("DELETE", "/v1/services/web/backends", {"backends": ["10.9.9.9"]}, 404, "not-found"),
        ("DELETE", "/v1/services/web/backends", {}, 400, "malformed"),
        ("POST", "/v1/services/web/backends", {"backends": ["10.244.0.7@4"]}, 409, "conflict"),
        ("POST", "/v1/apply", {}, 400, "malformed"),
        (
            "POST",
            "/v1/apply",
            {"services": [{**WEB, "name": "filed", "address": "10.96.0.21"}]},
            409,
            "owned",
        ),
    ],
)
def test_refusals(method: str, path: str, body: object, status: int, kind: str) -> None:
    async def story(api: Api) -> None:
        await api.add(WEB)
        before, kernel = api.store_path.read_bytes(), dict(api.dataplane.kernel)
        answer = await api.ask(method, path, body)
        assert (answer.status, answer.kind) == (status, kind), answer.body
        assert set(answer.body["error"]) == {"kind", "what", "why", "hint", "problems"}
        assert (api.store_path.read_bytes(), api.dataplane.kernel) == (before, kernel)

    served(story, file_owned)


@pytest.mark.parametrize(
    ("method", "path", "body", "what"),
    [
        ("POST", "/v1/services", {"service": {**WEB, "name": "new", "address": "10.97.0.1"}}, "10.97.0.1"),
        ("PATCH", "/v1/services/web", {"service": {"address": "10.97.0.1"}}, "10.97.0.1"),
        ("POST", "/v1/apply", {"services": [{**WEB, "address": "10.97.0.1"}]}, "10.97.0.1"),
        ("PATCH", "/v1/services/web", {"service": {"backends": ["10.9.9.9"]}}, "10.9.9.9"),
        ("POST", "/v1/services/web/backends", {"backends": ["10.9.9.9"]}, "10.9.9.9"),
    ],
)
def test_a_change_is_admitted_like_a_new_service(method: str, path: str, body: object, what: str) -> None:
    async def story(api: Api) -> None:
        api.claims = AddressPolicy(allowed=("10.96.0.0/16",), backends=("10.244.0.0/16",))
        assert actions(await api.add(WEB)) == {"web": "created"}
        before = api.store_path.read_bytes()
        for asked in (f"{path}?dry_run=1", path):
            answer = await api.ask(method, asked, body)
            assert (answer.status, answer.kind) == (422, "invalid"), answer.body
            assert what in json.dumps(answer.body["error"])
        assert api.store_path.read_bytes() == before

    served(story)


@pytest.mark.parametrize(
    "data", [b"{", b"nonsense", b'"text"', b"\xff\xfe", b'{"service": }', b"[" * 100_000, b"[1" * 2]
)
def test_a_body_that_is_not_a_json_object_is_malformed(data: bytes) -> None:
    async def story(api: Api) -> None:
        answer = await api.ask("POST", "/v1/services", data=data)
        assert (answer.status, answer.kind) == (400, "malformed")

    served(story)


def test_a_body_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_bodies, "SMALL_BODY_BYTES", 1000)
    monkeypatch.setattr(request_bodies, "MAX_BODY_BYTES", 1000)

    async def story(api: Api) -> None:
        large = {**WEB, "backends": [f"10.244.1.{n}" for n in range(1, 200)]}
        for answer in (await api.add(large), await api.ask("POST", "/v1/apply", {"services": [large]})):
            assert (answer.status, answer.kind) == (413, "too-large")
        assert actions(await api.add(WEB)) == {"web": "created"}

    served(story)


def test_a_change_of_a_version_that_is_outdated_is_refused() -> None:
    async def story(api: Api) -> None:
        await api.add(WEB)
        version = (await api.ask("GET", "/v1/services/web")).body["version"]
        path = f"/v1/services/web?version={version}"
        assert actions(await api.ask("PATCH", path, {"service": {"affinity": "client-ip"}})) == {
            "web": "changed"
        }
        late = await api.ask("PATCH", path, {"service": {"affinity": "10m"}})
        assert (late.status, late.kind) == (409, "changed")
        found = (await api.ask("GET", "/v1/services/web")).body
        assert (found["service"]["spec"]["affinity"], found["version"] != version) == ("client-ip", True)

    served(story)


def test_a_failing_kernel_leaves_the_change_stored_and_says_so() -> None:
    async def story(api: Api) -> None:
        api.dataplane.failures = [broken_tool() for _ in range(ENDLESS)]
        answer = await api.add(WEB)
        assert answer.status == 200
        assert (answer.body["changed"], answer.body["applied"]) == (True, False)
        assert "it said no" in answer.body["message"]
        assert api.stored() == {"web"}
        status = (await api.ask("GET", "/v1/status")).body
        assert status["state"] == "failed"
        assert "it said no" in status["message"]
        view = (await api.ask("GET", "/v1/services/web")).body["service"]
        assert view["status"]["state"] == "pending"

    served(story)


def test_an_unchanged_service_that_is_not_in_the_kernel_is_not_called_applied() -> None:
    async def story(api: Api) -> None:
        api.dataplane.failures = [broken_tool() for _ in range(ENDLESS)]
        assert (await api.add(WEB)).body["applied"] is False
        again = await api.add(WEB)
        assert actions(again) == {"web": "unchanged"}
        assert again.body["applied"] is False

    served(story)


def test_a_late_kernel_is_told_and_tried_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vipd.api.context.APPLY_TIMEOUT_SECONDS", 0.1)

    async def story(api: Api) -> None:
        api.dataplane.gate = asyncio.Event()
        answer = await api.add(WEB)
        assert answer.body["applied"] is False
        assert "goes on trying" in answer.body["message"]
        assert (await api.ask("GET", "/v1/status")).body["state"] in ("pending", "starting")
        api.dataplane.gate.set()
        await api.until(lambda: api.reconciler.progress.state == "in-sync")
        assert (await api.ask("GET", "/v1/status")).body["state"] == "in-sync"

    served(story)


def test_a_service_whose_rules_are_on_their_way_is_pending() -> None:
    async def story(api: Api) -> None:
        api.dataplane.gate = asyncio.Event()
        adding = asyncio.create_task(api.add(WEB))
        await api.dataplane.entered.wait()
        view = (await api.ask("GET", "/v1/services/web")).body["service"]
        api.dataplane.gate.set()
        await adding
        assert view["status"]["state"] == "pending"

    served(story)


def test_a_change_waits_for_its_own_services_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_for: list[set[str] | None] = []
    settled = Reconciler.wait_synced

    async def noted(
        reconciler: Reconciler, wish: int, timeout: float, services: Collection[str] | None = None
    ) -> bool:
        waited_for.append(None if services is None else set(services))
        return await settled(reconciler, wish, timeout, services)

    async def story(api: Api) -> None:
        waited_for.clear()
        await api.add(WEB)
        await api.ask(
            "POST", "/v1/overrides", {"service": "web", "backend": "10.244.0.7", "admin": "draining"}
        )
        assert waited_for == [{"web"}, {"web"}]
        await api.ask("POST", "/v1/reload")
        assert waited_for[2:] == [None], "all of them"

    monkeypatch.setattr(Reconciler, "wait_synced", noted)
    served(story)


def test_reload_reads_everything_anew_and_looks_at_the_kernel() -> None:
    async def story(api: Api) -> None:
        api.declare("f.yaml", block("10.96.0.21", "filed", "10.244.0.9"))
        api.dataplane.kernel = {}
        answer = await api.ask("POST", "/v1/reload")
        assert answer.body["applied"]
        view = (await api.ask("GET", "/v1/services/filed")).body["service"]
        assert view["spec"]["address"] == "10.96.0.21"
        assert api.dataplane.kernel
        assert "forget" in api.dataplane.events

    served(story, file_owned)


def test_a_reload_with_problems_tells_them_and_keeps_serving() -> None:
    async def story(api: Api) -> None:
        api.declare("f.yaml", "  - {address: 10.96.0.300}\n")
        api.declare("g.yaml", block("10.96.0.30", "good", "10.244.0.9"))
        answer = await api.ask("POST", "/v1/reload")
        assert (answer.status, answer.kind) == (422, "invalid")
        assert any("f.yaml:3" in problem for problem in answer.body["error"]["problems"])
        names = [s["name"] for s in (await api.ask("GET", "/v1/services")).body["services"]]
        assert names == ["filed", "good"]
        (files, _) = (await api.ask("GET", "/v1/status")).body["sources"]
        assert any("f.yaml:3" in problem for problem in files["problems"])

    served(story, file_owned)


def test_a_broken_store_is_kept_and_changes_are_refused_with_a_hint() -> None:
    def prepare(api: Api) -> None:
        file_owned(api)
        api.store_path.write_text("nonsense")

    async def story(api: Api) -> None:
        answer = await api.add(WEB)
        assert (answer.status, answer.kind) == (500, "internal")
        assert "vipctl reload" in json.dumps(answer.body["error"])
        assert api.store_path.read_text() == "nonsense"
        assert (await api.ask("GET", "/v1/services/filed")).status == 200
        api.store_path.unlink()
        await api.ask("POST", "/v1/reload")
        assert actions(await api.add(WEB)) == {"web": "created"}

    served(story, prepare)


def test_a_client_that_hangs_up_harms_nobody() -> None:
    async def story(api: Api) -> None:
        api.dataplane.gate = asyncio.Event()
        body = json.dumps({"service": WEB}).encode()
        request = b"POST /v1/services HTTP/1.1\r\nHost: vipd\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        for sent in (request, request[:-5], b"GET /v1/st"):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(api.socket))
                client.sendall(sent)
                await asyncio.sleep(0.05)
        api.dataplane.gate.set()
        assert (await api.ask("GET", "/v1/status")).status == 200
        await api.until(lambda: api.stored() == {"web"})  # what was understood is done

    served(story)


def test_an_order_is_stored_told_and_taken_back() -> None:
    async def story(api: Api) -> None:
        await api.add(WEB)
        order = {"service": "web", "backend": "10.244.0.7", "admin": "draining", "reason": "disk"}
        given = await api.ask("POST", "/v1/overrides", order)
        assert (given.body["changed"], given.body["applied"]) == (True, True)
        assert given.body["backends"] == [{"service": "web", "backend": "10.244.0.7"}]
        again = await api.ask("POST", "/v1/overrides", order)
        assert not again.body["changed"]
        view = (await api.ask("GET", "/v1/services/web")).body["service"]
        (endpoint,) = view["forwardings"][0]["endpoints"]
        assert not endpoint["ready"]
        assert endpoint["reason"].startswith("draining by ")
        assert endpoint["reason"].endswith(": disk")
        (listed,) = (await api.ask("GET", "/v1/overrides")).body["overrides"]
        assert (listed["service"], listed["admin"], listed["reason"]) == ("web", "draining", "disk")
        gone = await api.ask("DELETE", "/v1/overrides", {"service": "web", "backend": "10.244.0.7"})
        assert gone.body["overrides"] == [listed]
        assert (await api.ask("GET", "/v1/overrides")).body["overrides"] == []
        assert (await api.ask("DELETE", "/v1/overrides", {"all": True})).body["changed"] is False

    served(story)


def test_a_dry_run_orders_nothing() -> None:
    async def story(api: Api) -> None:
        await api.add(WEB)
        order = {"address": "10.244.0.7", "admin": "disabled"}
        answer = await api.ask("POST", "/v1/overrides?dry_run=1", order)
        assert (answer.body["changed"], answer.body["applied"]) == (True, False)
        assert (await api.ask("GET", "/v1/overrides")).body["overrides"] == []

    served(story)


def test_a_weight_for_a_files_backend_is_an_order() -> None:
    async def story(api: Api) -> None:
        file_owned(api)
        await api.ask("POST", "/v1/reload")
        answer = await api.ask("PATCH", "/v1/services/filed/backends/10.244.0.9", {"weight": 5})
        assert actions(answer) == {"filed": "changed"}
        assert answer.body["stored"] == str(api.root / "overrides.json")
        (key,) = api.dataplane.kernel
        assert [e.weight for e in api.dataplane.kernel[key].endpoints] == [5]

    served(story)


def test_requests_that_fail_are_logged_once_and_named_until_one_is_answered(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> bytes:
        raise KeyError("nobody expects it")

    async def story(api: Api) -> None:
        containment = api.reconciler.containment
        with monkeypatch.context() as patched:
            patched.setattr("vipd.api.request_bodies.read_raw", broken)
            for _ in range(20):
                assert (await api.add(WEB)).status == 500
            (warning,) = containment.warnings
            assert "internal error while answering POST /v1/services: KeyError" in warning
            assert (await api.ask("GET", "/v1/status")).status == 200
        assert (await api.add(WEB)).status == 200
        assert not containment.warnings

    served(story)
    assert sum(record.exc_info is not None for record in caplog.records) == 1
