from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Vipctl
from tests.cli.documents import changed
from tests.cli.fake_daemon import FakeDaemon

NOT_ASKED = "; vipd was not asked whether others claim the same"

GOOD = """\
apiVersion: vipd/v1
services:
  - {name: web, address: 10.96.0.1, ports: [80/tcp], backends: [10.0.0.1, 10.0.0.2]}
  - {name: dns, address: 10.96.0.2, ports: [53/udp]}
"""
WEB_SPEC = {"name": "web", "address": "10.96.0.1", "ports": ["80/tcp"], "backends": ["10.0.0.1", "10.0.0.2"]}
DNS_SPEC = {"name": "dns", "address": "10.96.0.2", "ports": ["53/udp"]}

BAD = """\
apiVersion: vipd/v1
services:
  - {name: web2, address: 10.96.0.999, ports: [80/tcp]}
  - {name: web3, address: 10.96.0.3, ports: [80/tpc]}
"""

OTHER = """\
apiVersion: vipd/v1
services:
  - {name: web, address: 10.96.0.7, ports: [80/tcp]}
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.yaml"
    path.write_text(BAD)
    return path


def standard_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


class TestCheck:
    def test_good_files(self, vipctl: Vipctl, good: Path) -> None:
        assert vipctl("check", str(good)) == (0, f"ok: 2 services in 1 file{NOT_ASKED}\n", "")
        assert vipctl("check", str(good), "-q") == (0, "", "")

    def test_problems_are_lines_on_stderr(self, vipctl: Vipctl, good: Path, bad: Path) -> None:
        ended = vipctl("check", str(good), str(bad))
        assert (ended.code, ended.out) == (1, "")
        first, second, summary = ended.err.splitlines()
        assert first.startswith(f"{bad}:3: services[0].address: ")
        assert second.startswith(f"{bad}:4: services[1].ports[0]: ")
        assert summary == "2 problems in 1 file"

    def test_a_program_that_this_host_lacks_is_a_note(self, vipctl: Vipctl, tmp_path: Path) -> None:
        file, missing = tmp_path / "exec.yaml", tmp_path / "pg-check"
        commands = (["/bin/true"], [str(missing), "-q"], [str(missing)], [f"{missing} -q"])
        lines = [
            f"  - {{address: 10.96.0.{n}, ports: 80, backends: [{{address: 10.0.0.1, check: "
            f"{{type: exec, command: {json.dumps(command)}}}}}]}}\n"
            for n, command in enumerate(commands)
        ]
        file.write_text("apiVersion: vipd/v1\nservices:\n" + "".join(lines))
        ended = vipctl("check", str(file))
        assert (ended.code, ended.out) == (0, f"ok: 4 services in 1 file{NOT_ASKED}\n")
        why = "no such file; install it on this host, or correct the path"
        split = f"write each word as an item of the list: [{missing}, -q]"
        assert ended.err.splitlines() == [
            f"{file}:4: note: 10.96.0.1:80/tcp: {missing}: {why}",
            f"{file}:6: note: 10.96.0.3:80/tcp: {missing} -q: no such file; {split}",
        ]
        assert vipctl("check", "-q", str(file)) == (0, "", "")

    def test_an_address_of_a_lan_needs_etcd_where_the_settings_are_known(
        self, vipctl: Vipctl, tmp_path: Path
    ) -> None:
        file, settings = tmp_path / "lan.yaml", tmp_path / "vipd.yaml"
        file.write_text(
            "apiVersion: vipd/v1\nservices:\n"
            "  - {name: web, address: 203.0.113.10, ports: 80, announce: l2, backends: [10.244.0.5]}\n"
        )
        lan = ("--set", "announce_addresses=203.0.113.0/24")
        assert vipctl("check", str(file), *lan).code == 0, "it may be meant for a host with etcd"
        settings.write_text("announce_addresses: [203.0.113.0/24]\n")
        ended = vipctl("check", str(file), "--settings", str(settings))
        assert ended.code == 1
        assert ended.err.startswith(
            f"{file}:3: web: announce: l2 needs etcd, and vipd has none here; set etcd in vipd.yaml, or "
            "leave announce out and use keepalived with vipctl ready\n"
        )
        with settings.open("a") as more:
            more.write("etcd: {endpoints: ['http://127.0.0.1:2379']}\n")
        assert vipctl("check", str(file), "--settings", str(settings)).code == 0

    def test_files_are_checked_together(self, vipctl: Vipctl, good: Path, tmp_path: Path) -> None:
        other = tmp_path / "other.yaml"
        other.write_text(OTHER)
        assert vipctl("check", str(other)).code == 0
        ended = vipctl("check", str(good), str(other))
        assert ended.code == 1
        assert ended.err.startswith(f"{other}:3: ")
        assert f"already taken by the service at {good}:3" in ended.err
        assert ended.err.endswith("1 problem in 1 file\n")

    def test_a_conflict_within_a_file_is_told_once(self, vipctl: Vipctl, tmp_path: Path) -> None:
        (tmp_path / "twice.yaml").write_text(OTHER + OTHER.splitlines()[2].replace("web", "w2") + "\n")
        assert vipctl("check", str(tmp_path / "twice.yaml")).err.endswith("\n1 problem in 1 file\n")

    def test_a_directory_is_its_declarations(self, vipctl: Vipctl, tmp_path: Path) -> None:
        place = tmp_path / "services.d"
        place.mkdir()
        for name in ("a.yaml", "b.yml"):
            (place / name).write_text(
                GOOD.replace("web", f"web-{name[0]}").replace("10.96.0.", f"10.96.{ord(name[0])}.")
            )
        (place / "b.yml").write_text("apiVersion: vipd/v1\n")
        (place / "c.json").write_text('{"apiVersion": "vipd/v1", "services": []}')
        (place / ".hidden.yaml").write_text(BAD)
        (place / "notes.txt").write_text(BAD)
        assert vipctl("check", str(place)).out == f"ok: 2 services in 3 files{NOT_ASKED}\n"
        assert vipctl("check", "--services-dir", str(place)).out == f"ok: 2 services in 3 files{NOT_ASKED}\n"

    def test_what_cannot_be_read_is_a_problem(self, vipctl: Vipctl, tmp_path: Path) -> None:
        (tmp_path / "latin.yaml").write_bytes(b"apiVersion: vipd/v1\n# caf\xe9\n")
        ended = vipctl("check", str(tmp_path / "nope.yaml"), str(tmp_path / "latin.yaml"))
        assert ended.code == 1
        assert ended.err == (
            f"{tmp_path}/latin.yaml:2: not UTF-8 text; save it as UTF-8\n"
            f"{tmp_path}/nope.yaml: cannot be read: No such file or directory; check the spelling\n"
            "2 problems in 2 files\n"
        )

    def test_standard_input(self, vipctl: Vipctl, monkeypatch: pytest.MonkeyPatch) -> None:
        standard_input(monkeypatch, GOOD.encode())
        assert vipctl("check", "-").out == f"ok: 2 services in 1 file{NOT_ASKED}\n"
        standard_input(monkeypatch, BAD.encode())
        assert vipctl("check", "-").err.startswith("<stdin>:3: ")

    def test_json(self, vipctl: Vipctl, good: Path, bad: Path) -> None:
        ended = vipctl("check", str(bad), "-o", "json")
        document = json.loads(ended.out)
        assert (ended.code, ended.err, document["ok"]) == (1, "", False)
        assert {key: document["problems"][0][key] for key in ("file", "line", "path")} == {
            "file": str(bad),
            "line": 3,
            "path": "services[0].address",
        }
        assert set(document["problems"][0]) == {"file", "line", "path", "what", "hint"}
        expected = {"apiVersion": "vipd/v1", "ok": True, "services": 2, "problems": []}
        assert json.loads(vipctl("check", str(good), "--json").out) == expected

    def test_needs_no_daemon(self, vipctl: Vipctl, daemon: FakeDaemon, good: Path) -> None:
        vipctl("check", str(good))
        assert daemon.requests == []


class TestApply:
    @pytest.mark.parametrize("option", [[], ["-f"]])
    def test_says_what_happened(
        self, vipctl: Vipctl, daemon: FakeDaemon, good: Path, option: list[str]
    ) -> None:
        daemon.answer("POST /v1/apply", changed(("created", "dns"), ("unchanged", "web")))
        ended = vipctl("apply", *option, str(good))
        assert ended.code == 0
        assert ended.out == (
            "created    dns\nunchanged  web\n1 created, 1 unchanged; "
            "stored in /var/lib/vipd/services.yaml; survives reboot\n"
        )
        assert daemon.last.body == {"services": [WEB_SPEC, DNS_SPEC], "prune": False}

    def test_nothing_new(self, vipctl: Vipctl, daemon: FakeDaemon, good: Path) -> None:
        daemon.answer("POST /v1/apply", changed(("unchanged", "dns"), ("unchanged", "web")))
        assert vipctl("apply", str(good)).out.splitlines()[-1] == "2 unchanged"
        assert json.loads(vipctl("apply", str(good), "--json").out)["changed"] is False

    def test_prune_and_dry_run(self, vipctl: Vipctl, daemon: FakeDaemon, good: Path) -> None:
        daemon.answer("POST /v1/apply", changed(("removed", "old")))
        ended = vipctl("apply", "-f", str(good), "--prune", "--dry-run")
        assert ended.out.splitlines()[-1] == "1 removed; dry run: nothing was done"
        assert (daemon.last.body["prune"], daemon.last.query) == (True, "dry_run=1")

    def test_several_and_standard_input(
        self, vipctl: Vipctl, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, good: Path
    ) -> None:
        daemon.answer("POST /v1/apply", changed())
        standard_input(monkeypatch, OTHER.replace("web", "api").encode())
        ended = vipctl("apply", "-f", str(good), "-f", "-")
        assert ended.out == "no services\n"
        assert [spec["name"] for spec in daemon.last.body["services"]] == ["web", "dns", "api"]

    def test_problems_send_nothing(self, vipctl: Vipctl, daemon: FakeDaemon, good: Path, bad: Path) -> None:
        ended = vipctl("apply", str(good), str(bad))
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith(f"{bad}:3: ")
        assert ended.err.endswith("vipctl: 2 problems in 1 file\n")
        assert daemon.requests == []

    def test_not_in_the_kernel_yet(self, vipctl: Vipctl, daemon: FakeDaemon, good: Path) -> None:
        daemon.answer(
            "POST /v1/apply", changed(("created", "a"), ("created", "b"), applied=False, message="busy")
        )
        ended = vipctl("apply", str(good))
        assert ended.code == 1
        assert ended.out == "created    a\ncreated    b\n2 created\n"
        assert "the change of 2 services: stored in" in ended.err

    def test_no_file_is_wrong_usage(self, vipctl: Vipctl) -> None:
        assert vipctl("apply").code == 2


class TestDiff:
    def test_same(self, vipctl: Vipctl, daemon: FakeDaemon, good: Path) -> None:
        daemon.answer("POST /v1/apply", changed(("unchanged", "dns"), ("unchanged", "web")))
        assert vipctl("diff", str(good)) == (0, "2 unchanged\n", "")
        assert daemon.last.query == "dry_run=1"

    def test_differs(self, vipctl: Vipctl, daemon: FakeDaemon, good: Path) -> None:
        results = (("created", "dns"), ("changed", "web"), ("removed", "10.96.0.9:80/tcp"))
        daemon.answer("POST /v1/apply", changed(*results))
        old = {"address": "10.96.0.9", "ports": ["80/tcp"]}
        daemon.answer("GET /v1/export", {"services": [WEB_SPEC | {"backends": ["10.0.0.1"]}, old]})
        ended = vipctl("diff", "-f", str(good), "--prune")
        assert ended.code == 1
        assert ended.out == (
            "# dns: would be created\n"
            "+ name: dns\n"
            "+ address: 10.96.0.2\n"
            "+ ports: [53/udp]\n"
            "# web: would be changed\n"
            "  name: web\n"
            "  address: 10.96.0.1\n"
            "  ports: [80/tcp]\n"
            "- backends: [10.0.0.1]\n"
            "+ backends: [10.0.0.1, 10.0.0.2]\n"
            "# 10.96.0.9:80/tcp: would be removed\n"
            "- address: 10.96.0.9\n"
            "- ports: [80/tcp]\n"
            "1 created, 1 changed, 1 removed\n"
        )
        assert vipctl("diff", str(good), "-q") == (1, "", "")
        assert json.loads(vipctl("diff", str(good), "--json").out)["changed"] is True

    @pytest.mark.parametrize(("in_sync", "code"), [(True, 0), (False, 1)])
    def test_kernel(self, vipctl: Vipctl, daemon: FakeDaemon, in_sync: bool, code: int) -> None:
        text = "" if in_sync else "+ -A VIPD-SERVICES\n"
        daemon.answer("GET /v1/diff", {"in_sync": in_sync, "diff": text})
        assert vipctl("diff") == (code, text, "")
        assert vipctl("diff", "-o", "json").code == code

    def test_no_error_looks_like_a_difference(self, vipctl: Vipctl, daemon: FakeDaemon, bad: Path) -> None:
        assert vipctl("diff", str(bad)).code == 2
        daemon.refuse("GET /v1/diff", 500, "internal", "no")
        assert vipctl("diff").code == 2
        daemon.refuse("GET /v1/diff", 403, "forbidden", "no")
        assert vipctl("diff").code == 4
        assert vipctl("diff", "--socket", "/nowhere").code == 4


CLUSTER = """\
{apiVersion: v1, kind: Service, metadata: {name: a}, spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}}
---
{apiVersion: v1, kind: Service, metadata: {name: b}, spec: {clusterIP: 10.96.0.002, ports: [{port: 80}]}}
---
{apiVersion: v1, kind: Service, metadata: {name: c}, spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}}
"""


class TestObjectsOfKubernetes:
    """What vipd does with such a file, these verbs do: of the objects those without a problem."""

    @pytest.fixture
    def cluster(self, tmp_path: Path) -> Path:
        path = tmp_path / "cluster.yaml"
        path.write_text(CLUSTER)
        return path

    def test_check_names_every_problem(self, vipctl: Vipctl, cluster: Path) -> None:
        ended = vipctl("check", str(cluster))
        assert ended.code == 1
        assert f"{cluster}:3: spec.clusterIP: " in ended.err
        assert f"{cluster}:5: default/c: 10.96.0.1:80/tcp already belongs to default/a" in ended.err
        assert ended.err.endswith("2 problems in 1 file\n")

    def test_check_names_an_address_of_this_host(self, vipctl: Vipctl, tmp_path: Path) -> None:
        path = tmp_path / "k3s.yaml"
        balancer = CLUSTER.partition("---")[0].replace("spec: {", "spec: {type: LoadBalancer, ")
        path.write_text(
            f"{balancer.rstrip()[:-1]}, status: {{loadBalancer: {{ingress: [{{ip: 192.0.2.1}}]}}}}}}"
        )
        ended = vipctl("check", str(path), "--set", "host_addresses=192.0.2.1")
        assert ended.code == 1
        assert "192.0.2.1 is an address of this host itself: it is left out" in ended.err

    @pytest.mark.parametrize("verb", ["apply", "diff"])
    def test_what_has_no_problem_is_applied(
        self, vipctl: Vipctl, daemon: FakeDaemon, cluster: Path, verb: str
    ) -> None:
        daemon.answer("POST /v1/apply", changed(("unchanged", "default/a")))
        ended = vipctl(verb, "-f", str(cluster))
        assert ended.code == (1 if verb == "apply" else 2)
        assert "1 unchanged" in ended.out
        assert [spec["name"] for spec in daemon.last.body["services"]] == ["default/a"]
        assert ended.err.endswith("2 problems in 1 file: what has one is left out: 1 service\n")

    @pytest.mark.parametrize("more", ["--prune", "other.yaml"])
    def test_nothing_is_sent_that_would_remove_what_is_refused(
        self, vipctl: Vipctl, daemon: FakeDaemon, cluster: Path, bad: Path, more: str
    ) -> None:
        """Nor with a file that is refused as a whole."""
        ended = vipctl("apply", "-f", str(cluster), more if more == "--prune" else str(bad))
        assert (ended.code, ended.out, daemon.requests) == (1, "", [])
