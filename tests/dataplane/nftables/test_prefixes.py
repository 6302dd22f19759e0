"""Long walks over a kernel that is none: after each step nothing is left to do, and after each transaction
every packet that is served before and after the step is served.

`VIPD_STEPS=10000 pytest tests/dataplane/nftables/test_prefixes.py` walks that far.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.dataplane.declared import backends
from tests.dataplane.nftables.declared import numbered
from tests.dataplane.nftables.fake_nft import FakeNft, FakeTable
from tests.lab.examples import examples
from tests.lab.inside import NotWrittenError, Synced, reached, reading_from, synced
from vipd.model.flow_limits import FlowLimits
from vipd.model.service import (
    Affinity,
    Balance,
    ExternalAddress,
    Masquerade,
    Protocol,
    Service,
    ServicePort,
)

STEPS = int(os.environ.get("VIPD_STEPS", "0")) or examples(100)
VIPS = {"ip": tuple(f"10.96.0.{n}" for n in range(1, 6)), "ip6": ("fd00:96::1", "fd00:96::2")}
BACKENDS = {"ip": [f"10.244.0.{n}" for n in range(1, 6)], "ip6": [f"fd00:244::{n}" for n in range(1, 4)]}
CLIENTS = {"ip": "192.0.2.7", "ip6": "2001:db8::7"}
REFUSED = "10.244.0.66"


def service(dice: Random, number: int, vips: Sequence[str]) -> Service:
    """Any service of these addresses."""
    chosen = [
        *dice.sample(BACKENDS["ip"], dice.randint(0, 4)),
        *dice.sample(BACKENDS["ip6"], dice.randint(0, 3)),
        *([REFUSED] if dice.random() < 0.1 else []),
    ]
    weighted = [f"{each}@{dice.choice([1, 1, 3])}" if ":" not in each else each for each in chosen]
    takeover = dice.random() < 0.15
    limits = FlowLimits(connections=9, new_per_client=3) if dice.random() < 0.15 else None
    return Service(
        f"test/s{number}",
        tuple(vips),
        (ServicePort(80, Protocol.TCP, "http", 8080, 30000 + number if dice.random() < 0.3 else None),),
        backends(*weighted),
        affinity=None if takeover else dice.choice([None, None, Affinity(60), Affinity(600)]),
        masquerade=Masquerade.HAIRPIN if takeover else dice.choice([None, *Masquerade]),
        balance=Balance.SOURCE_HASH
        if takeover
        else dice.choice([Balance.RANDOM, Balance.RANDOM, Balance.ROUND_ROBIN]),
        flow_takeover=takeover,
        limits=limits,
        answers_ping=dice.random() < 0.5,
        external_addresses=(ExternalAddress(f"203.0.113.{number}"),) if dice.random() < 0.3 else (),
    )


def changed(dice: Random, services: dict[int, Service]) -> None:
    """Some services come, change and go; addresses move between them."""
    for _ in range(dice.choice([1, 1, 1, 2, 4])):
        number = dice.randint(1, 5)
        services.pop(number, None)
        used = {vip for each in services.values() for vip in each.addresses}
        free = [vip for vips in VIPS.values() for vip in vips if vip not in used]
        if free and dice.random() < 0.8:
            services[number] = service(dice, number, dice.sample(free, dice.randint(1, min(3, len(free)))))
    if dice.random() < 0.02:
        services.clear()


def disturbed(dice: Random, nft: FakeNft) -> None:
    """Another program does something to a table."""
    if not nft.tables:
        return
    name = dice.choice(sorted(nft.tables))
    table = nft.tables[name]
    elements, chain = table.elements[dice.choice(sorted(table.sets))], dice.choice(sorted(table.chains))
    acts: list[Callable[[], object]] = [
        lambda: nft.tables.pop(name),
        lambda: table.rules.update({each: [] for each in table.rules}),
        lambda: table.rules[chain].clear(),
        lambda: table.rules[chain].insert(0, "accept"),
        lambda: elements.clear(),
        lambda: (table.chains.update(theirs=""), table.rules.update(theirs=[])),
        lambda: table.elements["claimed"].update({"10.9.9.9" if name == "ip vipd" else "fd00::9": ""}),
        lambda: elements and elements.pop(dice.choice(sorted(elements))),
    ]
    dice.choice(acts)()


def backends_reached(tables: dict[str, FakeTable]) -> dict[str, frozenset[str]]:
    """By address, the backends that a client may get to; without those of which some flow is not served."""
    found = {}
    for family, vips in VIPS.items():
        if (table := tables.get(f"{family} vipd")) is None:
            continue
        by_address = reached(table.listing(f"{family} vipd"), CLIENTS[family], vips, 80)
        found.update({vip: there for vip, there in by_address.items() if there})
    return found


def check_served(before: dict[str, FakeTable], states: Sequence[dict[str, FakeTable]]) -> None:
    first, *between = map(backends_reached, (before, *states))
    last = between[-1]
    for number, state in enumerate(between):
        for vip in first.keys() & last.keys():
            assert state.get(vip, {""}) <= first[vip] | last[vip], f"{vip} after transaction {number}"


def check_settled(vipd: Synced) -> None:
    assert vipd.pending() == ""
    assert vipd.drift() == ""


@pytest.mark.parametrize("seed", range(2))
def test_no_prefix_has_a_hole_and_nothing_is_left_to_do(tmp_path: Path, seed: int) -> None:
    dice, nft, services = Random(f"{seed} {STEPS}"), FakeNft(), dict[int, Service]()
    with reading_from(nft.reader):
        vipd = synced("nftables", nft, tmp_path / "walk", netlink=False)
        for _ in range(STEPS):
            changed(dice, services)
            bad = {s.name for s in services.values() if any(b.address == REFUSED for b in s.backends)}
            vipd.declare(services.values())
            foreign = dice.random() < 0.3
            if foreign:
                disturbed(dice, nft)
                vipd.doubt() if dice.random() < 0.5 else None
            nft.refused = REFUSED if dice.random() < 0.3 else ""
            nft.fails = dice.random() < 0.05
            if dice.random() < 0.05:
                vipd.restart()
            before, nft.states = nft.tables, []
            try:
                vipd.step(tidy=False)
            except NotWrittenError:
                assert nft.fails
            assert vipd.refused().keys() <= bad, "nobody else is blamed"
            if nft.states:
                check_served(before, nft.states)
            if dice.random() < 0.7:
                with suppress(NotWrittenError) if nft.fails or foreign else nullcontext():
                    vipd.step()  # clears away what is left over
            if nft.fails or foreign:
                nft.fails = False
                vipd.doubt()
                vipd.step()
            check_settled(vipd)
        nft.refused = ""
        vipd.doubt()
        vipd.step()
        fresh = FakeNft()
        with reading_from(fresh.reader):
            synced("nftables", fresh, tmp_path / "cold", netlink=False).become(*services.values())
    assert sorted(nft.listing().splitlines()) == sorted(fresh.listing().splitlines())


def test_what_all_services_share_is_nobody_s_fault(tmp_path: Path) -> None:
    """And nft is not run more often for more services."""

    def runs(number: int) -> int:
        nft = FakeNft()
        nft.refused = "chain ip vipd dispatch"
        with reading_from(nft.reader):
            vipd = synced("nftables", nft, tmp_path / str(number), netlink=False)
            vipd.declare([numbered(n, "10.244.0.1") for n in range(number)])
            with pytest.raises(NotWrittenError, match="is refused by the test"):
                vipd.step()
            assert not vipd.refused()
            ran, nft.refused = nft.started, ""
            vipd.step()
            check_settled(vipd)
        return ran

    assert runs(80) == runs(8)


def test_a_chain_that_one_service_needs_is_the_fault_of_that_one(tmp_path: Path) -> None:
    nft = FakeNft()
    nft.refused = "pinned-60"
    pinned = replace(numbered(7, "10.244.0.1"), affinity=Affinity(60))
    with reading_from(nft.reader):
        vipd = synced("nftables", nft, tmp_path, netlink=False)
        vipd.become(pinned, *(numbered(n, "10.244.0.1") for n in range(7)))
        assert list(vipd.refused()) == [pinned.name]
        assert all(f"10.96.0.{n} . tcp . 80 :" in nft.listing() for n in range(7))
        nft.refused = ""
        vipd.retry(pinned.name)
        vipd.step()
        check_settled(vipd)
        assert "10.96.0.7 . tcp . 80 :" in nft.listing()
