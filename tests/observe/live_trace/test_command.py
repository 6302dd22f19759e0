"""`vipctl trace` beside a real daemon, with packets of this host and of another."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import UPLINK, Lab, Wiring
from tests.observe.explain.asking import rules_text
from tests.observe.live_trace.tracing import PATIENCE, documents, rest, traces, waiting
from tests.observe.terminal import on_terminal

pytestmark = pytest.mark.root

DECLARED = """
  - name: web
    address: 10.96.0.20
    ports: [{port: 80, target: 8080, node_port: 30080}]
    backends: [10.244.0.11]
  - {name: dns, address: 10.96.0.53, ports: [53/udp], backends: [10.244.0.11]}
  - {name: dead, address: 10.96.0.30, ports: [80/tcp]}
  - {name: six, address: "fd00:96::20", ports: [{port: 80, target: 8080}], backends: ["fd00:244::11"]}
"""
WEB = "10.96.0.20:80/tcp"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(Wiring(backends=1)) as made:
        made.serve_everywhere(8080, 53)
        yield made


@pytest.fixture(scope="module")
def daemon(lab: Lab) -> Iterator[Daemon]:
    with Daemon(lab.host, DECLARED) as made:
        yield made


def test_packets_that_it_sends(daemon: Daemon) -> None:
    ended = daemon.vipctl("trace", "--send", "-n", "2", "-o", "json", "web")
    first, second = traces(ended)
    for found in (first, second):
        assert (found["verdict"], found["destination"]) == ("delivered", "10.244.0.11:8080")
        assert (found["agrees"], found["answer"]) == (True, "connected")
        assert found["packet"]["arriving"] == "local"
        assert found["prediction"]["share"] == 1
    assert first["packet"]["source_port"] != second["packet"]["source_port"]
    hit = next(rule for rule in first["rules"] if "DNAT" in rule["rule"])
    assert (hit["part"], hit["vipd"]) == ("backend 10.244.0.11:8080", True)
    assert [rule["hook"] for rule in first["rules"]].count("output") > 2
    assert first["rules"][-1]["hook"] == "postrouting"
    assert first["time"] < second["time"]
    assert (first["inbound"], first["outbound"]) == (None, "cluster")
    assert first["conntrack"]["reply_source"] == "10.244.0.11:8080"
    assert first["conntrack"]["state"] in (
        "ESTABLISHED",
        "FIN_WAIT",
        "TIME_WAIT",
        "CLOSE_WAIT",
        "LAST_ACK",
        "CLOSE",
    )


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ((f"{UPLINK[4]}:30080",), "kernel:   goes to 10.244.0.11:8080, masqueraded as 10.244.0.1; connected"),
        (("six",), "kernel:   goes to [fd00:244::11]:8080, not masqueraded; connected"),
        (("dead",), "kernel:   is refused; connection refused"),
        (("--from", UPLINK[4], "dns"), "kernel:   goes to 10.244.0.11:53, not masqueraded; sent"),
    ],
)
def test_outcomes_in_words(daemon: Daemon, words: tuple[str, ...], end: str) -> None:
    ended = daemon.vipctl("trace", "--send", *words)
    assert ended.stdout.splitlines()[-2:] == [end, "explain:  the same"]


def test_waiting_through_a_repair(lab: Lab, daemon: Daemon) -> None:
    """vipd mends its own rules meanwhile. It takes the trace rule for no disturbance, and leaves it."""
    assert "repaired" not in daemon.log
    with waiting(daemon.host, daemon.socket, "--from", lab.client.ipv4, "web") as process:
        assert "repaired" not in daemon.log
        daemon.host.run("iptables", "-t", "nat", "-F", "VIPD-SERVICES")
        daemon.wait_until(lambda: "repaired" in daemon.log, True, PATIENCE)
        assert "vipd-trace" in daemon.host.run("nft", "list", "tables").stdout
        lab.client.send("10.96.0.20", 80).all_answered()
        said = rest(process)
    assert f"{lab.client.ipv4}:" in said
    assert "came in by clients, leaves by cluster, " in said
    assert "hook prerouting\n" in said
    assert re.search(r"tracked:  [A-Z_]+, answers from 10\.244\.0\.11:8080 to ", said)
    assert said.endswith("explain:  the same\n")
    assert process.returncode == 0
    assert "vipd-trace" not in daemon.log


def test_interleaved_flows_until_ctrl_c(lab: Lab, daemon: Daemon) -> None:
    with waiting(daemon.host, daemon.socket, "--follow", "-o", "json", WEB) as process:
        lab.client.send("10.96.0.20", 80, count=6).all_answered()
        coming = documents(process, PATIENCE)
        found = [next(coming) for _ in range(6)]
        os.kill(process.pid, signal.SIGINT)
        assert rest(process) == ""
    assert process.returncode == 130
    assert len({each["packet"]["source_port"] for each in found}) == 6
    assert all(each["agrees"] and each["verdict"] == "delivered" for each in found)
    # Each has its own rules, and all of them the same.
    assert len({json.dumps([rule["chain"] for rule in each["rules"]]) for each in found}) == 1


SVC, SEP = r"VIPD-SVC-[A-Z2-7]{16}", r"VIPD-SEP-[A-Z2-7]{16}"
WAY = [
    r"nat, hook prerouting",
    r"PREROUTING  +on to VIPD-PREROUTING",
    r"VIPD-PREROUTING +entry +flow marked as vipd's",
    r"VIPD-PREROUTING +entry +on to VIPD-SERVICES",
    r"VIPD-SERVICES +dispatch +10\.96\.0\.20:80/tcp of web",
    rf"{SVC} +service web +to be masqueraded, unless from this host",
    r"VIPD-MARK-MASQ +mark +marked for masquerade, mark 0x4000",
    rf"{SVC} +service web +to 10\.244\.0\.11:8080.*",
    rf"{SEP} +backend 10\.244\.0\.11:8080 +DNAT to 10\.244\.0\.11:8080",
]


def test_the_way_in_words_and_the_rules_themselves(lab: Lab, daemon: Daemon) -> None:
    said = {}
    for form in ("text", "wide"):
        with waiting(daemon.host, daemon.socket, "--from", lab.client.ipv4, "-o", form, "web") as process:
            lab.client.send("10.96.0.20", 80).all_answered()
            said[form] = [line.strip() for line in rest(process).splitlines()]
    wrong = [row for row, line in zip(WAY, said["text"][1:], strict=False) if not re.fullmatch(row, line)]
    assert wrong == [], said["text"]
    shown = [line for line in said["wide"] if re.search(r"handle \d+: ", line)]
    assert any(line.endswith(" -j DNAT --to-destination 10.244.0.11:8080") for line in shown)
    assert max(map(len, shown)) > 120, "not cut"
    assert not any("handle " in line for line in said["text"])


def test_a_screen_of_80_columns(daemon: Daemon) -> None:
    argv = [sys.executable, "-m", "vipd.cli.main", "--socket", str(daemon.socket), "trace", "--send"]
    for target in ("web", "six", "dead"):
        lines = on_terminal(daemon.host.inside([*argv, target]), 80).splitlines()
        assert len(lines) > 5
        assert max(map(len, lines)) <= 80


def test_what_waits_to_be_read_is_no_silence(lab: Lab, daemon: Daemon) -> None:
    """The program stands still while everything comes, for longer than the silence that ends a trace."""
    with waiting(daemon.host, daemon.socket, "--from", lab.client.ipv4, "-o", "json", "web") as process:
        os.kill(process.pid, signal.SIGSTOP)
        lab.client.send("10.96.0.20", 80).all_answered()
        lab.client.send("192.0.2.99", 9, timeout=1.5)
        os.kill(process.pid, signal.SIGCONT)
        (found,) = json.loads(rest(process))["traces"]
    assert (found["agrees"], found["verdict"]) == (True, "delivered")
    assert found["rules"][-1]["hook"] == "postrouting"


def test_packets_that_another_program_traces_are_left_out(lab: Lab, daemon: Daemon) -> None:
    """And those of its chain that it marks, too."""
    every = "ip daddr { 10.96.0.20, 10.96.0.53 } meta nftrace set 1"
    with (
        foreign(daemon, "type filter hook prerouting priority -350; policy accept", every),
        waiting(daemon.host, daemon.socket, "--follow", "-o", "json", WEB) as process,
    ):
        lab.client.send("10.96.0.53", 53, protocol="udp").all_answered()
        lab.client.send("10.96.0.20", 80).all_answered()
        found = next(documents(process, PATIENCE))
        os.kill(process.pid, signal.SIGINT)
        assert rest(process) == ""
    assert (found["packet"]["port"], found["agrees"]) == (80, True)


def test_a_flow_that_began_before(lab: Lab, daemon: Daemon) -> None:
    with lab.client.open("10.96.0.53", 53, "udp") as flow:
        flow.ask()
        with waiting(daemon.host, daemon.socket, "--timeout", "6s", "dns") as process:
            flow.ask()
            said = rest(process)
    assert process.returncode == 5
    assert "1 of flows that had begun before, whose way was decided then" in said


@contextlib.contextmanager
def foreign(daemon: Daemon, base_chain: str, rule: str) -> Iterator[None]:
    """A table of somebody else with one rule, in which vipd has no say."""
    daemon.host.run("nft", f"add table ip wall; add chain ip wall out {{ {base_chain}; }}")
    daemon.host.run("nft", f"add rule ip wall out {rule}")
    try:
        yield
    finally:
        daemon.host.run("nft", "delete", "table", "ip", "wall")


def test_beside_a_kube_proxy(lab: Lab, daemon: Daemon) -> None:
    """Its chains look like vipd's, and its jumps come first."""
    rules = re.sub("^-A ([A-Z]+) ", r"-I \1 1 ", rules_text("my-nginx"), flags=re.MULTILINE)
    daemon.host.run("iptables-restore", "--noflush", text=rules)
    try:
        ended = daemon.vipctl("trace", "--send", "-n", "2", "-o", "json", WEB, check=False)
        with waiting(daemon.host, daemon.socket, "--from", lab.client.ipv4, "-o", "json", "web") as process:
            lab.client.send("10.96.0.20", 80).all_answered()
            forwarded = json.loads(rest(process))["traces"]
    finally:
        daemon.host.run("sh", "-c", "iptables-save | grep -v KUBE- | iptables-restore")
    found = [*traces(ended), *forwarded]
    assert [each["differences"] for each in found] == [[], [], []]
    assert (ended.returncode, process.returncode) == (0, 0)
    kube = [rule for each in found for rule in each["rules"] if rule["chain"].startswith("KUBE-")]
    assert {"KUBE-POSTROUTING"} <= {rule["chain"] for rule in kube}
    assert not any(rule["vipd"] or rule["part"] for rule in kube)


def test_a_foreign_translation_is_shouted(daemon: Daemon) -> None:
    ahead, rule = "type nat hook output priority -110", "ip daddr 10.96.0.20 dnat to 10.244.0.11:53"
    with foreign(daemon, ahead, f"tcp dport 80 {rule}"):
        ended = daemon.vipctl("trace", "--send", "web", check=False)
    assert ended.returncode == 1
    different = "DIFFERENT: explain and the kernel do not agree"
    assert ended.stdout.splitlines()[-4:] == [
        "kernel:   goes to 10.244.0.11:53, not masqueraded; connected",
        "explain:  goes to 10.244.0.11:8080, not masqueraded",
        f"decided:  ip wall out: tcp dport 80 {rule} (not a rule of vipd)",
        f"{different}: backend: 10.244.0.11:53 in the kernel, 10.244.0.11:8080 in explain",
    ]


@pytest.mark.parametrize(
    ("policy", "rule", "shown"),
    [
        ("policy accept", "tcp dport 8080 drop", "tcp dport 8080 drop"),
        ("policy drop", "tcp dport 1 accept", "policy DROP"),
    ],
)
def test_a_foreign_drop_is_shouted(daemon: Daemon, policy: str, rule: str, shown: str) -> None:
    with foreign(daemon, f"type filter hook output priority 10; {policy}", rule):
        ended = daemon.vipctl("trace", "--send", "-o", "json", "web", check=False)
    (found,) = traces(ended)
    assert (ended.returncode, found["verdict"], found["agrees"]) == (1, "dropped", False)
    last = found["rules"][-1]
    assert (last["family"], last["table"], last["chain"], last["vipd"]) == ("ip", "wall", "out", False)
    assert last["rule"] == shown


def test_without_a_daemon(daemon: Daemon) -> None:
    ended = daemon.vipctl("--socket", "/nowhere", "trace", "--send", WEB)
    assert "no prediction: cannot reach vipd at /nowhere" in ended.stderr
    assert ended.stdout.splitlines()[-2:] == [
        "kernel:   goes to 10.244.0.11:8080, not masqueraded; connected",
        "explain:  not known: cannot reach vipd at /nowhere: No such file or directory",
    ]
    named = daemon.vipctl("--socket", "/nowhere", "trace", "web", check=False)
    assert (named.returncode, "cannot look up web" in named.stderr) == (4, True)


def test_without_the_right_to(daemon: Daemon) -> None:
    without = ("setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin")
    command = (sys.executable, "-m", "vipd.cli.main", "--socket", str(daemon.socket), "trace", WEB)
    ended = daemon.host.run(*without, *command, check=False)
    assert (ended.returncode, ended.stdout) == (4, "")
    assert "vipctl: trace needs root: " in ended.stderr
    assert "hint: sudo vipctl trace" in ended.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("nope",), 3, "no service nope"),
        (("--from", "here", "web"), 2, "is a name, not an IP address"),
        (("--from", "fd00::9", WEB), 2, "of different families"),
        (("--send", "--from", f"{UPLINK[4]}:7777", "-n", "2", "web"), 2, "good for one packet"),
        (("--send", "--follow", "web"), 2, "--follow goes neither with"),
        (("--timeout", "soon", "web"), 2, "is not a duration"),
        (("--send", "--from", "127.0.0.1", "198.51.100.9:80"), 1, "the packet never came to the rules"),
    ],
)
def test_faults(daemon: Daemon, words: tuple[str, ...], code: int, said: str) -> None:
    ended = daemon.vipctl("trace", *words, check=False)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert said in ended.stderr


def test_another_host_must_send_by_itself(lab: Lab, daemon: Daemon) -> None:
    words = ("trace", "--send", "--timeout", "1s", "--from", lab.client.ipv4, "web")
    ended = daemon.vipctl(*words, check=False)
    assert ended.returncode == 5
    assert f"{lab.client.ipv4} is no address of this host: the packet must be sent there" in ended.stderr
    # The backend's connections are only its own probes: nothing was sent in the client's name.
    flows = daemon.host.run("conntrack", "-L", "-s", lab.client.ipv4, "-d", "10.96.0.20", check=False)
    assert "SYN_SENT" not in flows.stdout
