"""What `explain` says against what real packets meet: a real kube-proxy's rules, and vipd's own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from tests.lab.topology import Lab, Wiring
from tests.observe.explain import generated
from tests.observe.explain.probe_lab import (
    HOST_ADDRESSES,
    NODE,
    ON_B1,
    OTHER_NODE,
    SENDERS,
    ProbeLab,
    Sender,
    backend_sender,
    difference,
    silence,
)
from tests.observe.simulator.cases import CASES, GOLDEN, family_of_case, rules_text
from vipd.cli.offline import Compilation
from vipd.dataplane.base import DATAPLANES, DataplaneName
from vipd.dataplane.iptables.render import render
from vipd.dataplane.nftables.render import render as render_table
from vipd.declaration.native import parse_declaration
from vipd.host.settings.settings import load_settings
from vipd.model.forwarding import Forwarding
from vipd.model.service import Affinity, Balance, Family, Frontend, Masquerade, Service, family_of
from vipd.observe.explain.explanation import Explanation, explain
from vipd.observe.explain.query import ask
from vipd.observe.simulator import PacketVerdict

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def probe_lab() -> Iterator[ProbeLab]:
    with Lab(Wiring(backends=2, backends_apart=True)) as lab:
        yield ProbeLab(lab)


def compiled(text: str, settings: dict[str, object]) -> tuple[tuple[Service, ...], Compilation]:
    """The services of a declaration, and what a daemon on the lab's host makes of them."""
    declared = parse_declaration(text, "declared")
    assert declared.problems == ()
    adapted = load_settings(None, {**settings, "host_addresses": sorted(HOST_ADDRESSES)})
    return declared.services, Compilation.of(declared.services, adapted, HOST_ADDRESSES)


def asked(
    compilation: Compilation, sender: Sender, to: Frontend, dataplane: DataplaneName = "iptables"
) -> Explanation:
    """What explain says of a sender and a frontend."""
    addresses = compilation.host_addresses
    source = sender.address(family_of(to.address))
    question = ask(source, str(to), compilation.forwardings, addresses)
    by_table = dataplane == "nftables"
    options = (compilation.table_options if by_table else compilation.options)(question.packet.family)
    return explain(question, compilation.forwardings, options, addresses)


def load(probe_lab: ProbeLab, compilation: Compilation, dataplane: DataplaneName) -> None:
    """Put a compilation's IPv4 rules into the host."""
    if dataplane == "nftables":
        probe_lab.load_table(render_table(compilation.forwardings, compilation.table_options(Family.IPV4)))
    else:
        probe_lab.load(render(compilation.forwardings, compilation.options(Family.IPV4)), Family.IPV4)


def targets(service: Service, family: Family) -> Iterator[Frontend]:
    """Every frontend of a service, its node ports at two addresses of the host, and a port it lacks."""
    for frontend in service.frontends():
        if frontend.address:
            if family_of(frontend.address) is family:
                yield frontend
        elif family is Family.IPV4:
            yield from (frontend._replace(address=address) for address in (NODE, OTHER_NODE))
    own = [address for address in service.addresses if family_of(address) is family]
    yield from (Frontend(address, 7, service.ports[0].protocol) for address in own[:1])


def senders(service: Service, family: Family) -> list[Sender]:
    """The usual ones, and the service's backend on b1 if there is one."""
    own = [b.address for b in service.backends if b.address in ON_B1 and family_of(b.address) is family]
    return [*SENDERS, *map(backend_sender, own)]


def probes(services: Iterable[Service], family: Family) -> Iterator[tuple[Service, Frontend, Sender]]:
    """Who sends to what."""
    for service in services:
        for to in dict.fromkeys(targets(service, family)):
            yield from ((service, to, sender) for sender in senders(service, family))


def contradictions(
    probe_lab: ProbeLab,
    services: Iterable[Service],
    compilation: Compilation,
    family: Family,
    dataplane: DataplaneName = "iptables",
) -> list[str]:
    """Every packet of every sender whose fate explain does not tell right."""
    found, silent = [], []
    for service, to, sender in probes(services, family):
        if service.balance is Balance.SOURCE_HASH:
            # What is told is of this address alone.
            sender = replace(sender, many=False)
        explanation = asked(compilation, sender, to, dataplane)
        if explanation.verdict in (PacketVerdict.DROPPED, PacketVerdict.UNCHANGED):
            silent.append((explanation, (sender, to, silence(explanation))))
            continue
        pinned = service.affinity is not None and not (sender.many and family is Family.IPV4)
        seen = probe_lab.probe(sender, to, explanation, pinned=pinned)
        found.append(difference(explanation, seen, pinned=pinned))
    nothing = probe_lab.probe_silent([probe for _, probe in silent])
    found += [difference(explanation, seen) for (explanation, _), seen in zip(silent, nothing, strict=True)]
    assert len(found) >= len(SENDERS), "nothing was compared"
    return [text for text in found if text]


@pytest.mark.parametrize("case", CASES)
def test_rules_that_kube_proxy_wrote(probe_lab: ProbeLab, case: str) -> None:
    settings = json.loads((GOLDEN / case / "case.json").read_text())["settings"]
    services, compilation = compiled((GOLDEN / case / "manifest.json").read_text(), settings)
    if case == "large-cluster":
        # 999 backends would take ten thousands of flows; the other service's rules are terse all the same.
        services = tuple(service for service in services if len(service.backends) < 10)
    family = family_of_case(case)
    probe_lab.load(rules_text(case), family)
    assert contradictions(probe_lab, services, compilation, family) == []


@pytest.mark.parametrize("seed", generated.NATIVE)
def test_rules_that_vipd_writes(probe_lab: ProbeLab, seed: int) -> None:
    services, compilation = compiled(generated.declaration(seed), generated.settings(seed))
    for family in sorted({f.key.family for f in compilation.forwardings}):
        here = [s for s in services if family_of(s.addresses[0]) is family]
        probe_lab.load(render(compilation.forwardings, compilation.options(family)), family)
        assert contradictions(probe_lab, here, compilation, family) == []


@pytest.mark.parametrize("seed", generated.TABLES)
def test_tables_that_vipd_writes(probe_lab: ProbeLab, seed: int) -> None:
    settings = {**generated.settings(seed), "dataplane": "nftables"}
    settings.pop("compat", None)
    services, compilation = compiled(generated.balanced(seed), settings)
    for family in sorted({f.key.family for f in compilation.forwardings}):
        here = [s for s in services if family_of(s.addresses[0]) is family]
        probe_lab.load_table(render_table(compilation.forwardings, compilation.table_options(family)))
        assert contradictions(probe_lab, here, compilation, family, "nftables") == []


SOUND = """
apiVersion: vipd/v1
services:
  - name: s0
    address: 10.96.0.20
    ports: [{port: 80, target: 8080}]
    backends: [10.244.1.10, 10.244.2.11, 10.244.2.12]
"""


def without_last(forwarding: Forwarding) -> Forwarding:
    return replace(forwarding, endpoints=forwarding.endpoints[:-1])


def with_another(forwarding: Forwarding) -> Forwarding:
    another = forwarding.endpoints[0]._replace(address="10.244.2.21")
    return replace(forwarding, endpoints=(*forwarding.endpoints, another))


WRONG = {
    "a backend less": without_last,
    "a backend more": with_another,
    "no backend": lambda f: replace(f, endpoints=(), has_endpoints=False),
    "none on this host": lambda f: replace(f, endpoints=()),
    "kept sources": lambda f: replace(f, masquerade=Masquerade.HAIRPIN),
    "hidden sources": lambda f: replace(f, masquerade=Masquerade.ALWAYS),
    "another port": lambda f: replace(f, port=81),
}


@pytest.mark.nightly(each_time="iptables")
@pytest.mark.parametrize("dataplane", DATAPLANES)
def test_the_comparison_can_fail(probe_lab: ProbeLab, dataplane: DataplaneName) -> None:
    services, compilation = compiled(SOUND, {})
    load(probe_lab, compilation, dataplane)
    assert contradictions(probe_lab, services, compilation, Family.IPV4, dataplane) == []
    unseen = []
    for fault, wronged in WRONG.items():
        wrong = replace(compilation, forwardings=tuple(map(wronged, compilation.forwardings)))
        if not contradictions(probe_lab, services, wrong, Family.IPV4, dataplane):
            unseen.append(fault)
    assert unseen == []


@pytest.mark.parametrize("dataplane", DATAPLANES)
def test_pinned_flows_stay_within_what_is_told(probe_lab: ProbeLab, dataplane: DataplaneName) -> None:
    (service,), _ = compiled(SOUND, {})
    kept = replace(service, affinity=Affinity())
    settings = load_settings(None, {"host_addresses": sorted(HOST_ADDRESSES)})
    compilation = Compilation.of([kept], settings, HOST_ADDRESSES)
    load(probe_lab, compilation, dataplane)
    explanation = asked(compilation, SENDERS[1], kept.frontends()[0], dataplane)
    # The first alone: of flows that begin at the same moment each may choose.
    seen = probe_lab.send(SENDERS[1], kept.frontends()[0], 1)
    seen |= probe_lab.send(SENDERS[1], kept.frontends()[0], 19)
    assert len(seen.reached) == 1
    assert difference(explanation, seen, pinned=True) == ""
    assert any("keeps its backend" in note for note in explanation.notes)
