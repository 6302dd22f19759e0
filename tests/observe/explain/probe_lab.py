"""A lab in which every address of the golden cases and of generated declarations is somewhere.

client: 10.10.0.2, 10.11.0.0/16 (outside), 10.244.9.9 (a pod elsewhere), 203.0.113.5
host:   192.0.2.2 and others
b1:     one backend of each service, so that it can be a client of its own service
b2:     every other backend
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.lab.flow import Process, read_line
from tests.lab.node import Node
from tests.lab.topology import UPLINK, Lab, add_addresses, ip
from tests.observe.explain.asking import Json
from vipd.model.service import Family, Frontend, family_of, socket_text

NODE = "192.168.100.1"
"""The host's address in the golden cases."""
OTHER_NODE = "192.168.101.1"
HOST_ADDRESSES = frozenset(
    {"127.0.0.1", "10.10.0.1", "10.244.0.1", UPLINK[4], NODE, OTHER_NODE}
    | {"::1", "fd00:10::1", "fd00:244::1", UPLINK[6], "fd00:100::1"}
)
ON_B1 = ("10.244.1.10", "10.244.1.11", "10.244.0.5", "10.244.3.38", "fd00:10:244:1::a")
ON_B2 = ("10.244.2.11", "10.244.2.12", "10.244.2.21", "10.244.3.12", "10.244.0.7", "fd00:10:244:2::b")
CLIENT = ("10.244.9.9", "203.0.113.5", "fd00:10:244:9::9")

TCP_PORTS = (53, 80, 5353, 8080, 8443, 9153)
UDP_PORTS = (53, 8080)
NODE_PORTS = (30080, 30081, 30082)

_RESTORE = {Family.IPV4: "iptables-restore", Family.IPV6: "ip6tables-restore"}

SILENCE = 0.4
"""Seconds after which a flow that should get no answer got none."""
PATIENCE = 20.0
"""Seconds that one may take that should get an answer."""
CERTAINTY = 35
"""The chance to miss any backend in one probe is below e to the minus this."""
LONGEST_BURST = 240.0


@dataclass(frozen=True)
class Sender:
    """Somebody who sends packets, with its address in each family."""

    program: str
    """Which of the lab's programs sends for it."""
    ipv4: str
    ipv6: str
    many: bool = False
    """It also has all of 10.11.0.0/16, which every rule treats like its address."""

    def address(self, family: Family) -> str:
        """Its address."""
        return self.ipv4 if family is Family.IPV4 else self.ipv6


SENDERS = (
    Sender("client", "10.10.0.2", "fd00:10::2", many=True),
    Sender("client", CLIENT[0], CLIENT[2]),
    Sender("client", CLIENT[1], "fd00:10::3"),
    Sender("host", UPLINK[4], UPLINK[6]),
)


def backend_sender(address: str) -> Sender:
    """One of b1's addresses."""
    return Sender("b1", address, address)


@dataclass(frozen=True)
class FlowOutcomes:
    """What became of flows: `endpoint, masqueraded` of those answered, and the kinds of failure."""

    reached: frozenset[tuple[str, bool]]
    failures: frozenset[str] = frozenset()

    def __or__(self, other: FlowOutcomes) -> FlowOutcomes:
        return FlowOutcomes(self.reached | other.reached, self.failures | other.failures)


class ProbeLab:
    """A lab with more addresses, and its programs running."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._made = 0
        self._wire()
        b1, b2 = lab.backends
        everywhere = [f"tcp/{port}" for port in TCP_PORTS]
        self._answer(b1, [*everywhere, *_udp(ON_B1)])
        self._answer(b2, [*everywhere, *_udp(ON_B2)])
        self._answer(lab.host, [f"tcp/{port}" for port in NODE_PORTS])
        nodes = {"client": lab.client, "host": lab.host, "b1": b1}
        self._senders = {name: self._program(node, "sender") for name, node in nodes.items()}

    def load(self, rules: str, family: Family) -> None:
        """Replace all rules of the host by these of iptables; no flow of before is remembered."""
        self._empty()
        self._lab.host.run(_RESTORE[family], text=rules)
        self._lab.host.run("conntrack", "-F")

    def load_table(self, table: str) -> None:
        """The same with a table of nftables."""
        self._empty()
        self._lab.host.run("nft", "-f", "-", text=table)
        self._lab.host.run("conntrack", "-F")

    def _empty(self) -> None:
        self._lab.host.run("nft", "flush", "ruleset")
        for tool in _RESTORE.values():
            self._lab.host.run(tool, text="*nat\nCOMMIT\n*filter\nCOMMIT\n")

    def probe(self, sender: Sender, to: Frontend, explanation: Json, *, pinned: bool = False) -> FlowOutcomes:
        """What becomes of as many flows as an explanation needs to be judged by; of two when `pinned`."""
        told = backends_of(explanation)
        seen = FlowOutcomes(frozenset())
        for flows in (2,) if pinned else bursts(explanation):
            seen |= self.send(sender, to, flows)
            if seen.reached >= told:
                break
        return seen

    def probe_silent(self, probes: Sequence[tuple[Sender, Frontend, float]]) -> list[FlowOutcomes]:
        """What becomes of one flow each, in so many seconds; all at the same time, because most wait for
        nothing."""
        indexed: dict[str, list[int]] = {}
        for index, (sender, _, _) in enumerate(probes):
            indexed.setdefault(sender.program, []).append(index)
        requests = {
            name: [
                self._request(sender, to, 1, seconds)
                for sender, to, seconds in (probes[index] for index in indexes)
            ]
            for name, indexes in indexed.items()
        }
        for name, asked in requests.items():
            self._tell(name, asked)
        seen: dict[int, FlowOutcomes] = {}
        for name, indexes in indexed.items():
            seen |= dict(zip(indexes, self._hear(name, requests[name]), strict=True))
        return [seen[index] for index in range(len(probes))]

    def send(self, sender: Sender, to: Frontend, flows: int) -> FlowOutcomes:
        """Make this many flows; what became of them."""
        requests = [self._request(sender, to, flows, PATIENCE)]
        self._tell(sender.program, requests)
        return self._hear(sender.program, requests)[0]

    def _request(self, sender: Sender, to: Frontend, flows: int, timeout: float) -> dict[str, Any]:
        family = family_of(to.address)
        sources = [sender.address(family)] * flows
        if flows > 1 and sender.many and family is Family.IPV4:
            sources = [f"10.11.{n // 250 % 250}.{n % 250 + 1}" for n in range(self._made, self._made + flows)]
            self._made += flows
        where = {"to": to.address, "port": to.port, "protocol": str(to.protocol)}
        return {**where, "timeout": timeout, "sources": sources}

    def _tell(self, name: str, requests: list[dict[str, Any]]) -> None:
        program = self._senders[name]
        assert program.stdin is not None
        program.stdin.write(json.dumps(requests) + "\n")
        program.stdin.flush()

    def _hear(self, name: str, requests: list[dict[str, Any]]) -> list[FlowOutcomes]:
        said = json.loads(read_line(self._senders[name], LONGEST_BURST))
        return [_seen(outcomes, asked["sources"]) for outcomes, asked in zip(said, requests, strict=True)]

    def _wire(self) -> None:
        lab = self._lab
        host, client = lab.host.namespace, lab.client.namespace
        b1, b2 = lab.backends
        lab.host.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
        add_addresses(host, "uplink", f"{NODE}/32", f"{OTHER_NODE}/32", "fd00:100::1/128")
        add_addresses(client, "eth0", *(_full(address) for address in CLIENT))
        ip("-n", client, "route", "add", "local", "10.11.0.0/16", "dev", "lo")
        ip("-n", host, "route", "add", "10.11.0.0/16", "via", lab.client.ipv4)
        add_addresses(b1.namespace, "eth0", *(_full(address) for address in ON_B1))
        add_addresses(b2.namespace, "eth0", *(_full(address) for address in ON_B2))
        nodes = ((lab.client, CLIENT), (b1, ON_B1), (b2, ON_B2))
        for address, node in ((address, node) for node, addresses in nodes for address in addresses):
            ip("-n", host, "route", "add", _full(address), "via", node.address(family_of(address)))

    def _answer(self, node: Node, places: Iterable[str]) -> None:
        self._program(node, "answerer", *places)

    def _program(self, node: Node, name: str, *words: str) -> Process:
        process = node.start(sys.executable, "-m", f"tests.observe.explain.{name}", *words)
        said = read_line(process)
        assert said == "READY", f"{name} in {node.namespace} did not start: {said!r}"
        return process


def silence(explanation: Json) -> float:
    """Seconds that a flow may take that meets no rules, or is dropped: the host answers or refuses what is
    left to it, and is given the time for that."""
    by_host = explanation["verdict"] == "unchanged" and explanation["packet"]["destination"] in HOST_ADDRESSES
    return PATIENCE if by_host else SILENCE


def bursts(explanation: Json) -> Iterator[int]:
    """Numbers of flows to make, one burst after the other, until all backends told of were seen.

    Together so many that one is missed only once in e to the `CERTAINTY`; the first alone are so many that a
    backend that was not told of hardly stays unseen.
    """
    shares = [backend["share"] for backend in explanation["backends"] if backend["share"]]
    if len(shares) < 2:
        yield 2 if shares else 1
        return
    left = math.ceil((math.log(len(shares)) + CERTAINTY) / min(shares))
    while left > 0:
        yield 8 * len(shares)
        left -= 8 * len(shares)


def difference(explanation: Json, seen: FlowOutcomes, *, pinned: bool = False) -> str:
    """How what was seen contradicts an explanation; empty when it does not.

    `pinned`: affinity kept all flows at one backend, so that the others need not be seen.
    """
    told, failures, packet = backends_of(explanation), _failures(explanation), explanation["packet"]
    if explanation["verdict"] == "unchanged" and packet["destination"] in HOST_ADDRESSES:
        if packet["port"] in NODE_PORTS and packet["protocol"] == "tcp":
            here = socket_text(packet["destination"], packet["port"])
            told, failures = frozenset({(here, False)}), frozenset()
        else:
            failures = frozenset({"refused"})
    same = bool(seen.reached) and seen.reached <= told if pinned and told else seen.reached == told
    if same and (seen.failures <= failures if failures else not seen.failures):
        return ""
    return f"{explanation['summary']}\n  told {sorted(told)} or {sorted(failures)}\n  seen {seen}"


def backends_of(explanation: Json) -> frozenset[tuple[str, bool]]:
    """Each backend that is told of, and whether masqueraded. A share of zero is none."""
    return frozenset((b["endpoint"], b["masqueraded"]) for b in explanation["backends"])


def _failures(explanation: Json) -> frozenset[str]:
    """How flows may fail that meet this verdict."""
    packet = explanation["packet"]
    at_once = ("EPERM",) if packet["protocol"] == "udp" and packet["arriving"] == "local" else ()
    return {
        # A datagram that a rule refuses, or drops, on its way out fails at once.
        "rejected": frozenset({"refused", *at_once}),
        "dropped": frozenset({"timeout", *at_once}),
        "unchanged": frozenset({"timeout", "EHOSTUNREACH", "ENETUNREACH"}),
    }.get(explanation["verdict"], frozenset())


def _seen(outcomes: Iterable[str], sources: Collection[str]) -> FlowOutcomes:
    pairs = [outcome.partition(" ") for outcome in outcomes]
    reached = [(endpoint, source.strip("[]")) for endpoint, _, source in pairs if source]
    return FlowOutcomes(
        frozenset((endpoint, _masqueraded(source, sources)) for endpoint, source in reached),
        frozenset(failure for failure, _, source in pairs if not source),
    )


def _masqueraded(source: str, sources: Collection[str]) -> bool:
    assert source in sources or source in HOST_ADDRESSES, f"a backend saw {source}: neither client nor host"
    return source not in sources


def _full(network: str) -> str:
    return f"{network}/{family_of(network).bits}"


def _udp(addresses: Iterable[str]) -> list[str]:
    return [f"udp/{socket_text(address, port)}" for address in addresses for port in UDP_PORTS]
