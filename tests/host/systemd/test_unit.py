"""The real daemon as a unit of type notify: what the service manager hears of it, and when."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from functools import partial

import pytest

from tests.host.systemd.manager import REFUSAL, Unit, unit
from tests.lab.waiting import wait_until
from tests.model.samples import block, many_declared
from vipd.daemon.status_reporter import READY_TIMEOUT_SECONDS

pytestmark = pytest.mark.root

VIP, OTHER = "10.96.0.10", "10.96.0.11"
IN_SYNC = "1 service, 1/1 backends ready, 1 unchecked, in sync"


@pytest.fixture
def node() -> Iterator[Unit]:
    with unit() as made:
        made.declare("dns.yaml", block(VIP, "dns", "10.244.0.5"))
        yield made


def in_kernel(node: Unit, text: str) -> bool:
    return text in node.rules()


def ready(node: Unit) -> bool:
    return "1" in node.manager.all("READY")


def test_ready_is_told_when_the_rules_are_in_the_kernel_and_not_before(node: Unit) -> None:
    told = node.manager
    node.tools.set("broken")
    node.begin()
    wait_until(lambda: node.tools.calls() >= 4, "several tries")
    wait_until(lambda: any(REFUSAL in text for text in told.all("STATUS")), "a status that says why")
    node.signal(signal.SIGHUP)
    extended, calls = len(told.all("EXTEND_TIMEOUT_USEC")), node.tools.calls()
    wait_until(lambda: node.tools.calls() >= calls + 2, "further tries")
    told.catch_up()
    assert not ready(node), "nor by a reload"
    assert len(told.all("EXTEND_TIMEOUT_USEC")) == extended, "a start that failed is not prolonged"
    assert VIP not in node.rules()
    node.tools.unset("broken")
    wait_until(lambda: ready(node), "ready")
    assert VIP in node.rules()
    # An event of the host may have asked for another step meanwhile.
    wait_until(lambda: told.all("STATUS")[-1] == IN_SYNC, "in sync in the status")
    assert node.tools.inherited() == "", "what vipd starts must not speak in its name"


def test_ready_that_nobody_took_is_told_again() -> None:
    with unit(WATCHDOG_USEC="1000000") as node:
        node.declare("dns.yaml", block(VIP, "dns", "10.244.0.5"))
        (node.root / "notify").rename(node.root / "away")
        node.begin()
        node.wait_for(lambda: node.get("status")["state"] == "in-sync")
        assert node.manager.told == []
        (node.root / "away").rename(node.root / "notify")
        wait_until(lambda: ready(node), "ready")


@pytest.mark.nightly
def test_a_start_that_fails_for_long_is_ready_all_the_same(node: Unit) -> None:
    """Whoever waits for the unit does not wait for ever; the API answers and says what is wrong."""
    node.tools.set("broken")
    node.begin()
    wait_until(lambda: ready(node), "ready", READY_TIMEOUT_SECONDS + 60)
    assert REFUSAL in node.manager.all("STATUS")[-1]
    status = node.get("status")
    assert status["state"] == "failed"
    assert REFUSAL in str(status)
    node.tools.unset("broken")
    wait_until(lambda: node.manager.all("STATUS")[-1] == IN_SYNC, "in sync in the status")


def test_a_quarantined_service_does_not_keep_ready_away(node: Unit) -> None:
    node.declare("bad.yaml", block(OTHER, "bad", "10.244.0.66"))
    node.tools.set("refused", "10.244.0.66\n")
    node.begin()
    wait_until(lambda: ready(node), "ready")
    assert VIP in node.rules()
    status = "2 services, 2/2 backends ready, 2 unchecked, 1 quarantined"
    wait_until(lambda: node.manager.all("STATUS")[-1] == status, "the quarantine in the status")


def test_status_follows_and_reload_and_stop_are_told(node: Unit) -> None:
    told, began = node.manager, time.monotonic()
    node.begin()
    wait_until(lambda: ready(node), "ready")
    for number in range(1, 6):  # each of them would be another status
        added = f"10.244.1.{number}"
        node.declare("more.yaml", block(OTHER, "more", *(f"10.244.1.{n}" for n in range(1, number + 1))))
        wait_until(partial(in_kernel, node, added), "a change in the kernel")
    node.declare("more.yaml", block(OTHER, "more", "10.244.0.6", "{address: 10.244.0.7, weight: 0}"))
    more = "2 services, 2/3 backends ready, 2 unchecked, in sync"
    wait_until(lambda: told.all("STATUS")[-1] == more, "the second service in the status")
    since = [each for each in told.told if each.at > told.times("READY")[0] and "STATUS" in each.assignments]
    # At most one a second: however late a letter is read here, it was not sent before its time.
    assert all(each.at - began > number for number, each in enumerate(since, 1)), since
    node.write("more.yaml", "nonsense")
    before = time.monotonic()
    node.signal(signal.SIGHUP)
    wait_until(lambda: len(told.all("READY")) == 2, "the end of the reload")
    (begun,) = [each for each in told.told if "RELOADING" in each.assignments]
    assert begun.assignments["RELOADING"] == "1"
    assert before <= int(begun.assignments["MONOTONIC_USEC"]) / 1e6 + 1e-6
    assert int(begun.assignments["MONOTONIC_USEC"]) / 1e6 <= begun.at <= told.times("READY")[1]
    wrong = f"{more}, 1 with problems: see vipctl status"
    wait_until(lambda: told.all("STATUS")[-1] == wrong, "the problem in the status")
    assert re.search(r"reloaded: 2 services, none changed; problems: 1.*more\.yaml", node.log())
    assert node.end(signal.SIGTERM) == 0
    told.catch_up()
    assert told.told[-1].assignments["STOPPING"] == "1"


def pending(node: Unit) -> bool:
    """True; AssertionError unless the API says that something is still to be done."""
    assert node.get("status")["state"] == "pending"
    return True


def test_signs_of_life_end_when_a_step_hangs_and_the_api_goes_on() -> None:
    with unit(WATCHDOG_USEC="1000000") as node:
        told = node.manager
        node.declare("dns.yaml", block(VIP, "dns", "10.244.0.5"))
        node.begin()
        wait_until(lambda: ready(node), "ready")
        idle = len(told.all("WATCHDOG"))
        wait_until(lambda: len(told.all("WATCHDOG")) >= idle + 3, "signs of life of an idle daemon")
        node.tools.set("hanging")
        before = node.tools.calls()
        node.declare("more.yaml", block(OTHER, "more", "10.244.0.6"))
        wait_until(lambda: node.tools.calls() > before, "a program that hangs")
        # An idle loop gives one each half second; of a machine that is slow some may come late.
        wait_until(
            lambda: pending(node) and time.monotonic() - told.times("WATCHDOG")[-1] > 1.5, "no more signs", 15
        )
        last = len(told.all("WATCHDOG"))
        node.tools.unset("hanging")
        wait_until(lambda: len(told.all("WATCHDOG")) >= last + 2, "signs of life again")
        wait_until(lambda: told.all("STATUS")[-1].startswith("2 services"), "the change")


def test_a_long_load_gives_signs_of_life_and_asks_for_time() -> None:
    with unit(WATCHDOG_USEC="2000000", WATCHDOG_PID="") as node:
        told = node.manager
        (node.services_dir / "many.yaml").write_text(many_declared(2400, backends=1))
        node.tools.set("seconds", "0.5")
        node.begin()
        wait_until(lambda: ready(node), "ready", 200)
        kinds = [name for each in told.told for name in each.assignments]
        loading = kinds[: kinds.index("READY")]
        # It takes longer than the watchdog waits; each block of it is told, on a machine of any speed.
        assert node.tools.calls() >= 5, "the load was too short to tell anything"
        assert loading.count("WATCHDOG") >= node.tools.calls() - 1
        assert loading.count("EXTEND_TIMEOUT_USEC") >= 3
        assert int(told.all("EXTEND_TIMEOUT_USEC")[0]) > 10_000_000
        log = node.log()
        assert "2400 services in the kernel" in log
        assert " added" not in log, "a first load is told in one line"


def test_a_start_without_the_right_to_change_rules_says_so(
    node: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", node.environment["NOTIFY_SOCKET"])
    for path in (node.root.parent, node.root, node.services_dir, *node.services_dir.iterdir()):
        path.chmod(0o755)
    node.state_dir.mkdir()
    os.chown(node.state_dir, 65534, 65534)
    done = node.vipd_as_nobody()
    assert done.returncode == 77
    assert "CAP_NET_ADMIN" in done.stderr
    assert "hint" in done.stderr
    assert "Traceback" not in done.stderr
    wait_until(lambda: node.manager.all("ERRNO") == ["1"], "why the start failed")
    assert "CAP_NET_ADMIN" in node.manager.all("STATUS")[-1]
    assert not ready(node)


def test_settings_that_cannot_be_used_are_told(node: Unit) -> None:
    assert node.vipd("--set", "mark_bit=99").returncode == 78
    wait_until(lambda: any("mark_bit" in text for text in node.manager.all("STATUS")), "why")


def test_checking_does_not_speak_for_the_daemon(node: Unit) -> None:
    assert node.vipd("--check").returncode == 0
    node.write("dns.yaml", "nonsense")
    done = node.vipd("--check")
    assert done.returncode == 1
    assert "dns.yaml" in done.stderr
    node.manager.catch_up()
    assert node.manager.told == []
