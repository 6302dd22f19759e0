"""The table over time: what others do to it, what the kernel does not take, other formats, and its end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dataplane.declared import HTTP, backends
from tests.dataplane.namespace import Namespace
from tests.dataplane.nftables.declared import numbered
from tests.dataplane.nftables.listed import tables
from tests.dataplane.watched_programs import WatchedPrograms, raising, refusing
from tests.lab.inside import NotWrittenError, ProgramResult, Synced, compiled, synced
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


def nft(namespace: Namespace, text: str) -> None:
    """Another program runs these commands."""
    namespace.do("nft", "-f", "-", text=text.replace("; ", "\n"))


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


@pytest.mark.parametrize("change", DISTURBANCES)
def test_what_others_do_is_seen_and_undone(vipd: Synced, namespace: Namespace, change: str) -> None:
    """And only what they touched is read."""
    vipd.become(WEB, PLAIN)
    before = tables(namespace)
    (heard, *_) = vipd.heard(lambda: nft(namespace, change), 1, silence=0.2)
    assert heard.text.startswith("nft (pid ")
    assert tables(namespace) != before
    vipd.doubt(*heard.parts)
    vipd.declare([WEB, PLAIN, numbered(3, "10.244.0.3")])
    vipd.step()
    vipd.become(WEB, PLAIN)
    assert tables(namespace) == before


def test_own_writes_are_no_disturbance(vipd: Synced, namespace: Namespace) -> None:
    """Chains by nft, elements by netlink."""
    assert vipd.heard(lambda: vipd.become(WEB)) == []
    assert vipd.heard(lambda: vipd.become(WEB, PLAIN)) == []
    moved = numbered(2, "10.244.0.9")

    def both() -> None:
        vipd.become(WEB, moved)
        nft(namespace, "add element ip vipd claimed { 10.9.9.9 }")

    (heard,) = vipd.heard(both, 1)
    assert {part.rpartition(" ")[2] for part in heard.parts} == {"claimed"}


def taken_over(name: str, *outside: str) -> Service:
    """A service that continues flows of other hosts."""
    external = tuple(ExternalAddress(address, True, ()) for address in outside)
    return replace(
        WEB,
        name=name,
        addresses=(),
        external_addresses=external,
        affinity=None,
        balance=Balance.SOURCE_HASH,
        masquerade=Masquerade.HAIRPIN,
        flow_takeover=True,
    )


def test_rules_for_replies_come_and_go_with_their_service(vipd: Synced, namespace: Namespace) -> None:
    vipd.become(PLAIN)
    assert "reply" not in tables(namespace)
    service = taken_over("one", "203.0.113.2", "2001:db8::2")
    vipd.become(PLAIN, service)
    listed = tables(namespace)
    for element in ("10.244.0.1 . 8080 : 203.0.113.2 . 80", "fd00:244::1 . 8080 : 2001:db8::2 . 80"):
        assert element in listed
    for rule in ("tcp sport @reply_sources", "snat ip to ip saddr . tcp sport map @reply_frontends"):
        assert rule in listed
    vipd.restart()
    vipd.declare([PLAIN, service])
    assert vipd.pending() == "", "what is read equals what was written"
    # A reply has the only service of its endpoint; of several it is not known which.
    vipd.become(PLAIN, service, taken_over("other", "203.0.113.3"))
    assert "10.244.0.1 . 8080 : 203.0.113." not in tables(namespace)
    vipd.become(PLAIN, service)
    assert tables(namespace) == listed
    vipd.become(PLAIN)
    assert tables(namespace).count("@reply") == 0


OTHER_FORMATS = {
    "an older one": """table ip vipd {
    comment "vipd format 2"
    set claimed { type ipv4_addr; elements = { 10.96.0.1 } }
    map frontends { type ipv4_addr . inet_proto . inet_service : verdict; }
    chain unused { reject; }
    chain dispatch { ip daddr @claimed goto unused; }
    chain prerouting { type nat hook prerouting priority dstnat; policy accept; goto dispatch; }
}
""",
    "a chain at another hook": (
        'table ip vipd { comment "vipd format 0"; chain dispatch { type filter hook input priority 0; }; }'
    ),
    "a map of another type": "table ip vipd { map frontends { type ipv4_addr : verdict; }; }",
}


@pytest.mark.parametrize("older", OTHER_FORMATS)
def test_a_table_of_another_format_is_replaced(
    vipd: Synced, namespace: Namespace, tmp_path: Path, older: str
) -> None:
    """It refuses nobody before, and who is refused meanwhile is the only one to be blamed."""
    others = [WEB, *(numbered(number, "10.244.0.1") for number in range(2, 10) if number != 7)]
    vipd.become(*others)
    wanted = tables(namespace)
    seventh = numbered(7, "10.244.0.1")
    for bad, checks in (((), True), ((seventh,), True), ((seventh,), False)):
        namespace.do("nft", "flush", "ruleset")
        namespace.do("nft", "-f", "-", text=OTHER_FORMATS[older])
        programs = WatchedPrograms(refusing("10.96.0.7 ", checks=checks))
        other = synced("nftables", namespace.name, tmp_path, through=programs, netlink=False)
        other.become(*others, *bad)
        assert list(other.refused()) == [service.name for service in bad]
        assert tables(namespace) == wanted
    if "unused" in OTHER_FORMATS[older]:
        first = next(text for text in programs.written if text.startswith("flush chain ip vipd unused"))
        assert first == "flush chain ip vipd unused\nadd rule ip vipd unused drop\n"


def test_any_other_hook_or_declaration_is_reason_enough_to_replace_the_table(
    vipd: Synced, namespace: Namespace
) -> None:
    vipd.become(PLAIN)
    wanted = tables(namespace)
    text = compiled([PLAIN], "nftables")
    hooks = [line.strip() for line in text.splitlines() if " hook " in line]
    assert len(hooks) > 3
    changes = {hook: re.sub("priority [^;]*", "priority 77", hook) for hook in hooks}
    changes |= {"size 65536": "size 65535"} if "size 65536" in text else {}
    for old, new in changes.items():
        namespace.do("nft", "-f", "-", text=f"delete table ip vipd\n{text.replace(old, new)}")
        assert tables(namespace) != wanted
        vipd.restart()
        assert vipd.step(), new
        assert tables(namespace) == wanted, new


def test_a_refused_change_leaves_what_was_there(namespace: Namespace, tmp_path: Path) -> None:
    """Also in a later one of several transactions."""
    programs = WatchedPrograms(refusing("10.244.0.66"))
    vipd = synced("nftables", namespace.name, tmp_path, through=programs, netlink=False, batch=5)
    vipd.become(*(numbered(number, "10.244.0.1", "10.244.0.2") for number in range(1, 9)))
    changed = [numbered(number, "10.244.0.2") for number in range(1, 9) if number != 6]
    vipd.become(*changed, numbered(6, "10.244.0.66"))
    assert list(vipd.refused()) == ["test/s6"]
    listing = tables(namespace)
    assert "10.96.0.8 . tcp . 80 . 0.0.0.0 : 10.244.0.2 . 8080" in listing
    assert "10.96.0.6 . tcp . 80 . 0.0.0.1 : 10.244.0.2 . 8080" in listing


def test_a_rendered_table_is_the_one_that_is_programmed(vipd: Synced, namespace: Namespace) -> None:
    vipd.become(WEB, PLAIN)
    wanted = tables(namespace)
    namespace.do("nft", "flush", "ruleset")
    for family in Family:
        namespace.do("nft", "-f", "-", text=compiled([WEB, PLAIN], "nftables", family))
    assert tables(namespace) == wanted


def test_an_upgraded_nft_is_asked_anew_what_it_can_do(namespace: Namespace, tmp_path: Path) -> None:
    version, able = "1.0.2", False

    def instead(argv: Sequence[str], text: str) -> ProgramResult | None:
        if "--version" in argv:
            return ProgramResult(0, f"nftables v{version}\n", "")
        lacks = not able and any(word in text for word in ("probe-affinity", "probe-random-ports"))
        return ProgramResult(1, "", "Error: syntax error") if lacks else None

    vipd = synced("nftables", namespace.name, tmp_path, through=WatchedPrograms(instead))
    found = []
    for version, able in (("1.0.2", False), ("1.0.2", True), ("1.1.0", True)):  # noqa: B007
        vipd.restart()
        vipd.become()
        vipd.become(WEB)
        found.append(("pins" in tables(namespace), bool(vipd.warnings())))
    assert found[0] == (False, True)
    assert found[-1] == (True, False)


ONE, MOVED = numbered(1, "10.244.0.1"), numbered(1, "10.244.0.2")


@pytest.fixture
def watched(namespace: Namespace, programs: WatchedPrograms, tmp_path: Path) -> Synced:
    """A dataplane whose programs are looked on."""
    return synced("nftables", namespace.name, tmp_path, through=programs)


def test_a_small_change_runs_no_program(
    watched: Synced, programs: WatchedPrograms, namespace: Namespace
) -> None:
    watched.become(ONE)
    assert programs.started
    programs.started.clear()
    watched.become(MOVED)
    watched.become(MOVED, numbered(2, "10.244.0.3"))
    watched.become(MOVED)
    assert programs.started == []
    assert "10.244.0.2" in tables(namespace)
    assert "10.244.0.3" not in tables(namespace)
    watched.restart()
    assert watched.pending() == "", "what is read equals what was written"
    watched.become(
        replace(MOVED, addresses=("10.96.0.1", "fd00::1")), numbered(2, "10.244.0.3", "10.244.0.4")
    )
    assert programs.written, "a chain is written by nft"


def test_nft_writes_the_chains_of_a_load_and_no_element_of_a_service(
    watched: Synced, programs: WatchedPrograms, namespace: Namespace
) -> None:
    vips = [(f"10.96.{n // 250}.{n % 250 + 1}", f"fd00:96::{n + 1:x}") for n in range(700)]
    many = [replace(numbered(n, f"10.244.0.{n % 200 + 1}"), addresses=both) for n, both in enumerate(vips)]
    watched.become(*many)
    texts = [text for text in programs.written if "element ip" in text or "chain ip" in text]
    assert len([text for text in texts if "handlers" in text]) == 2, "one for each family"
    assert "10.244.0.1" not in "".join(programs.written)
    assert tables(namespace).count("10.244.0.1 . 8080") == 4
    watched.restart()
    assert watched.pending() == "", "what is read equals what was written"


def test_what_another_program_has_added_blames_nobody(
    watched: Synced, programs: WatchedPrograms, namespace: Namespace
) -> None:
    """The kernel refuses an element that is there already, and vipd does not know of it."""
    watched.become(ONE)
    nft(namespace, "add element ip vipd frontends { 10.96.0.8 . tcp . 80 : 1.2.3.4 }")
    watched.become(MOVED, numbered(8, "10.244.0.1"))
    assert watched.netlink_refusals
    assert not watched.refused()
    result = tables(namespace)
    namespace.do("nft", "flush", "ruleset")
    watched.restart()
    watched.step()
    assert result == tables(namespace)


def test_nft_that_is_missing_is_found_when_it_is_there(
    watched: Synced, programs: WatchedPrograms, namespace: Namespace
) -> None:
    programs.instead = raising(FileNotFoundError(2, "nft"))
    watched.restart()
    for _ in range(2):
        with pytest.raises(NotWrittenError, match=r"nft cannot be run: there is no such program; hint: apt"):
            watched.become(ONE)
    assert "no such program" in watched.versions()["ipv4"]
    programs.instead = lambda argv, stdin: None
    assert watched.step()
    assert "10.244.0.1" in tables(namespace)
    assert watched.versions()["ipv4"].startswith("nftables v")
