"""Which recorded changes concern us, and bursts made one disturbance."""

from __future__ import annotations

import pytest

from tests.dataplane.iptables.watch.recorded import datagrams
from vipd.dataplane.iptables.names import ChainId, Names
from vipd.dataplane.iptables.watch.debouncer import (
    MAX_CHAINS,
    MAX_SECONDS,
    QUIET_SECONDS,
    Debouncer,
)
from vipd.dataplane.iptables.watch.external_change import (
    Actor,
    ChangeKind,
    ExternalChange,
    OwnershipFilter,
    named,
)
from vipd.dataplane.iptables.watch.messages import Change, Generation, MessageKind, read_messages
from vipd.model.service import Family

SCOPE = OwnershipFilter(Names("VIPD"), frozenset(Family))
SEP = ChainId("nat", "VIPD-SEP-AAAAAAAAAAAAAAAA")
SERVICES, PREROUTING = ChainId("nat", "VIPD-SERVICES"), ChainId("nat", "PREROUTING")
FORWARD = ChainId("filter", "FORWARD")


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
                gathering.end(message, Actor(message.name, message.pid), nobody, now)
                last = message
    return last


def change_after(name: str, scope: OwnershipFilter = SCOPE) -> ExternalChange | None:
    gathering = Debouncer(scope)
    hear(gathering, name)
    return gathering.collect(nobody)


@pytest.mark.parametrize(
    ("name", "chains", "deeds"),
    [
        ("insert-ahead", {PREROUTING}, {ChangeKind.RULE_ADDED}),
        ("replace-in-sep", {SEP}, {ChangeKind.RULE_ADDED, ChangeKind.RULE_DELETED}),
        ("delete-jump", {FORWARD}, {ChangeKind.RULE_DELETED}),
        ("flush", {PREROUTING, SEP, SERVICES}, {ChangeKind.RULE_DELETED}),
    ],
)
def test_what_concerns_us(name: str, chains: set[ChainId], deeds: set[ChangeKind]) -> None:
    found = change_after(name)
    assert found is not None
    assert found.chains == {(Family.IPV4, chain) for chain in chains}
    assert found.kinds == deeds
    assert found.families == {Family.IPV4}
    assert not found.everything
    assert [actor.name for actor in found.actors] == ["iptables-nft"]


def test_a_deleted_table_is_everything() -> None:
    found = change_after("flush-ruleset")
    assert found is not None
    assert found.everything
    assert ChangeKind.TABLE_DELETED in found.kinds
    assert str(found.actors[0]).startswith("nft (pid ")


@pytest.mark.parametrize("name", ["append-behind", "delete-foreign", "policy", "foreign-chain"])
def test_what_is_no_business_of_ours(name: str) -> None:
    gathering = Debouncer(SCOPE)
    hear(gathering, name)
    assert gathering.due is None
    assert gathering.collect(nobody) is None


def test_another_family_or_prefix_is_not_ours() -> None:
    assert change_after("flush-ruleset", OwnershipFilter(Names("VIPD"), frozenset({Family.IPV6}))) is None
    assert change_after("replace-in-sep", OwnershipFilter(Names("KUBE"), frozenset(Family))) is None


def test_a_rule_whose_content_is_not_told_may_be_our_jump() -> None:
    change = Change(MessageKind.RULE_DELETED, Family.IPV4, "filter", "FORWARD", 0, b"", 1)
    assert SCOPE.classify(change) is ChangeKind.RULE_DELETED


def test_a_built_in_chain_that_is_declared_takes_nothing_away() -> None:
    change = Change(MessageKind.CHAIN_ADDED, Family.IPV4, "filter", "FORWARD", 0, b"", 1)
    assert SCOPE.classify(change) is None


def test_our_jump_appended_by_somebody_concerns_us() -> None:
    jump = next(
        message
        for datagram in datagrams("restore")
        for message in read_messages(datagram)
        if isinstance(message, Change)
        and (message.kind, message.chain) == (MessageKind.RULE_ADDED, "FORWARD")
    )
    assert SCOPE.classify(jump) is ChangeKind.RULE_ADDED


def test_our_own_transactions_do_not_count_also_when_the_pid_is_learnt_late() -> None:
    gathering = Debouncer(SCOPE)
    ours = hear(gathering, "restore")
    assert gathering.due is not None
    foreign = hear(gathering, "flush")
    found = gathering.collect(lambda pid, port: pid == ours.pid)
    assert found is not None
    assert [actor.pid for actor in found.actors] == [foreign.pid]
    assert found.kinds == {ChangeKind.RULE_DELETED}
    hear(gathering, "restore")
    assert gathering.collect(lambda pid, port: pid == ours.pid) is None


def test_a_transaction_without_its_end_waits() -> None:
    gathering = Debouncer(SCOPE)
    for datagram in datagrams("flush")[:-1]:
        for message in read_messages(datagram):
            assert isinstance(message, Change)
            gathering.change(message)
    assert gathering.due is None
    assert gathering.collect(nobody) is None


def test_a_burst_is_one_disturbance_told_after_quiet_but_never_late() -> None:
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
    assert (Family.IPV4, FORWARD) in found.chains
    assert gathering.due is None


def test_many_chains_are_everything_and_not_a_long_list() -> None:
    gathering = Debouncer(SCOPE)
    for number in range(60_000):
        name = f"VIPD-SEP-{'ABCDEFGHIJKLMNOP'[number % 16]}{'A' * 11}{_base32(number)}"
        gathering.change(Change(MessageKind.CHAIN_DELETED, Family.IPV6, "nat", name, 0, b"", 7))
    gathering.end(Generation(7, 8, "nft"), Actor("nft", 8), nobody, 0.0)
    found = gathering.collect(nobody)
    assert found is not None
    assert found.everything
    assert len(found.chains) <= MAX_CHAINS
    assert found.families == {Family.IPV6}


def _base32(number: int) -> str:
    return "".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"[number >> shift & 31] for shift in (15, 10, 5, 0))


def test_lost_events_are_everything_of_every_family() -> None:
    gathering = Debouncer(SCOPE)
    gathering.lost(5.0)
    assert gathering.due == 5.0 + QUIET_SECONDS
    found = gathering.collect(nobody)
    assert found == ExternalChange(
        frozenset(Family), frozenset(), frozenset({ChangeKind.EVENTS_LOST}), (), True
    )
    assert gathering.collect(nobody) is None


def test_skipped_messages_of_a_stranger_count_as_lost() -> None:
    """Their netlink address was that of a process of ours, but the kernel names another pid."""
    gathering = Debouncer(SCOPE)
    gathering.skip(42)
    gathering.end(Generation(42, 42, "iptables-nft-re"), Actor("x"), lambda pid, port: pid == 42, 0.0)
    assert gathering.collect(nobody) is None
    gathering.skip(42)
    gathering.end(Generation(42, 99, "iptables-nft-re"), Actor("x"), lambda pid, port: pid == 42, 0.0)
    found = gathering.collect(nobody)
    assert found is not None
    assert found.kinds == {ChangeKind.EVENTS_LOST}


@pytest.mark.parametrize(
    ("actor", "culprit"),
    [
        (Actor("iptables-restor", 9, "firewalld", 8), ("firewalld", 8)),
        (Actor("nft", 9, "bash", 8), ("bash", 8)),
        (Actor("nft", 9), ("nft", 9)),
        (Actor("firewalld", 9, "systemd", 1), ("firewalld", 9)),
    ],
)
def test_who_is_behind_it(actor: Actor, culprit: tuple[str, int]) -> None:
    assert actor.offender == culprit


def test_a_program_that_ran_often_is_named_once() -> None:
    docker = [Actor("iptables", pid, "dockerd", 5) for pid in (8, 9, 9, 10)]
    others = [Actor("nft", 11), Actor("iptables", 12, "bash", 4)]
    assert named([*docker, *others, *docker]) == [
        "iptables (3 processes) of dockerd (pid 5)",
        "nft (pid 11)",
        "iptables (pid 12) of bash (pid 4)",
    ]
    chains = frozenset({(Family.IPV4, SEP)})
    disturbance = ExternalChange(
        frozenset({Family.IPV4}), chains, frozenset({ChangeKind.RULE_ADDED}), tuple(docker)
    )
    assert str(disturbance).startswith("iptables (3 processes) of dockerd (pid 5): rule added in ")


def test_a_disturbance_in_words() -> None:
    found = change_after("replace-in-sep")
    assert found is not None
    pid = found.actors[0].pid
    assert str(found) == f"iptables-nft (pid {pid}): rule added, rule deleted in ipv4 nat {SEP.name}"
    everything = ExternalChange(frozenset(Family), frozenset(), frozenset({ChangeKind.EVENTS_LOST}), (), True)
    assert str(everything) == "somebody: events were lost in ipv4, ipv6"
