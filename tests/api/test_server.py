from __future__ import annotations

import asyncio
import io
import json
import socket
from typing import Any

import pytest

from tests.api.specs import DNS, WEB, actions, stored
from tests.lab.inside import Vipd, running
from tests.lab.stored import stored as on_disk
from tests.lab.stories import story_of
from tests.model.samples import HEAD, block

TARGET = "/v1/services/kube-system%2Fkube-dns"
ENDLESS = [("iptables-restore", "it said no")] * 1000
"""So many failures that no retry comes through during a test."""


def file_owned(vipd: Vipd) -> None:
    """One service that a file declares."""
    vipd.declare(block("10.96.0.20", "filed", "10.244.0.9"))


@story_of(running)
async def test_a_service_lives_from_add_to_remove(vipd: Vipd) -> None:
    added = await vipd.add(DNS)
    assert actions(added) == {"kube-system/kube-dns": "created"}
    assert (added.body["changed"], added.body["applied"], added.body["message"]) == (True, True, "")
    assert added.body["stored"] == str(vipd.state_dir / "state.db")
    assert stored(vipd) == vipd.kernel.names() == {"kube-system/kube-dns"}
    again = await vipd.add(DNS)
    assert (actions(again), again.body["changed"]) == ({"kube-system/kube-dns": "unchanged"}, False)
    patched = await vipd.ask("PATCH", TARGET, {"service": {"affinity": "client-ip"}})
    assert actions(patched) == {"kube-system/kube-dns": "changed"}
    assert actions(await vipd.ask("DELETE", TARGET)) == {"kube-system/kube-dns": "removed"}
    assert stored(vipd) == vipd.kernel.names() == set()


@story_of(running)
async def test_whoever_asks_may_say_over_which_port_he_does(vipd: Vipd) -> None:
    body = json.dumps({"service": {**WEB, "ports": [{"port": 80, "node_port": 22}]}})
    for session, status in (("192.0.2.1:22", 422), ("[2001:db8::1]:22", 200), ("22", 400)):
        url, headers = "http://vipd/v1/services", {"Vipd-Session": session}
        async with vipd.session.post(url, data=body, headers=headers) as response:
            answer = await response.json()
        assert response.status == status, answer
    assert answer["error"]["what"] == "Vipd-Session: 22"


@story_of(running)
async def test_targets_with_slashes_and_brackets_are_percent_encoded(vipd: Vipd) -> None:
    targets = (
        *("kube-system%2Fkube-dns", "kube-system%2fkube-dns", "10.96.0.10%3A53%2Fudp", "10.96.0.10:53%2Fudp"),
        "%5Bfd00%3A0%3A10%3A%3A10%5D%3A53%2Fudp",
    )
    for target in targets:
        await vipd.add(DNS)
        service = f"/v1/services/{target}"
        assert (await vipd.ask("GET", service)).body["service"]["name"] == "kube-system/kube-dns"
        new, weight = [{"address": "fd01::5", "port": 5353}], {"weight": 9}
        backend = f"{service}/backends/%5Bfd01%3A%3A5%5D%3A5353"
        gone = ["[fd01::5]:5353", "10.244.0.5"]
        changes = [
            await vipd.ask("POST", f"{service}/backends", {"backends": new}),
            await vipd.ask("PATCH", backend, weight),
            await vipd.ask("PATCH", backend, weight),
            await vipd.ask("DELETE", f"{service}/backends", {"backends": gone}),
        ]
        results = [actions(answer)["kube-system/kube-dns"] for answer in changes]
        assert results == ["changed", "changed", "unchanged", "changed"]
        left = (await vipd.ask("GET", service)).body["service"]["spec"]["backends"]
        assert left == [{"address": "10.244.0.6", "weight": 2}, "fd01::5"]
        await vipd.ask("DELETE", service)


@story_of(running, file_owned)
async def test_reading(vipd: Vipd) -> None:
    await vipd.add(WEB)
    await vipd.add(DNS)
    assert set((await vipd.ask("GET", "/v1/version")).body) == {"apiVersion", "version"}
    names = [s["name"] for s in (await vipd.ask("GET", "/v1/services")).body["services"]]
    assert names == ["filed", "kube-system/kube-dns", "web"]
    exported = (await vipd.ask("GET", "/v1/export")).body["services"]
    assert WEB in exported
    assert DNS in exported
    assert [spec["name"] for spec in exported] == names
    difference = (await vipd.ask("GET", "/v1/diff")).body
    assert (difference["in_sync"], difference["diff"]) == (True, "")
    vipd.kernel.rules.clear()
    difference = (await vipd.ask("GET", "/v1/diff")).body
    assert not difference["in_sync"]
    assert "web" in difference["diff"]


@story_of(running, file_owned)
async def test_the_status_tells_the_whole_state(vipd: Vipd) -> None:
    await vipd.add(DNS)
    status = await vipd.status()
    assert status["state"] == "in-sync"
    assert (status["services"], status["backends"], status["ready"], status["applies"]) == (2, 4, 4, 2)
    assert [(s["name"], s["location"], s["services"]) for s in status["sources"]] == [
        ("files", str(vipd.services_dir), 1),
        ("store", str(vipd.state_dir / "state.db"), 1),
    ]
    assert status["dataplane"] == {"name": "iptables", "ipv4": "fake v1", "ipv6": "fake v1"}
    assert status["settings"]["chain_prefix"] == "VIPD"
    assert status.keys() >= {"version", "pid", "started", "message", "last_apply_seconds", "warnings"}
    assert status["apply_failures"] == 0
    assert status["last_apply"].endswith("Z")


@story_of(running)
async def test_apply_makes_the_store_hold_these(vipd: Vipd) -> None:
    await vipd.add(WEB)
    first = await vipd.ask("POST", "/v1/apply", {"services": [DNS]})
    assert actions(first) == {"kube-system/kube-dns": "created"}
    pruned = await vipd.ask("POST", "/v1/apply", {"services": [DNS], "prune": True})
    assert actions(pruned) == {"kube-system/kube-dns": "unchanged", "web": "removed"}
    assert stored(vipd) == {"kube-system/kube-dns"}
    bad = await vipd.ask("POST", "/v1/apply", {"services": [WEB, {"name": "x"}], "prune": True})
    assert (bad.status, bad.kind) == (422, "invalid")
    assert bad.body["error"]["problems"]
    assert stored(vipd) == {"kube-system/kube-dns"}


@story_of(running)
async def test_a_dry_run_answers_the_same_and_changes_nothing(vipd: Vipd) -> None:
    dry = await vipd.ask("POST", "/v1/services?dry_run=1", {"service": WEB})
    assert actions(dry) == {"web": "created"}
    assert stored(vipd) == vipd.kernel.names() == set()
    assert (await vipd.ask("POST", "/v1/services?dry_run=1", {"service": {}})).status == 422
    assert (await vipd.add(WEB)).body["results"] == dry.body["results"]


WEIGHT = "/v1/services/web/backends/10.244.0.7"
FILED = {**WEB, "name": "filed", "address": "10.96.0.21"}
REFUSALS: tuple[tuple[str, str, object, int, str], ...] = (
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
    ("PATCH", WEIGHT, {"weight": -1}, 422, "invalid"),
    ("PATCH", WEIGHT, {}, 422, "invalid"),
    ("PATCH", "/v1/services/web/backends/10.9.9.9", {"weight": 1}, 404, "not-found"),
    ("PATCH", "/v1/services/web/backends/x", {"weight": 1}, 422, "invalid"),
    ("DELETE", "/v1/services/web/backends", {"backends": ["10.9.9.9"]}, 404, "not-found"),
    ("DELETE", "/v1/services/web/backends", {}, 400, "malformed"),
    ("POST", "/v1/services/web/backends", {"backends": ["10.244.0.7@4"]}, 409, "conflict"),
    ("POST", "/v1/apply", {}, 400, "malformed"),
    ("POST", "/v1/apply", {"services": [FILED]}, 409, "owned"),
)
BAD_BODIES = (b"{", b"nonsense", b'"text"', b"\xff\xfe", b'{"service": }', b"[" * 100_000, b"[1" * 2)


@story_of(running, file_owned)
async def test_what_is_refused_says_why_and_changes_nothing(vipd: Vipd) -> None:
    await vipd.add(WEB)
    wrong: list[object] = []
    before, rules = on_disk(vipd.state_dir), dict(vipd.kernel.rules)
    for method, what, body, status, kind in REFUSALS:
        answer = await vipd.ask(method, what, body)
        parts = set(answer.body["error"]) == {"kind", "what", "why", "hint", "problems"}
        if (answer.status, answer.kind) != (status, kind) or not parts:
            wrong.append((method, what, body, answer))
    for data in BAD_BODIES:
        answer = await vipd.ask("POST", "/v1/services", data=data)
        if (answer.status, answer.kind) != (400, "malformed"):
            wrong.append(("POST", "", data[:20], answer))
    assert wrong == []
    assert (on_disk(vipd.state_dir), vipd.kernel.rules) == (before, rules)


@story_of(running, allowed_addresses=["10.96.0.0/16"], allowed_backends=["10.244.0.0/16"])
async def test_a_change_is_admitted_like_a_new_service(vipd: Vipd) -> None:
    requests: tuple[tuple[str, str, Any, str], ...] = (
        ("POST", "/v1/services", {"service": {**WEB, "name": "new", "address": "10.97.0.1"}}, "10.97.0.1"),
        ("PATCH", "/v1/services/web", {"service": {"address": "10.97.0.1"}}, "10.97.0.1"),
        ("POST", "/v1/apply", {"services": [{**WEB, "address": "10.97.0.1"}]}, "10.97.0.1"),
        ("PATCH", "/v1/services/web", {"service": {"backends": ["10.9.9.9"]}}, "10.9.9.9"),
        ("POST", "/v1/services/web/backends", {"backends": ["10.9.9.9"]}, "10.9.9.9"),
    )
    assert actions(await vipd.add(WEB)) == {"web": "created"}
    before = on_disk(vipd.state_dir)
    for method, path, body, what in requests:
        for asked in (f"{path}?dry_run=1", path):
            answer = await vipd.ask(method, asked, body)
            assert (answer.status, answer.kind) == (422, "invalid"), answer.body
            assert what in json.dumps(answer.body["error"])
    assert on_disk(vipd.state_dir) == before


@story_of(running)
async def test_a_body_that_is_too_large_is_refused(vipd: Vipd) -> None:
    for path, mebibytes in (("services", 2), ("apply", 49)):
        large = io.BytesIO(b'{"service": "' + b"x" * (mebibytes << 20) + b'"}')
        async with vipd.session.post(f"http://vipd/v1/{path}", data=large) as response:
            assert (response.status, (await response.json())["error"]["kind"]) == (413, "too-large")
    assert actions(await vipd.add(WEB)) == {"web": "created"}


@story_of(running)
async def test_a_change_of_a_version_that_is_outdated_is_refused(vipd: Vipd) -> None:
    await vipd.add(WEB)
    version = (await vipd.ask("GET", "/v1/services/web")).body["version"]
    path = f"/v1/services/web?version={version}"
    change = {"service": {"affinity": "client-ip"}}
    assert actions(await vipd.ask("PATCH", path, change)) == {"web": "changed"}
    late = await vipd.ask("PATCH", path, {"service": {"affinity": "10m"}})
    assert (late.status, late.kind) == (409, "changed")
    now = (await vipd.ask("GET", "/v1/services/web")).body
    assert (now["service"]["spec"]["affinity"], now["version"] != version) == ("client-ip", True)


@story_of(running)
async def test_a_failing_kernel_leaves_the_change_stored_and_says_so(vipd: Vipd) -> None:
    vipd.kernel.failures = list(ENDLESS)
    answer = await vipd.add(WEB)
    assert (answer.status, answer.body["changed"], answer.body["applied"]) == (200, True, False)
    assert "it said no" in answer.body["message"]
    assert stored(vipd) == {"web"}
    status = await vipd.status()
    assert status["state"] == "failed"
    assert "it said no" in status["message"]
    assert (await vipd.service("web"))["status"]["state"] == "pending"
    again = await vipd.add(WEB)
    assert (actions(again), again.body["applied"]) == ({"web": "unchanged"}, False)


@story_of(running, simulated=True)
async def test_a_late_kernel_is_told_and_tried_on(vipd: Vipd) -> None:
    vipd.kernel.gate.clear()
    vipd.kernel.writing.clear()
    adding = asyncio.create_task(vipd.add(WEB))
    await vipd.kernel.writing.wait()
    assert (await vipd.service("web"))["status"]["state"] == "pending"
    answer = await adding
    assert answer.body["applied"] is False
    assert "goes on trying" in answer.body["message"]
    assert (await vipd.status())["state"] == "pending"
    vipd.kernel.gate.set()
    await vipd.until_status(lambda status: status["state"] == "in-sync")
    assert vipd.kernel.names() == {"web"}


@story_of(running, file_owned)
async def test_reload_reads_everything_anew_and_looks_at_the_kernel(vipd: Vipd) -> None:
    vipd.declare(block("10.96.0.21", "filed", "10.244.0.9"))
    vipd.kernel.rules.clear()
    assert (await vipd.reload()).body["applied"]
    assert (await vipd.service("filed"))["spec"]["address"] == "10.96.0.21"
    assert list(vipd.kernel.serving()) == ["filed 10.96.0.21:53/udp"]
    vipd.kernel.rules.clear()
    assert (await vipd.reload()).body["applied"]
    assert vipd.kernel.names() == {"filed"}, "somebody else had deleted its rules"


def test_a_broken_store_of_an_earlier_version_is_kept_and_changes_are_refused_with_a_hint() -> None:
    def prepare(vipd: Vipd) -> None:
        file_owned(vipd)
        (vipd.state_dir / "services.yaml").write_text("nonsense")

    async def story(vipd: Vipd) -> None:
        path = vipd.state_dir / "services.yaml"
        answer = await vipd.add(WEB)
        assert (answer.status, answer.kind) == (500, "internal")
        assert "vipctl reload" in json.dumps(answer.body["error"])
        assert path.read_text() == "nonsense"
        assert (await vipd.ask("GET", "/v1/services/filed")).status == 200
        path.write_text(HEAD + block("10.96.0.20", "kept", "10.244.0.9"))
        await vipd.reload()
        assert vipd.kernel.names() == {"kept"}, "its frontend is taken from the file"
        assert not path.exists()
        assert path.with_name("services.yaml.taken-over").exists()
        (entry,) = (await vipd.ask("GET", "/v1/history")).body["entries"]
        assert entry["reason"] == "taken over from services.yaml"
        assert actions(await vipd.add(WEB)) == {"web": "created"}

    running(story, prepare)


@story_of(running)
async def test_a_client_that_hangs_up_harms_nobody(vipd: Vipd) -> None:
    vipd.kernel.gate.clear()
    body = json.dumps({"service": WEB}).encode()
    request = b"POST /v1/services HTTP/1.1\r\nHost: vipd\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    for sent in (request, request[:-5], b"GET /v1/st"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(vipd.socket))
            client.sendall(sent)
            await asyncio.sleep(0.05)
    vipd.kernel.gate.set()
    assert (await vipd.ask("GET", "/v1/status")).status == 200
    await vipd.until(lambda: stored(vipd) == {"web"})  # what was understood is done


@story_of(running, file_owned)
async def test_a_weight_for_a_files_backend_is_an_order(vipd: Vipd) -> None:
    answer = await vipd.ask("PATCH", "/v1/services/filed/backends/10.244.0.9", {"weight": 5})
    assert actions(answer) == {"filed": "changed"}
    assert answer.body["stored"] == str(vipd.state_dir / "state.db")
    assert vipd.kernel.serving() == {"filed 10.96.0.20:53/udp": {"10.244.0.9:53": 5}}


def test_requests_that_fail_are_logged_once_and_named_until_one_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unexpected(*_: object, **__: object) -> object:
        raise KeyError("nobody expects it")

    async def story(vipd: Vipd) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(json, "loads", unexpected)
            statuses = [await status_of(vipd) for _ in range(20)]
        assert statuses == [500] * 20
        (warning,) = (await vipd.status())["warnings"]
        assert "internal error while answering POST /v1/services: KeyError" in warning
        assert (await vipd.add(WEB)).status == 200
        assert not (await vipd.status())["warnings"]
        assert sum(record.exc_info is not None for record in vipd.journal) == 1

    async def status_of(vipd: Vipd) -> int:
        async with vipd.session.post("http://vipd/v1/services", data=b'{"service": {}}') as response:
            return response.status

    running(story)
