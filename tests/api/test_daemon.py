from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from subprocess import CompletedProcess

import pytest

from tests.api.daemon_process import ConfiguredHost, host
from tests.model.samples import block

pytestmark = pytest.mark.root

DNS = block("10.96.0.10", "dns", "10.244.0.5")
FORWARD = "net.ipv4.ip_forward"
STOPPING_SECONDS = 20.0
"""What its unit for systemd gives it. vipd itself gives open requests 5; waiting for them would never end."""


@pytest.fixture
def node() -> Iterator[ConfiguredHost]:
    """A host with one declared service."""
    with host() as made:
        made.declare("dns.yaml", DNS)
        yield made


def test_it_starts_follows_files_repairs_and_stops_leaving_its_rules(node: ConfiguredHost) -> None:
    node.tool("sysctl", "-qw", f"{FORWARD}=0")
    node.start()
    assert "10.96.0.10" in node.rules()
    assert node.tool("sysctl", "-n", FORWARD).strip() == "1"
    node.declare("web.yaml", block("10.96.0.11", "web", "10.244.0.6"))
    node.wait_for(lambda: "10.96.0.11" in node.rules())
    node.tool("iptables", "-t", "nat", "-F")
    node.process.send_signal(signal.SIGHUP)  # type: ignore[union-attr]  # it was started above
    node.wait_for(lambda: "10.96.0.10" in node.rules() and "10.96.0.11" in node.rules())
    held = node.hold()
    began = time.monotonic()
    try:
        assert node.end(signal.SIGTERM) == 0
    finally:
        held.close()
    assert time.monotonic() - began < STOPPING_SECONDS
    assert "10.96.0.10" in node.rules()
    assert not node.socket.exists()
    assert "Traceback" not in node.log()
    cleaned = node.cleanup()
    assert cleaned.returncode == 0, cleaned.stderr
    assert "VIPD" not in node.tool("iptables-save")
    assert node.tool("sysctl", "-n", FORWARD).strip() == "0"


def test_a_socket_in_use_is_left_to_its_daemon(node: ConfiguredHost) -> None:
    node.start()
    other = node.vipd("--state-dir", str(node.root / "other"), "--set", "chain_prefix=OTHER")
    assert other.returncode == 1
    assert "vipd.sock" in other.stderr
    assert "in use" in other.stderr
    assert "Traceback" not in other.stderr
    assert node.names() == {"dns"}


def test_once_applies_what_is_good_and_tells_by_its_code_what_is_not(node: ConfiguredHost) -> None:
    assert node.vipd("--once").returncode == 0
    assert "10.96.0.10" in node.rules()
    node.declare("bad.yaml", "  - {address: 10.96.0.300}\n")
    node.declare("web.yaml", block("10.96.0.11", "web", "10.244.0.6"))
    done = node.vipd("--once")
    assert done.returncode == 1
    assert "bad.yaml:3" in done.stderr
    assert "10.96.0.11" in node.rules()


@pytest.mark.parametrize("name", ["state.db", "services.yaml"])
def test_once_with_a_broken_store_is_no_success(node: ConfiguredHost, name: str) -> None:
    """Its own, or that of an earlier version."""
    node.state_dir.mkdir()
    (node.state_dir / name).write_text("nonsense")
    done = node.vipd("--once")
    assert name in done.stderr
    assert done.returncode == 1


def test_check_prints_every_problem_and_touches_nothing(node: ConfiguredHost) -> None:
    good = node.vipd("--check")
    assert (good.returncode, good.stdout) == (0, "ok: 1 service\n")
    assert node.vipd("--check", "--log-level", "debug").stderr == ""
    node.declare("bad.yaml", "  - {address: 10.96.0.300}\n")
    node.declare("twin.yaml", block("10.96.0.10", "twin", "10.244.0.6"))
    lan = "  - {name: web, address: 203.0.113.10, ports: 80, announce: l2, backends: [10.244.0.5]}\n"
    node.declare("lan.yaml", lan)
    bad = node.vipd("--check", "--set", "announce_addresses=203.0.113.0/24")
    assert bad.returncode == 1
    for problem in ("bad.yaml:3", "twin.yaml:3", "lan.yaml:3: web: announce: l2 needs etcd"):
        assert problem in bad.stderr
    assert not node.state_dir.exists()
    assert "VIPD" not in node.rules()


def test_without_root_the_reason_is_told_and_no_traceback(node: ConfiguredHost) -> None:
    node.state_dir.mkdir(mode=0o750)
    for path in (node.root, *node.services_dir.iterdir()):
        path.chmod(0o755)
    done = node.vipd_as_nobody()
    assert done.returncode == 1
    assert str(node.state_dir) in done.stderr
    assert "Traceback" not in done.stderr


def test_who_may_not_read_good_files_is_told_so_and_not_to_move_them(node: ConfiguredHost) -> None:
    node.root.chmod(0o755)
    node.state_dir.mkdir(mode=0o755)
    node.services_dir.chmod(0o755)
    for name in ("state.db", "dataplane"):
        (node.state_dir / name).touch(mode=0o600)
    done = node.vipd_as_nobody("--check")
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if "state.db" in line)
    assert "Permission denied" in line
    assert "run this as root (sudo)" in line
    assert "run vipd --check as root (sudo)" in done.stderr
    assert "aside" not in done.stderr


def test_a_path_that_cannot_be_a_socket_is_told(node: ConfiguredHost) -> None:
    node.settings["socket"] = str(node.root / ("x" * 120))
    done = node.vipd()
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_a_stop_during_the_first_apply_is_clean(node: ConfiguredHost) -> None:
    node.begin()
    node.wait_for(lambda: "serves" in node.log())
    assert node.end(signal.SIGTERM) == 0
    assert "Traceback" not in node.log()


def test_a_request_in_flight_does_not_hold_up_the_stop(node: ConfiguredHost) -> None:
    node.start()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(node.socket))
        client.sendall(b"POST /v1/services HTTP/1.1\r\nHost: vipd\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.1)
        began = time.monotonic()
        assert node.end(signal.SIGTERM) == 0
        assert time.monotonic() - began < STOPPING_SECONDS, "systemd waits longer, but not for ever"


def test_it_holds_what_all_files_together_no_longer_say(node: ConfiguredHost) -> None:
    def vipctl(*words: str) -> CompletedProcess[str]:
        return node.run(*words, "--socket", str(node.socket), module="vipd.cli.main")

    node.declare("web.yaml", block("10.96.0.11", "web", "10.244.0.6"))
    node.start()
    for path in list(node.services_dir.iterdir()):
        path.unlink()
    node.wait_for(lambda: "2 files are gone" in vipctl("status").stdout)
    assert "10.96.0.10" in node.rules()
    assert "10.96.0.11" in node.rules()
    assert node.end(signal.SIGTERM) == 0
    checked = node.vipd("--check")
    assert (checked.returncode, "2 files are gone" in checked.stderr) == (1, True)
    assert node.vipd("--once").returncode == 1
    assert "10.96.0.10" in node.rules()
    node.start()
    accepted = vipctl("accept-removal")
    assert accepted.stdout.endswith("2 files let go\n"), accepted.stderr
    assert "10.96.0.10" not in node.rules()
    assert vipctl("accept-removal").stdout == "nothing was held\n"
