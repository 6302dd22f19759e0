"""Removing every rule of a prefix, on the fake and on the real programs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.dataplane.declared import Machine, kube_like_services, numbered
from tests.dataplane.iptables.fake_kernel import FakeKernel
from tests.dataplane.namespace import Namespace
from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.removal import find_leftovers, remove, remove_empty_tables
from vipd.dataplane.registry import HostDataplanes
from vipd.host.host_changes import HostChanges
from vipd.host.process import ProgramResult, Runner
from vipd.host.settings.settings import Settings
from vipd.model.service import Family

VARIANTS = ("nft", "legacy")
STEMS = ("iptables", "ip6tables")
FOREIGN = """\
*filter
:FOREIGN - [0:0]
-A FOREIGN -j RETURN
-A INPUT -j FOREIGN
COMMIT
*nat
:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]
:VIPD-MINE - [0:0]
-A PREROUTING -j VIPD-MINE
COMMIT
"""
SERVICES = [*kube_like_services(), numbered(1, "10.244.0.1")]


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.root)])
def run(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """The programs of an empty host."""
    if request.param == "fake":
        yield FakeKernel().run
    else:
        with Namespace() as namespace:
            yield namespace.run


def ended(run: Runner, program: str, text: str = "") -> ProgramResult:
    """Run a save or, given rules, a restore program."""

    async def wait() -> ProgramResult:
        return await run([program, "--noflush", "-w", "5"] if text else [program], text)

    finished = asyncio.run(wait())
    assert finished.exit_code == 0, finished.stderr
    return finished


def saved(run: Runner) -> dict[str, str]:
    """What each save program prints, without comments and counters."""
    found = {}
    for variant in VARIANTS:
        for stem in STEMS:
            output = ended(run, f"{stem}-{variant}-save").stdout
            text = re.sub(r"\[\d+:\d+\]", "[0:0]", re.sub(r"(?m)^#.*\n", "", output))
            found[f"{stem}-{variant}"] = "".join(sorted(re.findall(r"(?ms)^\*.*?^COMMIT\n", text)))
    return found


def write_foreign(run: Runner) -> None:
    for variant in VARIANTS:
        for stem in STEMS:
            ended(run, f"{stem}-{variant}-restore", FOREIGN)


def write_ours(run: Runner, directory: Path, **settings: object) -> None:
    for variant, other in (VARIANTS, VARIANTS[::-1]):

        async def alone(argv: Sequence[str], stdin: str, other: str = other) -> ProgramResult:
            if f"-{other}" in argv[0]:  # else what that holds of ours would be removed
                raise FileNotFoundError(argv[0])
            return await run(argv, stdin)

        Machine(alone, directory, iptables_variant=variant, **settings).become(SERVICES)


def clean(run: Runner, *prefixes: str) -> int:
    """Find and remove; returns how many places held something."""
    found = asyncio.run(find_leftovers(prefixes, run))
    asyncio.run(remove(found, run))
    return len(found)


def test_rules_of_both_variants_and_families_go_and_foreign_ones_stay(run: Runner, tmp_path: Path) -> None:
    write_foreign(run)
    before = saved(run)
    write_ours(run, tmp_path)
    assert all("VIPD-SVC-" in text for text in saved(run).values())
    assert clean(run, "VIPD") == 4
    assert saved(run) == before
    assert clean(run, "VIPD") == 0


def test_each_prefix_is_removed_alone(run: Runner, tmp_path: Path) -> None:
    write_ours(run, tmp_path, chain_prefix="ONE")
    before = saved(run)
    write_ours(run, tmp_path, chain_prefix="TWO")
    assert clean(run, "TWO", "THREE") == 4
    assert saved(run) == before
    assert clean(run, "ONE", "TWO") == 4
    assert not re.search("ONE-|TWO-", str(saved(run)))


def test_half_removed_rules_are_removed_wholly(run: Runner, tmp_path: Path) -> None:
    """Jumps gone and a chain emptied by someone else; a jump doubled."""
    write_ours(run, tmp_path)
    jump = '-m comment --comment "vipd postrouting rules" -j VIPD-POSTROUTING'
    lines = [f"-D POSTROUTING {jump}", "-F VIPD-SERVICES", "-A PREROUTING -j VIPD-SERVICES"]
    text = "\n".join(["*nat", *lines, "-A PREROUTING -j VIPD-SERVICES", "COMMIT", ""])
    ended(run, "iptables-nft-restore", text)
    assert clean(run, "VIPD") == 4
    assert "VIPD" not in str(saved(run))


def test_a_variant_that_is_not_installed_is_passed_over(tmp_path: Path) -> None:
    kernel = FakeKernel()
    Machine(kernel.run, tmp_path).become(SERVICES)
    kernel.absent |= {"iptables-legacy", "ip6tables-legacy"}
    assert clean(kernel.run, "VIPD") == 2


@pytest.mark.parametrize("names", ["unreadable", "absent"])
def test_a_confined_daemon_that_changes_its_dataplane_passes_over_legacy_tables(
    names: str, tmp_path: Path
) -> None:
    kernel = FakeKernel()
    Machine(kernel.run, tmp_path).become(SERVICES)
    if names == "unreadable":
        (tmp_path / "net/ip_tables_names").mkdir(parents=True)
        (tmp_path / "net/ip6_tables_names").mkdir()

    async def confined(argv: Sequence[str], stdin: str) -> ProgramResult:
        if "-legacy" in argv[0]:
            return ProgramResult(
                1, "", "Failed to list table names in /proc/net/ip_tables_names: Permission denied"
            )
        return await kernel.run(argv, stdin)

    dataplanes = HostDataplanes(Settings(), HostChanges(tmp_path), confined, tmp_path)
    assert asyncio.run(dataplanes.remove("iptables"))
    assert not [chain for family in Family for chain in kernel.chains("nat", family) if "VIPD" in chain]
    # vipctl cleanup does not pass over what it may not read: it would say that nothing is left.
    with pytest.raises(ApplyError, match="Permission denied"):
        asyncio.run(find_leftovers(["VIPD"], confined))


def test_tables_made_by_the_first_write_go_when_empty(run: Runner, tmp_path: Path) -> None:
    Machine(run, tmp_path, iptables_variant="nft").become(SERVICES)
    tables = HostChanges(tmp_path).read().tables
    assert sorted(tables) == ["ipv4 filter", "ipv4 nat", "ipv6 filter", "ipv6 nat"]
    assert asyncio.run(remove_empty_tables(tables, run)) == []
    foretold = asyncio.run(remove_empty_tables(tables, run, foretold=["VIPD"]))
    assert "*nat" in saved(run)["iptables-nft"]
    assert clean(run, "VIPD") == 2
    gone = asyncio.run(remove_empty_tables(tables, run))
    assert sorted(foretold) == sorted(gone)
    assert sorted(gone) == ["ip filter", "ip nat", "ip6 filter", "ip6 nat"]
    assert not any(saved(run).values())
    assert asyncio.run(remove_empty_tables(tables, run)) == []


@pytest.mark.parametrize(
    "by_another",
    [
        "*filter\n-A INPUT -j ACCEPT\nCOMMIT\n",
        "*filter\n:OTHER - [0:0]\nCOMMIT\n",
        "*filter\n:FORWARD DROP [0:0]\nCOMMIT\n",
    ],
    ids=["a rule", "a chain", "a policy"],
)
def test_tables_that_others_use_since_stay(by_another: str, run: Runner, tmp_path: Path) -> None:
    Machine(run, tmp_path, iptables_variant="nft").become([numbered(1, "10.244.0.1")])
    ended(run, "iptables-nft-restore", by_another)
    tables = HostChanges(tmp_path).read().tables
    assert asyncio.run(remove_empty_tables(tables, run, foretold=["VIPD"])) == ["ip nat"]
    clean(run, "VIPD")
    assert asyncio.run(remove_empty_tables(tables, run)) == ["ip nat"]
    assert "*filter" in saved(run)["iptables-nft"]


def test_without_the_nft_program_the_tables_stay(tmp_path: Path) -> None:
    kernel = FakeKernel()
    Machine(kernel.run, tmp_path).become(SERVICES)
    clean(kernel.run, "VIPD")
    kernel.absent.add("nft")
    assert asyncio.run(remove_empty_tables(["ipv4 nat"], kernel.run)) == []
    assert "*nat" in kernel.saved()
