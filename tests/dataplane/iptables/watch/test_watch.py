"""Everything that others do to our rules, done for real: heard of within a second, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest

from tests.dataplane.declared import kube_like_services, numbered
from tests.dataplane.namespace import Namespace
from tests.lab.inside import Heard, Synced, synced

pytestmark = pytest.mark.root

WAYS = {"nft": ("nft", True), "legacy": ("legacy", True), "nft polled": ("nft", False)}
"""Variant, and whether the kernel tells of changes."""
SERVICES = [*kube_like_services(), numbered(1, "10.244.0.1", "10.244.0.2")]
DOCKER = "*nat\n:DOCKER - [0:0]\n-A PREROUTING -j DOCKER\n-A DOCKER -p udp -j RETURN\nCOMMIT\n"


class Host:
    """A host with vipd's services and somebody's own chain."""

    def __init__(self, namespace: Namespace, directory: Path, variant: str, events: bool) -> None:
        self.namespace, self.iptables, self._events = namespace, f"iptables-{variant}", events
        self.vipd: Synced = synced("iptables", namespace.name, directory, iptables_variant=variant)
        self.do(f"{self.iptables}-restore", "--noflush", text=DOCKER)
        self.vipd.become(*SERVICES)

    def do(self, *argv: str, text: str | None = None) -> str:
        """Somebody else runs a program; it waits for the lock of legacy tables, which namespaces share."""
        if argv[0] in ("iptables-legacy", "iptables-legacy-restore"):
            argv = (argv[0], "-w", *argv[1:])
        return self.namespace.do(*argv, text=text)

    def heard(self, work: Callable[[], object], least: int = 1) -> list[Heard]:
        """What is reported while work is done."""
        return self.vipd.heard(work, least, events=self._events)

    def repaired(self, heard: list[Heard]) -> None:
        """What is reported is all that must be read for a repair, which is not reported."""
        self.vipd.doubt(*(part for each in heard for part in each.parts))
        if self.iptables == "iptables-legacy" or not self._events:
            self.vipd.step()  # a watch that polls would first see what was there before
        assert self.heard(self.vipd.step, 0) == []
        assert self.vipd.drift() == ""


@pytest.fixture(params=WAYS)
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    variant, events = WAYS[str(request.param)]
    with Namespace() as namespace:
        yield Host(namespace, tmp_path, variant, events)


@pytest.fixture
def nft_host(tmp_path: Path) -> Iterator[Host]:
    with Namespace() as namespace:
        yield Host(namespace, tmp_path, "nft", events=True)


def flush(host: Host) -> set[str]:
    host.do(host.iptables, "-t", "nat", "-F")
    return {"ipv4 nat PREROUTING", "ipv4 nat VIPD-SERVICES"}


def flush_and_remove(host: Host) -> set[str]:
    host.do(f"{host.iptables}-restore", "--noflush", text="*nat\n-F\n-X\nCOMMIT\n")
    return {"ipv4 nat PREROUTING", "ipv4 nat VIPD-SERVICES"}


def restore_what_was_saved(host: Host) -> set[str]:
    """As a firewall's script does, without --noflush: our rules are gone."""
    host.do(f"{host.iptables}-restore", text=DOCKER)
    return {"ipv4 nat PREROUTING", "ipv4 nat VIPD-SERVICES"}


def delete_one_jump(host: Host) -> set[str]:
    host.do(host.iptables, "-t", "filter", "-D", "FORWARD", "1")
    return {"ipv4 filter FORWARD"}


def change_one_endpoint(host: Host) -> set[str]:
    lines = host.do(f"{host.iptables}-save", "-t", "nat").splitlines()
    line = next(line for line in lines if line.startswith("-A VIPD-SEP-") and "DNAT" in line)
    _, chain, rule = line.split(" ", 2)
    head, _, port = rule.rpartition(":")
    last = str(int(head[-1]) % 9 + 1)  # as long as before, so that a legacy table keeps its size
    host.do(
        host.iptables, "-t", "nat", "-R", chain, "2", *f"{head[:-1]}{last}:{port}".replace('"', "").split()
    )
    return {f"ipv4 nat {chain}"}


DEEDS = [flush, flush_and_remove, restore_what_was_saved, delete_one_jump, change_one_endpoint]


@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_what_others_do_is_heard_of_and_repaired(host: Host, deed: Callable[[Host], set[str]]) -> None:
    touched = set[str]()
    heard = host.heard(lambda: touched.update(deed(host)))
    parts = {part for each in heard for part in each.parts}
    assert touched <= parts or parts == {"ipv4"}
    if len(touched) == 1:
        assert parts == touched, "no other chain needs to be read"
    if host.iptables == "iptables-nft" and "rules differ" not in heard[0].text:
        assert heard[0].text.startswith("iptables-nft"), "the tool in full"
    host.repaired(heard)


FIREWALLD = "table inet firewalld {\n chain input {\n  type filter hook input priority 10;\n  accept\n }\n}\n"


def test_a_flushed_ruleset_is_everything_and_a_table_of_others_is_nothing(nft_host: Host) -> None:
    """As when firewalld loads its rules anew, with FlushAllOnReload or without."""
    host = nft_host
    assert host.heard(lambda: host.do("nft", "-f", "-", text=FIREWALLD), 0) == []
    text = f"delete table inet firewalld\n{FIREWALLD}"
    assert host.heard(lambda: host.do("nft", "-f", "-", text=text), 0) == []
    heard = host.heard(lambda: host.do("nft", "flush", "ruleset"))
    assert heard[0].parts == {"ipv4", "ipv6"}
    assert heard[0].text.startswith("nft (pid ")
    assert "table deleted" in heard[0].text
    host.repaired(heard)


def test_what_does_not_concern_us(host: Host) -> None:
    def work() -> None:
        for argv in (
            ("-t", "nat", "-A", "DOCKER", "-p", "tcp", "-j", "RETURN"),
            ("-t", "nat", "-F", "DOCKER"),
            ("-t", "nat", "-N", "VIPDOCKER"),
            ("-t", "nat", "-A", "PREROUTING", "-p", "tcp", "-j", "VIPDOCKER"),
            ("-t", "nat", "-D", "PREROUTING", "-p", "tcp", "-j", "VIPDOCKER"),
            ("-t", "filter", "-P", "FORWARD", "DROP"),
            ("-t", "mangle", "-A", "PREROUTING", "-j", "RETURN"),
        ):
            host.do(host.iptables, *argv)
        if host.iptables == "iptables-nft":
            host.do("nft", "add", "table", "ip", "somebody")
            host.do("nft", "delete", "table", "ip", "somebody")

    assert host.heard(work, 0) == []


def test_our_own_writes_are_silent_while_others_write_too(host: Host) -> None:
    """vipd changes its services over and over; in the midst somebody's iptables-restore is heard of."""
    theirs = '*nat\n-D PREROUTING -m comment --comment "vipd services" -j VIPD-PREROUTING\nCOMMIT\n'

    def own() -> None:
        for number in range(2, 12):
            host.vipd.become(*SERVICES, numbered(number, "10.244.0.1"))

    def both() -> None:
        host.vipd.declare([*SERVICES, *(numbered(number, "10.244.0.9") for number in range(20, 60))])
        restore = f"{host.iptables}-restore"
        others = Thread(target=lambda: host.do(restore, "--noflush", text=theirs))
        others.start()
        host.vipd.step()
        others.join()

    assert host.heard(own, 0) == []
    # A poll cannot tell a foreign change of size in the moment of our own write from ours; its next reading
    # of all rules does.
    heard = host.heard(both)
    assert "ipv4 nat PREROUTING" in {part for each in heard for part in each.parts}
    host.repaired(heard)


def test_a_flush_of_many_rules_is_one_disturbance(nft_host: Host) -> None:
    host = nft_host
    nodes = [f"10.244.1.{i}" for i in range(1, 9)]
    host.vipd.become(*(numbered(number, *nodes) for number in range(10, 310)))
    (heard,) = host.heard(lambda: host.do("iptables-nft", "-t", "nat", "-F"))
    assert heard.parts == {"ipv4"}
    assert "rule deleted in ipv4" in heard.text
    host.repaired([heard])


def test_who_runs_the_tool_is_told_when_it_still_lives(nft_host: Host) -> None:
    own = Path("/proc/self/comm").read_text().rstrip("\n")  # the shell does what we have it do
    script = "iptables-nft -t nat -F PREROUTING; sleep 0.5"
    heard = nft_host.heard(lambda: nft_host.do("sh", "-c", script))
    # The tool may have ended before it was asked for its parent; it must never be a wrong one.
    assert heard[0].text.startswith("iptables-nft (pid ")
    assert f" of {own} (pid " in heard[0].text or " of " not in heard[0].text
    nft_host.repaired(heard)
