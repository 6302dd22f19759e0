"""`vipctl rules` on real kernels, beside a real daemon and without it: both dataplanes, both variants."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.daemon_process import ConfiguredHost, host
from tests.lab import unprivileged
from tests.observe.rule_tree.kernel_rules import nodes
from tests.observe.terminal import on_terminal

pytestmark = pytest.mark.root

SENDER = """
import socket, sys
# All open at a time: each has a port of its own, and so is a flow of its own.
senders = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(int(sys.argv[1]))]
for sender in senders:
    sender.sendto(b"x" * 20, ("10.96.0.10", 53))
"""
SENT = 25


SERVICES = """\
  - name: shop/web
    address: [10.96.0.20, "fd00:96::20"]
    ports: [{name: http, port: 80, protocol: tcp, target: 8080, node_port: 30080}]
    backends: [10.244.0.7, {address: 10.244.0.8, weight: 2}, 10.244.0.9, "fd00:244:1111:2222:3333:4444:5:6"]
  - name: dns
    address: 10.96.0.10
    ports: [53/udp]
    backends: [10.244.0.5, 10.244.0.6]
    affinity: {by: client-ip, timeout: 10m}
  - name: empty
    address: 10.96.0.30
    ports: [80/tcp]
    backends: []
"""
MANY = "".join(
    f"  - {{name: many/s{number}, address: 10.97.0.{number}, ports: [80/tcp], backends: [10.244.1.1]}}\n"
    for number in range(1, 22)
)


class DaemonHost:
    """A host with a daemon, and vipctl in its namespace."""

    def __init__(self, made: ConfiguredHost, dataplane: str, variant: str) -> None:
        self.host, self.dataplane, self.variant = made, dataplane, variant

    def vipctl(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """`vipctl rules WORDS`; AssertionError for another exit code."""
        done = self.host.run("--socket", str(self.host.socket), "rules", *words, module="vipd.cli.main")
        assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
        return done

    def argv(self, *words: str) -> list[str]:
        """The command line of `vipctl rules` in the namespace."""
        return self.host.argv("--socket", str(self.host.socket), "rules", *words, module="vipd.cli.main")

    def rules(self, *words: str) -> dict[str, Any]:
        """What is said of them as JSON."""
        found: dict[str, Any] = json.loads(self.vipctl(*words, "-o", "json").stdout)["rules"]
        return found

    def tool(self, *argv: str) -> str:
        """A program of the variant, in the namespace."""
        program = argv[0].replace("iptables", f"iptables-{self.variant}") if self.variant else argv[0]
        return self.host.tool(program, *argv[1:])


KINDS = (("iptables", "nft"), ("iptables", "legacy"), ("nftables", ""))


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(filter(None, kind)))
def daemon_host(request: pytest.FixtureRequest) -> Iterator[DaemonHost]:
    dataplane, variant = request.param
    for program in ("nft",) if dataplane == "nftables" else (f"iptables-{variant}",):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    with host() as made:
        made.settings |= {"dataplane": dataplane, "vip_device": ""}
        made.settings |= {"iptables_variant": variant} if variant else {}
        made.declare("services.yaml", SERVICES, MANY if dataplane == "nftables" else "")
        # Everything is at home: nothing leaves the namespace.
        made.tool("ip", "link", "set", "lo", "up")
        for network in ("10.96.0.0/15", "10.244.0.0/16"):
            made.tool("ip", "route", "add", "local", network, "dev", "lo")
        made.start()
        yield DaemonHost(made, dataplane, variant)


IN_ONE = pytest.mark.parametrize("daemon_host", [KINDS[2]], indirect=True, ids=["nftables"])
"""For what does not depend on the dataplane."""
IN_TWO = pytest.mark.parametrize(
    "daemon_host", [KINDS[0], KINDS[2]], indirect=True, ids=["iptables-nft", "nftables"]
)
"""For what does not depend on the variant."""


def test_a_service_is_shown_as_the_daemon_means_it(daemon_host: DaemonHost) -> None:
    found = daemon_host.rules("shop/web")
    assert found["notes"] == []
    assert [(t["service_port"], t["family"], t["faults"]) for t in found["services"]] == [
        ("shop/web:http", "ipv4", []),
        ("shop/web:http", "ipv6", []),
    ]
    tree = found["services"][0]
    assert {node["name"] for node in nodes([tree], "frontend")} == {
        "10.96.0.20:80/tcp",
        "node port 30080/tcp",
    }
    shares = {node["name"]: node["share"] for node in nodes([tree], "backend")}
    expected = {"10.244.0.7:8080": 0.25, "10.244.0.8:8080": 0.5, "10.244.0.9:8080": 0.25}
    assert shares == pytest.approx(expected, abs=1e-6)
    chain = daemon_host.host.get("services/shop%2Fweb")["service"]["forwardings"][0]["chain"]
    assert chain in {node["name"] for node in nodes([tree], "chain")}


def test_names_chains_shares_and_counts_stand_side_by_side(daemon_host: DaemonHost) -> None:
    text = daemon_host.vipctl("shop/web").stdout
    assert re.search(r"^shop/web:http, tcp, ipv4, (iptables v|table ip vipd)", text)
    assert re.search(
        r"^ +\d+ +\d+ +50\.0 .* to 10\.244\.0\.8:8080, (probability 0\.6666|2 of 4 slots)", text, re.M
    )
    if daemon_host.dataplane == "iptables":
        assert re.search(r"VIPD-SEP-[A-Z2-7]{16}: 10\.244\.0\.8:8080$", text, re.M)


def test_wide_shows_what_the_kernel_has_beside_its_meaning(daemon_host: DaemonHost) -> None:
    lines = daemon_host.vipctl("shop/web", "-o", "wide").stdout.splitlines()
    backend = next(line for line in lines if "to 10.244.0.8:8080, " in line or ": 10.244.0.8:8080, " in line)
    assert re.search(r" (-m statistic .*-j VIPD-SEP-|10\.244\.0\.8 \. 8080$)", backend), backend
    shown = [node for tree in daemon_host.rules("shop/web")["services"] for node in nodes([tree], "rule")]
    assert shown
    ends = [f"{n['rule']}  # {n['place']}" if "place" in n else n.get("rule", "") for n in shown]
    assert all(any(line.endswith(end) for line in lines) for end in ends)


def test_wide_numbers_are_those_of_the_kernel(daemon_host: DaemonHost) -> None:
    """Each chain's rules by the program's own listing."""
    chains = [
        node
        for tree in daemon_host.rules("shop/web")["services"]
        if tree["family"] == "ipv4"
        for node in nodes([tree], "chain")
        if node.get("children")
    ]
    checked = 0
    for chain, rule in (
        (c, r) for c in chains for r in c["children"] if r.get("place") and r["kind"] != "chain"
    ):
        kind, number = rule["place"].split()
        if daemon_host.dataplane == "nftables":
            listed = daemon_host.tool("nft", "-a", "list", "table", "ip", "vipd")
            assert re.search(rf"# {kind} {number}$", listed, re.M), rule
            (line,) = re.findall(rf"^.*# {kind} {number}$", listed, re.M)
        else:
            table = "filter" if chain["text"].startswith("filter") else "nat"
            line = daemon_host.tool("iptables", "-t", table, "-S", chain["name"], number)
        assert " ".join(rule["rule"].split()) in " ".join(line.split()), rule
        checked += 1
    assert checked > 2


def test_counters_move_with_packets(daemon_host: DaemonHost) -> None:
    def parsed() -> tuple[int, int, int]:
        tree = daemon_host.rules("10.96.0.10:53/udp")["services"][0]
        frontend = next(nodes([tree], "frontend"))
        counted = [node for node in nodes([tree], "rule") if "10.244.0" in node["text"]]
        through = sum(
            node.get("packets", 0)
            for node in (*nodes([tree], "backend"), *counted)
            if "DNAT" not in node["text"]
        )
        return frontend["packets"], frontend["bytes"], through

    before = parsed()
    subprocess.run(
        ["ip", "netns", "exec", daemon_host.host.namespace, sys.executable, "-c", SENDER, str(SENT)],
        check=True,
        timeout=60,
    )
    packets, octets, through = (now - then for now, then in zip(parsed(), before, strict=True))
    # A datagram of 20 bytes has 48 with its headers.
    assert (packets, octets, through) == (SENT, 48 * SENT, SENT)


@IN_TWO
def test_a_service_that_is_removed_ends_its_flows_by_rules_with_words(daemon_host: DaemonHost) -> None:
    ending = (
        "  - {name: ending, address: 10.96.0.40, ports: [80/tcp], backends: [10.244.0.5], on_remove: reset}\n"
    )
    host = daemon_host.host
    host.declare("ending.yaml", ending)
    assert host.ask("POST", "reload")[0] == 200
    host.write("ending.yaml", "apiVersion: vipd/v1\nservices: []\n")
    assert host.ask("POST", "reload")[0] == 200
    found = daemon_host.rules("--all")
    trees = (*found["services"], *found["shared"])
    assert "10.96.0.40" in str(trees), daemon_host.host.rules()
    shown = [node for tree in trees for node in nodes([tree], "rule")]
    assert [node["text"] for node in shown if node["text"] == node.get("rule")] == []


@IN_TWO
def test_a_service_without_backends_shows_how_it_is_refused(daemon_host: DaemonHost) -> None:
    tree = daemon_host.rules("empty")["services"][0]
    assert tree["faults"] == []
    texts = [node["text"] for kind in ("frontend", "rule") for node in nodes([tree], kind)]
    assert any("refused" in text for text in texts)


def test_everything_is_shared_chains_then_services(daemon_host: DaemonHost) -> None:
    found = daemon_host.rules()
    assert [tree["faults"] for tree in (*found["shared"], *found["services"])] == [[]] * (
        len(found["shared"]) + len(found["services"])
    )
    assert len(found["shared"]) == 2
    text = daemon_host.vipctl().stdout
    if daemon_host.dataplane == "nftables":
        assert re.search(r"^many/s7 +tcp +10\.97\.0\.7:80 +1 +0 +0 +-$", text, re.M)
        refused = daemon_host.vipctl("--format", "dot", code=2)
        assert "name one, or --all" in refused.stderr
    else:
        assert (
            text.index("shared chains, ipv4")
            < text.index("dns, udp, ipv4")
            < text.index("shop/web:http, tcp, ipv4")
        )


@IN_TWO
def test_a_chain_from_a_log_is_traced_to_its_service(daemon_host: DaemonHost) -> None:
    if daemon_host.dataplane == "nftables":
        digest = base64.b32encode(hashlib.sha256(b"shop/web:http" + b"tcp").digest()).decode()
        name = f"VIPD-SVC-{digest[:16]}"
        assert f"{name} was of shop/web:http; it is not there now" in daemon_host.vipctl(name).stdout
        return
    endpoints = daemon_host.host.get("services/shop%2Fweb")["service"]["forwardings"][0]["endpoints"]
    chain = next(each["chain"] for each in endpoints if each["address"] == "10.244.0.8")
    text = daemon_host.vipctl(chain).stdout
    assert text.startswith(f"{chain} is of backend 10.244.0.8:8080 of shop/web:http\n")
    assert re.search(rf"{chain}: .* <--$", text, re.M)
    assert "this host's address becomes the source" in daemon_host.vipctl("VIPD-POSTROUTING").stdout


@IN_ONE
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("nothing",), 3, "no service nothing in the kernel; hint: "),
        (("10.96.9.9:80/tcp",), 3, "no service 10.96.9.9:80/tcp"),
        (("VIPD-SEP-AAAAAAAAAAAAAAAA",), 3, "no chain VIPD-SEP-AAAAAAAAAAAAAAAA"),
        (("--format", "svg"), 2, "svg"),
        (("shop/web", "--format", "dot", "-o", "json"), 2, "exclude each other"),
        (("shop/web", "dns"), 2, "unexpected extra argument"),
    ],
)
def test_wrong_words_are_answered(
    daemon_host: DaemonHost, words: tuple[str, ...], code: int, said: str
) -> None:
    done = daemon_host.vipctl(*words, code=code)
    assert said in done.stderr
    assert done.stdout == ""


@IN_ONE
def test_without_root_the_way_is_told(daemon_host: DaemonHost) -> None:
    argv = daemon_host.argv("shop/web")
    module = argv[argv.index("-m") + 1 :]
    done = subprocess.run(
        [*argv[:4], *unprivileged.command(*module)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 4
    assert done.stderr == "vipctl: the kernel shows its rules to root only; hint: sudo vipctl rules\n"


@IN_TWO
@pytest.mark.parametrize("words", [(), ("shop/web",)])
def test_a_screen_of_80_columns_is_enough(daemon_host: DaemonHost, words: tuple[str, ...]) -> None:
    said = on_terminal(daemon_host.argv(*words), 80)
    assert [line for line in said.splitlines() if len(line) > 80] == []
    assert "├" in said


@IN_ONE
def test_head_ends_it_quietly(daemon_host: DaemonHost) -> None:
    argv = ["bash", "-c", '"$@" | head -n 1', "bash", *daemon_host.argv("shop/web")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("shop/web:http")
    assert done.stderr == ""


@pytest.fixture
def stopped(daemon_host: DaemonHost) -> DaemonHost:
    """The daemon ended, its rules left. Used by the last tests of this file: nothing starts it again."""
    if daemon_host.host.process is not None:
        assert daemon_host.host.end(signal.SIGTERM) == 0
    return daemon_host


@IN_TWO
def test_without_a_daemon_it_says_where_names_come_from(stopped: DaemonHost) -> None:
    frontend = stopped.vipctl("10.96.0.20:80/tcp")
    assert "the daemon does not answer" in frontend.stderr
    assert "10.244.0.8:8080" in frontend.stdout
    if stopped.dataplane == "iptables":
        assert "names are those in the comments on rules" in frontend.stderr
        assert stopped.vipctl("shop/web").stdout.startswith("shop/web:http, tcp, ipv4")
        assert stopped.vipctl(re.findall(r"VIPD-SEP-\w+", frontend.stdout)[0]).stdout
    else:
        assert "nftables has no names of services" in frontend.stderr
        assert "give a frontend" in stopped.vipctl("shop/web", code=3).stderr


@IN_TWO
def test_what_others_did_is_marked(stopped: DaemonHost) -> None:
    if stopped.dataplane == "nftables":
        chain = next(
            name for name in stopped.host.tool("nft", "list", "chains").split() if name.startswith("random-4")
        )
        stopped.tool("nft", "insert", "rule", "ip", "vipd", chain, "ip", "saddr", "192.0.2.9", "accept")
        stopped.tool("nft", "flush", "chain", "ip", "vipd", "postrouting")
        damaged = ["ip saddr 192.0.2.9 accept: not written by vipd"]
    else:
        text = stopped.vipctl("10.96.0.20:80/tcp").stdout
        chain = re.findall(r"VIPD-SVC-\w+", text)[0]
        stopped.tool("iptables", "-t", "nat", "-I", chain, "-s", "192.0.2.9", "-j", "RETURN")
        sep = re.findall(r"VIPD-SEP-\w+", text)[0]
        stopped.tool("iptables", "-t", "nat", "-F", sep)
        stopped.tool("iptables", "-t", "nat", "-F", "VIPD-POSTROUTING")
        damaged = [
            "-s 192.0.2.9/32 -j RETURN: not written by vipd",
            "backend: it is empty, so new flows go past it",
        ]
    tree = stopped.rules("10.96.0.20:80/tcp")["services"][0]
    assert tree["faults"] == damaged
    done = stopped.vipctl("10.96.0.20:80/tcp")
    assert re.search(r"! not written by vipd$", done.stdout, re.M)
    assert f"{len(damaged)} thing" in done.stderr
    assert "hint: vipctl diff" in done.stderr
    shared = stopped.rules()["shared"][0]
    assert any("it is empty" in fault for fault in shared["faults"])


@IN_TWO
def test_where_nothing_is_nothing_is_shown(stopped: DaemonHost) -> None:
    stopped.host.cleanup()
    done = stopped.vipctl()
    assert done.stdout == ""
    assert "the kernel has no rule of vipd" in done.stderr
    assert "the kernel has no rule of vipd; see vipctl status" in stopped.vipctl("shop/web", code=3).stderr
