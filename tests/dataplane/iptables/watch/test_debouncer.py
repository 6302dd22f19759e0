"""Which recorded changes concern us, and bursts made one report."""

from __future__ import annotations

from tests.dataplane.iptables.watch.recorded import datagrams
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.watch.debouncer import MAX_OPEN, MAX_SECONDS, QUIET_SECONDS, Debouncer
from vipd.dataplane.iptables.watch.external_change import Actor, ExternalChange, OwnershipFilter, named
from vipd.dataplane.iptables.watch.messages import Change, Generation, MessageKind, read_messages
from vipd.model.service import Family

SCOPE = OwnershipFilter(Names("VIPD"), frozenset(Family))
SEP = "VIPD-SEP-AAAAAAAAAAAAAAAA"


def nobody(pid: int, port: int) -> bool:
    """None of the processes is ours."""
    return False


def hear(gathering: Debouncer, name: str, now: float = 0.0) -> Generation:
    """Feed a recorded command; returns its last transaction's end."""
    for datagram in datagrams(name):
        for message in read_messages(datagram):
            if isinstance(message, Change):
                gathering.change(message)
            else:
                gathering.end(message, nobody, now)
                last = message
    return last


def told(change: ExternalChange | None) -> str:
    """What the log says, without pids; empty: nothing."""
    return "" if change is None else str(change).partition("): ")[2] or str(change)


def after(*names: str, scope: OwnershipFilter = SCOPE) -> ExternalChange | None:
    gathering = Debouncer(scope)
    for name in names:
        hear(gathering, name)
    due, change = gathering.due, gathering.collect(nobody)
    assert (due is None) is (change is None)
    return change


TOLD = {
    "insert-ahead": "rule added in ipv4 nat PREROUTING",
    "replace-in-sep": f"rule added, rule deleted in ipv4 nat {SEP}",
    "delete-jump": "rule deleted in ipv4 filter FORWARD",
    "flush": "rule deleted in ipv4 nat PREROUTING and 2 chains more",
    "flush-ruleset": "chain deleted, table deleted in ipv4",
    "append-behind": "",
    "delete-foreign": "",
    "policy": "",
    "foreign-chain": "",
}


def test_what_concerns_us() -> None:
    changes = {name: after(name) for name in TOLD}
    assert {name: told(change) for name, change in changes.items()} == TOLD
    assert all(change.families == {Family.IPV4} for change in changes.values() if change)
    assert {name for name, change in changes.items() if change and change.everything} == {"flush-ruleset"}
    assert after("flush-ruleset", scope=OwnershipFilter(Names("VIPD"), frozenset({Family.IPV6}))) is None
    assert after("replace-in-sep", scope=OwnershipFilter(Names("KUBE"), frozenset(Family))) is None


def test_messages_of_other_families_and_subsystems_are_passed_over() -> None:
    whole = datagrams("flush")[0]
    for place, value in ((16, 7), (5, 1)):  # NFPROTO_BRIDGE; the subsystem of conntrack
        altered = bytearray(whole)
        altered[place] = value
        assert list(read_messages(bytes(altered))) == list(read_messages(whole))[1:]


def change(kind: MessageKind, chain: str, table: str = "filter") -> Change:
    """One message whose rule is not told."""
    return Change(kind, Family.IPV4, table, chain, 0, b"", 1)


def test_a_rule_whose_content_is_not_told_may_be_our_jump() -> None:
    """And a built-in chain that is declared takes nothing away."""
    assert SCOPE.classify(change(MessageKind.RULE_DELETED, "FORWARD"))
    assert SCOPE.classify(change(MessageKind.CHAIN_ADDED, "FORWARD")) is None


def test_our_own_transactions_do_not_count_also_when_the_pid_is_learnt_late() -> None:
    gathering = Debouncer(SCOPE)
    ours = hear(gathering, "restore")
    assert gathering.due is not None
    foreign = hear(gathering, "flush")
    found = gathering.collect(lambda pid, port: pid == ours.pid)
    assert found is not None
    assert [actor.pid for actor in found.actors] == [foreign.pid]
    assert told(found) == TOLD["flush"]
    hear(gathering, "restore")
    assert gathering.collect(lambda pid, port: pid == ours.pid) is None


def test_a_transaction_without_its_end_waits_and_many_are_let_go_of() -> None:
    gathering = Debouncer(SCOPE)
    first = [message for message in read_messages(datagrams("flush")[0]) if isinstance(message, Change)]
    for message in first:
        gathering.change(message)
    assert gathering.due is None
    assert gathering.collect(nobody) is None
    for port in range(1, 2 * MAX_OPEN):
        gathering.change(first[0]._replace(port=port))
    gathering.end(Generation(0, 1, "iptables"), nobody, 0.0)
    assert told(gathering.collect(nobody)) == "somebody: events were lost in ipv4, ipv6"
    gathering.end(Generation(1, 1, "iptables"), nobody, 0.0)
    assert gathering.collect(nobody) is None


def test_a_burst_is_one_report_after_quiet_but_never_late() -> None:
    gathering = Debouncer(SCOPE)
    hear(gathering, "flush", 10.0)
    assert gathering.due == 10.0 + QUIET_SECONDS
    now = 10.0
    while now < 11.0:
        hear(gathering, "flush", now)
        now += QUIET_SECONDS / 2
        assert gathering.due is not None
        assert gathering.due <= 10.0 + MAX_SECONDS
    hear(gathering, "delete-jump", now)
    found = gathering.collect(nobody)
    assert found is not None
    assert len(found.actors) == 2
    assert told(found) == "rule deleted in ipv4 filter FORWARD and 3 chains more"
    assert gathering.due is None


def test_lost_events_are_everything_though_one_chain_is_known() -> None:
    gathering = Debouncer(SCOPE)
    hear(gathering, "delete-jump", 5.0)
    gathering.lost(5.0)
    assert gathering.due == 5.0 + QUIET_SECONDS
    found = gathering.collect(nobody)
    assert found is not None
    assert found.everything
    assert gathering.collect(nobody) is None


def test_skipped_messages_of_a_stranger_count_as_lost() -> None:
    """Their netlink address was that of a process of ours, but the kernel names another pid."""
    for pid, lost in ((42, False), (99, True)):
        gathering = Debouncer(SCOPE)
        gathering.skip(42)
        gathering.end(Generation(42, pid, "iptables-nft-re"), lambda pid, port: pid == 42, 0.0)
        assert (gathering.collect(nobody) is not None) is lost


def test_a_program_that_ran_often_is_named_once() -> None:
    several = [Actor("iptables", pid) for pid in (8, 9, 9, 10)]
    others = [Actor("nft", 11), Actor.of(Generation(0, 12, "iptables-restor"))]
    assert named([*several, *others, *several]) == [
        "iptables (3 processes)",
        "nft (pid 11)",
        "iptables-restore (pid 12)",
    ]
