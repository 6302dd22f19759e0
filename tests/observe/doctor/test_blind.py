"""What could not be looked at is said to be so: no failure of a look becomes a fact about the host."""

from __future__ import annotations

from typing import Any

import pytest

from tests.observe.doctor.cases import OF_NETWORK, OF_RULES
from tests.observe.doctor.deceived import Deceived

pytestmark = pytest.mark.root

OF_NFT = {"forward-chains", "rules-twice", "firewalls"}
NEEDED_FOR: dict[str, set[str]] = {
    "ip -j": {*OF_NETWORK, "backend-neighbour"},
    "ip -j -d link": {*OF_NETWORK},
    "ip -force": {*OF_NETWORK},
    "ip": {*OF_NETWORK, "backend-neighbour"},
    "nft -j list": OF_NFT,
    "nft --version": {"nft"},
    "nft": OF_NFT | {"nft"},
    "iptables-nft --version": {*OF_RULES},
    "iptables-nft-save": {*OF_RULES},
    "ip6tables-nft-save": {*OF_RULES},
    "iptables-nft": {*OF_RULES},
    "unshare": {"kernel-features"},
}
"""What cannot be checked when a program fails."""
GROUPS = (
    ("ip -j", "unshare", "iptables-nft --version"),
    ("ip -j -d link", "nft -j list"),
    ("ip -force", "iptables-nft-save", "nft --version"),
    ("ip6tables-nft-save",),
)
"""Programs that fail together, to ask less often."""
SAYING = ("failing", "babbling", "odd", "cut")


def at_night(*faults: str) -> list[Any]:
    return [pytest.param(fault, marks=pytest.mark.nightly) for fault in faults]


def unchecked(deceived: Deceived, *words: str) -> set[str]:
    """What was not checked. Nothing is wrong, as far as the doctor says."""
    findings = deceived.doctor.ask(*words)
    assert {f["id"]: f["cause"] for f in findings if f["severity"] in ("problem", "warning")} == {}
    return {f["id"] for f in findings if f["severity"] == "unchecked"}


def test_a_host_that_is_well(deceived: Deceived) -> None:
    assert unchecked(deceived) == set()


@pytest.mark.parametrize("fault", SAYING)
@pytest.mark.parametrize("programs", GROUPS, ids=" and ".join)
def test_programs_that_fail(deceived: Deceived, programs: tuple[str, ...], fault: str) -> None:
    if fault in ("babbling", "odd", "cut"):  # what unshare and the program behind it print is not read
        programs = tuple(each for each in programs if each != "unshare")
    with deceived.programs(dict.fromkeys(programs, fault)):
        seen = unchecked(deceived)
    if fault == "cut":  # half of a version is enough, and half of two tables may be one
        programs = tuple(
            each for each in programs if not each.startswith(("ip6", "nft --v", "iptables-nft --v"))
        )
    assert seen >= set[str]().union(*(NEEDED_FOR[each] for each in programs))


@pytest.mark.parametrize("fault", ["missing", "forbidden"])
def test_programs_that_cannot_be_run(deceived: Deceived, fault: str) -> None:
    """iptables-nft is: uninstalling it takes no rule away."""
    programs = ("ip", "nft", "unshare", "iptables-nft")
    with deceived.programs(dict.fromkeys(programs, fault)):
        assert unchecked(deceived) >= set[str]().union(*(NEEDED_FOR[each] for each in programs))


@pytest.mark.nightly
def test_a_program_that_hangs(deceived: Deceived) -> None:
    with deceived.programs({"unshare": "hanging"}):
        assert unchecked(deceived) == {"kernel-features"}


@pytest.mark.parametrize("fault", ["failing", "cut", "forbidden", *at_night("babbling", "odd")])
def test_an_iptables_that_fails_is_named(deceived: Deceived, fault: str) -> None:
    stems = ("iptables", "ip6tables", "nft") if fault != "forbidden" else ("iptables", "iptables-nft", "nft")
    with deceived.programs(dict.fromkeys(stems, fault)):
        findings = deceived.doctor.ask()
    assert {f["id"] for f in findings if f["severity"] == "problem"} <= {"iptables"}
    seen = {f["id"] for f in findings if f["severity"] == "unchecked"}
    assert seen >= {"forward-chains", "rules-twice", *(OF_RULES if fault != "cut" else ())}


@pytest.mark.parametrize("fault", ["missing", "failing", *at_night("forbidden", "babbling")])
def test_an_nft_that_is_the_dataplanes_and_fails(deceived: Deceived, fault: str) -> None:
    with deceived.without_daemon() as settings, deceived.programs({"nft": fault}):
        findings = deceived.doctor.ask(*settings, "--set", "dataplane=nftables")
    worst = {f["id"] for f in findings if f["severity"] == "problem"}
    assert "nft" in worst
    assert worst <= {"nft", "kernel-features", "rules-twice"}
    assert "vip-route" in {f["id"] for f in findings if f["severity"] == "unchecked"}


READ_FOR: dict[str, set[str]] = {
    "locks": {"other-vipd"},
    "net/tcp": {"local-backend", "node-port-taken"},
    "net/stat/nf_conntrack": {"conntrack-drops", "conntrack-races"},
    "net/netstat": set(),
    "sys/ipv4/ip_forward": {"ip-forward"},
    "sys/netfilter/nf_conntrack_max": {"conntrack-room"},
    "sys/netfilter/nf_conntrack_tcp_be_liberal": {"tcp-be-liberal"},
    "sys/ipv4/conf/cluster/rp_filter": {"rp-filter"},
    "sys/ipv6/conf/all/disable_ipv6": {"ipv6-disabled"},
    "recent/ip_list_tot": {"affinity-limit"},
}


@pytest.mark.parametrize(
    "text", [b"\xff\xfe no\n such file\n", b"", None], ids=["garbage", "empty", "directory"]
)
def test_files_that_cannot_be_read(deceived: Deceived, text: bytes | None) -> None:
    expected = set[str]().union(*READ_FOR.values())
    # The list of locks is a mount of its own.
    names = [name for name in READ_FOR if text is not None or name != "locks"]
    with deceived.files(dict.fromkeys(names, text)):
        assert unchecked(deceived) == expected - ({"other-vipd"} if text is None else set())


def test_tables_of_legacy_iptables_that_are_not_known(deceived: Deceived) -> None:
    with deceived.files({"net/ip_tables_names": None}):
        assert unchecked(deceived) >= {*OF_RULES, "vip-route", "tcp-be-liberal"}
    with deceived.files({"net/ip_tables_names": b"\xff\xfe no\n"}):
        assert unchecked(deceived) >= set()


def test_without_the_kernels_lists_nothing_is_said_of_daemons(deceived: Deceived) -> None:
    """Whether one is at work is not known, and so not that none is."""
    with deceived.without_daemon() as settings, deceived.files({"locks": ""}):
        seen = unchecked(deceived, *settings)
    assert {"daemon-running", "other-vipd"} <= seen
