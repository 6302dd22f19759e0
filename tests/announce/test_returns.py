"""Faults that return, and two at once: what clients are sent to, and how many of their connections fail.

A cell is a fault of the host that is in use, or of what both share, a second fault, and an order. Each change
is followed until packets go where they must. Prints a line for each change. All of it:

    sudo .venv/bin/python -m pytest tests/announce/test_returns.py --nightly -n 4 -rP
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.announce.faulty_network import Fault, FaultyNetwork, LanNetwork, RoutedNetwork, Undo
from tests.announce.many_clients import many_clients
from tests.announce.routed_lab import require
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

OF_A_HOST = ("link", "lan", "killed", "stopped", "paused")
OF_VIPD = ("killed", "stopped", "paused")
SHARED = ("etcd", "backends", "router")
ORDERS = ("during", "as it returns")
FOLLOWED_SECONDS = 30.0
"""Less than BIRD waits after it has lost a session, without `error wait time`."""
STEADY_SECONDS = 2.0
"""A daemon has noticed a fault by then, and decided."""
FLAP_SECONDS = 0.3
"""No host is in use for a shorter time."""
LOST_SECONDS = 0.2
"""A host that stays in use is never missing for longer: BIRD replaces a route by two messages."""
EACH_TIME = {("routes", "link", "backends", "during")}
"""It found most. On a LAN that was a killed holder that returns: a shorter test in test_lan.py."""


class Second(NamedTuple):
    """The second fault, at the host of the first one or the other."""

    part: str
    other: bool = False

    def __str__(self) -> str:
        return f"{self.part} at the other" if self.other else self.part


def cells() -> Iterator[Any]:
    for way in ("routes", "l2"):
        for first in (*OF_A_HOST, *SHARED):
            seconds = [*map(Second, (*OF_A_HOST, *SHARED)), *(Second(part, other=True) for part in OF_A_HOST)]
            for second in seconds:
                same = not second.other and (first == second.part or {first, second.part} <= {*OF_VIPD})
                # What is shared fails both hosts alike: then it does not matter which one the second is of.
                mirrored = first in SHARED and second.other and way == "routes"
                for order in () if same or mirrored else ORDERS:
                    cell = (way, first, str(second), order)
                    marks = [] if cell in EACH_TIME else [pytest.mark.nightly]
                    yield pytest.param(way, first, second, order, id=", ".join(cell), marks=marks)


class State:
    """What has failed now, and where packets for the address must and may go then."""

    def __init__(self, network: FaultyNetwork) -> None:
        self._network = network
        self.faults: set[Fault] = set()
        self.misled = set[int]()
        """Hosts whose vipd did not run when the backends came back."""

    def note(self, failed_before: set[Fault]) -> None:
        """Note after a change who may not know of it."""
        if Fault("backends") in failed_before - self.faults:
            self.misled |= {host for host in (1, 2) if self._lacks(host, *OF_VIPD)}

    def _lacks(self, host: int, *parts: str) -> bool:
        return any(Fault(part, at) in self.faults for part in parts for at in (0, host))

    def expected(self) -> tuple[set[int], set[int], bool]:
        """The hosts that must be in use, those that may be, and whether at least one must be."""
        routed = isinstance(self._network, RoutedNetwork)
        return self._behind_a_router() if routed else self._on_a_lan()

    def _behind_a_router(self) -> tuple[set[int], set[int], bool]:
        must, may = set[int](), set[int]()
        for host in (1, 2):
            if self._lacks(host, "link"):
                continue
            if self._lacks(host, *OF_VIPD):
                # What a daemon announced before it ended stays.
                found = {host} if self._network.has_route(host) else set()
                must, may = must | found, may | found
            elif not self._lacks(host, "lan", "backends"):
                must, may = must | {host}, may | {host}
            elif not self._lacks(host, "lan", "etcd"):
                may.add(host)  # as the last one
        return must, may, self.faults == {Fault("backends")}

    def _on_a_lan(self) -> tuple[set[int], set[int], bool]:
        if self._lacks(0, "etcd", "router"):
            return set(), set(), False
        may = {host for host in (1, 2) if not self._lacks(host, "link", *OF_VIPD)}
        can = {host for host in may if not self._lacks(host, "lan", "backends")}
        return set(), can or may, bool(can) or self.faults == {Fault("backends")}

    def is_as_expected(self) -> bool:
        if isinstance(self._network, RoutedNetwork) and Fault("router") in self.faults:
            return True  # nobody changes its table
        must, may, some = self.expected()
        reaches = self._network.reaches()
        return must <= reaches <= may and (bool(reaches) or not some)

    @property
    def untouched(self) -> set[int]:
        """Hosts whose flows nothing stops."""
        touched = {h for h in (1, 2) if self._lacks(h, "link", "lan", "backends", "router")}
        return {1, 2} - touched - self.misled


class Story:
    def __init__(self, network: FaultyNetwork) -> None:
        self._network, self.state = network, State(network)
        self._lines = list[str]()

    def settle(self, what: str) -> float:
        """Return once packets go where they must and stay there, with the seconds that took."""

        def said() -> str:
            now = f"{what}: {sorted(self._network.reaches())} in use, not {self.state.expected()}"
            logs = "\n".join(f"{n}:\n{d.log[-3000:]}" for n, d in self._network.daemons.items())
            return "\n".join((*self._lines, now, logs))

        since = time.monotonic()

        def steady() -> bool:
            nonlocal since
            if not self.state.is_as_expected():
                since = time.monotonic()
            return time.monotonic() - since >= STEADY_SECONDS

        return wait_until(steady, said, FOLLOWED_SECONDS) - STEADY_SECONDS

    def change(self, what: str, *acts: Callable[[], object]) -> dict[str, Any]:
        before, began = self.state.expected()[0] & self.state.untouched, time.monotonic()
        failed_before, in_use = set(self.state.faults), self._network.reaches()
        with many_clients(self._network.client, self._network.vip, 1.5) as outcome:
            for act in acts:
                act()
            self.state.note(failed_before)
            seconds = self.settle(what)
        outcome |= {"change": what, "in use": sorted(self._network.reaches()), "after": round(seconds, 1)}
        self._lines.append(json.dumps(outcome))
        print(self._lines[-1])
        must = self.state.expected()[0]
        if isinstance(self._network, RoutedNetwork) and "router" not in what:
            returns_only = self.state.faults < failed_before
            kept = before & must & self.state.untouched
            self._never_missing(what, began, kept, some=bool(returns_only and in_use and must))
        return outcome

    def _never_missing(self, what: str, since: float, hosts: set[int], some: bool) -> None:
        """No host that stays in use was missing meanwhile; with `some`, there was always one."""
        history = [*self._network.history(), (time.monotonic(), frozenset[int]())]
        for (at, found), (until, _) in pairwise(history):
            if at >= since and until - at > LOST_SECONDS:
                missing = f"of {hosts}, {set(found)} in use for {until - at:.1f} s"
                assert hosts <= found, f"{what}: {missing}; {self._lines}"
                assert found or not some, f"{what}: {missing}; {self._lines}"


class Networks:
    """One network at a time, used by cells one after the other as long as they go well."""

    def __init__(self, root: Path) -> None:
        self._root, self._stack, self._numbers = root, ExitStack(), count()
        self._way = ""
        self._network: FaultyNetwork

    def use(self, way: str) -> FaultyNetwork:
        if way != self._way:
            self.discard()
            root = self._root / f"{next(self._numbers)}"
            root.mkdir()
            self._network = self._stack.enter_context(
                RoutedNetwork() if way == "routes" else LanNetwork(root)
            )
            self._way = way
        return self._network

    def discard(self) -> None:
        self._way = ""
        self._stack.close()


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Networks]:
    made = Networks(tmp_path_factory.mktemp("networks"))
    yield made
    made.discard()


@pytest.mark.parametrize(("way", "first", "second", "order"), [*cells()])
def test_what_fails_and_returns(networks: Networks, way: str, first: str, second: Second, order: str) -> None:
    require("bird")
    network = networks.use(way)
    story = Story(network)
    undone = dict[Fault, Undo]()
    try:
        network.forget_verdicts()
        story.settle("before")
        (one, *_) = sorted(network.reaches())
        began = time.monotonic()
        faults = Fault(first, one if first in OF_A_HOST else 0), Fault(second.part, _host(second, one))
        play(story, network, faults, order, undone)
    except BaseException:
        for undo in undone.values():
            undo()
        networks.discard()
        raise
    if way == "l2":
        turns = [(at, until) for (at, _), (until, _) in pairwise(network.history()) if at > began]
        assert all(until - at > FLAP_SECONDS for at, until in turns), "two hosts answer in turn"


def _host(second: Second, one: int) -> int:
    return 0 if second.part in SHARED else 3 - one if second.other else one


def play(
    story: Story, network: FaultyNetwork, faults: tuple[Fault, Fault], order: str, undone: dict[Fault, Undo]
) -> None:

    def begin(fault: Fault) -> Callable[[], None]:
        def act() -> None:
            undone[fault] = network.begin(fault)
            story.state.faults.add(fault)

        return act

    def end(fault: Fault) -> Callable[[], None]:
        def act() -> None:
            undone.pop(fault)()
            story.state.faults.discard(fault)

        return act

    first, second = faults
    outcome = story.change(f"{first} fails", begin(first))
    if first.part in (*OF_VIPD, "etcd") and isinstance(network, RoutedNetwork):
        assert outcome["failed"] == {}, "the kernel goes on without it"
    if order == "during":
        story.change(f"{second} fails, too", begin(second))
        story.change(f"{first} is back", end(first))
    else:
        story.change(f"{first} is back, {second} fails", end(first), begin(second))
    story.change(f"{second} is back", end(second))

    def served() -> bool:
        return not network.client.send(network.vip, 80, count=20, timeout=1.0).failures

    print(f"clients are served after {wait_until(served, 'clients are served', FOLLOWED_SECONDS):.1f} s more")
