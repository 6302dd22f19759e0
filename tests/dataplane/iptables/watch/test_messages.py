"""Reading notifications, on datagrams that a kernel sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dataplane.iptables.watch.recorded import COMMANDS, datagrams
from vipd.dataplane.iptables.watch.messages import (
    Change,
    Generation,
    MessageKind,
    read_messages,
    rule_facts,
    sender_and_end,
)
from vipd.model.service import Family

SEP = "VIPD-SEP-AAAAAAAAAAAAAAAA"


def messages(name: str) -> list[Change | Generation]:
    return [message for datagram in datagrams(name) for message in read_messages(datagram)]


def changes(name: str) -> list[tuple[MessageKind, str, str]]:
    return [(m.kind, m.table, m.chain) for m in messages(name) if isinstance(m, Change)]


def test_a_replaced_rule_is_one_deleted_and_one_added() -> None:
    assert changes("replace-in-sep") == [
        (MessageKind.RULE_DELETED, "nat", SEP),
        (MessageKind.RULE_ADDED, "nat", SEP),
    ]


def test_a_deleted_table_is_told_with_its_chains() -> None:
    found = changes("flush-ruleset")
    assert (MessageKind.TABLE_DELETED, "nat", "") in found
    assert (MessageKind.TABLE_DELETED, "filter", "") in found
    assert (MessageKind.CHAIN_DELETED, "filter", "VIPD-FORWARD") in found
    assert not [change for change in found if change[0] is MessageKind.RULE_DELETED], (
        "nft names the chains only"
    )


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_transaction_ends_with_who_did_it(name: str) -> None:
    found = messages(name)
    end = found[-1]
    assert isinstance(end, Generation)
    assert end.name == COMMANDS[name][0][0][:15]
    assert end.pid > 1
    assert {m.port for m in found} == {end.port}
    assert {m.family for m in found if isinstance(m, Change)} == {Family.IPV4}


@pytest.mark.parametrize("name", list(COMMANDS))
def test_the_opening_tells_sender_and_generations(name: str) -> None:
    for datagram in datagrams(name):
        read = list(read_messages(datagram))
        assert sender_and_end(datagram) == (read[0].port, isinstance(read[0], Generation))
        assert len({isinstance(message, Generation) for message in read}) == 1, "a mixed datagram"


@pytest.mark.parametrize(
    ("name", "appended", "mentions"),
    [("insert-ahead", False, False), ("append-behind", True, False), ("delete-jump", False, True)],
)
def test_what_a_rule_says(name: str, appended: bool, mentions: bool) -> None:
    change = messages(name)[0]
    assert isinstance(change, Change)
    facts = rule_facts(change)
    assert facts.expressions is not None
    assert (facts.appended, b"VIPD-" in facts.expressions) == (appended, mentions)


def test_messages_of_other_families_and_subsystems_are_passed_over() -> None:
    whole = datagrams("flush")[0]
    for place, value in ((16, 7), (5, 1)):  # NFPROTO_BRIDGE; the subsystem of conntrack
        altered = bytearray(whole)
        altered[place] = value
        assert list(read_messages(bytes(altered))) == list(read_messages(whole))[1:]


@given(name=st.sampled_from(sorted(COMMANDS)), data=st.data())
def test_a_cut_or_altered_datagram_is_read_or_refused(name: str, data: st.DataObject) -> None:
    whole = bytearray(data.draw(st.sampled_from(datagrams(name))))
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=4)):
        whole[place] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    sender_and_end(cut)
    try:
        for message in read_messages(cut):
            if isinstance(message, Change):
                rule_facts(message)
    except ValueError:
        pass


def test_a_cut_datagram_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes at byte"):
        list(read_messages(datagrams("flush")[0][:-8]))
