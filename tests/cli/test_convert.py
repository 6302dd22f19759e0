import io
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Spawn, Vipctl
from tests.declaration.manifests import endpoint_slice, items, service
from tests.lab.inside import declare
from vipd.model.service import Backend

WEB = """\
apiVersion: vipd/v1
services:
  - name: default/web
    address: 10.96.0.20
    ports: [{port: 80, protocol: tcp, target: 8080}]
    backends:
      - 10.244.0.1
"""
OBJECTS = items(service(), endpoint_slice("10.244.0.1"), {"apiVersion": "v1", "kind": "Pod"})
NOTE = "note: left out of the List: 1 Pod\n"


@pytest.fixture
def manifest(tmp_path: Path) -> str:
    file = tmp_path / "web.json"
    file.write_text(json.dumps(OBJECTS))
    return str(file)


def test_kubernetes_objects_are_printed_as_a_declaration(vipctl: Vipctl, manifest: str) -> None:
    ended = vipctl("convert", manifest)
    assert (ended.code, ended.out, ended.err) == (0, WEB, f"{manifest}:1: {NOTE}")
    assert vipctl("convert", "-f", manifest, "-q") == (0, WEB, "")


def test_json_is_read_back_as_the_same(vipctl: Vipctl, manifest: str) -> None:
    for form in (("-o", "json"), ("--json",)):
        ended = vipctl("convert", manifest, *form)
        assert json.loads(ended.out)["apiVersion"] == "vipd/v1"
        declaration = declare(ended.out, "x")
        assert declaration.ok
        assert declaration.services[0].backends == (Backend("10.244.0.1"),)


def test_what_is_printed_converts_to_itself(vipctl: Vipctl, tmp_path: Path) -> None:
    (tmp_path / "web.yaml").write_text(WEB)
    assert vipctl("convert", str(tmp_path / "web.yaml")) == (0, WEB, "")


def test_standard_input_is_a_file(vipctl: Vipctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps(OBJECTS).encode())))
    ended = vipctl("convert", "-")
    assert (ended.code, ended.out, ended.err) == (0, WEB, f"<stdin>:1: {NOTE}")


def test_nothing_is_printed_when_there_is_a_problem(vipctl: Vipctl, tmp_path: Path) -> None:
    (tmp_path / "web.json").write_text(json.dumps(items(service(ports=[{"port": 0}]))))
    ended = vipctl("convert", str(tmp_path))
    assert (ended.code, ended.out) == (1, "")
    assert "items[0].spec.ports[0].port: 0 is out of range" in ended.err


def test_a_file_must_be_named(vipctl: Vipctl) -> None:
    ended = vipctl("convert")
    assert (ended.code, ended.out) == (2, "")
    assert "no file to convert" in ended.err


def test_check_tells_notes_apart_from_problems(vipctl: Vipctl, manifest: str) -> None:
    ended = vipctl("check", manifest)
    assert (ended.code, ended.out, ended.err) == (
        0,
        "ok: 1 service in 1 file; vipd was not asked whether others claim the same\n",
        f"{manifest}:1: {NOTE}",
    )
    assert vipctl("check", "-q", manifest) == (0, "", "")
    ended = vipctl("check", "--json", manifest)
    assert (json.loads(ended.out)["ok"], ended.err) == (True, f"{manifest}:1: {NOTE}")


def test_no_daemon_is_needed(spawn: Spawn, manifest: str) -> None:
    process = spawn("convert", manifest)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out.decode()) == (0, WEB)


IPVSADM = """\
-A -t 10.96.0.20:80 -s sed
-a -t 10.96.0.20:80 -r 10.244.0.1:8080 -g -w 1
"""
WEB_BY_ADDRESS = WEB.replace("  - name: default/web\n    address", "  - address")


@pytest.fixture
def saved(tmp_path: Path) -> str:
    file = tmp_path / "ipvsadm.rules"
    file.write_text(IPVSADM)
    return str(file)


def test_what_another_program_has_is_printed_with_each_line_that_is_lost(vipctl: Vipctl, saved: str) -> None:
    for options in ((), ("--from", "ipvsadm")):
        ended = vipctl("convert", *options, saved)
        assert (ended.code, ended.out) == (1, WEB_BY_ADDRESS)
        lines = ended.err.splitlines()
        assert [line.removeprefix(saved).split(": ")[:2] for line in lines[:-1]] == [
            [":1", "note"],
            [":1", "scheduler sed"],
            [":2", "-r 10.244.0.1:8080 -g"],
        ]
        assert lines[-1] == "vipctl: 2 problems in 1 file: what was printed lacks these parts"


def test_quiet_leaves_out_notes_and_no_loss(vipctl: Vipctl, saved: str) -> None:
    ended = vipctl("convert", "-q", saved)
    assert (ended.code, ended.out) == (1, WEB_BY_ADDRESS)
    assert "note:" not in ended.err
    assert "scheduler sed" in ended.err


def test_a_conversion_without_loss_is_done(vipctl: Vipctl, tmp_path: Path) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text("listen web\n  bind :80\n  server a 10.244.0.1:80\n")
    ended = vipctl("convert", str(file))
    assert (ended.code, ended.out) == (1, "apiVersion: vipd/v1\nservices: []\n")
    assert "--address 10.96.0.10" in ended.err
    ended = vipctl("convert", "--address", "10.96.0.20", "--json", str(file))
    assert (ended.code, ended.err) == (0, "")
    assert json.loads(ended.out)["services"][0]["ports"] == [{"port": 80, "protocol": "tcp", "node_port": 80}]


def test_files_of_several_formats_are_one_declaration(vipctl: Vipctl, manifest: str, tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text("stream { server { listen 10.96.0.21:80; proxy_pass 10.244.0.2:80; } }\n")
    ended = vipctl("convert", "-q", manifest, str(file))
    assert (ended.code, ended.err) == (0, "")
    assert declare(ended.out, "x").services[1].addresses == ("10.96.0.21",)


def test_nothing_is_printed_when_two_files_claim_the_same(vipctl: Vipctl, saved: str, manifest: str) -> None:
    ended = vipctl("convert", saved, manifest)
    assert (ended.code, ended.out) == (1, "")
    assert "already belongs to" in ended.err


def test_nothing_is_printed_when_a_file_cannot_be_read(vipctl: Vipctl, saved: str, tmp_path: Path) -> None:
    ended = vipctl("convert", saved, str(tmp_path / "missing"))
    assert (ended.code, ended.out) == (1, "")
    assert "cannot be read" in ended.err


def test_an_unknown_format_must_be_named(vipctl: Vipctl, tmp_path: Path) -> None:
    file = tmp_path / "a.conf"
    file.write_text("pool web\n")
    ended = vipctl("convert", str(file))
    assert (ended.code, ended.out) == (1, "")
    assert "--from ipvsadm|keepalived|haproxy|nginx|kubernetes" in ended.err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--from", "haproxy", "."), ".: is a directory"),
        (("--from", "envoy", "a"), "'envoy' is not one of"),
        (("--address", "web", "a"), "is a name"),
        (("--address", "10.0.0.1", "--address", "10.0.0.2", "a"), "two addresses of one family"),
    ],
)
def test_wrong_options(vipctl: Vipctl, arguments: tuple[str, ...], why: str) -> None:
    ended = vipctl("convert", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert why in ended.err
