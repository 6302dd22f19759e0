"""Settings of what may be claimed, as vipctl reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.inside import vipctl

HEAD = "apiVersion: vipd/v1\nservices:\n"
BAD = {
    "node_port_range: 0": ":1: node_port_range: '0' is no range of ports; hint: ",
    "node_port_range: 5-4": ":1: node_port_range: '5-4' is no range of ports; hint: ",
    "node_port_range: []": ":1: node_port_range: names no port; hint: 30000-32767, or any",
    "node_port_range: {etdc: any}": ":1: node_port_range: must be one of file, cli, etcd, not ",
    "allowed_backends:\n  etcd:\n  - 10.0.0.0/8\n  - x/8": ":4: allowed_backends: 'x/8' does not appear",
    "allowed_backends: {etcd: 7}": ":1: allowed_backends: must be a list, not 7",
    "allowed_addresses:\n- 10.0.0.0/8\n- 10.0.0.1/8": ":3: allowed_addresses: 10.0.0.1/8 has host",
}


def service(number: int, node_port: int) -> str:
    ports = f"[{{port: 80, node_port: {node_port}}}]"
    return f"  - {{name: s{number}, address: 10.96.0.{number + 1}, ports: {ports}, backends: [10.244.0.5]}}\n"


def test_a_limit_that_cannot_be_read_is_told_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "web.yaml").write_text(HEAD + service(0, 30000))
    said = {}
    for text in BAD:
        (tmp_path / "vipd.conf").write_text(f"{text}\n")
        assert vipctl(["check", str(tmp_path / "web.yaml"), "--settings", str(tmp_path / "vipd.conf")]) == 2
        said[text] = " ".join(capsys.readouterr().err.split())
    assert [text for text, start in BAD.items() if f"vipd.conf{start}" not in said[text]] == [], said


def test_render_takes_any_port_and_check_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "web.yaml").write_text(HEAD + service(0, 40000))
    words = [str(tmp_path / "web.yaml"), "--set", "node_port_range=30000-32767"]
    words += ["--set", "host_addresses=[10.0.0.1]"]
    assert vipctl(["render", *words]) == 0
    assert "--dport 40000" in capsys.readouterr().out
    assert vipctl(["check", *words]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "lies outside node_port_range (30000-32767 for file)" in told


@pytest.mark.parametrize(("number", "code"), [(10, 0), (11, 1)])
def test_check_tells_of_a_file_with_too_many_ports(
    number: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "many.yaml").write_text(HEAD + "".join(service(n, 30000 + n) for n in range(number)))
    (tmp_path / "other.yaml").write_text(HEAD + service(99, 30200))
    settings = ("node_ports_per_author=10", "host_addresses=[10.0.0.1]")
    words = ["check", str(tmp_path), *(word for setting in settings for word in ("--set", setting))]
    assert vipctl(words) == code
    told = " ".join(capsys.readouterr().err.split())
    assert ("many.yaml:13: s10: " in told) is bool(code)
    assert ("more than 10 ports of this host, the most of one author" in told) is bool(code)
