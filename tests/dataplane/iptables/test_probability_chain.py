"""The ladder of probabilities by which a service's chain chooses an endpoint."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vipd.control.selection import SelectionPolicy, select_backends
from vipd.dataplane.iptables.compile import Compiler
from vipd.dataplane.iptables.digest import stored_spelling
from vipd.dataplane.iptables.names import ChainId
from vipd.dataplane.iptables.options import RuleOptions
from vipd.model.service import MAX_WEIGHT, Backend, Family, Masquerade, Protocol, Service, ServicePort

POLICY = SelectionPolicy(dict.fromkeys(Family, Masquerade.HAIRPIN))
COMPILER = Compiler(RuleOptions(Family.IPV4))
ROUNDING = 0.5e-10
"""Of one probability, written with ten decimals."""
STORING = 0.5 / 2**31
"""Of one probability, as xt_statistic keeps it."""

weights = st.integers(1, MAX_WEIGHT)


def balanced(weights: list[int]) -> tuple[list[str], list[tuple[int, str]]]:
    """The SVC chain of a service with these backends; then weight and chain of each, in its order."""
    backends = tuple(Backend(f"10.0.{i // 256}.{i % 256}", 80, w) for i, w in enumerate(weights))
    service = Service("s", ("10.96.0.1",), (ServicePort(80, Protocol.TCP),), backends)
    (forwarding,) = select_backends(service, POLICY)
    names = RuleOptions(Family.IPV4).names
    chains = COMPILER.compile(forwarding).chains
    targets = [(e.weight, names.endpoint(forwarding.key, e)) for e in forwarding.endpoints]
    return list(chains[ChainId("nat", names.service(forwarding.key))]), targets


def probabilities(rules: list[str]) -> list[str]:
    return [found[1] for rule in rules if (found := re.search(r"--probability (\S+)", rule))]


def shares(rules: list[str]) -> list[float]:
    """The part of new flows that each rule takes, when every earlier one let it pass."""
    left, taken = 1.0, []
    for text in [*probabilities(rules), "1"]:
        taken.append(left * float(text))
        left *= 1 - float(text)
    return taken


@given(st.lists(weights, min_size=1, max_size=300))
def test_shares_are_the_weights(given_weights: list[int]) -> None:
    """A share is a product of n factors within 0..1, so its error is at most the sum of theirs."""
    rules, targets = balanced(given_weights)
    total, n = sum(given_weights), len(given_weights)
    for share, (weight, _) in zip(shares(rules), targets, strict=True):
        assert abs(share - weight / total) <= n * ROUNDING + 1e-12
    stored = [stored_spelling(rule) for rule in rules]
    for share, (weight, _) in zip(shares(stored), targets, strict=True):
        assert abs(share - weight / total) <= n * (ROUNDING + STORING) + 1e-12


@given(st.lists(weights, min_size=1, max_size=40))
def test_every_endpoint_has_one_step_and_the_last_is_certain(given_weights: list[int]) -> None:
    rules, targets = balanced(given_weights)
    assert [rule.rpartition(" -j ")[2] for rule in rules] == [chain for _, chain in targets]
    assert ["statistic" in rule for rule in rules] == [True] * (len(rules) - 1) + [False]
    assert all(0 < float(p) < 1 for p in probabilities(rules))


@pytest.mark.parametrize("weight", [1, 3, MAX_WEIGHT])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 10, 100])
def test_equal_weights_read_as_kube_proxy_writes_them(n: int, weight: int) -> None:
    rules, _ = balanced([weight] * n)
    assert probabilities(rules) == [f"{1 / (n - i):0.10f}" for i in range(n - 1)]


@given(st.lists(st.integers(0, 3), max_size=12))
def test_weight_zero_takes_no_step(given_weights: list[int]) -> None:
    if not any(given_weights):
        return
    rules, targets = balanced(given_weights)
    assert len(rules) == len(targets) == sum(w > 0 for w in given_weights)
    assert all(weight > 0 for weight, _ in targets)


def test_only_weights_of_zero_mean_no_chain_at_all() -> None:
    service = Service("s", ("10.96.0.1",), (ServicePort(80, Protocol.TCP),), (Backend("10.0.0.1", None, 0),))
    (forwarding,) = select_backends(service, POLICY)
    assert not COMPILER.compile(forwarding).chains
