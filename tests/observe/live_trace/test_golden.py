"""Every golden case with real packets: the kernel's trace tells what explain says, in the same words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from tests.lab.inside import DATAPLANES
from tests.lab.topology import Lab, Wiring
from tests.observe.explain.asking import CASES, Json, family_of_case, golden, rules_text
from tests.observe.explain.probe_lab import SILENCE, ProbeLab, Sender
from tests.observe.explain.probes import on_the_host, probes
from tests.observe.live_trace.tracing import Predicting, documents, predicting, waiting
from vipd.model.service import Family, Frontend

pytestmark = pytest.mark.root

EMPTY = "*nat\nCOMMIT\n*filter\nCOMMIT\n"
ANSWER_SECONDS = 20.0


class Probe(NamedTuple):
    """One packet to send, and what is expected of it."""

    sender: Sender
    source: str
    to: Frontend
    explanation: Json


class Case(NamedTuple):
    """What is to be loaded and sent."""

    family: Family
    rules: str
    prefix: str
    probes: Sequence[Probe]


def case_of(case: str, dataplane: str) -> Case:
    """A case with the rules that a real kube-proxy wrote, or with vipd's table."""
    own: dict[str, object] = {"compat": None, "chain_prefix": None, "dataplane": dataplane}
    own = own if dataplane == "nftables" else {}
    recorded = golden(case, **own)
    services, declared = on_the_host(recorded.text, dict(recorded.settings))
    # Explaining 999 backends takes seconds; the rules of the other service are terse all the same.
    services = tuple(service for service in services if len(service.backends) < 10)
    family = family_of_case(case)
    # A kube-proxy leaves out comments where there are many backends, so that they say less.
    terse = {"terse": case == "large-cluster"}
    rules = declared.render(family, dataplane) if own else rules_text(case)
    found = {
        (source, to): Probe(sender, source, to, declared.explain(source, str(to), dataplane) | terse)
        for _, to, sender in probes(services, family)
        for source in [sender.address(family)]
    }
    return Case(family, rules, "VIPD" if own else "KUBE", list(found.values()))


class Traced:
    """A lab in which packets are sent, and traced on the host."""

    def __init__(self, lab: Lab, dataplane: str, daemon: Predicting) -> None:
        self._host, self.dataplane, self._daemon = lab.host, dataplane, daemon
        self._probe_lab = ProbeLab(lab)
        self._tool = ""

    def faults(self, case: Case) -> list[str]:
        """Send each packet; every one that was not traced, or went otherwise than explain says."""
        self._load(case)
        self._daemon.prefix = case.prefix
        self._daemon.predictions = {(p.source, str(p.to)): p.explanation for p in case.probes}
        by_target: defaultdict[Frontend, list[Probe]] = defaultdict(list)
        for probe in case.probes:
            by_target[probe.to].append(probe)
        return list(self._traced(by_target))

    def _traced(self, by_target: Mapping[Frontend, list[Probe]]) -> Iterator[str]:
        with ExitStack() as stack:
            processes = {
                to: stack.enter_context(
                    waiting(self._host, self._daemon.socket, "--follow", "-o", "json", str(to))
                )
                for to in by_target
            }
            every = [probe for of_target in by_target.values() for probe in of_target]
            self._probe_lab.probe_silent([(probe.sender, probe.to, SILENCE) for probe in every])
            for to, process in processes.items():
                left = {probe.source: probe for probe in by_target[to]}
                for seen in documents(process, ANSWER_SECONDS):
                    # Some packets are sent again, and traced again.
                    if probe := left.pop(seen["packet"]["source"], None):
                        yield from _faults(probe.explanation, seen)
                    if not left:
                        break
                if left:
                    yield f"{to}: nothing came of {list(left)}"

    def _load(self, case: Case) -> None:
        """Replace all rules of the host."""
        if self.dataplane == "nftables":
            self._host.run("nft", "flush", "ruleset")
        elif self._tool:
            self._host.run(self._tool, text=EMPTY)
        stem = "iptables" if case.family is Family.IPV4 else "ip6tables"
        self._tool = f"{stem}-nft-restore"
        if self.dataplane == "nftables":
            self._host.run("nft", "-f", "-", text=case.rules)
        else:
            self._host.run(self._tool, text=case.rules)
        self._host.run("conntrack", "-F")


def _faults(explanation: Json, seen: Json) -> Iterator[str]:
    """How a trace contradicts an explanation, or says in other words what a rule does."""
    if not seen["agrees"]:
        went = f"{seen['verdict']} to {seen['destination']}, masqueraded {seen['masqueraded']}"
        rules = [f"    {rule['table']} {rule['chain']}: {rule['rule']}" for rule in seen["rules"]]
        yield "\n".join([f"{explanation['summary']}: {went}; {seen['differences']}", *rules])
        return
    if explanation["terse"]:
        return
    words: defaultdict[str, set[str]] = defaultdict(set)
    for rule in (rule for outcome in explanation["outcomes"] for rule in outcome["rules"]):
        words[rule["chain"]].add(_plain(rule["meaning"]))
    for rule in (rule for rule in seen["rules"] if rule["vipd"] and rule["rule"]):
        chain, does = rule["chain"], _plain(rule["does"])
        # Which slot it was the kernel does not say.
        if chain in words and not any(text.startswith(does) for text in words[chain]):
            yield f"{explanation['summary']}: {chain}: {does!r} is none of {words[chain]}"


def _plain(text: str) -> str:
    """Without the braces around a set of one, which the kernel does not print."""
    return text.replace("{ ", "").replace(" }", "")


@pytest.fixture(scope="module", params=DATAPLANES)
def traced(request: pytest.FixtureRequest) -> Iterator[Traced]:
    with Lab(Wiring(backends=2, backends_apart=True)) as lab, predicting() as daemon:
        yield Traced(lab, request.param, daemon)


@pytest.mark.nightly(each_time="ranges")
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_does_what_explain_says(traced: Traced, case: str) -> None:
    faults = traced.faults(case_of(case, traced.dataplane))
    assert not faults, "\n".join(faults)
