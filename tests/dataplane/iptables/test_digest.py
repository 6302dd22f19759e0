"""What vipd keeps of rules that are written, and that it recognises and finds them again by that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from vipd.control.selection import SelectionPolicy, select_backends
from vipd.dataplane.iptables.digest import digest_of, same_rules, stored_spelling
from vipd.dataplane.iptables.names import ChainId, Names, Rules
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.plan import Installed, Plan, make_plan
from vipd.dataplane.iptables.restore_text import NFT_BATCHES
from vipd.dataplane.iptables.ruleset import DesiredChains, Ruleset
from vipd.model.forwarding import Forwarding
from vipd.model.service import Backend, Family, Masquerade, Protocol, Service, ServicePort

NAMES = Names("VIPD")
POLICY = SelectionPolicy(dict.fromkeys(Family, Masquerade.HAIRPIN))
RULES: Rules = (
    "-m statistic --mode random --probability 0.3333333333 -j VIPD-SEP-AAAAAAAAAAAAAAAA",
    "-j VIPD-SEP-BBBBBBBBBBBBBBBB",
)


def forwardings(number: int) -> list[Forwarding]:
    """Of so many services with three backends each."""
    services = [
        Service(
            f"s{n}",
            (f"10.96.{n // 250}.{n % 250 + 1}",),
            (ServicePort(80, Protocol.TCP),),
            tuple(Backend(f"10.1.{n % 250}.{b}", 80) for b in (1, 2, 3)),
        )
        for n in range(number)
    ]
    return [forwarding for service in services for forwarding in select_backends(service, POLICY)]


def loaded(number: int) -> tuple[Ruleset, Mapping[ChainId, Rules]]:
    """A ruleset with these, and the rules of their chains."""
    ruleset = Ruleset(RuleOptions(Family.IPV4))
    for forwarding in forwardings(number):
        ruleset.update(forwarding.key, forwarding)
    return ruleset, {
        chain: rules for group in ruleset.whole({}).service_chains for chain, rules in group.items()
    }


def written(ruleset: Ruleset, installed: Installed) -> Plan:
    """The plan for everything, recorded as written."""
    plan = make_plan(ruleset.whole(installed.chains), installed, NAMES, digests=ruleset.digests())
    plan.record_applied(installed)
    ruleset.mark_clean()
    return plan


def test_the_kernels_spelling_has_the_same_digest() -> None:
    stored = tuple(map(stored_spelling, RULES))
    assert stored != RULES
    assert digest_of(stored) == digest_of(RULES) == digest_of(digest_of(RULES))
    assert same_rules(stored, RULES)


@pytest.mark.parametrize(
    "other",
    [RULES[::-1], RULES[:1], (*RULES, RULES[1]), (), (RULES[0].replace("0.33", "0.34"), RULES[1]), None],
)
def test_any_other_rules_differ(other: Rules | None) -> None:
    for known in (RULES, digest_of(RULES)):
        assert not same_rules(known, other)
        assert not same_rules(other, known)


def test_no_rules_and_no_chain_differ() -> None:
    assert same_rules(None, None)
    assert same_rules((), digest_of(()))
    assert not same_rules((), None)


def test_of_written_chains_only_digests_are_kept_and_the_rules_are_compiled_again() -> None:
    ruleset, rules = loaded(3)
    installed = Installed()
    written(ruleset, installed)
    own = ruleset.digests()
    assert {chain: installed.chains[chain] for chain in own} == own
    assert all(isinstance(found, tuple) for chain, found in installed.chains.items() if chain not in own)
    ruleset.invalidate(own)
    again = {chain: found for group in ruleset.dirty().service_chains for chain, found in group.items()}
    assert again == rules


def test_what_the_kernel_has_is_recognised_and_only_the_rest_is_planned() -> None:
    ruleset, _ = loaded(3)
    written(ruleset, Installed())
    _, rules = loaded(3)
    found = Installed({chain: tuple(map(stored_spelling, each)) for chain, each in rules.items()})
    chain = next(iter(ruleset.digests()))
    found.chains[chain] = ("-j RETURN",)
    found.keep_digests(ruleset.digests())
    assert found.chains[chain] == ("-j RETURN",)
    groups = [group for group in ruleset.whole(found.chains).service_chains if chain in group]
    assert len(groups) == 1
    assert [*ruleset.whole(found.chains).service_chains][1:] == groups, "after the chains that all share"
    difference = str(make_plan(ruleset.whole(found.chains), found, NAMES))
    assert f"- -A {chain.name} -j RETURN" in difference
    assert all(f"+ -A {chain.name} {rule}" in difference for rule in rules[chain])


def test_a_load_holds_the_rules_of_two_restores_at_most() -> None:
    ruleset, rules = loaded(1500)
    wanted, held, most = ruleset.whole({}), 0, 0

    class Rule(str):
        __slots__ = ()

        def __new__(cls, text: str) -> Rule:
            nonlocal held, most
            held += 1
            most = max(most, held)
            return super().__new__(cls, text)

        def __del__(self) -> None:
            nonlocal held
            held -= 1

    counted = (
        {chain: tuple(map(Rule, found)) for chain, found in group.items()} for group in wanted.service_chains
    )
    lazily = DesiredChains(counted, wanted.shared, wanted.jumps, wanted.obsolete)
    plan = make_plan(lazily, Installed(), NAMES, digests=ruleset.digests())
    assert {change.chain for change in plan.changes} >= rules.keys()
    assert most < 2 * NFT_BATCHES.lines < sum(map(len, rules.values()))


def test_a_chain_without_rules_stays_one() -> None:
    ruleset, (made,) = Ruleset(RuleOptions(Family.IPV4)), forwardings(1)
    full = replace(made, endpoints=(), without_new_flows=made.endpoints, node_port=30080)
    ruleset.update(full.key, full)
    chain = ChainId("nat", NAMES.service(full.key, "EXT"))
    for _ in ("changed", "written"):
        (chains,) = [group for group in ruleset.dirty().service_chains if chain in group]
        assert chains[chain] == ()
        ruleset.mark_clean()
        ruleset.invalidate([chain])
