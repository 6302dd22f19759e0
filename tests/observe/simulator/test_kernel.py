"""The simulator against the kernel: its own print of the rules, and the counters real packets leave."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from tests.lab.namespace_names import new_prefix
from tests.observe.simulator.cases import CASES, HOST, OUTSIDE, PACKETS, family_of_case, rules_text, send
from vipd.model.service import Family
from vipd.observe.simulator import Host, Packet, SimulationResult, parse_ruleset, trace

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(
        shutil.which("iptables-restore") is None or shutil.which("ip") is None,
        reason="iptables-restore or ip is not installed",
    ),
]


T = TypeVar("T")


def run(*command: str, stdin: str = "") -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


class Namespace:
    """A network namespace of this test alone."""

    def __init__(self) -> None:
        self.name = f"{new_prefix()}-trace"
        run("ip", "netns", "add", self.name)

    def __call__(self, *command: str, stdin: str = "") -> str:
        return run("ip", "netns", "exec", self.name, *command, stdin=stdin)

    def restore(self, text: str, family: Family = Family.IPV4) -> str:
        """Load rules and read them back."""
        tool = "ip6tables" if family is Family.IPV6 else "iptables"
        self(f"{tool}-restore", stdin=text)
        return "".join(self(f"{tool}-save", "-t", table) for table in ("nat", "filter"))

    def hit(self) -> set[str]:
        """The rules that packets have matched, without their counters."""
        lines = "".join(self("iptables-save", "-c", "-t", table) for table in ("nat", "filter")).splitlines()
        counted = [line for line in lines if line.startswith("[")]
        return {line.split("] ", 1)[1] for line in counted if not line.startswith("[0:")}


@pytest.fixture
def make_namespace() -> Iterator[Callable[[], Namespace]]:
    made: list[Namespace] = []

    def make() -> Namespace:
        made.append(Namespace())
        return made[-1]

    yield make
    for namespace in made:
        run("ip", "netns", "del", namespace.name)


def meaning(found: SimulationResult) -> list[tuple[object, ...]]:
    return [(o.verdict, o.backend, o.probability, o.masqueraded, len(o.steps)) for o in found.outcomes]


@pytest.mark.parametrize("case", CASES)
def test_saved_and_restored_text_trace_equally(case: str, make_namespace: Callable[[], Namespace]) -> None:
    family = family_of_case(case)
    text = rules_text(case)
    # As vipd writes it: ten digits, a mark by its bits, the address without its length.
    written = (
        text.replace("0.33333333349", "0.3333333333")
        .replace("--set-xmark 0x4000/0x4000", "--or-mark 0x00004000")
        .replace("--set-xmark 0x4000/0x0", "--xor-mark 0x00004000")
        .replace("/32 ", " ")
    )
    saved = make_namespace().restore(written, family)
    assert saved != written
    before, after = parse_ruleset(written, family), parse_ruleset(saved, family)
    for packet in PACKETS[family]:
        assert meaning(trace(before, packet, HOST)) == meaning(trace(after, packet, HOST))


MARKED = """*nat
:SVC - [0:0]
:MASQ - [0:0]
-A PREROUTING -j SVC
-A OUTPUT -j SVC
-A SVC -d 10.96.0.9/32 -p udp -m udp --dport 53 -j MASQ
-A SVC -d 10.96.0.9/32 -p udp -m udp --dport 53 -j DNAT --to-destination 192.168.100.1:5353
-A MASQ -j MARK --set-xmark 0x4000/0x4000
-A INPUT -m comment --comment "nat input"
-A POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A POSTROUTING -j MASQUERADE --random-fully
COMMIT
*filter
:SEEN - [0:0]
-A INPUT -j SEEN
-A FORWARD -j SEEN
-A OUTPUT -j SEEN
-A SEEN -m conntrack --ctstate NEW
-A SEEN -m conntrack --ctstate DNAT
-A SEEN -m conntrack --ctstate SNAT
-A SEEN -m conntrack ! --ctstate DNAT,SNAT
-A SEEN -m mark --mark 0x4000/0x4000
-A SEEN -m mark ! --mark 0x4000/0x4000
-A SEEN -m addrtype --src-type LOCAL
-A SEEN -m addrtype ! --src-type LOCAL
-A SEEN -m addrtype --dst-type LOCAL
-A SEEN -s 192.168.100.1/32
-A SEEN -s 192.168.5.5/32
-A SEEN -s 127.0.0.1/32
-A SEEN -i lo
-A SEEN ! -i lo
-A SEEN -o lo
-A SEEN -o back0
-A SEEN ! -o lo
-A SEEN -d 192.168.100.1/32 -p udp -m udp --dport 5353
-A SEEN -p udp -m udp ! --dport 5353 -j RETURN
-A SEEN -m recent --set --name LATELY --mask 255.255.255.255 --rsource
-A SEEN -m recent --rcheck --name LATELY --mask 255.255.255.255 --rsource
COMMIT
"""

SENDER = """
import contextlib, socket, sys
source, destination, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    sender.bind((source, 0))
    with contextlib.suppress(PermissionError):  # how a drop in OUTPUT shows
        sender.sendto(b"x", (destination, port))
"""


@pytest.mark.parametrize(
    ("text", "sender", "source", "to", "port"),
    [
        (MARKED, "host", "192.168.100.1", "10.96.0.9", 53),
        (MARKED, "host", "127.0.0.1", "192.168.100.1", 99),
        (MARKED, "host", "192.168.100.1", "10.96.0.10", 53),
        (MARKED, "client", OUTSIDE, "10.96.0.9", 53),
        (MARKED, "client", OUTSIDE, "10.96.0.10", 53),
        (MARKED, "client", OUTSIDE, "192.168.100.1", 99),
        (MARKED.replace("192.168.100.1:5353", "10.244.1.10"), "client", OUTSIDE, "10.96.0.9", 53),
        (MARKED.replace("192.168.100.1:5353", "10.244.1.10"), "host", "192.168.100.1", "10.96.0.9", 53),
        (rules_text("clusterip-1ep").replace("tcp", "udp"), "client", OUTSIDE, "10.96.0.20", 80),
        (rules_text("clusterip-1ep").replace("tcp", "udp"), "host", "192.168.100.1", "10.96.0.20", 80),
        (rules_text("lb-source-ranges").replace("tcp", "udp"), "client", OUTSIDE, "198.51.100.5", 80),
        (rules_text("no-endpoints").replace("tcp", "udp"), "client", OUTSIDE, "10.96.0.20", 80),
        (rules_text("itp-local-none").replace("tcp", "udp"), "host", "192.168.100.1", "10.96.0.20", 80),
        (rules_text("nodeport-etp-local").replace("tcp", "udp"), "client", OUTSIDE, "192.168.100.1", 30080),
    ],
)
def test_the_rules_that_count_a_packet_are_the_steps(
    make_namespace: Callable[[], Namespace], text: str, sender: str, source: str, to: str, port: int
) -> None:
    host, client = make_namespace(), make_namespace()
    connect(host, client)
    # Answers of closed ports and of REJECT are packets of their own: they must not count.
    host("iptables", "-t", "raw", "-A", "OUTPUT", "-p", "icmp", "-j", "DROP")
    saved = host.restore(text)
    place = host if sender == "host" else client
    place("python3", "-c", SENDER, source, to, str(port))
    packet = send(source, to, "udp", port)
    packet = Packet(
        source,
        to,
        "udp",
        port,
        arriving=packet.arriving,
        in_interface=None if sender == "host" else "front0",
        out_interface="back0",
    )
    found = trace(parse_ruleset(saved, Family.IPV4), packet, Host(("192.168.100.1", "192.168.5.1")))
    assert len(found.outcomes) == 1
    steps = {s.rule for s in found.outcomes[0].steps}
    assert eventually(host.hit, steps) == steps


def eventually(ask: Callable[[], T], wanted: T) -> T:
    """The answer once it is as wanted; else the last one. A packet may still be on its way, or waits a second
    for its neighbour's address."""
    end = time.monotonic() + 20
    while (found := ask()) != wanted and time.monotonic() < end:
        time.sleep(0.05)
    return found


def connect(host: Namespace, client: Namespace) -> None:
    """client (192.168.5.5) - front0 host back0 - nobody, who takes all packets for the other networks."""
    host("ip", "link", "set", "lo", "up")
    host("ip", "link", "add", "front0", "type", "veth", "peer", "name", "c0", "netns", client.name)
    host("ip", "link", "add", "back0", "type", "veth", "peer", "name", "nobody")
    host("ip", "addr", "add", "192.168.100.1/24", "dev", "back0")
    host("ip", "addr", "add", "192.168.5.1/24", "dev", "front0")
    client("ip", "addr", "add", f"{OUTSIDE}/24", "dev", "c0")
    for link in ("front0", "back0", "nobody"):
        host("ip", "link", "set", link, "up")
    client("ip", "link", "set", "c0", "up")
    client("ip", "route", "add", "default", "via", "192.168.5.1")
    host("ip", "route", "add", "default", "via", "192.168.100.2")
    host("ip", "neigh", "add", "192.168.100.2", "lladdr", "02:00:00:00:00:99", "dev", "back0")
    host("sysctl", "-qw", "net.ipv4.ip_forward=1")
