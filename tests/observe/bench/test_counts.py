"""What programming costs in things that can be counted, so that no noise of a machine hides that it grew.

Measured by the benchmarks' own trials over the real kernel. Each number is pinned with the reason for it: who
changes one should know why it may be another.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.bench.trials.namespace import run_trial
from tests.bench.trials.trial import Outcome, Trial

pytestmark = pytest.mark.root

IPTABLES, LEGACY, NFTABLES = "vipd iptables-nft", "vipd iptables-legacy", "vipd nftables"
ALL = (IPTABLES, LEGACY, NFTABLES)
FEW, MANY = 20, 400
"""On both sides of the 64 addresses above which iptables rules are dispatched by groups."""


@cache
def outcome(subject: str, services: int, backends: int = 5) -> Outcome:
    found = run_trial(Trial(subject, services, backends, changes=3, count=True))
    assert not found.problem
    assert len(found.loads) == 1
    assert len(found.changes) == 3
    return found


def grown(subject: str, what: str, *, services: int = 0, backends: int = 0) -> float:
    """How many more there are in the kernel for each further service, or for each further backend of one."""
    fewer = outcome(subject, FEW).counts[what]
    if services:
        return (outcome(subject, FEW + services).counts[what] - fewer) / services
    return (outcome(subject, FEW, 5 + backends).counts[what] - fewer) / (backends * FEW)


@pytest.mark.nightly(each_time="nft")
@pytest.mark.parametrize("subject", [IPTABLES, LEGACY])
def test_chains_of_iptables(subject: str) -> None:
    """One for the service, one for each backend, as kube-proxy has them."""
    assert grown(subject, "chains", services=10) == 6
    assert grown(subject, "chains", backends=2) == 1


@pytest.mark.parametrize("subject", [IPTABLES, LEGACY])
def test_rules_of_iptables(subject: str) -> None:
    """For each backend the jump to it, and in its chain the hairpin mark and the DNAT. For a service its
    port, its masquerade mark, the answer to pings, and the refusal of unused ports, by three protocols.
    """
    assert grown(subject, "rules", backends=2) == 3
    assert grown(subject, "rules", services=10) == 5 * 3 + 6


def test_elements_of_nftables() -> None:
    """Its frontend, its 5 endpoints, and its address twice: for ping, and for unused ports."""
    assert grown(NFTABLES, "elements", backends=2) == 1
    assert grown(NFTABLES, "elements", services=10) == 8


def test_chains_and_rules_of_nftables_do_not_grow() -> None:
    """Services alike share their chains, so that packets and transactions do not pay for their number."""
    for what in ("chains", "rules"):
        assert outcome(NFTABLES, FEW).counts[what] == outcome(NFTABLES, FEW + 10).counts[what]


@pytest.mark.nightly(each_time="nft")
@pytest.mark.parametrize("subject", ALL)
def test_programs_of_a_change(subject: str) -> None:
    """One restore each. With legacy, counters are saved before, unless that has taken long. A change of
    elements alone needs no nft."""
    allowed = {IPTABLES: {1}, LEGACY: {1, 2}, NFTABLES: {0}}[subject]
    assert {usage.programs for usage in outcome(subject, MANY).changes} <= allowed


@pytest.mark.parametrize("subject", [IPTABLES, LEGACY])
def test_bytes_of_a_change_do_not_grow_with_the_services(subject: str) -> None:
    """Only the changed service is written. Longer names and addresses are all that makes a difference."""
    few, many = (max(usage.sent for usage in outcome(subject, number).changes) for number in (FEW, MANY))
    assert many <= few + 50
    assert many < 1500


@pytest.mark.parametrize("subject", ALL)
def test_bytes_of_a_load(subject: str) -> None:
    """Comments and names included. Kernel and tool pay for each byte."""
    a_service = (outcome(subject, MANY).loads[0].sent - outcome(subject, FEW).loads[0].sent) / (MANY - FEW)
    assert a_service < (400 if subject == NFTABLES else 3200)


@pytest.mark.parametrize("subject", ALL)
def test_programs_of_a_load(subject: str) -> None:
    """Versions, features, and batches that keep iptables-nft-restore below where it is quadratic."""
    assert outcome(subject, MANY).loads[0].programs <= (3 if subject == NFTABLES else 10)
