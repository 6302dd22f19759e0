"""One forwarding that is large is compiled and grouped beside the event loop, whatever makes it large."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from vipd.dataplane.families import LARGE
from vipd.dataplane.iptables.compile import Compiler
from vipd.dataplane.iptables.dispatch import Dispatch
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.ruleset import Ruleset
from vipd.dataplane.nftables import table
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.table import WantedTable
from vipd.model import Endpoint, ExternalAddress, Family, Forwarding, ForwardingKey, Masquerade, Protocol
from vipd.settings import Settings

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
    assert forwarding.work() > LARGE
    tables = (
        WantedTable(TableOptions(Family.IPV4)),
        Ruleset(RuleOptions.of(Settings(), Family.IPV4, random_fully=False)),
    )
    for each in tables:
        each.update(KEY, forwarding)
        assert each.changes > 500  # above which a plan is made in a thread
        assert each.work_of(KEY, None) > LARGE, "its end is work, too"


@pytest.mark.parametrize("forwarding", LARGE_ONES, ids=["backends", "externals", "networks", "both"])
def test_an_update_finds_compiled_what_was_compiled_ahead(forwarding: Forwarding) -> None:
    wanted = WantedTable(TableOptions(Family.IPV4))
    wanted.compile_ahead(KEY, forwarding)
    with patch.object(table, "compile_forwarding", side_effect=AssertionError):
        wanted.update(KEY, forwarding)
    wanted.written()
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
