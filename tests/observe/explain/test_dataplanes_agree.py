"""The same declarations reach the same backends with the same shares in both dataplanes.

Two differences are known, and no more are let through; see `_known`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.dataplane.nftables.declared import OWN, state
from tests.lab.examples import examples, some
from tests.lab.inside import DATAPLANES, written
from tests.observe.explain import generated
from tests.observe.explain.asking import CASES, Declared, Json, family_of_case, golden
from tests.observe.explain.probes import families, on_the_host, probes
from vipd.model.service import Balance, Family, Service, TrafficPolicy, family_of, socket_text

TOLERANCE = 0.01
"""By which shares may differ: weights are slots in one dataplane and probabilities in the other."""

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


def fates(view: Json) -> Fates:
    """What may become of a packet, and how likely; of what is not delivered only the verdict counts."""
    delivered = {("delivered", b["endpoint"], b["masqueraded"]): float(b["share"]) for b in view["backends"]}
    refused: Fates = {}
    for outcome in view["outcomes"]:
        if outcome["verdict"] != "delivered":
            key = (outcome["verdict"], None, False)
            refused[key] = refused.get(key, 0.0) + outcome["probability"]
    return {**delivered, **refused}


def differ(one: Fates, other: Fates) -> bool:
    return any(abs(one.get(k, 0) - other.get(k, 0)) > TOLERANCE for k in {*one, *other})


def _known(packet: Json, by_rules: Fates, by_table: Fates, services: Iterable[Service]) -> bool:
    """Whether a difference is one of those that are there:

    - a process whose own address is the backend that it reaches: with iptables its source is replaced by an
      address of this host, which it already was;
    - a node port under the local policy, no backend on this host, at an own address where node ports are
      closed: iptables drops it, the table leaves it alone.
    """
    itself = {b for _, b, _ in by_rules if b and ip_address(_address(b)) == ip_address(packet["source"])}
    if packet["arriving"] == "local" and itself:
        return not differ(*({k: p for k, p in f.items() if k[1] not in itself} for f in (by_rules, by_table)))
    local = any(
        port.node_port == packet["port"] and service.external_policy is TrafficPolicy.LOCAL
        for service in services
        for port in service.ports
    )
    verdicts = [{verdict for verdict, _, _ in found} for found in (by_rules, by_table)]
    return local and verdicts == [{"dropped"}, {"unchanged"}]


def _address(socket: str) -> str:
    return socket.rpartition(":")[0].strip("[]")


def contradiction(declared: Declared, services: Iterable[Service], source: str, target: str) -> str:
    """How the dataplanes differ in what they do to a packet; empty when they do not."""
    one, other = (declared.explain(source, target, dataplane) for dataplane in DATAPLANES)
    told = fates(one), fates(other)
    if differ(*told):
        known = _known(one["packet"], *told, services)
        return "" if known else f"{one['summary']} | {other['summary']}"
    words = [
        {key: view[key] for key in ("verdict", "reason", "service_port", "hint")} for view in (one, other)
    ]
    return "" if words[0] == words[1] else f"{one['summary']}: {words}"


def contradictions(services: Iterable[Service], declared: Declared, family: Family) -> list[str]:
    """Packets that the dataplanes do not treat alike."""
    found = [
        contradiction(declared, services, sender.address(family), str(to))
        for _, to, sender in probes(services, family)
    ]
    assert found
    return [text for text in found if text]


@pytest.mark.parametrize("case", sorted({*CASES} - {"large-cluster"}))  # of a thousand: test_golden.py
def test_golden_cases(case: str) -> None:
    # The nftables dataplane has no such form.
    recorded = golden(case, compat=None, chain_prefix=None)
    services, declared = on_the_host(recorded.text, dict(recorded.settings))
    assert contradictions(services, declared, family_of_case(case)) == []


@pytest.mark.parametrize("seed", some(generated.NATIVE, "agree", 2))
def test_generated_declarations(seed: int) -> None:
    chosen = generated.settings(seed)
    chosen.pop("compat", None)
    services, declared = on_the_host(generated.declaration(seed), chosen)
    for family in families(services):
        here = [s for s in services if family_of(s.addresses[0]) is family]
        assert contradictions(here, declared, family) == []


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
PACKETS = 12
"""So many of each example."""


@settings(
    max_examples=examples(25),
    deadline=None,
    derandomize=True,
    # To shrink an example takes minutes; what failed is told by the message.
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(state(), some_settings, st.integers(0, 2**32))
def test_any_services(services: tuple[Service, ...], chosen: dict[str, Any], seed: int) -> None:
    """All services together, sources on the host that are backends, closed node ports; pings too."""
    services = sound(services)
    declared = Declared(
        written(services), {"host_addresses": HOST, "allowed_backends": ["0.0.0.0/0", "::/0"]} | chosen
    )
    every = [packet for family in Family for packet in packets(services, family)]
    for source, target in random.Random(seed).sample(every, min(PACKETS, len(every))):
        assert contradiction(declared, services, source, target) == ""
    for family in Family:
        by_rules, by_table = (declared.render(family, dataplane) for dataplane in DATAPLANES)
        pinged = re.findall(r"-d (\S+)/\d+ -p (?:ipv6-)?icmp .* -j REDIRECT", by_rules)
        (elements,) = re.findall(r"set pinged {[^}]*elements = {(.*?)}", by_table, re.DOTALL) or [""]
        assert not pinged or "@pinged icmp" in by_table
        assert sorted(pinged) == sorted(element.strip() for element in elements.split(",") if element.strip())


def sound(services: Iterable[Service]) -> tuple[Service, ...]:
    """What of services a declaration may say: nothing of a family in which one has no address."""
    return tuple(service for service in map(_sound, services) if service.all_addresses())


def _sound(service: Service) -> Service:
    external = tuple(
        e
        for e in service.external_addresses
        if not e.allow_from or family_of(e.address) in map(family_of, e.allow_from)
    )
    service = replace(service, external_addresses=external)
    own = {family_of(address) for address in service.all_addresses()}
    return replace(service, backends=tuple(b for b in service.backends if family_of(b.address) in own))


def packets(services: Iterable[Service], family: Family) -> Iterator[tuple[str, str]]:
    """From every kind of source to every port, an unused one, and node ports everywhere."""
    targets: dict[str, None] = {}
    own = [address for address in HOST if family_of(address) is family]
    for service in services:
        for to in service.frontends():
            addresses = [to.address] if to.address else [*own, ELSEWHERE[family]]
            for address in (each for each in addresses if family_of(each) is family):
                unused = [] if not to.address else [f"{socket_text(address, 7777)}/{to.protocol}"]
                targets.update(dict.fromkeys([f"{socket_text(address, to.port)}/{to.protocol}", *unused]))
    for source in SOURCES[family]:
        yield from ((source, to) for to in targets if source in HOST or not to.startswith(("127.", "[::1]")))


SOUND = """
apiVersion: vipd/v1
services:
  - name: s0
    address: [10.96.0.20, "fd00:10:96::20"]
    ports: [{port: 80, target: 8080}]
    backends: [10.244.1.10, 10.244.2.11, {address: 10.244.2.12, weight: 3}, "fd00:10:244:1::a"]
"""


@pytest.mark.parametrize("balance", Balance)
def test_balances_share_by_weights(balance: Balance) -> None:
    """Turns are shares to whoever comes next; a hash gives each client one backend, and all their shares."""
    text = SOUND.replace("    backends:", f"    balance: {balance}\n    backends:")
    _, declared = on_the_host(text, {"dataplane": "nftables"})
    clients = 30 if balance is Balance.SOURCE_HASH else 1
    counted: dict[str, float] = {}
    for client in range(clients):
        for backend in declared.explain(f"10.11.{client}.{client}", "10.96.0.20:80", "nftables")["backends"]:
            counted[backend["endpoint"]] = counted.get(backend["endpoint"], 0) + backend["share"] / clients
    wanted = {"10.244.1.10:8080": 0.2, "10.244.2.11:8080": 0.2, "10.244.2.12:8080": 0.6}
    assert counted == pytest.approx(wanted, abs=0.12 if clients > 1 else 1e-6)
