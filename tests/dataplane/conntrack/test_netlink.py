"""The netlink client against answers that go wrong."""

from __future__ import annotations

import pytest

from tests.dataplane.conntrack.fake_table import FakeTable, Fault
from tests.dataplane.conntrack.kernel import made
from vipd.dataplane.conntrack.entries import Entry
from vipd.dataplane.conntrack.messages import Query
from vipd.dataplane.conntrack.netlink import ATTEMPTS, BATCH, Conntrack, ConntrackError
from vipd.model.service import Family, Protocol

QUERY = Query(Family.IPV4)
FLOWS = [made(("10.0.0.1", 1000 + n), ("10.96.0.1", 53)) for n in range(8)]


def read(table: FakeTable, query: Query = QUERY) -> list[Entry]:
    with Conntrack(table.connect()) as opened:
        return [entry for chunk in opened.dump(query) for entry in chunk]


def ports(entries: list[Entry]) -> set[int]:
    return {entry.source[1] for entry in entries}


def test_all_chunks_are_read() -> None:
    assert sorted(ports(read(FakeTable(FLOWS)))) == list(range(1000, 1008))


@pytest.mark.parametrize("fault", [Fault.INTERRUPTED, Fault.NO_ROOM])
def test_a_disturbed_reading_begins_again(fault: Fault) -> None:
    table = FakeTable(FLOWS)
    table.faults = [fault, fault]
    assert ports(read(table)) == set(range(1000, 1008))
    assert table.dumps == 3


def test_a_reading_that_is_always_disturbed_is_an_error() -> None:
    table = FakeTable(FLOWS)
    table.faults = [Fault.INTERRUPTED] * ATTEMPTS
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


def test_deletions_whose_answers_were_lost_are_asked_again() -> None:
    table = FakeTable(FLOWS)
    found = read(table)
    table.faults = [Fault.NO_ROOM, Fault.NO_ROOM]
    with Conntrack(table.connect()) as opened:
        opened.delete(found)
    assert not table.entries


def test_deletions_whose_answers_are_always_lost_are_an_error() -> None:
    table = FakeTable(FLOWS)
    found = read(table)
    table.faults = [Fault.NO_ROOM] * ATTEMPTS
    with Conntrack(table.connect()) as opened, pytest.raises(ConntrackError, match="answers were lost"):
        opened.delete(found)


def test_a_refused_deletion_is_an_error() -> None:
    table = FakeTable(FLOWS)
    found = read(table)
    table.faults = [Fault.REFUSED]
    with Conntrack(table.connect()) as opened, pytest.raises(ConntrackError, match="CAP_NET_ADMIN"):
        opened.delete(found)
