"""Where vipd's accept is needed in chains of others, and what is written there."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vipd.dataplane.base import ApplyError
from vipd.dataplane.forward_accept.accepts import (
    AcceptOptions,
    ForwardChain,
    ForwardChainState,
    found_by_nft,
    found_in_iptables,
    found_in_other_table,
    make_plan,
)
from vipd.dataplane.forward_accept.reading import HOOK, ForwardReader, NftChain
from vipd.dataplane.nftables.reader import BaseChain
from vipd.host.netlink_socket import open_netlink
from vipd.host.process import ProgramResult
from vipd.model.service import Family

OPTIONS = AcceptOptions("VIPD", 0x4000, 0x2000)
IPTABLES = ForwardChain.of_iptables(Family.IPV4, "nft")
NATIVE = ForwardChain("inet", "filter", "forward")
CHAIN, JUMP = OPTIONS.of_iptables(Family.IPV4)


@pytest.mark.parametrize(
    ("lines", "own", "drops", "accepted"),
    [
        (["-P FORWARD ACCEPT"], None, False, False),
        (["-P FORWARD DROP"], None, True, False),
        (["-P FORWARD ACCEPT", "-A FORWARD -j DOCKER-USER"], None, False, False),
        (["-P FORWARD ACCEPT", "-A FORWARD -j DOCKER-FORWARD"], None, True, False),
        (["-P FORWARD ACCEPT", "-A FORWARD -s 10.0.0.9/32 -j DROP"], None, False, False),
        (["-P FORWARD ACCEPT", "-A FORWARD -j REJECT"], None, True, False),
        (["-P FORWARD DROP", f"-A FORWARD {JUMP}"], CHAIN, True, True),
        (["-P FORWARD DROP", f"-A FORWARD {JUMP}"], (), True, False),
        (["-P FORWARD DROP", f"-A FORWARD {JUMP}", f"-A FORWARD {JUMP}"], CHAIN, True, False),
        (["-P FORWARD DROP", "-A FORWARD -j DOCKER-USER", f"-A FORWARD {JUMP}"], CHAIN, True, True),
        (["-P FORWARD DROP", "-A FORWARD -j DOCKER-FORWARD", f"-A FORWARD {JUMP}"], CHAIN, True, False),
        (["-P FORWARD DROP", "-A FORWARD -j VIPD-UNUSED", f"-A FORWARD {JUMP}"], CHAIN, True, True),
        (["-P FORWARD ACCEPT", f"-A FORWARD {JUMP}"], CHAIN, False, True),
    ],
)
def test_forward_of_iptables(
    lines: list[str], own: tuple[str, ...] | None, drops: bool, accepted: bool
) -> None:
    found = found_in_iptables(IPTABLES, "\n".join(lines), own, OPTIONS)
    assert (found.drops, found.accepted) == (drops, accepted)
    assert found.present is (own is not None)


MANGLE = ForwardChain.of_iptables(Family.IPV4, "nft", "mangle")


@pytest.mark.parametrize(
    ("lines", "drops"),
    [
        (["-P FORWARD ACCEPT"], False),
        (["-P FORWARD DROP"], True),
        (["-P FORWARD DROP", "-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"], True),
        (["-P FORWARD DROP", "-A FORWARD -o eth0 -j TCPMSS --clamp-mss-to-pmtu"], True),
        (["-P FORWARD DROP", "-A FORWARD -i eth0 -j ACCEPT"], False),
        (["-P FORWARD DROP", "-A FORWARD -j MINE"], False),
        ([], False),
    ],
)
def test_forward_of_a_table_that_vipd_does_not_write_is_told_where_it_surely_drops(
    lines: list[str], drops: bool
) -> None:
    found = found_in_other_table(MANGLE, "\n".join(lines))
    plan, problems = make_plan([found], frozenset(Family))
    assert not plan
    repair = "iptables-nft -t mangle -I FORWARD -m conntrack --ctstate DNAT -j ACCEPT"
    told = f"chain FORWARD of -t mangle, iptables-nft drops flows that vipd translated: {found.obstacle}"
    assert problems == ((told,) if drops else ())
    assert found.obstacle.endswith(f"hint: {repair}")


def rule(*statements: Any, comment: str = "", chain: str = "forward") -> dict[str, Any]:
    body = {"chain": chain, "handle": 7, "expr": list(statements)}
    return {"rule": body | ({"comment": comment} if comment else {})}


MARKED = {"match": {"op": "==", "left": {"&": [{"ct": {"key": "mark"}}, 0x2000]}, "right": 0x2000}}
DNAT = {"match": {"op": "in", "left": {"ct": {"key": "status"}}, "right": "dnat"}}
FROM = {"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "saddr"}}, "right": "10.0.0.9"}}
ACCEPT, DROP, COUNT = {"accept": None}, {"drop": None}, {"counter": {"packets": 0, "bytes": 0}}
OURS = rule(MARKED, DNAT, ACCEPT, comment=OPTIONS.comment)
OTHER_VIPD = rule(MARKED, DNAT, ACCEPT, comment="EDGE-FORWARD: vipd translated flows")
REFUSING = rule(FROM, DROP)


@pytest.mark.parametrize(
    ("policy", "listed", "drops", "accepted"),
    [
        ("accept", [], False, False),
        ("drop", [], True, False),
        ("accept", [rule(DROP), REFUSING], False, False),
        ("drop", [rule(DNAT, COUNT, ACCEPT)], False, False),
        ("drop", [rule(FROM, DNAT, ACCEPT)], True, False),
        ("drop", [rule("later", ACCEPT)], True, False),
        ("drop", [OURS], True, True),
        ("drop", [REFUSING, OURS], True, True),
        ("drop", [OURS, REFUSING], True, False),
        ("drop", [OURS, REFUSING | {"rule": REFUSING["rule"] | {"chain": "input"}}], True, True),
        ("drop", [OURS, OTHER_VIPD], True, True),
        ("drop", [OTHER_VIPD], True, False),
        ("drop", [OURS, OURS], True, False),
        ("accept", [OURS], False, True),
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_a_chain_that_nft_writes(
    policy: str, listed: list[dict[str, Any]], drops: bool, accepted: bool, first: bool
) -> None:
    """vipd's accept stands in place of a policy that drops; with `first`, before every rule of others."""
    options = replace(OPTIONS, first=first)
    found = found_by_nft(NATIVE, policy, listed[::-1] if first else listed, options)
    others = any(each["rule"]["chain"] == "forward" and each not in (OURS, OTHER_VIPD) for each in listed)
    assert (found.drops, found.accepted) == (drops or (first and others), accepted)
    assert found.insert_text.count("delete rule inet filter forward handle 7") == listed.count(OURS)
    assert found.insert_text.endswith(
        f"{'insert' if first else 'add'} rule inet filter forward ct mark & 0x2000 == 0x2000 ct status dnat "
        'accept comment "VIPD-FORWARD: vipd translated flows"\n'
    )


@pytest.mark.parametrize("policy", ["accept", "drop"])
@pytest.mark.parametrize("end", [(DROP,), (COUNT, {"log": None}, {"reject": {"type": "icmpx"}})])
def test_a_last_rule_of_nft_that_refuses_everything_is_as_a_policy(policy: str, end: tuple[Any, ...]) -> None:
    last = rule(*end)
    for listed, accepted in (
        ([last], False),
        ([REFUSING, last], False),
        ([REFUSING, OURS, last], True),
        ([OURS, REFUSING, last], False),
        ([REFUSING, last, OURS], False),
    ):
        found = found_by_nft(NATIVE, policy, listed, OPTIONS)
        assert (found.drops, found.accepted) == (True, accepted), listed
        assert "insert rule inet filter forward handle 7 ct mark" in found.insert_text
    assert not found_by_nft(NATIVE, policy, [rule(DNAT, ACCEPT), last], OPTIONS).drops


@pytest.mark.parametrize(
    "objects", [[3], [{"rule": {}}], [{"rule": []}], [{"rule": {"chain": "forward", "expr": 5}}]]
)
def test_objects_of_nft_that_are_not_understood_are_an_error(objects: list[object]) -> None:
    async def run(argv: Sequence[str], stdin: str) -> ProgramResult:
        return ProgramResult(0, json.dumps({"nftables": objects}), "")

    reader = ForwardReader(OPTIONS, run, open_netlink, Path("/proc"))
    chain = BaseChain("inet", "filter", "forward", HOOK, accepts=False)
    with pytest.raises(ApplyError, match="what nft prints is not understood"):
        asyncio.run(reader._native(NATIVE, NftChain(chain, 0)))


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "too many"), OSError(errno.EACCES, "no"), ValueError()]
)
def test_what_keeps_nft_from_running_is_named(error: Exception) -> None:
    async def run(argv: Sequence[str], stdin: str) -> ProgramResult:
        raise error

    reader = ForwardReader(OPTIONS, run, open_netlink, Path("/proc"))
    chain = BaseChain("inet", "filter", "forward", HOOK, accepts=True)
    with pytest.raises(ApplyError, match="nft cannot be run"):
        asyncio.run(reader._native(NATIVE, NftChain(chain, 0)))


@pytest.mark.parametrize("prefix", ["KUBE", "VIPD"])
def test_flows_of_kube_proxys_exact_rules_are_accepted_too(prefix: str) -> None:
    options = AcceptOptions(prefix, 0x4000, 0x2000, kube_proxy=True)
    chain, jump = options.of_iptables(Family.IPV6)
    assert len(chain) == len(options.native()) == 3
    assert jump.endswith(f"-j {prefix}-FORWARD")


def test_what_is_planned() -> None:
    closed = ForwardChainState(NATIVE, drops=True)
    held = ForwardChainState(NATIVE, drops=True, obstacle="it is owned")
    left = ForwardChainState(IPTABLES, drops=False, present=True)
    both = frozenset(Family)
    assert str(make_plan([closed], both)[0]) == (
        "+ chain forward of table inet filter: accept flows that vipd translated\n"
    )
    assert make_plan([held], both) == (
        make_plan([], both)[0],
        ("chain forward of table inet filter drops flows that vipd translated: it is owned",),
    )
    assert str(make_plan([left], both)[0]).startswith("- chain FORWARD of iptables-nft")
    other = ForwardChainState(ForwardChain.of_iptables(Family.IPV6, "nft"), drops=True)
    assert not make_plan([other], frozenset({Family.IPV4}))[0]
    assert not make_plan([closed], frozenset())[0]
