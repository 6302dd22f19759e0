"""The real daemon as a unit of type notify: what the service manager hears of it, and when."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.samples import block
from tests.systemd.manager import REFUSAL, Unit, unit, until
from vipd.bench.declared import declaration as many_services

pytestmark = pytest.mark.root

VIP, OTHER = "10.96.0.10", "10.96.0.11"
IN_SYNC = "1 service, 1/1 backends ready, in sync"


@pytest.fixture
def node() -> Iterator[Unit]:
    with unit() as made:
        made.declare("dns.yaml", block(VIP, "dns", "10.244.0.5"))
        yield made


def ready(node: Unit) -> bool:
    return "1" in node.manager.all("READY")


def test_ready_is_told_when_the_rules_are_in_the_kernel_and_not_before(node: Unit) -> None:
    told = node.manager
    node.tools.set("broken")
    node.begin()
    until(lambda: node.tools.calls() >= 4, "several tries")
    until(lambda: any(REFUSAL in text for text in told.all("STATUS")), "a status that says why")
    assert not ready(node)
    assert VIP not in node.rules()
    node.tools.unset("broken")
    until(lambda: ready(node), "ready")
    assert VIP in node.rules()
    assert told.all("STATUS")[-1] == IN_SYNC
    assert node.tools.inherited() == "", "what vipd starts must not speak in its name"


def test_a_quarantined_service_does_not_keep_ready_away(node: Unit) -> None:
    node.declare("bad.yaml", block(OTHER, "bad", "10.244.0.66"))
    node.tools.set("refused", "10.244.0.66\n")
    node.begin()
    until(lambda: ready(node), "ready")
    assert VIP in node.rules()
    status = "2 services, 2/2 backends ready, 1 quarantined"
    until(lambda: node.manager.all("STATUS")[-1] == status, "the quarantine in the status")


def test_status_follows_and_reload_and_stop_are_told(node: Unit) -> None:
    told = node.manager
    node.begin()
    until(lambda: ready(node), "ready")
    node.declare("more.yaml", block(OTHER, "more", "10.244.0.6", "{address: 10.244.0.7, weight: 0}"))
    more = "2 services, 2/3 backends ready, in sync"
    until(lambda: told.all("STATUS")[-1] == more, "the second service in the status")
    statuses = told.times("STATUS")
    # The first follows the moment of the start, and READY brings one at any time.
    assert all(later - earlier > 0.5 for earlier, later in pairwise(statuses[2:])), statuses
    (node.services_dir / "more.yaml").write_text("nonsense")
    node.signal(signal.SIGHUP)
    until(lambda: len(told.all("READY")) == 2, "the end of the reload")
    (begun,) = [each for each in told.told if "RELOADING" in each.assignments]
    assert begun.assignments["RELOADING"] == "1"
    assert abs(int(begun.assignments["MONOTONIC_USEC"]) / 1e6 - begun.at) < 5
    assert begun.at <= told.times("READY")[1]
    assert told.all("STATUS")[-1] == f"{more}, 1 with problems: see vipctl status"
    assert re.search(r"reloaded: 2 services, none changed; problems: 1.*\n.*more\.yaml", node.log())
    assert node.end(signal.SIGTERM) == 0
    assert told.told[-1].assignments["STOPPING"] == "1"


def test_signs_of_life_end_when_a_step_hangs_and_the_api_goes_on() -> None:
    with unit(WATCHDOG_USEC="1000000") as node:
        told = node.manager
        node.declare("dns.yaml", block(VIP, "dns", "10.244.0.5"))
        node.begin()
        until(lambda: ready(node), "ready")
        idle = len(told.all("WATCHDOG"))
        until(lambda: len(told.all("WATCHDOG")) >= idle + 3, "signs of life of an idle daemon")
        node.tools.set("hanging")
        before = node.tools.calls()
        node.declare("more.yaml", block(OTHER, "more", "10.244.0.6"))
        until(lambda: node.tools.calls() > before, "a program that hangs")
        time.sleep(0.3)
        last = len(told.all("WATCHDOG"))
        for _ in range(15):
            assert node.get("status")["state"] == "pending"
            time.sleep(0.1)
        assert len(told.all("WATCHDOG")) == last
        node.tools.unset("hanging")
        until(lambda: len(told.all("WATCHDOG")) >= last + 2, "signs of life again")
        until(lambda: told.all("STATUS")[-1].startswith("2 services"), "the change")


def test_a_long_load_gives_signs_of_life_and_asks_for_time() -> None:
    watchdog = 2.0
    with unit(WATCHDOG_USEC=str(int(watchdog * 1e6)), WATCHDOG_PID="") as node:
        told = node.manager
        (node.services_dir / "many.yaml").write_text(many_services(800, backends=1))
        node.tools.set("seconds", "0.5")
        node.begin()
        until(lambda: ready(node), "ready", 60)
        alive = [at for at in told.times("WATCHDOG") if at <= told.times("READY")[0]]
        alive.append(told.times("READY")[0])
        assert alive[-1] - alive[0] > watchdog, "the load was too short to tell anything"
        assert max(later - earlier for earlier, later in pairwise(alive)) < watchdog
        asked = [at for at in told.times("EXTEND_TIMEOUT_USEC") if at < alive[-1]]
        assert len(asked) >= 3
        assert int(told.all("EXTEND_TIMEOUT_USEC")[0]) > 10_000_000
        log = node.log()
        assert "800 services in the kernel" in log
        assert " added" not in log, "a first load is told in one line"


def test_a_start_without_the_right_to_change_rules_says_so(
    node: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", node.environment["NOTIFY_SOCKET"])
    node.environment.clear()  # another program between would end what lets a plain user run this Python
    for path in (node.root.parent, node.root, node.services_dir, *node.services_dir.iterdir()):
        path.chmod(0o755)
    node.state_dir.mkdir()
    os.chown(node.state_dir, 65534, 65534)
    done = node.vipd_as_nobody()
    assert done.returncode == 77
    assert "CAP_NET_ADMIN" in done.stderr
    assert "hint" in done.stderr
    assert "Traceback" not in done.stderr
    until(lambda: node.manager.all("ERRNO") == ["1"], "why the start failed")
    assert "CAP_NET_ADMIN" in node.manager.all("STATUS")[-1]
    assert not ready(node)


def test_settings_that_cannot_be_used_are_told(node: Unit) -> None:
    assert node.vipd("--set", "mark_bit=99").returncode == 78
    until(lambda: any("mark_bit" in text for text in node.manager.all("STATUS")), "why")


def test_checking_does_not_speak_for_the_daemon(node: Unit) -> None:
    assert node.vipd("--check").returncode == 0
    (node.services_dir / "dns.yaml").write_text("nonsense")
    done = node.vipd("--check")
    assert done.returncode == 1
    assert "dns.yaml" in done.stderr
    time.sleep(0.2)
    assert node.manager.told == []
