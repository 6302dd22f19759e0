"""One forwarding that is large is compiled and grouped beside the event loop, whatever makes it large."""

from __future__ import annotations

import time
from dataclasses import replace
from unittest.mock import Mock, patch

import pytest

from vipd.dataplane.dual_stack import LARGE
from vipd.dataplane.iptables.compile import Compiler
from vipd.dataplane.iptables.dispatch import Dispatch
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.ruleset import Ruleset
from vipd.dataplane.nftables import table
from vipd.dataplane.nftables.chains import TableNumbers
from vipd.dataplane.nftables.compile import _Compilation, compile_forwarding, first_chain
from vipd.dataplane.nftables.driver import NftablesDataplane
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.table import DesiredTable
from vipd.dataplane.slots import slot_counts
from vipd.host.settings.settings import Settings
from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.service import ExternalAddress, Family, Masquerade, Protocol, TrafficPolicy

KEY = ForwardingKey("web", "", Protocol.TCP, Family.IPV4)
NETWORKS = tuple(f"10.{n // 256}.{n % 256}.0/24" for n in range(1000))
MANY = tuple(f"203.{n // 256}.{n % 256}.1" for n in range(1000))


def _forwarding(backends: int = 1, externals: int = 0, networks: int = 0) -> Forwarding:
    return Forwarding(
        key=KEY,
        addresses=("10.96.0.1",),
        port=80,
        endpoints=tuple(Endpoint(f"10.244.{n // 250}.{n % 250 + 1}", 80) for n in range(backends)),
        masquerade=Masquerade.ALWAYS,
        external_addresses=tuple(
            ExternalAddress(MANY[n], allow_from=NETWORKS[:networks] or None) for n in range(externals)
        ),
    )


LARGE_ONES = [_forwarding(1000), _forwarding(1, 1000), _forwarding(1, 1, 1000), _forwarding(50, 50)]


@pytest.mark.parametrize("forwarding", LARGE_ONES, ids=["backends", "externals", "networks", "both"])
def test_what_is_large_counts_as_large(forwarding: Forwarding) -> None:
    assert forwarding.compile_cost() > LARGE
    tables = (
        DesiredTable(TableOptions(Family.IPV4)),
        Ruleset(RuleOptions.of(Settings(), Family.IPV4, random_fully=False)),
    )
    for each in tables:
        each.update(KEY, forwarding)
        assert each.changes > 500  # above which a plan is made in a thread
        assert each.work_of(KEY, None) > LARGE, "its end is work, too"


@pytest.mark.parametrize("forwarding", LARGE_ONES, ids=["backends", "externals", "networks", "both"])
def test_an_update_finds_compiled_what_was_compiled_ahead(forwarding: Forwarding) -> None:
    wanted = DesiredTable(TableOptions(Family.IPV4))
    wanted.compile_ahead(KEY, forwarding)
    with patch.object(table, "compile_forwarding", side_effect=AssertionError):
        wanted.update(KEY, forwarding)
    wanted.mark_clean()
    wanted.compile_ahead(KEY, None)
    with patch.object(table, "compile_forwarding", side_effect=AssertionError):
        wanted.update(KEY, None)
    rules = Ruleset(RuleOptions.of(Settings(), Family.IPV4, random_fully=False))
    rules.compile_ahead(KEY, forwarding)
    with patch.object(Compiler, "compile", side_effect=AssertionError):
        rules.update(KEY, forwarding)


def test_many_addresses_at_once_are_grouped_when_the_rules_are_asked_for() -> None:
    rules = Ruleset(RuleOptions.of(Settings(), Family.IPV4, random_fully=False))
    rules.update(KEY, _forwarding(1, 900))
    rules.shared()
    with patch.object(Dispatch, "_build", side_effect=AssertionError):
        rules.update(KEY, _forwarding(1, 1000))
        rules.update(KEY, _forwarding(2, 500))
    anew = Ruleset(RuleOptions.of(Settings(), Family.IPV4, random_fully=False))
    anew.update(KEY, _forwarding(2, 500))
    assert rules.shared() == anew.shared()


@pytest.mark.parametrize("addresses", [("10.96.0.1",), ()])
@pytest.mark.parametrize("outside", [(0, 0), (2, 0), (2, 2)])
@pytest.mark.parametrize("backends", [0, 3])
@pytest.mark.parametrize("timeout", [None, 600])
@pytest.mark.parametrize("masquerade", [Masquerade.ALWAYS, Masquerade.HAIRPIN])
@pytest.mark.parametrize("policy", list(TrafficPolicy))
def test_the_first_chain_is_told_without_compiling(
    addresses: tuple[str, ...],
    outside: tuple[int, int],
    backends: int,
    timeout: int | None,
    masquerade: Masquerade,
    policy: TrafficPolicy,
) -> None:
    made = _forwarding(backends, *outside)
    forwarding = replace(
        made,
        addresses=addresses,
        affinity_timeout=timeout,
        masquerade=masquerade,
        external_policy=policy,
        node_port=30080,
        has_endpoints=backends > 0,
    )
    options = TableOptions(Family.IPV4)
    fragment = compile_forwarding(forwarding, options, TableNumbers(Family.IPV4))
    first = next(iter(fragment.elements.values()))
    assert first_chain(forwarding, options) == fragment.chain_numbers.get(first, first.rpartition(" ")[2])


def test_looking_at_a_service_compiles_nothing() -> None:
    forwarding = replace(_forwarding(1000), affinity_timeout=600)
    with patch.object(_Compilation, "run", side_effect=AssertionError):
        dataplane = NftablesDataplane(
            {Family.IPV4: Mock(desired=DesiredTable(TableOptions(Family.IPV4)))}, Names("VIPD")
        )
        chain, holders = dataplane.chains_of(forwarding)
    assert chain == "always-random-1000-pinned-600"
    assert set(holders.values()) == {"numbered"}


def test_uneven_weights_of_many_backends_are_work_but_not_a_quadratic_one() -> None:
    two = Endpoint("10.0.0.1", 80, 1), Endpoint("10.0.0.2", 80, 65535)
    assert replace(_forwarding(), endpoints=two).compile_cost() > LARGE
    weights = (65535,) + (1,) * 9_999
    began = time.process_time()
    counts = slot_counts(weights)
    took, once = time.process_time() - began, time.process_time()
    for _ in range(30):
        sorted(weights, key=lambda weight: -weight / 7)
    assert sum(counts) == 40_000
    assert min(counts) == 1
    assert took < 30 * (time.process_time() - once), "for each slot too many all backends were looked through"
