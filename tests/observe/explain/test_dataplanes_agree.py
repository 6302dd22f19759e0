"""The same declarations reach the same backends with the same shares in both dataplanes.

Two differences are known, and no more are let through; see `_known`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.dataplane.nftables.declared import OWN, state
from tests.lab.examples import examples, some
from tests.observe.explain import generated
from tests.observe.explain.test_real_packets import compiled, probes
from tests.observe.simulator.cases import CASES, GOLDEN, family_of_case
from vipd.cli.offline import Compilation
from vipd.dataplane.iptables.render import render as render_rules
from vipd.dataplane.nftables.render import render as render_table
from vipd.host.settings.settings import load_settings
from vipd.model.forwarding import Forwarding
from vipd.model.service import Balance, Family, Service, TrafficPolicy, family_of
from vipd.observe.explain.explanation import Explanation, explain
from vipd.observe.explain.query import ask
from vipd.observe.simulator import (
    Arrival,
    Host,
    Packet,
    PacketVerdict,
    SimulationResult,
    parse_ruleset,
    parse_tables,
    trace,
)

TOLERANCE = 0.01
"""By which shares may differ: weights are slots in one dataplane and probabilities in the other."""

MANY = 100
"""Of a service with so many backends one packet is enough."""

HOST = (*OWN, "192.168.100.1", "192.168.101.1", "fd00:100::1", "127.0.0.1", "::1")
SOURCES = {
    Family.IPV4: (
        "192.0.2.5",
        "198.51.100.7",
        "10.244.0.2",
        "10.244.9.9",
        "192.168.100.1",
        "10.244.0.1",
        "127.0.0.1",
    ),
    Family.IPV6: ("2001:db8:1::5", "fd00:244::2", "fd00:244:9::9", "fd00:100::1", "fd00:244::1"),
}
ELSEWHERE = {Family.IPV4: "192.0.2.99", Family.IPV6: "2001:db8::99"}

Fates = dict[tuple[str, str | None, bool], float]


def fates(found: SimulationResult) -> Fates:
    """What may become of a packet, and how likely; of what is not delivered only the verdict counts."""
    summed: defaultdict[tuple[str, str | None, bool], float] = defaultdict(float)
    for outcome in found.outcomes:
        delivered = outcome.verdict is PacketVerdict.DELIVERED
        backend = outcome.backend if delivered else None
        summed[str(outcome.verdict), backend, delivered and outcome.masqueraded] += outcome.probability
    return dict(summed)


def differ(one: Fates, other: Fates) -> bool:
    return any(abs(one.get(k, 0) - other.get(k, 0)) > TOLERANCE for k in {*one, *other})


def _known(packet: Packet, by_rules: Fates, by_table: Fates, forwardings: Iterable[Forwarding]) -> bool:
    """Whether a difference is one of those that are there:

    - a process whose own address is the backend that it reaches: with iptables its source is replaced by an
      address of this host, which it already was;
    - a node port under the local policy, no backend on this host, at an own address where node ports are
      closed: iptables drops it, the table leaves it alone.
    """
    itself = {b for _, b, _ in by_rules if b and ip_address(_address(b)) == ip_address(packet.source)}
    if packet.arriving is Arrival.LOCAL and itself:
        return not differ(*({k: p for k, p in f.items() if k[1] not in itself} for f in (by_rules, by_table)))
    empty = any(
        f.node_port == packet.port and f.external_policy is TrafficPolicy.LOCAL and not f.local_endpoints
        for f in forwardings
    )
    return empty and (set(by_rules), set(by_table)) == (
        {_only(PacketVerdict.DROPPED)},
        {_only(PacketVerdict.UNCHANGED)},
    )


def _only(verdict: PacketVerdict) -> tuple[str, str | None, bool]:
    return str(verdict), None, False


def _address(socket: str) -> str:
    return socket.rpartition(":")[0].strip("[]")


def explained(
    compilation: Compilation, source: str, target: str, family: Family
) -> tuple[Explanation, Explanation]:
    """What is told of a packet by both dataplanes."""
    forwardings, addresses = compilation.forwardings, compilation.host_addresses
    question = ask(source, target, forwardings, addresses)
    by_rules = explain(question, forwardings, compilation.options(family), addresses)
    return by_rules, explain(question, forwardings, compilation.table_options(family), addresses)


def contradictions(services: Iterable[Service], compilation: Compilation, family: Family) -> Iterator[str]:
    """Packets that the dataplanes do not treat alike."""
    compared = 0
    for _, to, sender in probes(services, family):
        one, other = explained(compilation, sender.address(family), str(to), family)
        compared += 1
        told = fates(one.trace), fates(other.trace)
        if differ(*told) and not _known(one.packet, *told, compilation.forwardings):
            yield f"{one.summary} | {other.summary}"
        elif not differ(*told):
            assert (one.verdict, one.reason, one.service_port, one.hint) == (
                other.verdict,
                other.reason,
                other.service_port,
                other.hint,
            )
    assert compared


@pytest.mark.parametrize("case", CASES)
def test_golden_cases(case: str) -> None:
    chosen = json.loads((GOLDEN / case / "case.json").read_text())["settings"]
    for key in ("compat", "chain_prefix"):
        # The nftables dataplane has no such form.
        chosen.pop(key, None)
    services, compilation = compiled((GOLDEN / case / "manifest.json").read_text(), chosen)
    few = tuple(service for service in services if len(service.backends) < MANY)
    assert list(contradictions(few, compilation, family_of_case(case))) == []
    for service in (service for service in services if service not in few):
        one, other = explained(compilation, "192.0.2.5", str(service.frontends()[0]), family_of_case(case))
        assert not differ(fates(one.trace), fates(other.trace))


@pytest.mark.parametrize("seed", some(generated.NATIVE, "agree"))
def test_generated_declarations(seed: int) -> None:
    chosen = generated.settings(seed)
    chosen.pop("compat", None)
    services, compilation = compiled(generated.declaration(seed), chosen)
    for family in sorted({f.key.family for f in compilation.forwardings}):
        here = [s for s in services if family_of(s.addresses[0]) is family]
        assert list(contradictions(here, compilation, family)) == []


_CIDRS: dict[str, Any] = {"cluster_cidrs": ["10.244.0.0/16", "fd00:244::/56"]}
_masquerade = st.sampled_from(
    [{}, {"masquerade": "always"}, {"masquerade": "hairpin"}, _CIDRS, {**_CIDRS, "masquerade": "forwarded"}]
)
_besides = st.fixed_dictionaries(
    {},
    optional={
        "node_port_addresses": st.sampled_from([["192.168.100.0/24"], ["10.244.0.0/16"]]),
        "reject_unused_ports": st.booleans(),
        "localhost_node_ports": st.booleans(),
        "dispatch": st.sampled_from(["flat", "grouped"]),
    },
)
some_settings = st.tuples(_masquerade, _besides).map(lambda both: {**both[0], **both[1]})


@pytest.mark.nightly
@settings(
    max_examples=examples(10),
    deadline=None,
    derandomize=True,
    # To shrink an example takes minutes; what failed is told by the message.
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(state(), some_settings)
def test_whole_rulesets_of_any_services(services: tuple[Service, ...], chosen: dict[str, Any]) -> None:
    """All forwardings together, ping too, sources on the host that are backends, closed node ports."""
    adapted = load_settings(None, {**chosen, "host_addresses": sorted(HOST)})
    compilation = Compilation.of(services, adapted, HOST)
    for family in Family:
        of_family = [f for f in compilation.forwardings if f.key.family is family]
        rules = parse_ruleset(render_rules(of_family, compilation.options(family)), family)
        table = parse_tables(render_table(of_family, compilation.table_options(family)), family)
        for packet in packets(of_family, family):
            told = fates(trace(rules, packet, Host(HOST))), fates(trace(table, packet, Host(HOST)))
            assert not differ(*told) or _known(packet, *told, of_family), (packet, *told)


def packets(forwardings: Collection[Forwarding], family: Family) -> Iterator[Packet]:
    """From every kind of source to every port, an unused one, node ports everywhere, and ping."""
    targets: dict[tuple[str, str, int | None], None] = {}
    own = [address for address in HOST if family_of(address) is family]
    for f in forwardings:
        protocol, ping = str(f.key.protocol), "icmp" if family is Family.IPV4 else "icmpv6"
        for address in (*f.addresses, *(e.address for e in f.external_addresses)):
            targets.update(dict.fromkeys([(address, protocol, f.port), (address, protocol, 7777)]))
            targets[address, ping, None] = None
        if f.node_port:
            targets.update({(address, protocol, f.node_port): None for address in (*own, ELSEWHERE[family])})
    for source in SOURCES[family]:
        arriving = Arrival.LOCAL if source in HOST else Arrival.FORWARDED
        for address, protocol, port in targets:
            if arriving is Arrival.LOCAL or not ip_address(address).is_loopback:
                yield Packet(source, address, protocol, port, arriving=arriving)


SOUND = """
apiVersion: vipd/v1
services:
  - name: s0
    address: [10.96.0.20, "fd00:10:96::20"]
    ports: [{port: 80, target: 8080}]
    backends: [10.244.1.10, 10.244.2.11, {address: 10.244.2.12, weight: 3}, "fd00:10:244:1::a"]
"""


def test_the_comparison_can_fail() -> None:
    services, compilation = compiled(SOUND, {})
    assert list(contradictions(services, compilation, Family.IPV4)) == []
    fewer = [replace(f, endpoints=f.endpoints[1:]) for f in compilation.forwardings]
    table = parse_tables(render_table(fewer, compilation.table_options(Family.IPV4)), Family.IPV4)
    packet = Packet("192.0.2.5", "10.96.0.20", "tcp", 80)
    told = explained(compilation, packet.source, "10.96.0.20:80", Family.IPV4)[0].trace
    assert differ(fates(told), fates(trace(table, packet, Host(HOST))))


def test_balances_share_by_weights() -> None:
    """Turns are shares to whoever comes next; a hash gives each client one backend, and all their shares."""
    (service,), _ = compiled(SOUND, {})
    for balance in Balance:
        compilation = Compilation.of(
            [replace(service, balance=balance)], load_settings(None, {"host_addresses": list(HOST)}), HOST
        )
        options = compilation.table_options(Family.IPV4)
        table = parse_tables(render_table(compilation.forwardings, options), Family.IPV4)
        counted: defaultdict[str, float] = defaultdict(float)
        clients = 3000 if balance is Balance.SOURCE_HASH else 1
        for client in range(clients):
            packet = Packet(f"10.11.{client >> 8}.{client & 255}", "10.96.0.20", "tcp", 80)
            for backend, share in trace(table, packet, Host(HOST)).shares().items():
                counted[backend] += share / clients
        wanted = {"10.244.1.10:8080": 0.2, "10.244.2.11:8080": 0.2, "10.244.2.12:8080": 0.6}
        assert dict(counted) == pytest.approx(wanted, abs=0.04 if clients > 1 else 1e-9)
