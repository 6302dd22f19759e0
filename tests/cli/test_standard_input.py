"""Files on standard input, and verbs that need no daemon: none is there."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Spawn, Vipctl
from tests.cli.documents import changed
from tests.cli.fake_daemon import FakeDaemon
from tests.declaration.manifests import endpoint_slice, items, service

GOOD = "apiVersion: vipd/v1\nservices:\n  - {name: web, address: 10.96.0.1, ports: [80/tcp]}\n"
OBJECTS = json.dumps(items(service(), endpoint_slice("10.244.0.1")))


def standard_input(monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))


def test_a_file_may_be_standard_input(vipctl: Vipctl, monkeypatch: pytest.MonkeyPatch) -> None:
    standard_input(monkeypatch, GOOD)
    assert vipctl("check", "-").out.startswith("ok: 1 service in 1 file; ")
    standard_input(monkeypatch, GOOD.replace("tcp", "tpc"))
    assert vipctl("check", "-").err.startswith("<stdin>:3: services[0].ports[0]: ")
    standard_input(monkeypatch, OBJECTS)
    assert "  - name: default/web\n" in vipctl("convert", "-").out


def test_apply_takes_several_files_and_standard_input(
    vipctl: Vipctl, daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "web.yaml").write_text(GOOD)
    standard_input(monkeypatch, GOOD.replace("web", "api").replace("0.1", "0.2"))
    daemon.answer("POST /v1/apply", changed())
    assert vipctl("apply", "-f", str(tmp_path / "web.yaml"), "-f", "-").out == "no services\n"
    assert [spec["name"] for spec in daemon.last.body["services"]] == ["web", "api"]


def test_convert_needs_no_daemon(spawn: Spawn, tmp_path: Path) -> None:
    (tmp_path / "web.json").write_text(OBJECTS)
    process = spawn("convert", str(tmp_path / "web.json"))
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out.startswith(b"apiVersion: vipd/v1\n")) == (0, True)


def test_check_notes_a_program_that_this_host_lacks(vipctl: Vipctl, tmp_path: Path) -> None:
    file, missing = tmp_path / "exec.yaml", tmp_path / "pg-check"
    commands = (["/bin/true"], [str(missing), "-q"], [str(missing)], [f"{missing} -q"])
    lines = [
        f"  - {{address: 10.96.0.{n}, ports: 80, backends: [{{address: 10.0.0.1, check: "
        f"{{type: exec, command: {json.dumps(command)}}}}}]}}\n"
        for n, command in enumerate(commands)
    ]
    file.write_text("apiVersion: vipd/v1\nservices:\n" + "".join(lines))
    ended = vipctl("check", str(file))
    assert (ended.code, ended.out[:3]) == (0, "ok:")
    why = "no such file; install it on this host, or correct the path"
    split = f"write each word as an item of the list: [{missing}, -q]"
    assert ended.err.splitlines() == [
        f"{file}:4: note: 10.96.0.1:80/tcp: {missing}: {why}",
        f"{file}:6: note: 10.96.0.3:80/tcp: {missing} -q: no such file; {split}",
    ]
    assert vipctl("check", "-q", str(file)) == (0, "", "")


def test_an_address_of_a_lan_needs_etcd_where_the_settings_are_known(vipctl: Vipctl, tmp_path: Path) -> None:
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


def test_check_names_an_address_of_this_host_in_objects_of_kubernetes(vipctl: Vipctl, tmp_path: Path) -> None:
    balancer = service(type="LoadBalancer", status={"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}})
    (tmp_path / "k3s.json").write_text(json.dumps(items(balancer)))
    ended = vipctl("check", str(tmp_path / "k3s.json"), "--set", "host_addresses=192.0.2.1")
    assert ended.code == 1
    assert "192.0.2.1 is an address of this host itself: it is left out" in ended.err
    (tmp_path / "latin.yaml").write_bytes(b"apiVersion: vipd/v1\n# caf\xe9\n")
    assert (
        "latin.yaml:2: not UTF-8 text; save it as UTF-8\n"
        in vipctl("check", str(tmp_path / "latin.yaml")).err
    )
