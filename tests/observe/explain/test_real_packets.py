"""What `explain` says against what real packets meet: a real kube-proxy's rules, and vipd's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from tests.lab.examples import some
from tests.lab.inside import DATAPLANES
from tests.lab.topology import Lab, Wiring
from tests.observe.explain import generated
from tests.observe.explain.asking import CASES, Declared, family_of_case, golden, rules_text
from tests.observe.explain.probe_lab import SENDERS, ProbeLab, difference, silence
from tests.observe.explain.probes import families, on_the_host, probes
from vipd.model.service import Balance, Family, Service, family_of

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def probe_lab() -> Iterator[ProbeLab]:
    with Lab(Wiring(backends=2, backends_apart=True)) as lab:
        yield ProbeLab(lab)


def load(probe_lab: ProbeLab, declared: Declared, family: Family, dataplane: str) -> None:
    """Put the rules of a declaration into the host."""
    if dataplane == "nftables":
        probe_lab.load_table(declared.render(family, dataplane))
    else:
        probe_lab.load(declared.render(family), family)


def contradictions(
    probe_lab: ProbeLab,
    services: Iterable[Service],
    declared: Declared,
    family: Family,
    dataplane: str = "iptables",
) -> list[str]:
    """Every packet of every sender whose fate explain does not tell right."""
    found, silent = [], []
    for service, to, sender in probes(services, family):
        if service.balance is Balance.SOURCE_HASH:
            # What is told is of this address alone.
            sender = replace(sender, many=False)
        explanation = declared.explain(sender.address(family), str(to), dataplane)
        if explanation["verdict"] in ("dropped", "unchanged"):
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
    recorded = golden(case)
    services, declared = on_the_host(recorded.text, dict(recorded.settings))
    if case == "large-cluster":
        # 999 backends would take ten thousands of flows; the other service's rules are terse all the same.
        services = tuple(service for service in services if len(service.backends) < 10)
    family = family_of_case(case)
    probe_lab.load(rules_text(case), family)
    assert contradictions(probe_lab, services, declared, family) == []


@pytest.mark.parametrize(
    ("dataplane", "seed"),
    [
        *(("iptables", seed) for seed in some(generated.NATIVE, "packets")),
        *(("nftables", seed) for seed in some(generated.TABLES, "packets")),
    ],
)
def test_rules_that_vipd_writes(probe_lab: ProbeLab, dataplane: str, seed: int) -> None:
    settings = generated.settings(seed)
    text = generated.declaration(seed)
    if dataplane == "nftables":
        settings = {**settings, "dataplane": dataplane}
        settings.pop("compat", None)
        text = generated.balanced(seed)
    services, declared = on_the_host(text, settings)
    for family in families(services):
        here = [service for service in services if family_of(service.addresses[0]) is family]
        load(probe_lab, declared, family, dataplane)
        assert contradictions(probe_lab, here, declared, family, dataplane) == []


SOUND = """
apiVersion: vipd/v1
services:
  - name: s0
    address: 10.96.0.20
    ports: [{port: 80, target: 8080}]
    backends: [10.244.1.10, 10.244.2.11, 10.244.2.12]
"""
BACKENDS = "[10.244.1.10, 10.244.2.11, 10.244.2.12]"


@pytest.mark.parametrize("dataplane", DATAPLANES)
def test_pinned_flows_stay_within_what_is_told(probe_lab: ProbeLab, dataplane: str) -> None:
    (kept,), declared = on_the_host(f"{SOUND}    affinity: {{by: client-ip}}\n", {})
    load(probe_lab, declared, Family.IPV4, dataplane)
    explanation = declared.explain(SENDERS[1].ipv4, str(kept.frontends()[0]), dataplane)
    # The first alone: of flows that begin at the same moment each may choose.
    seen = probe_lab.send(SENDERS[1], kept.frontends()[0], 1)
    seen |= probe_lab.send(SENDERS[1], kept.frontends()[0], 19)
    assert len(seen.reached) == 1
    assert difference(explanation, seen, pinned=True) == ""
    assert any("keeps its backend" in note for note in explanation["notes"])


@pytest.mark.parametrize("family", list(Family), ids=str)
def test_each_client_reaches_the_backend_that_its_address_hashes_to(
    probe_lab: ProbeLab, family: Family
) -> None:
    text = SOUND.replace(BACKENDS, f"{BACKENDS}\n    balance: source-hash")
    if family is Family.IPV6:
        text = text.replace("10.96.0.20", '"fd00:96::20"')
        text = text.replace(BACKENDS, '["fd00:10:244:1::a", "fd00:10:244:2::b"]')
    (service,), declared = on_the_host(text, {"dataplane": "nftables"})
    load(probe_lab, declared, family, "nftables")
    to = service.frontends()[0]
    clients = [replace(s, many=False) for s in SENDERS]
    if family is Family.IPV4:
        clients += [replace(SENDERS[0], ipv4=f"10.11.{n}.{n + 7}", many=False) for n in range(30)]
    wrong, reached = [], set()
    for client in clients:
        explanation = declared.explain(client.address(family), str(to), "nftables")
        reached |= {backend["endpoint"] for backend in explanation["backends"]}
        wrong.append(difference(explanation, probe_lab.send(client, to, 2)))
    assert [text for text in wrong if text] == []
    assert len(reached) == len(service.backends)
