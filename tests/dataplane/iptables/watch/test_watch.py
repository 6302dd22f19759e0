"""Everything that others do to our rules, done for real: seen within a second, and nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.dataplane.declared import kube_like_services, numbered
from tests.dataplane.iptables.watch.watched import Watched
from tests.dataplane.namespace import Namespace
from vipd.dataplane.iptables.names import ChainId
from vipd.dataplane.iptables.watch.external_change import ChangeKind, ExternalChange
from vipd.model.service import Family

pytestmark = pytest.mark.root

WAYS = {"nft": ("nft", True), "legacy": ("legacy", True), "nft polled": ("nft", False)}
"""Variant, and whether there are events."""
Way = tuple[str, bool]


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    with Namespace() as made:
        yield made


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[str(request.param)]


def among_others(
    namespace: Namespace, way: Way, directory: Path, then: Callable[[Watched], Awaitable[None]]
) -> None:
    """Run a scene on a host with vipd's services and somebody's own chain; vipd's writes go unreported."""

    async def scene() -> None:
        variant, events = way
        async with Watched(namespace, variant, directory, events) as watched:
            docker = "*nat\n:DOCKER - [0:0]\n-A PREROUTING -j DOCKER\n-A DOCKER -p udp -j RETURN\nCOMMIT\n"
            await watched.do(f"iptables-{variant}-restore", "--noflush", stdin=docker)
            await watched.drain()
            await watched.become([*kube_like_services(), numbered(1, "10.244.0.1", "10.244.0.2")])
            await watched.silent()
            await then(watched)
            assert not await watched.repair(), "the scene must leave everything repaired"

    asyncio.run(scene())


def a_sep(saved: str) -> tuple[str, str]:
    """Some SEP chain and its last rule."""
    line = next(line for line in saved.splitlines() if line.startswith("-A VIPD-SEP-") and "DNAT" in line)
    _, chain, rule = line.split(" ", 2)
    return chain, rule


async def flush(watched: Watched, iptables: str) -> set[ChainId]:
    await watched.do(iptables, "-t", "nat", "-F")
    return {ChainId("nat", "PREROUTING"), ChainId("nat", "VIPD-SERVICES")}


async def flush_and_remove(watched: Watched, iptables: str) -> set[ChainId]:
    await watched.do(f"{iptables}-restore", "--noflush", stdin="*nat\n-F\n-X\nCOMMIT\n")
    return {ChainId("nat", "PREROUTING"), ChainId("nat", "VIPD-SERVICES")}


async def delete_one_jump(watched: Watched, iptables: str) -> set[ChainId]:
    await watched.do(iptables, "-t", "filter", "-D", "FORWARD", "1")
    return {ChainId("filter", "FORWARD")}


async def change_one_endpoint(watched: Watched, iptables: str) -> set[ChainId]:
    chain, rule = a_sep(await watched.do(f"{iptables}-save", "-t", "nat"))
    head, _, port = rule.rpartition(":")
    last = str(int(head[-1]) % 9 + 1)  # as long as before, so that a legacy table keeps its size
    argv = f"{head[:-1]}{last}:{port}".replace('"', "").split()
    await watched.do(iptables, "-t", "nat", "-R", chain, "2", *argv)
    return {ChainId("nat", chain)}


DEEDS = [flush, flush_and_remove, delete_one_jump, change_one_endpoint]


@pytest.mark.parametrize("kind_of_change", DEEDS, ids=lambda kind_of_change: kind_of_change.__name__)
def test_what_others_do_is_seen_and_repaired(
    namespace: Namespace,
    way: Way,
    tmp_path: Path,
    kind_of_change: Callable[[Watched, str], Awaitable[set[ChainId]]],
) -> None:
    async def then(watched: Watched) -> None:
        touched = await kind_of_change(watched, f"iptables-{watched.variant}")
        found = await watched.next()
        assert found.families == {Family.IPV4}
        assert {(Family.IPV4, chain) for chain in touched} <= found.chains
        if len(touched) == 1:
            assert len(found.chains) == 1, "no other chain needs to be read"
        assert await watched.repair()
        await watched.silent()

    among_others(namespace, way, tmp_path, then)


def test_a_flushed_ruleset_is_everything(namespace: Namespace, tmp_path: Path) -> None:
    async def then(watched: Watched) -> None:
        await watched.do("nft", "flush", "ruleset")
        found = await watched.next()
        assert found.everything
        assert found.families == frozenset(Family)
        assert found.actors[0].name == "nft"
        assert await watched.repair()
        await watched.silent()

    among_others(namespace, WAYS["nft"], tmp_path, then)


@pytest.mark.parametrize("flushed", [True, False], ids=["flushing all", "leaving foreign rules"])
def test_a_firewalld_reload(namespace: Namespace, tmp_path: Path, flushed: bool) -> None:
    """It removes everything and puts back its own, in a table of its own; or it replaces that table alone."""
    own = "table inet firewalld {\n chain input {\n  type filter hook input priority 10;\n  accept\n }\n}\n"

    async def then(watched: Watched) -> None:
        await watched.do("nft", "-f", "-", stdin=own)
        await watched.silent()
        text = await watched.do("nft", "list", "table", "inet", "firewalld")
        if flushed:
            await watched.do("nft", "flush", "ruleset")
            await watched.do("nft", "-f", "-", stdin=text)
            assert (await watched.next()).everything
            assert await watched.repair()
        else:
            await watched.do("nft", "-f", "-", stdin=f"delete table inet firewalld\n{text}")
        await watched.silent()

    among_others(namespace, WAYS["nft"], tmp_path, then)


def test_a_firewall_script_that_restores_what_it_had_saved(
    namespace: Namespace, way: Way, tmp_path: Path
) -> None:
    """iptables-restore without --noflush: our rules are gone, and somebody else's iptables-restore did it."""
    docker = "*nat\n:PREROUTING ACCEPT [0:0]\n:DOCKER - [0:0]\n-A PREROUTING -j DOCKER\nCOMMIT\n"

    async def then(watched: Watched) -> None:
        await watched.do(f"iptables-{watched.variant}-restore", stdin=docker)
        found = await watched.next()
        if watched.watch.ways[Family.IPV4] == "events":
            assert found.actors[0].name.startswith("iptables-nft-re")
        assert await watched.repair()
        await watched.silent()

    among_others(namespace, way, tmp_path, then)


def test_what_does_not_concern_us(namespace: Namespace, way: Way, tmp_path: Path) -> None:
    async def then(watched: Watched) -> None:
        iptables = f"iptables-{watched.variant}"
        for argv in (
            ("-t", "nat", "-A", "DOCKER", "-p", "tcp", "-j", "RETURN"),
            ("-t", "nat", "-F", "DOCKER"),
            ("-t", "nat", "-N", "VIPDOCKER"),
            ("-t", "nat", "-A", "PREROUTING", "-p", "tcp", "-j", "VIPDOCKER"),
            ("-t", "nat", "-D", "PREROUTING", "-p", "tcp", "-j", "VIPDOCKER"),
            ("-t", "filter", "-P", "FORWARD", "DROP"),
            ("-t", "mangle", "-A", "PREROUTING", "-j", "RETURN"),
        ):
            await watched.do(iptables, *argv)
        if watched.variant == "nft":
            await watched.do("nft", "add", "table", "ip", "somebody")
            await watched.do("nft", "delete", "table", "ip", "somebody")
        await watched.silent()

    among_others(namespace, way, tmp_path, then)


def test_our_own_writes_are_silent_while_others_write_too(
    namespace: Namespace, way: Way, tmp_path: Path
) -> None:
    """vipd changes its services over and over; in the midst somebody's iptables-restore is seen."""

    async def then(watched: Watched) -> None:
        for number in range(2, 12):
            await watched.become([numbered(number, "10.244.0.1")])
        await watched.silent()
        theirs = '*nat\n-D PREROUTING -m comment --comment "vipd services" -j VIPD-PREROUTING\nCOMMIT\n'
        await asyncio.gather(
            watched.become([numbered(number, "10.244.0.9") for number in range(20, 60)]),
            watched.do(f"iptables-{watched.variant}-restore", "--noflush", stdin=theirs),
        )
        # A poll cannot tell a foreign change of size in the moment of our own write from ours; its next
        # reading of all rules does.
        found = await watched.next()
        assert (Family.IPV4, ChainId("nat", "PREROUTING")) in found.chains
        assert await watched.repair()
        await watched.silent()

    among_others(namespace, way, tmp_path, then)


def test_a_flush_of_many_rules_is_one_disturbance(namespace: Namespace, tmp_path: Path) -> None:
    async def then(watched: Watched) -> None:
        services = [numbered(number, *(f"10.244.1.{i}" for i in range(1, 9))) for number in range(10, 310)]
        await watched.become(services)
        await watched.silent()
        await watched.do("iptables-nft", "-t", "nat", "-F")
        found = await watched.next()
        assert found.everything
        assert found.kinds == {ChangeKind.RULE_DELETED}
        await watched.silent()
        assert await watched.repair()
        await watched.silent()

    among_others(namespace, WAYS["nft"], tmp_path, then)


def test_who_runs_the_tool_is_told_when_it_still_lives(namespace: Namespace, tmp_path: Path) -> None:
    own = Path("/proc/self/comm").read_text().rstrip("\n")  # the shell does what we have it do

    async def then(watched: Watched) -> None:
        script = "iptables-nft -t nat -F PREROUTING; sleep 0.5"
        await watched.do("sh", "-c", script)
        found: ExternalChange = await watched.next()
        # The tool may have ended before it was asked for its parent; it must never be a wrong one.
        assert found.actors[0].offender[0] in (own, "iptables-nft")
        assert await watched.repair()

    among_others(namespace, WAYS["nft"], tmp_path, then)


def test_without_permission_for_events_rules_are_polled(namespace: Namespace, tmp_path: Path) -> None:
    async def then(watched: Watched) -> None:
        assert set(watched.watch.ways.values()) == {"poll: [Errno 1] Operation not permitted"}

    among_others(namespace, WAYS["nft polled"], tmp_path, then)


def test_unwatched_time_between_entry_and_first_write_is_none(namespace: Namespace, tmp_path: Path) -> None:
    """Events that came before anybody asked for them are kept."""

    async def then(watched: Watched) -> None:
        await watched.do("iptables-nft", "-t", "nat", "-F")
        await asyncio.sleep(0.5)
        assert (await watched.next()).kinds == {ChangeKind.RULE_DELETED}
        assert await watched.repair()

    among_others(namespace, WAYS["nft"], tmp_path, then)
