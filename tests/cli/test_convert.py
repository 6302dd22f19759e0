import io
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Spawn, Vipctl
from tests.declaration.manifests import endpoint_slice, items, service
from vipd.declaration.native import parse_declaration
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
        declaration = parse_declaration(ended.out, "x")
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
