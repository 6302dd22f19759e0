"""What this host answers for, with a crash between any two writes: never an address past the gate."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from tests.lab.node import Node
from tests.lab.waiting import wait_until
from tests.sources.host import namespace
from vipd.host.host_changes import HostChanges
from vipd.host.lan import neighbours
from vipd.host.lan.answer_gate import AnswerGate
from vipd.host.lan.answers import TABLE, LanAnswers
from vipd.host.lan.interfaces import lan_of, read_lans

pytestmark = pytest.mark.root

FIRST, SECOND, THIRD, ELSEWHERE = "192.0.2.10", "192.0.2.11", "2001:db8::10", "198.51.100.10"
WRITES = ("add_proxies", "delete_proxies")
GATE_WRITES = ("make", "remove", "prepare", "open", "extend", "hold", "release")


class KilledError(BaseException):
    """The process is killed."""


@pytest.fixture
def node() -> Iterator[Node]:
    with namespace() as node:
        for number, address in enumerate(("192.0.2.1/24", "198.51.100.1/24")):
            node.run(*f"ip link add eth{number} type veth peer name peer{number}".split())
            node.run("ip", "addr", "add", address, "dev", f"eth{number}")
            node.run("ip", "link", "set", f"eth{number}", "up")
            node.run("ip", "link", "set", f"peer{number}", "up")
        node.run("ip", "addr", "add", "2001:db8::1/64", "dev", "eth0", "nodad")
        with node.entered():
            yield node


class Kernel:
    """Counts the writes of processes, which are killed at write `kill_at`. `watched`: each is looked at."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self._node = node
        self.writes, self.kill_at, self.watched = 0, -1, False
        for name in WRITES:
            monkeypatch.setattr(neighbours, name, partial(self._write, getattr(neighbours, name)))
        for name in GATE_WRITES:
            monkeypatch.setattr(AnswerGate, name, self._method(getattr(AnswerGate, name)))

    def _method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: self._write(method, *arguments)

    def _write(self, write: Callable[..., Any], *arguments: Any) -> Any:
        if self.writes == self.kill_at:
            raise KilledError
        self.writes += 1
        done = write(*arguments)
        if self.watched:
            assert self.unguarded() == set(), f"after write {self.writes}: {write.__name__}"
        return done

    def unguarded(self) -> set[str]:
        """The addresses that the kernel answers for past the gate."""
        proxies = {place.address for place in neighbours.own_proxies()}
        if not proxies:
            return set()
        ruleset = json.loads(self._node.run("nft", "-j", "list", "ruleset").stdout)["nftables"]
        listed = {
            str(ip_address(element))
            for each in ruleset
            if (found := each.get("set")) and (found["table"], found["name"]) == (TABLE, "addresses")
            for element in found.get("elem", ())
        }
        return proxies - listed


async def day(node: Node, root: Path) -> None:
    """Everything that a process does with its answers."""
    answers = LanAnswers(HostChanges(root))
    lans = read_lans()
    places = {address: lan for address in (FIRST, SECOND, THIRD) if (lan := lan_of(address, lans))}
    elsewhere = lan_of(ELSEWHERE, lans)
    assert elsewhere is not None
    await answers.prepare(5)  # the loop of the lease may be first
    await answers.configure(places)
    await answers.prepare(5)
    assert await answers.open(5)
    await answers.hold({FIRST, THIRD})
    assert await answers.extend(5)
    await answers.hold({SECOND})
    await answers.configure({FIRST: places[FIRST], SECOND: elsewhere})
    await answers.release({FIRST, SECOND})
    node.run("nft", "flush", "ruleset")
    await answers.hold({FIRST})
    await answers.reset()
    await answers.hold({FIRST})
    await answers.stop()


def test_no_crash_leaves_an_address_that_the_gate_does_not_guard(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(node, monkeypatch)
    kernel.watched = True
    asyncio.run(day(node, tmp_path))
    assert neighbours.own_proxies() == frozenset()
    writes = kernel.writes
    for kill_at in range(writes):
        kernel.writes, kernel.kill_at, kernel.watched = 0, kill_at, False
        with pytest.raises(KilledError):
            asyncio.run(day(node, tmp_path))
        assert kernel.unguarded() == set(), f"after write {kill_at}"
        # The next process, until it has made its gate.
        kernel.writes, kernel.kill_at, kernel.watched = 0, 6, True
        with pytest.raises(KilledError):
            asyncio.run(day(node, tmp_path))


def test_an_unplugged_device_is_on_no_lan(node: Node) -> None:
    def lans() -> set[str]:
        return {lan.interface for lan in read_lans()}

    wait_until(lambda: lans() == {"eth0", "eth1"}, "both are up")
    node.run("ip", "link", "set", "peer0", "down")
    wait_until(lambda: lans() == {"eth1"}, "eth0 is down")
    node.run("ip", "link", "set", "peer0", "up")
    wait_until(lambda: lans() == {"eth0", "eth1"}, "eth0 is up")
