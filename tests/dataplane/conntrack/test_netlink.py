"""The netlink client against answers that go wrong; and entries that are unusual."""

from __future__ import annotations

import pytest

from tests.dataplane.conntrack.fake_table import FakeTable, Fault
from tests.dataplane.conntrack.kernel import made, new_request
from vipd.dataplane.conntrack import entries
from vipd.dataplane.conntrack.entries import Entry, parse
from vipd.dataplane.conntrack.messages import Query, delete_request
from vipd.dataplane.conntrack.netlink import ATTEMPTS, BATCH, Conntrack, ConntrackError
from vipd.host.netlink import attribute, nested
from vipd.model.service import Family, Protocol

QUERY = Query(Family.IPV4)
FLOWS = [made(("10.0.0.1", 1000 + n), ("10.96.0.1", 53)) for n in range(8)]


def read(table: FakeTable, query: Query = QUERY) -> list[Entry]:
    with Conntrack(table.connect()) as opened:
        return [entry for chunk in opened.dump(query) for entry in chunk]


def ports(found: list[Entry]) -> set[int]:
    return {entry.source[1] for entry in found}


@pytest.mark.parametrize("fault", [Fault.INTERRUPTED, Fault.NO_ROOM])
def test_a_disturbed_reading_begins_again_and_is_an_error_when_it_always_is(fault: Fault) -> None:
    table = FakeTable(FLOWS)
    table.faults = [fault, fault]
    assert ports(read(table)) == set(range(1000, 1008))
    assert table.dumps == 3
    table.faults = [fault] * ATTEMPTS
    with pytest.raises(ConntrackError, match=f"disturbed {ATTEMPTS} times"):
        read(table)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault.REFUSED, "not permitted; hint: .*CAP_NET_ADMIN"),
        (Fault.SILENCE, "no answer"),
        (Fault.CUT, "not understood: message of"),
        (Fault.TOO_LONG, "more than"),
        (Fault.MALFORMED, "not understood: attribute of"),
    ],
)
def test_what_cannot_be_understood_is_an_error(fault: Fault, said: str) -> None:
    table = FakeTable(FLOWS)
    table.faults = [fault]
    with pytest.raises(ConntrackError, match=said):
        read(table)


@pytest.mark.parametrize("fault", [Fault.FORGED, Fault.LATE])
def test_answers_that_are_not_to_this_request_are_ignored(fault: Fault) -> None:
    table = FakeTable(FLOWS)
    table.faults = [fault]
    assert len(read(table)) == 8


def test_entries_that_an_old_kernel_does_not_leave_out_are_left_out_here() -> None:
    replied = made(("10.0.0.1", 1), ("10.96.0.1", 53), replied=True)
    tcp = made(("10.0.0.1", 2), ("10.96.0.1", 53), protocol=Protocol.TCP)
    table = FakeTable([*FLOWS, replied, tcp])
    assert ports(read(table, Query(Family.IPV4, Protocol.UDP))) == {1, *range(1000, 1008)}
    assert ports(read(table, Query(Family.IPV4, Protocol.TCP))) == {2}
    assert ports(read(table, Query(Family.IPV4, Protocol.UDP, unreplied=True))) == set(range(1000, 1008))


def test_deletions_are_counted_and_those_that_are_gone_are_no_error() -> None:
    table = FakeTable(made(("10.0.0.1", n), ("10.96.0.1", 53)) for n in range(2 * BATCH + 5))
    found = read(table)
    del table.entries[1]
    with Conntrack(table.connect()) as opened:
        assert opened.delete(found) == 2 * BATCH + 4
        assert opened.delete(found) == 0
    assert not table.entries


def test_deletions_whose_answers_were_lost_are_asked_again_and_are_an_error_when_they_always_are() -> None:
    table = FakeTable(FLOWS)
    found = read(table)
    with Conntrack(table.connect()) as opened:
        table.faults = [Fault.NO_ROOM] * ATTEMPTS
        with pytest.raises(ConntrackError, match="answers were lost"):
            opened.delete(found)
        table.entries = dict(enumerate(FLOWS, 1))
        table.faults = [Fault.NO_ROOM, Fault.NO_ROOM]
        opened.delete(found)
    assert not table.entries


def test_other_protocols_and_families_are_no_entries() -> None:
    usual = new_request(made(("10.0.0.1", 1), ("10.0.0.2", 2)), 1)
    at = usual.index(attribute(entries.CTA_PROTO_NUM, b"\x11"))
    assert parse(usual[: at + 4] + b"\x01" + usual[at + 5 :]) is None
    assert parse(usual[:16] + b"\x07" + usual[17:]) is None
    assert parse(usual) is not None


@pytest.mark.parametrize("identity", [b"", attribute(entries.CTA_ID, b"1234"), nested(1, b"")])
def test_a_deletion_without_a_name_is_never_sent(identity: bytes) -> None:
    """The kernel would take it for: delete everything."""
    entry = made(("10.0.0.1", 1), ("10.0.0.2", 2))._replace(identity=identity)
    with pytest.raises(ValueError, match="must name"):
        delete_request(entry, 1)


def test_an_offloaded_tcp_flow_is_established_though_the_kernel_reports_no_state() -> None:
    """As Linux lists one in a flowtable: with IPS_OFFLOAD, and neither timeout nor protocol information."""
    entry = made(("10.0.0.1", 1), ("10.0.0.2", 2), protocol=Protocol.TCP, tcp_state=1)
    message = new_request(entry._replace(status=entry.status | entries.OFFLOADED), 1)
    protoinfo = nested(
        entries.CTA_PROTOINFO,
        nested(entries.CTA_PROTOINFO_TCP, attribute(entries.CTA_PROTOINFO_TCP_STATE, b"\x01")),
    )
    read = parse(message.replace(protoinfo, b""))
    assert read is not None
    assert entries.flow_state(read) == "ESTABLISHED"
    unmarked = parse(new_request(entry, 1).replace(protoinfo, b""))
    assert unmarked is not None
    assert entries.flow_state(unmarked) == "NONE"
