"""The table over time: what others do to it, what the kernel does not take, other formats, and its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dataplane.declared import HTTP, backends
from tests.dataplane.nftables.declared import numbered
from tests.dataplane.nftables.programmed import Inside, Programmed, only_nft
from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.watch.events import open_socket
from vipd.dataplane.iptables.watch.external_change import ExternalChange
from vipd.dataplane.iptables.watch.own_processes import OwnProcesses
from vipd.dataplane.iptables.watch.stream import WatchOptions
from vipd.dataplane.nftables.family import FamilyTable
from vipd.dataplane.nftables.foreign_chains import dropping_chains, warnings
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.removal import Leftover, find_leftovers, remove
from vipd.dataplane.nftables.render import render
from vipd.dataplane.nftables.tools import Nft, find_nft
from vipd.dataplane.nftables.watch import TableWatch
from vipd.dataplane.programs import Programs
from vipd.host.host_changes import HostChanges
from vipd.host.netlink_socket import Sockets
from vipd.host.process import ProgramResult, Runner
from vipd.host.settings.settings import load_settings
from vipd.model.service import Affinity, Balance, ExternalAddress, Family, Masquerade, Service

pytestmark = pytest.mark.root

WEB = Service(
    "web",
    ("10.96.0.1", "fd00:96::1"),
    (HTTP,),
    backends("10.244.0.1", "10.244.0.2@3", "fd00:244::1"),
    affinity=Affinity(600),
    external_addresses=(ExternalAddress("203.0.113.1", allow_from=("192.0.2.0/24",)),),
)
PLAIN = numbered(2, "10.244.0.1", "10.244.0.2")
OLDER = """table ip vipd {
    comment "vipd format 2"
    set claimed { type ipv4_addr; elements = { 10.96.0.1 } }
    map frontends { type ipv4_addr . inet_proto . inet_service : verdict; }
    chain unused { reject; }
    chain dispatch { ip daddr @claimed goto unused; }
    chain prerouting { type nat hook prerouting priority dstnat; policy accept; goto dispatch; }
}
"""
"""A table of another format, whose maps hold other values."""
FOREIGN = "table ip other { chain c { type filter hook forward priority 0; policy drop; }; }"

DISTURBANCES = [
    "flush ruleset",
    "delete table ip vipd",
    "flush chain ip vipd dispatch",
    "delete element ip vipd frontends { 10.96.0.1 . tcp . 80 }",
    "flush map ip vipd picks",
    "add element ip vipd frontends { 10.9.9.9 . tcp . 80 : 1.2.3.4 }",
    "flush map ip vipd handlers",
    "delete table ip6 vipd",
    "add element ip vipd handlers { 1.2.3.4 : drop }",
    "insert rule ip vipd postrouting drop",
    "add rule ip vipd unused accept",
    "delete map ip6 vipd node_picks",
    "add chain ip vipd theirs; add rule ip vipd theirs drop",
    "delete table ip vipd; add table ip vipd; add chain ip vipd dispatch",
    "delete element ip vipd claimed { 10.96.0.1 }; add element ip vipd hairpin { 1.1.1.1 . 1.1.1.1 }",
]


@pytest.mark.parametrize("kind_of_change", DISTURBANCES)
def test_what_others_do_is_undone(programmed: Programmed, kind_of_change: str) -> None:
    programmed.become(WEB, PLAIN)
    before = programmed.tables()
    programmed.inside.nft("-f", "-", text=kind_of_change.replace("; ", "\n"))
    assert programmed.tables() != before
    programmed.dataplane.invalidate_all()
    programmed.step()
    assert programmed.tables() == before


@pytest.mark.parametrize("kind_of_change", DISTURBANCES[1::2])
def test_others_are_seen_and_only_what_they_touched_is_read(
    programmed: Programmed, kind_of_change: str
) -> None:
    programmed.become(WEB, PLAIN)
    before = programmed.tables()
    disturbance = seen(
        programmed.inside, lambda: programmed.inside.nft("-f", "-", text=kind_of_change.replace("; ", "\n"))
    )
    assert any(actor.name == "nft" for actor in disturbance.actors)
    if disturbance.everything:
        programmed.dataplane.invalidate_all()
    else:
        programmed.dataplane.invalidate(disturbance.chains)
    programmed.declare([WEB, PLAIN, numbered(3, "10.244.0.3")])
    programmed.step()
    programmed.become(WEB, PLAIN)
    assert programmed.tables() == before


def test_rules_for_replies_come_and_go_with_their_service(programmed: Programmed) -> None:
    taken = replace(
        WEB,
        name="taken",
        addresses=(),
        external_addresses=(
            ExternalAddress("203.0.113.2", True, ()),
            ExternalAddress("2001:db8::2", True, ()),
        ),
        affinity=None,
        balance=Balance.SOURCE_HASH,
        masquerade=Masquerade.HAIRPIN,
        flow_takeover=True,
    )
    programmed.become(PLAIN)
    before = programmed.tables()
    programmed.become(PLAIN, taken)
    listed = programmed.tables()
    for element in ("10.244.0.1 . 8080 : 203.0.113.2 . 80", "fd00:244::1 . 8080 : 2001:db8::2 . 80"):
        assert element in listed
    programmed.restart()
    programmed.declare([PLAIN, taken])
    assert not asyncio.run(programmed.dataplane.plan()), "what is read equals what was written"
    programmed.become(PLAIN)
    assert "reply" not in before
    assert programmed.tables().count("@reply") == 0


def test_own_writes_are_no_disturbance(inside: Inside, tmp_path: Path) -> None:
    own = OwnProcesses(time.monotonic)

    async def watched() -> list[ExternalChange]:
        programmed.declare([WEB])
        found: list[ExternalChange] = []
        async with TableWatch(Names("VIPD"), WatchOptions(own), lambda: listening) as watch:
            await programmed.dataplane.apply(await programmed.dataplane.plan())
            try:
                found.append(await asyncio.wait_for(anext(watch), 0.5))
            except TimeoutError:
                return found
        return found

    async def run(argv: Sequence[str], stdin: str) -> ProgramResult:
        process = await asyncio.create_subprocess_exec(
            "ip", "netns", "exec", inside.namespace, *argv,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        with own.running(process.pid):
            output, errors = await process.communicate(stdin.encode())
        return ProgramResult(process.returncode or 0, output.decode(), errors.decode())

    listening = inside.make(open_socket)
    programmed = Programmed(inside, tmp_path, run, sockets=only_nft(inside))
    assert asyncio.run(watched()) == []


def test_chains_that_drop_are_told_with_what_would_help(programmed: Programmed) -> None:
    programmed.become(WEB)
    assert asyncio.run(dropping_chains(programmed.inside.open_socket)) == ()
    programmed.inside.nft("-f", "-", text=FOREIGN.replace("forward", "input"))
    chains = asyncio.run(dropping_chains(programmed.inside.open_socket))
    (told,) = warnings(chains, health_ports=True)
    assert "chain c of table ip other" in told
    assert warnings(chains, health_ports=False) == ()


def test_foreign_tables_are_left_alone(programmed: Programmed) -> None:
    programmed.inside.nft("-f", "-", text=FOREIGN)
    before = programmed.tables()
    programmed.become(WEB)
    assert "chain c" in programmed.tables()
    programmed.become()
    assert programmed.tables() == before


def test_a_restart_writes_nothing_and_keeps_what_packets_left(programmed: Programmed) -> None:
    programmed.become(WEB, PLAIN)
    learnt = "add element ip vipd pins { 192.0.2.9 . 0.0.0.1 : 0.0.0.7 }"
    programmed.inside.nft("-f", "-", text=learnt)
    programmed.restart()
    assert str(programmed.plan()) == ""
    programmed.become(WEB)
    assert "192.0.2.9" in programmed.inside.nft("list", "map", "ip", "vipd", "pins")


@pytest.mark.parametrize(
    "older",
    [
        'table ip vipd { comment "vipd format 0"; chain dispatch { type filter hook input priority 0; }; }',
        "table ip vipd { map frontends { type ipv4_addr : verdict; }; }",
        "table ip vipd { chain prerouting { type nat hook prerouting priority 7; }; }",
    ],
)
def test_a_table_of_another_format_is_replaced(programmed: Programmed, older: str) -> None:
    programmed.become(WEB)
    wanted = programmed.tables()
    programmed.inside.nft("-f", "-", text=f"flush ruleset\n{older}")
    programmed.restart()
    programmed.step()
    assert programmed.tables() == wanted


def test_who_the_kernel_refuses_holds_back_nobody(inside: Inside, tmp_path: Path) -> None:
    refused = "10.96.0.7 "
    programmed = Programmed(inside, tmp_path, refusing(inside.run, refused), sockets=only_nft(inside))
    others = [numbered(number, "10.244.0.1") for number in range(1, 20) if number != 7]
    programmed.become(*others, numbered(7, "10.244.0.1"))
    (key,) = programmed.dataplane.quarantined()
    assert key.service == "test/s7"
    clean = programmed.tables()
    assert "10.96.0.7" not in clean
    assert str(programmed.plan()) == ""
    programmed.become(*others)
    assert programmed.tables() == clean
    assert not programmed.dataplane.quarantined()


def test_a_refused_change_leaves_what_was_there(inside: Inside, tmp_path: Path) -> None:
    refused = refusing(inside.run, "10.244.0.66")
    programmed = Programmed(inside, tmp_path, refused, sockets=only_nft(inside))
    programmed.become(numbered(1, "10.244.0.1"), numbered(2, "10.244.0.1"))
    programmed.become(numbered(1, "10.244.0.66"), numbered(2, "10.244.0.2"))
    assert [key.service for key in programmed.dataplane.quarantined()] == ["test/s1"]
    listing = programmed.tables()
    assert "10.96.0.1 . tcp . 80 . 0.0.0.0 : 10.244.0.1 . 8080" in listing
    assert "10.96.0.2 . tcp . 80 . 0.0.0.0 : 10.244.0.2 . 8080" in listing


@pytest.mark.parametrize("checked", [True, False])
def test_a_refusal_while_a_table_is_replaced_blames_only_whoever_it_is_about(
    inside: Inside, tmp_path: Path, checked: bool
) -> None:
    refused = refusing(inside.run, "10.96.0.7 ", checked=checked)
    programmed = Programmed(inside, tmp_path, refused, sockets=only_nft(inside))
    others = [numbered(number, "10.244.0.1") for number in range(1, 10) if number != 7]
    programmed.become(*others)
    wanted = programmed.tables()
    programmed.inside.nft("-f", "-", text="add table ip vipd\ndelete table ip vipd\n" + OLDER)
    programmed.restart()
    programmed.become(*others, numbered(7, "10.244.0.1"))
    assert [key.service for key in programmed.dataplane.quarantined()] == ["test/s7"]
    assert programmed.tables() == wanted


def test_what_is_refused_only_once_is_written_as_a_whole(inside: Inside, tmp_path: Path) -> None:
    failures = [1]

    async def refuse_once(argv: Sequence[str], stdin: str) -> ProgramResult:
        once = "10.96.0.7 " in stdin and failures and failures.pop()
        return await (refusing(inside.run, "10.96.0.7 ") if once else inside.run)(argv, stdin)

    programmed = Programmed(inside, tmp_path, refuse_once, sockets=only_nft(inside))
    programmed.become(*(numbered(number, "10.244.0.1") for number in range(1, 10)))
    assert not failures
    assert not programmed.dataplane.quarantined()
    programmed.dataplane.invalidate_all()
    assert str(programmed.plan()) == ""


def test_a_refusal_in_a_later_batch_blames_only_whoever_it_is_about(
    inside: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vipd.dataplane.nftables.plan.BATCH_ELEMENTS", 5)
    refused = refusing(inside.run, "10.244.0.66")
    programmed = Programmed(inside, tmp_path, refused, sockets=only_nft(inside))
    programmed.become(*(numbered(number, "10.244.0.1", "10.244.0.2") for number in range(1, 9)))
    changed = [numbered(number, "10.244.0.2") for number in range(1, 9) if number != 6]
    programmed.become(*changed, numbered(6, "10.244.0.66"))
    assert [key.service for key in programmed.dataplane.quarantined()] == ["test/s6"]
    listing = programmed.tables()
    assert "10.96.0.8 . tcp . 80 . 0.0.0.0 : 10.244.0.2 . 8080" in listing
    assert "10.96.0.6 . tcp . 80 . 0.0.0.1 : 10.244.0.2 . 8080" in listing


def test_a_broken_nft_blames_no_service(inside: Inside, tmp_path: Path) -> None:
    programmed = Programmed(inside, tmp_path, refusing(inside.run, "table"))
    programmed.declare([numbered(1, "10.244.0.1")])
    plan = programmed.plan()
    with pytest.raises(ApplyError):
        asyncio.run(programmed.dataplane.apply(plan))
    assert not programmed.dataplane.quarantined()


def test_a_service_moves_to_another_ones_address(programmed: Programmed) -> None:
    one, other = numbered(1, "10.244.0.1"), numbered(2, "10.244.0.2")
    programmed.become(one, other)
    moved = Service("test/s3", one.addresses, one.ports, backends("10.244.0.3", "10.244.0.4"))
    plan = programmed.become(moved, other)
    texts = [each.text() for each in plan.plans[Family.IPV4].transactions()]
    assert len([text for text in texts if one.addresses[0] in text]) == 1
    programmed.dataplane.invalidate_all()
    assert str(programmed.plan()) == ""


def test_removal_needs_no_daemon_and_leaves_nothing(programmed: Programmed) -> None:
    programmed.inside.nft("-f", "-", text=FOREIGN)
    before = programmed.tables()
    programmed.become(WEB)
    leftovers = asyncio.run(find_leftovers(["VIPD", "OTHER"], programmed.inside.open_socket))
    assert [leftover.table for leftover in leftovers] == ["ip vipd", "ip6 vipd"]
    asyncio.run(remove(leftovers, programmed.inside.run))
    assert programmed.tables() == before


def test_a_table_lets_nobody_in_before_it_goes() -> None:
    written = []

    async def run(argv: Sequence[str], stdin: str) -> ProgramResult:
        written.append(stdin)
        return ProgramResult(0, "", "")

    asyncio.run(remove([Leftover("ip vipd", 9, 9, ("prerouting", "output"))], run))
    assert written == [
        "flush chain ip vipd prerouting\nflush chain ip vipd output\n",
        "delete table ip vipd\n",
    ]


def test_a_rendered_table_is_the_one_that_is_programmed(programmed: Programmed) -> None:
    programmed.become(WEB, PLAIN)
    wanted = programmed.tables()
    programmed.inside.nft("flush", "ruleset")
    for family in Family:
        options = TableOptions.of(programmed.settings, family)
        programmed.inside.nft("-f", "-", text=render(programmed.forwardings.values(), options))
    assert programmed.tables() == wanted


def test_without_nft_only_what_needs_it_fails(inside: Inside, tmp_path: Path) -> None:
    async def absent(argv: Sequence[str], stdin: str) -> ProgramResult:
        raise FileNotFoundError(argv[0])

    programmed = Programmed(inside, tmp_path, absent)
    assert not programmed.plan()
    programmed.declare([WEB])
    assert "apt install nftables" in str(programmed.plan())


def refusing(run: Runner, word: str, *, checked: bool = True) -> Runner:
    """A runner whose nft takes no transaction with this word; `checked`: a check says so, too."""

    async def refuse(argv: Sequence[str], stdin: str) -> ProgramResult:
        if word in stdin and (checked or "--check" not in argv):
            return ProgramResult(
                1, "", f"/dev/stdin:1:1-2: Error: Could not process rule: {word} is refused\n"
            )
        return await run(argv, stdin)

    return refuse


def seen(inside: Inside, kind_of_change: Callable[[], object]) -> ExternalChange:
    """What is told of a deed."""

    async def watched() -> ExternalChange:
        options = WatchOptions(OwnProcesses(time.monotonic))
        async with TableWatch(Names("VIPD"), options, lambda: listening) as watch:
            await asyncio.to_thread(kind_of_change)
            return await asyncio.wait_for(anext(watch), 60)

    listening = inside.make(open_socket)
    return asyncio.run(watched())


def test_an_upgraded_nft_is_asked_anew_what_it_can_do(tmp_path: Path) -> None:
    able = False

    async def run(argv: Sequence[str], text: str) -> ProgramResult:
        lacks = not able and any(word in text for word in ("probe-affinity", "probe-random-ports"))
        return ProgramResult(int(lacks), "", "Error: syntax error" if lacks else "")

    async def story() -> None:
        nonlocal able
        nft = Programs(("nft",), lambda: find_nft(run))
        settings = load_settings(flags={"state_dir": str(tmp_path)})
        table = FamilyTable(Family.IPV4, nft, settings, HostChanges(tmp_path), run, Sockets())
        found = []
        for version, now in (("1.0.2", False), ("1.0.2", True), ("1.1.0", True)):
            able = now
            await table._prepare(Nft(f"nftables v{version}"))
            found.append((table.desired.options.affinity, table.desired.options.random_fully))
        wanted = TableOptions.of(settings, Family.IPV4).random_fully
        assert found == [(False, False), (False, False), (True, wanted)], "the same one is not asked again"

    asyncio.run(story())
