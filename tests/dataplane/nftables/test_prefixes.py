"""Walks: after each step nothing is left to do, and after each transaction every packet is served that
is served before and after the step.

`VIPD_STEPS=10000 pytest tests/dataplane/nftables/test_prefixes.py` walks that far.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.dataplane.declared import backends
from tests.dataplane.namespace import Namespace
from tests.dataplane.nftables.declared import numbered
from tests.dataplane.nftables.listed import tables
from tests.dataplane.watched_programs import WatchedPrograms, failing, refusing
from tests.lab.examples import examples
from tests.lab.inside import NotWrittenError, ProgramResult, Synced, reached, synced
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

STEPS = int(os.environ.get("VIPD_STEPS", "0")) or examples(24)
VIPS = {"ip": tuple(f"10.96.0.{n}" for n in range(1, 6)), "ip6": ("fd00:96::1", "fd00:96::2")}
BACKENDS = {"ip": [f"10.244.0.{n}" for n in range(1, 6)], "ip6": [f"fd00:244::{n}" for n in range(1, 4)]}
CLIENTS = {"ip": "192.0.2.7", "ip6": "2001:db8::7"}
REFUSED = "10.244.0.66"

pytestmark = [pytest.mark.root, pytest.mark.timeout(300 + STEPS * 5)]


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


def disturbed(dice: Random, namespace: Namespace) -> None:
    """Another program does something to a table."""
    listing = listed(namespace)
    if not (names := re.findall("(?m)^table (.*) {", listing)):
        return
    name = dice.choice(names)
    own = next(part for part in listing.split("\ntable ") if part.removeprefix("table ").startswith(name))
    chain = dice.choice(re.findall(r"\tchain (\S+)", own))
    holder = dice.choice(re.findall(r"\t((?:map|set) \S+)", own))
    element = dice.choice(re.findall(r"\t(?:map|set) (\S+) \{[^}]*elements = \{ (.*?)(?: : |,| \})", own))
    acts = [
        f"delete table {name}",
        f"flush table {name}",
        f"flush chain {name} {chain}",
        f"insert rule {name} {chain} accept",
        f"flush {holder.replace(' ', f' {name} ')}",
        f"add chain {name} theirs",
        f"add element {name} claimed {{ {'10.9.9.9' if name == 'ip vipd' else 'fd00::9'} }}",
        f"delete element {name} {element[0]} {{ {element[1]} }}",
    ]
    namespace.do("nft", dice.choice(acts))


def listed(namespace: Namespace) -> str:
    """Without the rules for other segments than the first of a flow, which each nft writes in its own way."""
    return re.sub("(?m)^\t\ttcp flags .*\n", "", namespace.do("nft", "list", "ruleset"))


def backends_reached(listing: str) -> dict[str, frozenset[str]]:
    """By address, the backends that a client may get to; without those of which some flow is not served."""
    found = {}
    for family, vips in VIPS.items():
        if f"table {family} vipd" in listing:
            by_address = reached(listing, CLIENTS[family], vips, 80)
            found.update({vip: there for vip, there in by_address.items() if there})
    return found


def check_served(listings: Sequence[str]) -> None:
    first, *between = map(backends_reached, listings)
    for number, state in enumerate(between):
        for vip in first.keys() & between[-1].keys():
            assert state.get(vip, {""}) <= first[vip] | between[-1][vip], f"{vip} after transaction {number}"


class Programs(WatchedPrograms):
    """nft, which fails or refuses that backend where it is added while it is told to; and what there is after
    each transaction."""

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(self._disturbed)
        self.fails = self.refuses = False
        self.listings: list[str] = []
        self.after = lambda argv: self.listings.append(listed(namespace))

    def _disturbed(self, argv: Sequence[str], text: str) -> ProgramResult | None:
        if self.fails:
            return failing()(argv, text)
        added = "".join(f"{line}\n" for line in text.splitlines() if line.startswith("add "))
        return refusing(REFUSED)(argv, added) if self.refuses else None


def check_settled(vipd: Synced) -> None:
    assert vipd.pending() == ""
    assert vipd.drift() == ""


@pytest.mark.parametrize("seed", range(2))
def test_no_prefix_has_a_hole_and_nothing_is_left_to_do(
    namespace: Namespace, tmp_path: Path, seed: int
) -> None:
    dice, nft, services = Random(f"{seed} {STEPS}"), Programs(namespace), dict[int, Service]()
    vipd = synced("nftables", namespace.name, tmp_path, through=nft, netlink=False)
    for _ in range(STEPS):
        changed(dice, services)
        bad = {s.name for s in services.values() if any(b.address == REFUSED for b in s.backends)}
        vipd.declare(services.values())
        foreign = dice.random() < 0.3
        if foreign:
            disturbed(dice, namespace)
            vipd.doubt() if dice.random() < 0.5 else None
        nft.refuses, nft.fails = dice.random() < 0.3, dice.random() < 0.05
        if dice.random() < 0.05:
            vipd.restart()
        nft.listings = [listed(namespace)]
        try:
            vipd.step(tidy=False)
        except NotWrittenError:
            assert nft.fails
        assert vipd.refused().keys() <= bad, "nobody else is blamed"
        check_served(nft.listings)
        if dice.random() < 0.7:
            with suppress(NotWrittenError) if nft.fails or foreign else nullcontext():
                vipd.step()  # clears away what is left over
        if nft.fails or foreign:
            nft.fails = False
            vipd.doubt()
            vipd.step()
        check_settled(vipd)
    nft.refuses = False
    vipd.doubt()
    vipd.step()
    with Namespace() as fresh:
        synced("nftables", fresh.name, tmp_path / "cold").become(*services.values())
        assert tables(namespace) == tables(fresh)


def test_what_all_services_share_is_nobody_s_fault(namespace: Namespace, tmp_path: Path) -> None:
    """And nft is not run more often for more services."""

    def runs(number: int) -> int:
        nft = WatchedPrograms(refusing("chain ip vipd dispatch"))
        vipd = synced("nftables", namespace.name, tmp_path, through=nft, netlink=False)
        vipd.declare([numbered(n, "10.244.0.1") for n in range(number)])
        with pytest.raises(NotWrittenError, match="is refused by the test"):
            vipd.step()
        assert not vipd.refused()
        ran, nft.instead = len(nft.started), lambda argv, stdin: None
        vipd.step()
        check_settled(vipd)
        vipd.become()
        return ran

    assert runs(80) == runs(8)


def test_a_chain_that_one_service_needs_is_the_fault_of_that_one(
    namespace: Namespace, tmp_path: Path
) -> None:
    nft = WatchedPrograms(refusing("pinned-60"))
    pinned = replace(numbered(7, "10.244.0.1"), affinity=Affinity(60))
    vipd = synced("nftables", namespace.name, tmp_path, through=nft, netlink=False)
    vipd.become(pinned, *(numbered(n, "10.244.0.1") for n in range(7)))
    assert list(vipd.refused()) == [pinned.name]
    assert all(f"10.96.0.{n} . tcp . 80 :" in tables(namespace) for n in range(7))
    nft.instead = lambda argv, stdin: None
    vipd.retry(pinned.name)
    vipd.step()
    check_settled(vipd)
    assert "10.96.0.7 . tcp . 80 :" in tables(namespace)
