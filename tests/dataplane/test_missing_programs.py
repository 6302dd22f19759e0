"""What finds and removes rules passes over programs that are not installed, waits for none that hangs, and
closes a table before it goes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.dataplane.declared import kube_like_services
from tests.dataplane.iptables.fake_kernel import FakeKernel
from tests.dataplane.watched_programs import WatchedPrograms
from tests.lab.inside import ProgramResult, synced
from tests.lab.simulated_time import simulate
from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.removal import find_leftovers, remove, remove_empty_tables
from vipd.dataplane.nftables import removal as nftables
from vipd.dataplane.nftables.tools import find_nft


def test_a_variant_that_is_not_installed_is_passed_over(tmp_path: Path) -> None:
    kernel = FakeKernel()
    synced("iptables", kernel.run, tmp_path).become(*kube_like_services())
    kernel.absent |= {"iptables-legacy", "ip6tables-legacy", "nft"}
    leftovers = asyncio.run(find_leftovers(["VIPD"], kernel.run))
    assert len(leftovers) == 2
    asyncio.run(remove(leftovers, kernel.run))
    assert "VIPD" not in kernel.saved()
    assert asyncio.run(remove_empty_tables(["ipv4 nat"], kernel.run)) == []
    assert "*nat" in kernel.saved(), "without nft the tables stay"


def test_an_nft_that_hangs_is_not_waited_for() -> None:
    async def hang(argv: Sequence[str], stdin: str) -> ProgramResult:
        await asyncio.sleep(1000)
        raise AssertionError

    with pytest.raises(ApplyError, match=r"nft hangs: nft did not end within \d+ s"):
        simulate(find_nft(hang))


def test_a_table_lets_nobody_in_before_it_goes() -> None:
    programs = WatchedPrograms()

    async def taken(argv: Sequence[str], stdin: str) -> ProgramResult:
        return ProgramResult(0, "", "")

    leftover = nftables.Leftover("ip vipd", 9, 9, ("prerouting", "output"))
    asyncio.run(nftables.remove([leftover], programs(taken)))
    assert programs.written == [
        "flush chain ip vipd prerouting\nflush chain ip vipd output\n",
        "delete table ip vipd\n",
    ]
