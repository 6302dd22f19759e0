"""While rules change, no packet finds a hole: flows are made all the time, and each is served.

`VIPD_CHANGES=10000 pytest tests/dataplane/nftables/test_no_hole.py` makes that many changes in the first two
tests, and a tenth of it in the others.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import pytest

from tests.dataplane.nftables.serving import SERVED, VIPS, other, synced_in, web
from tests.dataplane.watched_programs import WatchedPrograms
from tests.lab.examples import some
from tests.lab.inside import Synced
from tests.lab.steady_client import steady_client
from tests.lab.topology import Lab
from vipd.model.service import Affinity, Balance, ExternalAddress, Service, TrafficPolicy

CHANGES = int(os.environ.get("VIPD_CHANGES", "50"))
STEPS = CHANGES // 10
"""Each starts several programs."""

pytestmark = [pytest.mark.root, pytest.mark.timeout(300 + CHANGES)]


@pytest.fixture
def vipd(lab: Lab, programs: WatchedPrograms, tmp_path: Path) -> Iterator[Synced]:
    """The dataplane of the lab's host, of which programs write everything."""
    made = synced_in(lab, tmp_path, netlink=False, through=programs)
    yield made
    made.become()


ENOUGH = 75
"""Connections without which nothing is proved."""


def connections(lab: Lab) -> int:
    """How many connections the client has begun so far."""
    names, values = lab.client.run("grep", "^Tcp:", "/proc/net/snmp").stdout.splitlines()
    return int(dict(zip(names.split(), values.split(), strict=True))["ActiveOpens"])


def at_least(number: int, enough: Callable[[], bool]) -> Iterator[int]:
    """So many changes, and more while there were too few connections."""
    for each in itertools.count():
        if each >= number and (each - number) % 10 == 0 and enough():
            return
        yield each


PASSAGE = f"""table inet passage {{
    counter came {{}}
    counter left {{}}
    chain arriving {{
        type filter hook prerouting priority -350;
        ip daddr {VIPS[4]} tcp dport 80 tcp flags & (syn | ack) == syn counter name came
        ip6 daddr {VIPS[6]} tcp dport 80 tcp flags & (syn | ack) == syn counter name came
    }}
    chain leaving {{
        type filter hook postrouting priority 350;
        tcp dport {SERVED} tcp flags & (syn | ack) == syn counter name left
    }}
}}
"""


@contextmanager
def every_packet_let_through(lab: Lab, least: int) -> Iterator[None]:
    """Each first packet of a connection that reaches the host, sent again or not, leaves it for a backend.

    They are counted, for a client that waits long may only be on a busy machine."""
    lab.host.run("nft", "-f", "-", text=PASSAGE)
    try:
        yield
        counted = json.loads(lab.host.run("nft", "-j", "list", "counters", "table", "inet", "passage").stdout)
        found = {each["counter"]["name"]: each["counter"]["packets"] for each in counted["nftables"][1:]}
        assert found["came"] >= least
        assert found["left"] == found["came"]
    finally:
        lab.host.run("nft", "delete", "table", "inet", "passage")


@contextmanager
def flows_all_the_time(lab: Lab, family: int) -> Iterator[Callable[[], bool]]:
    """Connections one after the other, from before the first change on; each is answered, without a packet
    lost on the host. What is given tells whether there were enough of them."""
    before = connections(lab)
    with every_packet_let_through(lab, ENOUGH):
        with steady_client(lab.client, VIPS[family], 80) as outcome:
            yield lambda: connections(lab) - before > ENOUGH
        assert outcome["failed"] == {}
        assert outcome["answered"] > ENOUGH // 2


def states(lab: Lab) -> list[Service]:
    """Other backends each time, alone or together, of equal weights and of others."""
    b1, b2, b3 = lab.backends
    picked = (((b1, b2, b3), (1, 1, 1)), ((b1,), (1,)), ((b2, b3), (5, 2)), ((b3,), (1,)))
    return [web(lab, *weights, backends=nodes) for nodes, weights in picked]


@pytest.mark.parametrize("affinity", [None, Affinity(1)], ids=["without affinity", "with affinity"])
def test_one_transaction_after_the_other(
    lab: Lab, vipd: Synced, programs: WatchedPrograms, tmp_path: Path, affinity: Affinity | None
) -> None:
    """As fast as one nft takes them."""
    texts = transactions(vipd, programs, [other(state, affinity=affinity) for state in states(lab)])
    with (tmp_path / "nft").open("w") as errors:
        nft = lab.host.start("nft", "-i", stderr=errors)
    assert nft.stdin is not None
    with flows_all_the_time(lab, 4) as enough:
        for number in at_least(CHANGES, enough):
            nft.stdin.write(texts[number % len(texts)])
        nft.communicate("", timeout=300 + CHANGES)
    assert (tmp_path / "nft").read_text() == ""


KINDS: dict[str, tuple[dict[str, object], ...]] = {
    "inside": (
        {},
        {"affinity": Affinity(1)},
        {"balance": Balance.ROUND_ROBIN},
        {"affinity": Affinity(600), "internal_policy": TrafficPolicy.CLUSTER, "answers_ping": False},
        {"affinity": Affinity(1), "balance": Balance.ROUND_ROBIN},
    ),
    "outside": (
        {"allow_from": ("10.10.0.0/24", "fd00:10::/64")},
        {"addresses": tuple(VIPS.values()), "external_addresses": ()},
        {"allow_from": ("10.0.0.0/8", "fd00::/16")},
        {},
        {"allow_from": ("10.10.0.0/24", "10.8.0.0/13", "fd00:10::/64"), "affinity": Affinity(1)},
    ),
}
"""Ways in which a service is served, each by other chains."""


def walk(lab: Lab, way: str) -> list[Service]:
    """A service of each of these kinds, one after the other."""
    external = tuple(map(ExternalAddress, VIPS.values()))
    placed = {"addresses": (), "external_addresses": external} if way == "outside" else {}
    kinds = zip(KINDS[way], cycle(states(lab)), strict=False)
    return [other(state, **{**placed, **kind}) for kind, state in kinds]


@pytest.mark.parametrize(
    ("way", "family"),
    [
        ("inside", 4),
        ("outside", 6),
        pytest.param("inside", 6, marks=pytest.mark.nightly),
        pytest.param("outside", 4, marks=pytest.mark.nightly),
    ],
)
def test_one_step_of_the_dataplane_after_the_other(lab: Lab, serving: Synced, way: str, family: int) -> None:
    """With chains that come and go, for each state is a service of another kind."""
    states = walk(lab, way)
    serving.become(states[-1])
    with flows_all_the_time(lab, family) as enough:
        for number in at_least(STEPS, enough):
            serving.become(states[number % len(states)])
    serving.doubt()
    assert serving.pending() == ""


@pytest.mark.parametrize("way", list(KINDS))
def test_who_was_led_by_what_was_before_finds_something_in_what_comes_after(
    lab: Lab, vipd: Synced, programs: WatchedPrograms, way: str
) -> None:
    """As a packet does that has met its frontend before a change, and looks for all else after it."""
    leading = tuple(f"{verb} element ip vipd frontends " for verb in ("delete", "add"))
    changes = some(list(itertools.permutations(walk(lab, way), 2)), way, fewer=2)

    def without_leading(text: str) -> str:
        lines = text.splitlines(keepends=True)
        if all(line.startswith("delete element ") for line in lines):
            return ""  # what goes some time later
        return "".join(line for line in lines if not line.startswith(leading))

    with every_packet_let_through(lab, 10 * len(changes)):
        for before, after in changes:
            vipd.become(before)
            vipd.declare([after])
            programs.before = without_leading
            vipd.step(tidy=False)
            programs.before = lambda text: text
            lab.client.send(VIPS[4], 80, count=10).all_answered()
            vipd.doubt()
            vipd.step()


def transactions(vipd: Synced, programs: WatchedPrograms, states: list[Service]) -> list[str]:
    """One line for each transaction that leads from a state to the next, and from the last to the first."""
    for state in (*states, *states):
        if state is states[0]:
            programs.written.clear()
        vipd.declare([state])
        vipd.step(tidy=False)
    texts = [text for text in programs.written if "element ip vipd " in text]
    return [text.strip().replace("\n", "; ") + "\n" for text in texts]
