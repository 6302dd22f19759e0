"""Every golden case with real packets: the kernel's trace tells what explain says, on every dataplane."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from tests.lab.flow import Process, read_line
from tests.lab.node import Node
from tests.lab.topology import Lab, Wiring
from tests.observe.explain.probe_lab import SILENCE, ProbeLab, Sender
from tests.observe.explain.test_real_packets import compiled, probes
from tests.observe.simulator.cases import CASES, GOLDEN, family_of_case, rules_text
from vipd.cli.offline import Compilation
from vipd.dataplane.nftables.render import render as render_table
from vipd.model.service import Family, Frontend, Service, family_of
from vipd.observe.explain.explanation import explain
from vipd.observe.explain.query import ask

pytestmark = pytest.mark.root

DATAPLANES = ("iptables", "legacy", "nftables")
EMPTY = "*nat\nCOMMIT\n*filter\nCOMMIT\n"
ANSWER_SECONDS = 90.0
LONGEST_SECONDS = 280.0


class Probe(NamedTuple):
    """One packet to send, and what is expected of it."""

    sender: Sender
    to: Frontend
    explanation: dict[str, Any]


class Traced:
    """A lab in which packets are sent, and traced on the host."""

    def __init__(self, lab: Lab) -> None:
        self._host = lab.host
        self.probe_lab = ProbeLab(lab)
        self._follower = self._started(lab.host)
        self._tools: set[str] = set()

    def load(self, dataplane: str, rules: str, family: Family) -> None:
        """Replace all rules of the host by these."""
        if "nftables" in self._tools or dataplane == "nftables":
            self._host.run("nft", "flush", "ruleset")
        for tool in sorted(self._tools - {"nftables"}):
            self._host.run(tool, text=EMPTY)
        self._tools.clear()
        stem = "iptables" if family is Family.IPV4 else "ip6tables"
        variant = "-legacy" if dataplane == "legacy" else "-nft"
        tool = "nftables" if dataplane == "nftables" else f"{stem}{variant}-restore"
        self._tools.add(tool)
        if dataplane == "nftables":
            self._host.run("nft", "-f", "-", text=rules)
        else:
            self._host.run(tool, text=rules)
        self._host.run("conntrack", "-F")

    def faults(self, asked: list[Probe]) -> list[str]:
        """Send each packet; every one that was not traced, or went otherwise than expected."""
        assert self._follower.stdin is not None
        self._follower.stdin.write(json.dumps([self._request(*each) for each in asked]) + "\n")
        self._follower.stdin.flush()
        assert read_line(self._follower, ANSWER_SECONDS) == "READY"
        self.probe_lab.probe_silent([(each.sender, each.to, SILENCE) for each in asked])
        found = json.loads(read_line(self._follower, ANSWER_SECONDS))
        return [text for each, seen in zip(asked, found, strict=True) if (text := _fault(each, seen))]

    @staticmethod
    def _request(sender: Sender, to: Frontend, explanation: dict[str, Any]) -> dict[str, Any]:
        where = {"destination": to.address, "port": to.port, "protocol": str(to.protocol)}
        return {**where, "source": sender.address(family_of(to.address)), "explanation": explanation}

    @staticmethod
    def _started(host: Node) -> Process:
        return host.start(sys.executable, "-m", "tests.observe.live_trace.follower")


def _fault(asked: Probe, seen: dict[str, Any] | None) -> str:
    place = f"{asked.explanation['summary']}:"
    if seen is None:
        return f"{place} never came to the rules"
    if seen["agrees"]:
        return ""
    rules = [f"    {rule['table']} {rule['chain']}: {rule['rule']}" for rule in seen["rules"]]
    went = f"{seen['verdict']} to {seen['destination']}, masqueraded {seen['masqueraded']}"
    return "\n".join([f"{place} {went}; {seen['differences']}", *rules])


def asked(services: Iterable[Service], compilation: Compilation, family: Family, nft: bool) -> list[Probe]:
    """Every packet that can be sent, each with what explain says of it."""
    options = (compilation.table_options if nft else compilation.options)(family)
    found = {}
    for _, to, sender in probes(services, family):
        addresses = compilation.host_addresses
        question = ask(sender.address(family), str(to), compilation.forwardings, addresses)
        view = explain(question, compilation.forwardings, options, addresses).view()
        found[sender.address(family), to] = Probe(sender, to, view)
    return list(found.values())


Compiled = tuple[tuple[Service, ...], Compilation]


def read(case: str) -> Compiled:
    """The services of a case, and what they compile to."""
    settings = json.loads((GOLDEN / case / "case.json").read_text())["settings"]
    return compiled((GOLDEN / case / "manifest.json").read_text(), settings)


def faults_of(traced: Traced, what: Compiled, case: str, dataplane: str) -> list[str]:
    """Every packet of a case that goes otherwise than explain says."""
    services, compilation = what
    if case == "large-cluster":
        # Explaining 999 backends takes seconds; the rules of the other service are terse all the same.
        services = tuple(service for service in services if len(service.backends) < 10)
    family, nft = family_of_case(case), dataplane == "nftables"
    # The rules of iptables are those that a real kube-proxy wrote.
    rules = render_table(compilation.forwardings, compilation.table_options(family)) if nft else ""
    traced.load(dataplane, rules or rules_text(case), family)
    return traced.faults(asked(services, compilation, family, nft))


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Iterator[Mapping[tuple[str, str], Future[list[str]]]]:
    """The faults of each wanted case; a host for each dataplane, all at work at the same time."""
    mine = [item for item in request.session.items if item.path == request.path]
    calls = [item.callspec.params for item in mine if hasattr(item, "callspec")]
    wanted = [(params["case"], params["dataplane"]) for params in calls]
    done: dict[tuple[str, str], Future[list[str]]] = {each: Future() for each in wanted}
    # Not beside the tests: settings are read from the environment, too, in which pytest writes.
    cases = {case: read(case) for case in dict.fromkeys(case for case, _ in wanted)}

    def work(dataplane: str) -> None:
        mine = [each for each in wanted if each[1] == dataplane]
        try:
            with Lab(Wiring(backends=2, backends_apart=True)) as lab:
                traced = Traced(lab)
                for case in mine:
                    done[case].set_result(faults_of(traced, cases[case[0]], *case))
        except BaseException as error:  # told by the tests that have no result yet
            for case in mine:
                if not done[case].done():
                    done[case].set_exception(error)

    with ThreadPoolExecutor(len(DATAPLANES)) as pool:
        for dataplane in dict.fromkeys(name for _, name in wanted):
            pool.submit(work, dataplane)
        yield done


@pytest.mark.parametrize("dataplane", DATAPLANES)
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_does_what_explain_says(
    found: Mapping[tuple[str, str], Future[list[str]]], case: str, dataplane: str
) -> None:
    faults = found[case, dataplane].result(LONGEST_SECONDS)
    assert not faults, "\n".join(faults)
