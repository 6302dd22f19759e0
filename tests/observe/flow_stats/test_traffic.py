"""Packets and bytes of real flows, judged by what conntrack says of them while they are there."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.observe.flow_stats.counted import PATIENCE_SECONDS, WEB, Numbers, reach, service

pytestmark = pytest.mark.root

TRAFFIC = ("packets_in", "bytes_in", "packets_out", "bytes_out")

STILL = 3
"""So many readings in a row must be the same."""

_MOVING = re.compile(r" (SYN_\w+|FIN_WAIT|CLOSE_WAIT|LAST_ACK) ")
_COUNTS = re.compile(r"packets=(\d+) bytes=(\d+)")
DATAGRAM = 20 + 8 + len("hello\n")


@pytest.fixture(scope="module")
def daemon(lab: Lab) -> Iterator[Daemon]:
    """It is conntrack that counts traffic, whichever dataplane has translated it."""
    lab.host.sysctl("net.netfilter.nf_conntrack_acct", 1)
    end_all_flows(lab)
    with Daemon(lab.host, WEB) as made:
        yield made


def end_all_flows(lab: Lab) -> None:
    for family in ("ipv4", "ipv6"):
        lab.host.run("conntrack", "-F", "-f", family)


def in_table(lab: Lab) -> Numbers:
    """What conntrack says has passed in flows to the VIPs, once their last packets have."""
    seen = [counted(lab)]
    end = time.monotonic() + PATIENCE_SECONDS
    # An end is some packets back and forth; an acknowledgement may be put off for 40 ms, and for 200 at most.
    while len(seen) < STILL or seen[-STILL:] != [seen[-1]] * STILL or seen[-1][0]:
        assert time.monotonic() < end, f"packets go on passing: {seen[-STILL:]}"
        time.sleep(0.15)
        seen.append(counted(lab))
    return seen[-1][1]


def counted(lab: Lab) -> tuple[int, Numbers]:
    """How many flows to the VIPs are about to begin or to end, and what has passed in all of them."""
    lines = [
        line
        for family in ("ipv4", "ipv6")
        for line in lab.host.run("conntrack", "-L", "-f", family).stdout.splitlines()
        if " dst=10.96.0.10 " in line or " dst=fd00:96::10 " in line
    ]
    total = Counter[int]()
    for line in lines:
        numbers = [int(number) for pair in _COUNTS.findall(line) for number in pair]
        assert len(numbers) == 4, line
        total.update(dict(enumerate(numbers)))
    return sum(bool(_MOVING.search(line)) for line in lines), tuple(total[column] for column in range(4))


def traffic_of(daemon: Daemon) -> Numbers:
    counted = service(daemon)
    of_backends = [sum(backend[name] for backend in counted["backends"]) for name in TRAFFIC]
    numbers = tuple(int(counted[name]) for name in TRAFFIC)
    assert numbers == tuple(of_backends)
    return numbers


def plus(one: Numbers, other: Numbers) -> Numbers:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def send_some(lab: Lab) -> None:
    lab.client.send("10.96.0.10", 80, count=12).all_answered()
    lab.client.send("10.96.0.10", 80, "udp", count=20).all_answered()
    lab.client.send("fd00:96::10", 80, count=4).all_answered()


def test_what_flows_had_stays_when_they_have_ended(lab: Lab, daemon: Daemon) -> None:
    before = traffic_of(daemon)
    send_some(lab)
    first = plus(before, in_table(lab))
    end_all_flows(lab)
    reach(daemon, lambda: traffic_of(daemon), first)
    with lab.client.open("10.96.0.10", 80) as kept:
        for _ in range(3):
            kept.ask()
        send_some(lab)
        reach(daemon, lambda: traffic_of(daemon), plus(first, in_table(lab)))
        end_all_flows(lab)
        assert service(daemon)["bytes_in"] >= first[1] + 20 * DATAGRAM
    daemon.wait_until(lambda: service(daemon)["flows"], 0, timeout=PATIENCE_SECONDS)


def test_flows_that_vipd_ends_count_and_so_does_their_backend(lab: Lab, daemon: Daemon) -> None:
    """UDP flows end when their backend leaves; without it the others go on."""
    before = traffic_of(daemon)
    lab.client.send("10.96.0.10", 80, "udp", count=30).all_answered()
    expected = before[1] + 30 * DATAGRAM
    daemon.declare(WEB.replace(", 10.244.0.12", ""))
    daemon.wait_until(lambda: traffic_of(daemon)[1], expected, timeout=PATIENCE_SECONDS)
    gone = [b for b in service(daemon)["backends"] if b["gone"]]
    assert all(backend["bytes_in"] > 0 for backend in gone if backend["endpoint"] == "10.244.0.12:80")
    daemon.declare(WEB)
    assert traffic_of(daemon)[1] == expected


def test_flows_that_end_while_others_begin_and_the_table_is_read_count_once(lab: Lab, daemon: Daemon) -> None:
    end_all_flows(lab)
    daemon.wait_until(lambda: service(daemon)["flows"], 0, timeout=PATIENCE_SECONDS)
    before, over = traffic_of(daemon), threading.Event()

    def end_and_read() -> None:
        while not over.is_set():
            lab.host.run("conntrack", "-D", "-d", "10.96.0.10", "-p", "udp", check=False)
            service(daemon)
            daemon.vipctl("flows", "web")

    thread = threading.Thread(target=end_and_read)
    thread.start()
    answered = 0
    try:
        for _ in range(20):
            answered += len(lab.client.send("10.96.0.10", 80, "udp", count=32).answers)
    finally:
        over.set()
        thread.join()
    end_all_flows(lab)
    # A flow of which the kernel forgets the translation in the middle is another one; each way counts.
    daemon.wait_until(
        lambda: traffic_of(daemon)[1] >= before[1] + answered * DATAGRAM, True, timeout=PATIENCE_SECONDS
    )
    assert traffic_of(daemon)[1] == before[1] + 640 * DATAGRAM


def test_a_restart_loses_nothing_and_a_crash_what_was_since_the_last_write(lab: Lab, daemon: Daemon) -> None:
    end_all_flows(lab)
    before = traffic_of(daemon)
    with lab.client.open("10.96.0.10", 80, "udp") as kept:
        kept.ask()
        daemon.stop()  # writes
        kept.ask()
        daemon.start()
        kept.ask()
        lab.client.send("10.96.0.10", 80, "udp", count=10).all_answered()
        end_all_flows(lab)
        daemon.wait_until(lambda: traffic_of(daemon)[1], before[1] + 13 * DATAGRAM, timeout=PATIENCE_SECONDS)
        daemon.kill()
        daemon.start()
        after = traffic_of(daemon)[1]
        assert before[1] + DATAGRAM <= after <= before[1] + 13 * DATAGRAM
        lab.client.send("10.96.0.10", 80, "udp", count=5).all_answered()
        end_all_flows(lab)
        daemon.wait_until(lambda: traffic_of(daemon)[1], after + 5 * DATAGRAM, timeout=PATIENCE_SECONDS)


def test_why_traffic_is_not_counted_is_said_and_nothing_is_lost(lab: Lab, daemon: Daemon) -> None:
    before = traffic_of(daemon)
    for setting in ("acct", "events"):
        name = f"net.netfilter.nf_conntrack_{setting}"
        lab.host.sysctl(name, 0)
        answer = daemon.get("stats?service=web")
        assert (answer["services"][0]["bytes_in"], answer["traffic"]["counted"]) == (None, False)
        assert answer["traffic"]["hint"] == f"sysctl -w {name}=1"
        lab.host.sysctl(name, 1)
        assert traffic_of(daemon) == before
    daemon.stop()
    config = daemon.config.read_text()
    daemon.config.write_text(f"{config}traffic_accounting: false\n")
    daemon.start()
    assert "traffic_accounting" in daemon.get("stats?service=web")["traffic"]["hint"]
    daemon.stop()
    daemon.config.write_text(config)
    daemon.start()
    assert traffic_of(daemon) == before
