"""`vipctl history`, `rollback`, `confirm`, and `--confirm` of the verbs that change services."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Vipctl
from tests.cli.documents import DNS, STATUS, changed
from tests.cli.fake_daemon import FakeDaemon

Json = dict[str, Any]

UNTIL = "2026-01-01T00:01:00Z"
WAITS: Json = {"revision": 7, "until": UNTIL, "seconds_left": 42}
LEFT = f"in 42s, at {UNTIL}"
DECLARED = "apiVersion: vipd/v1\nservices:\n  - {name: web, address: 10.96.0.1, ports: [80/tcp]}\n"


def entry(revision: int, *services: tuple[str, str], reason: str = "", more: int = 0) -> Json:
    actions: dict[str, int] = {}
    for action, _ in services:
        actions[action] = actions.get(action, 0) + 1
    if more:
        actions["changed"] = actions.get("changed", 0) + more
    return {
        "revision": revision,
        "at": "2026-01-01T00:00:00Z",
        "by": "root (pid 4711)",
        "reason": reason,
        "actions": actions,
        "services": [{"action": action, "name": name} for action, name in services],
    }


def listed(*entries: Json, waits: Json | None = None) -> Json:
    return {
        "entries": list(entries),
        "confirmation": waits,
        "oldest": 0,
        "stored": "/var/lib/vipd/history.jsonl",
    }


@pytest.fixture
def declared(tmp_path: Path) -> str:
    path = tmp_path / "web.yaml"
    path.write_text(DECLARED)
    return str(path)


class TestHistory:
    def test_the_changes_the_newest_first(self, daemon: FakeDaemon, vipctl: Vipctl) -> None:
        entries = (
            entry(7, ("created", "web"), ("changed", "dns"), more=3),
            entry(6, ("removed", "web"), reason="rollback to 4"),
            entry(5, ("created", "web")),
        )
        daemon.answer("GET /v1/history", listed(*entries))
        done = vipctl("history")
        assert done.out.splitlines() == [
            "REVISION  TIME                  BY               CHANGE",
            "       7  2026-01-01T00:00:00Z  root (pid 4711)  created web, changed dns and 3 more services",
            "       6  2026-01-01T00:00:00Z  root (pid 4711)  rollback to 4: removed web",
            "       5  2026-01-01T00:00:00Z  root (pid 4711)  created web",
        ]
        assert done.code == 0

    def test_nothing_yet(self, daemon: FakeDaemon, vipctl: Vipctl) -> None:
        daemon.answer("GET /v1/history", listed())
        assert vipctl("history") == (0, "no changes yet\n", "")

    def test_what_waits_for_a_confirmation_is_said(self, daemon: FakeDaemon, vipctl: Vipctl) -> None:
        daemon.answer("GET /v1/history", listed(entry(7, ("created", "web")), waits=WAITS))
        lines = vipctl("history").out.splitlines()
        assert lines[1].endswith("root (pid 4711)  unconfirmed: created web")
        assert lines[-1] == f"revision 7 is taken back {LEFT}, unless vipctl confirm comes before"

    def test_as_a_document(self, daemon: FakeDaemon, vipctl: Vipctl) -> None:
        daemon.answer("GET /v1/history", listed(entry(7, ("created", "web")), waits=WAITS))
        document = json.loads(vipctl("history", "-o", "json").out)
        assert document["confirmation"] == WAITS
        assert document["entries"][0]["services"] == [{"action": "created", "name": "web"}]

    def test_one_change_as_declarations_that_differ(self, daemon: FakeDaemon, vipctl: Vipctl) -> None:
        before: Json = {"name": "web", "address": "10.96.0.1", "ports": ["80/tcp"]}
        shown = entry(7, ("changed", "web"), ("removed", "old"), reason="rollback to 3")
        shown["services"][0] |= {"before": before, "after": {**before, "affinity": "client-ip"}}
        shown["services"][1] |= {"before": {"name": "old", "address": "10.96.0.2"}, "after": None}
        daemon.answer("GET /v1/history/7", {"entry": shown})
        done = vipctl("history", "7")
        assert done.out.splitlines() == [
            "revision 7, 2026-01-01T00:00:00Z, by root (pid 4711) (rollback to 3)",
            "",
            "# web: changed",
            "  name: web",
            "  address: 10.96.0.1",
            "  ports: [80/tcp]",
            "+ affinity: client-ip",
            "",
            "# old: removed",
            "- {name: old, address: 10.96.0.2}",
        ]

    def test_the_store_is_asked_that_is_meant(self, daemon: FakeDaemon, vipctl: Vipctl) -> None:
        daemon.answer("GET /v1/history", listed())
        vipctl("--store", "file", "history")
        assert daemon.last.query == "store=file"
        vipctl("history")
        assert daemon.last.query == ""


class TestRollback:
    def test_to_the_revision_before_or_a_named_one(self, daemon: FakeDaemon, vipctl: Vipctl) -> None:
        daemon.answer("POST /v1/rollback", changed(("removed", "web"), ("created", "dns")))
        done = vipctl("rollback")
        assert (daemon.last.body, daemon.last.query) == ({}, "")
        assert done.out.splitlines()[:2] == ["removed    web", "created    dns"]
        vipctl("rollback", "0", "--dry-run", "--confirm", "10m")
        assert (daemon.last.body, daemon.last.query) == ({"revision": 0}, "dry_run=1&confirm=600")

    def test_a_word_that_is_no_revision(self, vipctl: Vipctl) -> None:
        assert vipctl("rollback", "-1").code == 2
        assert vipctl("rollback", "x").code == 2
        assert vipctl("history", "0").code == 2

    def test_it_is_named_where_others_call_it_otherwise(self, vipctl: Vipctl) -> None:
        assert "did you mean rollback?" in vipctl("undo").err


class TestConfirm:
    def test_apply_says_how_long_it_holds(self, daemon: FakeDaemon, vipctl: Vipctl, declared: str) -> None:
        daemon.answer("POST /v1/apply", changed(("created", "web"), confirmation=WAITS))
        done = vipctl("apply", declared, "--confirm", "60s")
        assert daemon.last.query == "confirm=60"
        assert done.code == 0
        assert done.out.splitlines()[-2:] == [
            "1 created; stored in /var/lib/vipd/services.yaml",
            f"vipctl confirm keeps this; otherwise vipd takes it back {LEFT}",
        ]
        assert vipctl("apply", declared, "--confirm", "60s", "-q").out == ""

    def test_it_is_said_too_while_the_kernel_lacks_it(
        self, daemon: FakeDaemon, vipctl: Vipctl, declared: str
    ) -> None:
        answer = changed(("created", "web"), confirmation=WAITS, applied=False, message="busy")
        daemon.answer("POST /v1/apply", answer)
        done = vipctl("apply", declared, "--confirm", "60s")
        assert done.code == 1
        assert LEFT in done.out
        assert "not in the kernel yet" in done.err

    @pytest.mark.parametrize(
        ("route", "line"),
        [
            ("POST /v1/services", "add 10.96.0.12:80 10.244.0.5 --name web --check tcp"),
            ("PATCH /v1/services/web", "set web --affinity client-ip"),
            ("PATCH /v1/services/web", "set web --node-port 30080"),
            ("PATCH /v1/services/web/backends/10.244.0.5", "set web/10.244.0.5 --weight 2"),
            ("PATCH /v1/services/web", "set web/10.244.0.5:80 --backup true"),
            ("POST /v1/services/web/backends", "add-backend web 10.244.0.8:80"),
            ("DELETE /v1/services/web/backends", "remove-backend web 10.244.0.5:80"),
            ("DELETE /v1/services/web", "remove web"),
        ],
    )
    def test_every_verb_that_changes_a_service_has_it(
        self, daemon: FakeDaemon, vipctl: Vipctl, route: str, line: str
    ) -> None:
        spec = {"address": "10.96.0.12", "ports": ["80/tcp"], "backends": ["10.244.0.5:80"]}
        daemon.answer(
            "GET /v1/services/web", {"service": DNS | {"name": "web", "spec": spec}, "version": "1"}
        )
        daemon.answer(route, changed(("changed", "web"), confirmation=WAITS))
        done = vipctl(*line.split(), "--confirm", "60s")
        assert (done.code, done.err) == (0, "")
        assert daemon.last.query.removeprefix("version=1&") == "confirm=60"
        assert done.out.splitlines()[-1] == (
            f"vipctl confirm keeps this; otherwise vipd takes it back {LEFT}"
        )

    def test_only_one_removal_at_a_time_can_wait(self, daemon: FakeDaemon, vipctl: Vipctl) -> None:
        done = vipctl("remove", "web", "dns", "--confirm", "60s")
        assert done.code == 2
        assert "each removal is a change" in done.err
        assert daemon.requests == []

    def test_without_a_change_nothing_waits(self, daemon: FakeDaemon, vipctl: Vipctl, declared: str) -> None:
        daemon.answer("POST /v1/apply", changed(("unchanged", "web")))
        done = vipctl("apply", declared, "--confirm", "60s")
        assert done.out.splitlines()[-1] == "nothing has changed, so nothing waits for a confirmation"

    def test_a_daemon_that_knows_no_confirmation_is_found_out(
        self, daemon: FakeDaemon, vipctl: Vipctl, declared: str
    ) -> None:
        daemon.answer("POST /v1/apply", changed(("created", "web")))
        done = vipctl("apply", declared, "--confirm", "60s", "-q")
        assert done.code == 1
        assert "the change stays without a confirmation: vipd is older than vipctl" in done.err
        assert vipctl("apply", declared, "--confirm", "60s", "--dry-run").code == 0

    @pytest.mark.parametrize("word", ["0s", "x", "-1s"])
    def test_a_time_that_is_none(self, daemon: FakeDaemon, vipctl: Vipctl, declared: str, word: str) -> None:
        assert vipctl("apply", declared, "--confirm", word).code == 2
        assert daemon.requests == []

    def test_confirm_names_what_stays(self, daemon: FakeDaemon, vipctl: Vipctl) -> None:
        answer = {"changed": True, "applied": True, "message": "", "entry": entry(7, ("created", "web"))}
        daemon.answer("POST /v1/confirm", answer)
        assert vipctl("confirm") == (0, "confirmed revision 7: created web; it stays\n", "")
        assert vipctl("confirm", "-q") == (0, "", "")
        assert json.loads(vipctl("confirm", "--json").out)["entry"]["revision"] == 7

    def test_confirm_without_anything_to_confirm_fails(self, daemon: FakeDaemon, vipctl: Vipctl) -> None:
        daemon.refuse("POST /v1/confirm", 409, "conflict", "no change waits for a confirmation")
        done = vipctl("confirm")
        assert (done.code, done.err) == (1, "vipctl: no change waits for a confirmation\n")

    def test_status_and_describe_show_it(self, daemon: FakeDaemon, vipctl: Vipctl) -> None:
        daemon.answer("GET /v1/status", STATUS | {"confirmation": WAITS})
        text = f"revision 7 is taken back {LEFT}, unless vipctl confirm comes before"
        assert f"Unconfirmed  {text}\n" in vipctl("status").out
        daemon.answer(
            f"GET /v1/services/{DNS['name']}", {"service": DNS | {"confirmation": WAITS}, "version": "1"}
        )
        assert f"  Unconfirmed {text}\n" in vipctl("describe", DNS["name"]).out
