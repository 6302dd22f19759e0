from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPException

import pytest

from tests.api.daemon_process import PATIENCE_SECONDS, ConfiguredHost, host
from tests.lab.examples import examples
from tests.lab.inside import declare
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


def test_a_second_daemon_on_the_same_state_is_refused(node: ConfiguredHost) -> None:
    node.start()
    second = node.vipd("--socket", str(node.root / "other.sock"))
    assert second.returncode == 1
    assert f"another vipd runs on {node.state_dir}" in second.stderr
    assert "Traceback" not in second.stderr
    third = node.vipd("--state-dir", str(node.root / "other"))
    assert third.returncode == 1
    assert "another vipd writes the chains VIPD-* in this network namespace" in third.stderr
    fourth = node.vipd("--state-dir", str(node.root / "other"), "--set", "chain_prefix=OTHER")
    assert fourth.returncode == 1
    assert "vipd.sock" in fourth.stderr
    assert "in use" in fourth.stderr
    assert "Traceback" not in third.stderr + fourth.stderr
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


def test_once_with_a_broken_store_is_no_success(node: ConfiguredHost) -> None:
    node.state_dir.mkdir()
    (node.state_dir / "services.yaml").write_text("nonsense")
    done = node.vipd("--once")
    assert "services.yaml" in done.stderr
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


def test_check_warns_of_a_password_that_would_go_unencrypted(node: ConfiguredHost) -> None:
    etcd = {"endpoints": ["http://192.0.2.1:2379"], "user": "vipd-host", "password_file": "/etc/vipd/pw"}
    node.settings["etcd"] = etcd
    done = node.vipd("--check")
    assert (done.returncode, done.stdout) == (0, "ok: 1 service\n")
    assert done.stderr.startswith(
        "warning: etcd's password for vipd-host goes unencrypted to http://192.0.2.1"
    )


def test_unusable_settings_end_with_78_and_all_problems(node: ConfiguredHost) -> None:
    node.settings.update({"mark_bit": 99, "colour": "red"})
    done = node.vipd("--set", "log_level=loud")
    assert done.returncode == 78
    for name in ("mark_bit", "colour", "log_level"):
        assert name in done.stderr
    assert "Traceback" not in done.stderr
    assert node.run("--config", str(node.root / "none.yaml")).returncode == 78


def test_a_slip_in_the_environment_is_told(node: ConfiguredHost) -> None:
    done = node.run("--config", str(node.config), "--check", VIPD_LOGLEVEL="debug")
    assert done.returncode == 0
    assert "VIPD_LOGLEVEL" in done.stderr


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
    for name in ("services.yaml", "history.jsonl", "overrides.json", "dataplane"):
        (node.state_dir / name).touch(mode=0o600)
    done = node.vipd_as_nobody("--check")
    assert done.returncode == 1
    for name in ("services.yaml", "history.jsonl"):
        (line,) = (line for line in done.stderr.splitlines() if name in line)
        assert "Permission denied" in line
        assert "run this as root (sudo)" in line
    assert "run vipd --check as root (sudo)" in done.stderr
    assert "aside" not in done.stderr


def test_with_its_own_directories_but_without_root_it_tells_what_is_missing(node: ConfiguredHost) -> None:
    for path in (node.root, node.services_dir, *node.services_dir.iterdir()):
        path.chmod(0o755)
    node.state_dir.mkdir()
    os.chown(node.state_dir, 65534, 65534)
    done = node.vipd_as_nobody("--once")
    assert done.returncode == 1
    assert "root" in done.stderr
    assert "Traceback" not in done.stderr


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


def adding(node: ConfiguredHost, first: int, acknowledged: list[str], stop: threading.Event) -> None:
    """Add services one after the other until the daemon is gone; note each that was answered."""
    for number in range(first, first + 1000):
        if stop.is_set():
            return
        name = f"s{number}"
        address = f"10.98.{number // 250}.{number % 250 + 1}"
        spec = {"name": name, "address": address, "ports": ["53/udp"], "backends": ["10.244.0.5"]}
        try:
            status, body = node.ask("POST", "services", {"service": spec})
        except (OSError, HTTPException, ValueError):
            return
        assert status == 200, body
        acknowledged.append(name)


def test_what_was_answered_survives_any_kill(node: ConfiguredHost) -> None:
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    acknowledged: list[str] = []
    for round_ in range(min(10, examples(10))):
        node.begin()
        node.wait_for(lambda: node.get("status")["pid"])
        stop = threading.Event()
        client = threading.Thread(target=adding, args=(node, round_ * 1000, acknowledged, stop))
        client.start()
        answered = len(acknowledged) + chance.randint(1, 4)
        node.wait_for(lambda answered=answered: len(acknowledged) >= answered)
        time.sleep(chance.uniform(0, 0.1))
        node.end(signal.SIGKILL)
        stop.set()
        client.join(PATIENCE_SECONDS)
        assert not client.is_alive()
        store = node.state_dir / "services.yaml"
        if store.exists():
            found = declare(store.read_text(), str(store))
            assert found.ok, f"seed {seed}: {found.problems}"
            missing = set(acknowledged) - {s.name for s in found.services}
            assert not missing, f"seed {seed}: {missing}"
    node.start()
    assert node.names() >= set(acknowledged)


def test_a_watched_directory_may_come_late(node: ConfiguredHost) -> None:
    (node.services_dir / "dns.yaml").unlink()
    node.services_dir.rmdir()
    node.start()
    (files, _) = node.get("status")["sources"]
    assert "no such directory" in files["problems"][0]
    node.services_dir.mkdir()
    time.sleep(0.5)
    node.declare("dns.yaml", DNS)
    node.wait_for(lambda: node.names() == {"dns"})


def test_a_request_in_flight_does_not_hold_up_the_stop(node: ConfiguredHost) -> None:
    node.start()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(node.socket))
        client.sendall(b"POST /v1/services HTTP/1.1\r\nHost: vipd\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.1)
        began = time.monotonic()
        assert node.end(signal.SIGTERM) == 0
        assert time.monotonic() - began < STOPPING_SECONDS, "systemd waits longer, but not for ever"
