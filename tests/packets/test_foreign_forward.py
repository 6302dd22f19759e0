"""Flows that vipd translated pass the forward chains of other programs, with both dataplanes.

The rules in `firewalls` are those that ufw 0.36.2 and firewalld 1.3.3 of Debian 12 wrote, and of Docker 28.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab.daemon import Daemon
from tests.lab.flow import finish
from tests.lab.node import Node
from tests.lab.steady_client import steady_client
from tests.lab.topology import Lab, Wiring
from tests.packets.services import SERVED_PORT, Services

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("clean")]

FIREWALLS = Path(__file__).parent / "firewalls"
RESTORES = {4: "iptables-nft-restore", 6: "ip6tables-nft-restore"}
OWN_TABLE = """table inet filter {
    chain forward {
        type filter hook forward priority filter; policy drop;
        ct state vmap { established : accept, related : accept, invalid : drop }
    }
}
"""
REJECTING = ("-A FORWARD -i lo -j ACCEPT", "-A FORWARD -j REJECT --reject-with %s-port-unreachable")
SCREEN = """table inet screen {
    chain forward { type filter hook forward priority 5; policy drop; }
}
"""


def restore(host: Node, family: int, text: str) -> None:
    host.run(RESTORES[family], "--noflush", text=text)


def ufw(host: Node) -> None:
    for family in RESTORES:
        restore(host, family, (FIREWALLS / f"ufw.ipv{family}").read_text())


def docker(host: Node) -> None:
    """The lab's backends are its containers."""
    restore(host, 4, (FIREWALLS / "docker.ipv4").read_text().replace("docker0", "cluster"))
    host.run("ip6tables-nft", "-P", "FORWARD", "DROP")


def docker_that_did_not_turn_forwarding_on(host: Node) -> None:
    docker(host)
    for tool in ("iptables-nft", "ip6tables-nft"):
        host.run(tool, "-P", "FORWARD", "ACCEPT")


def firewalld(host: Node) -> None:
    host.run("nft", "-f", "-", text=(FIREWALLS / "firewalld.nft").read_text())


def own_table(host: Node) -> None:
    host.run("nft", "-f", "-", text=OWN_TABLE)


def rejecting(host: Node) -> None:
    for family, word in ((4, "icmp"), (6, "icmp6")):
        rules = "\n".join(REJECTING) % word
        restore(host, family, f"*filter\n:FORWARD ACCEPT [0:0]\n{rules}\nCOMMIT\n")


def legacy(host: Node) -> None:
    for tool in ("iptables-legacy", "ip6tables-legacy"):
        host.run(tool, "-P", "FORWARD", "DROP")


def iptables_table_with_rules_of_nft(host: Node) -> None:
    """Of which iptables says that it is incompatible."""
    for family, tool in (("ip", "iptables-nft"), ("ip6", "ip6tables-nft")):
        host.run(tool, "-P", "FORWARD", "DROP")
        host.run("nft", "add", "rule", family, "filter", "FORWARD", "ct", "mark", "1", "accept")


SHAPES = (ufw, docker, docker_that_did_not_turn_forwarding_on, firewalld, own_table, rejecting, legacy)


def flush(host: Node) -> None:
    host.run("nft", "flush", "ruleset")
    for tool in ("iptables-legacy-restore", "ip6tables-legacy-restore"):
        host.run(tool, text="*filter\n:FORWARD ACCEPT\nCOMMIT\n*nat\nCOMMIT\n")


def everything(host: Node) -> str:
    texts = [host.run("nft", "-s", "list", "ruleset").stdout]
    for tool in ("iptables-legacy-save", "ip6tables-legacy-save"):
        texts.append(host.run(tool).stdout)
    return re.sub(r"^#.*\n|\[[0-9:]+\]", "", "\n".join(texts), flags=re.MULTILINE)


def ours(host: Node) -> bool:
    return "VIPD-FORWARD" in everything(host)


@pytest.fixture(scope="module")
def dataplane() -> str:
    """The one that each story begins with, unless it has a daemon of its own."""
    return "iptables"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(Wiring(backends=2)) as built:
        built.serve_everywhere(SERVED_PORT)
        yield built


@pytest.fixture
def clean(lab: Lab) -> None:
    flush(lab.host)


def passes(lab: Lab, services: Services) -> list[str]:
    """Flows of both families pass; the services for that."""
    vips = [services.add(lab.backends, family=family) for family in (4, 6)]
    for vip in vips:
        lab.client.send(*vip, count=5, timeout=3).all_answered()
    return list(map(str, vips))


@pytest.mark.parametrize("shape", SHAPES)
def test_switching_loses_no_connection(lab: Lab, shape: Callable[[Node], None]) -> None:
    shape(lab.host)
    variant = "legacy" if shape is legacy else "nft"  # the one that the host has chosen
    with Daemon(lab.host, iptables_variant=variant) as daemon:
        services = Services(daemon)
        four, six = (services.add(lab.backends, "--masquerade", "hairpin", family=f) for f in (4, 6))
        with (
            lab.client.open(*four) as flow,
            lab.client.open(*six) as sixth,
            steady_client(lab.client, four.address, four.port) as outcome,
        ):
            first = flow.ask(), sixth.ask()
            for name in ("nftables", "iptables"):
                output = daemon.vipctl("set-dataplane", name).stdout
                assert "open connections go on" in output
                assert (flow.ask(), sixth.ask()) == first
                lab.client.send(*four, count=20).all_answered()
                lab.client.send(*six, count=20).all_answered()
                assert [w for w in daemon.status()["warnings"] if "drop" in w] == []
        assert outcome["failed"] == {}
        assert int(str(outcome["answered"])) > 20


@pytest.mark.parametrize("shape", [*SHAPES, iptables_table_with_rules_of_nft])
def test_with_nftables_from_the_start_flows_pass_until_the_last_service_goes(
    lab: Lab, shape: Callable[[Node], None]
) -> None:
    shape(lab.host)
    before = everything(lab.host)
    with Daemon(lab.host, dataplane="nftables") as daemon:
        services = Services(daemon)
        added = passes(lab, services)
        assert ours(lab.host) is (shape is not firewalld)  # that lets pass what was translated
        daemon.vipctl("remove", *added)
        record = daemon.state_dir / "host-changes.json"
        daemon.wait_until(lambda: json.loads(record.read_text())["accepts"], [])
        daemon.wait_until(lambda: everything(lab.host), before)
        passes(lab, services)
        daemon.stop()
        daemon.cleanup()
        assert everything(lab.host) == before


def test_a_dry_cleanup_names_it_and_changes_nothing(lab: Lab) -> None:
    own_table(lab.host)
    with Daemon(lab.host, dataplane="nftables") as daemon:
        Services(daemon).add(lab.backends)
        daemon.stop()
        assert "chain forward of table inet filter" in daemon.cleanup("--dry-run").stdout
        assert ours(lab.host)
        (daemon.state_dir / "host-changes.json").unlink()  # the record is no need
        assert "chain forward of table inet filter" in daemon.cleanup().stdout
        assert not ours(lab.host)


DEEDS = {
    "own table: every rule deleted": (own_table, "nft flush chain inet filter forward"),
    "own table: replaced": (own_table, "nft delete table inet filter; nft -f {own_table}"),
    "ufw: the jump deleted": (ufw, "iptables-nft -D FORWARD 1"),
    "ufw: the chain emptied": (ufw, "iptables-nft -F VIPD-FORWARD"),
    "ufw: reload": (ufw, "iptables-nft -F; iptables-nft -X; iptables-nft-restore {ufw}"),
    "docker: restart": (
        docker,
        "iptables-nft -D FORWARD -j DOCKER-USER; iptables-nft -I FORWARD -j DOCKER-USER",
    ),
    "legacy: every rule deleted": (legacy, "iptables-legacy -F FORWARD"),
    "nobody dropped before": (flush, "iptables-nft -P FORWARD DROP"),
    "nobody rejected before": (flush, "iptables-nft -A FORWARD -j REJECT"),
    "a new chain drops": (flush, "nft -f {screen}"),
}


@pytest.mark.parametrize("kind_of_change", DEEDS)
def test_what_others_do_is_repaired(lab: Lab, tmp_path: Path, kind_of_change: str) -> None:
    shape, script = DEEDS[kind_of_change]
    files = {"own_table": tmp_path / "own.nft", "screen": tmp_path / "screen.nft"}
    files["own_table"].write_text(OWN_TABLE)
    files["screen"].write_text(SCREEN)
    shape(lab.host)
    with Daemon(lab.host, dataplane="nftables") as daemon:
        vip = Services(daemon).add(lab.backends)
        lab.client.send(*vip, count=5, timeout=3).all_answered()
        for command in script.format(**files, ufw=FIREWALLS / "ufw.ipv4").split("; "):
            lab.host.run(*command.split())
        began = time.monotonic()
        daemon.wait_until(lambda: set(lab.client.send(*vip, timeout=0.5).failures), set())
        print(f"{kind_of_change}: passes after {time.monotonic() - began:.2f} s")
        daemon.wait_in_sync()
        if "docker" in kind_of_change:
            jump = '-m comment --comment "vipd translated flows" -j VIPD-FORWARD'

            def rules() -> list[str]:
                return lab.host.run("iptables-nft", "-S", "FORWARD").stdout.splitlines()[1:]

            order = ["-j DOCKER-USER", jump, "-j DOCKER-FORWARD"]
            daemon.wait_until(rules, [f"-A FORWARD {rule}" for rule in order])


@pytest.fixture
def say(lab: Lab) -> Iterator[Callable[[str], None]]:
    """Another process that owns a table, and does to it what it is told."""
    holder = lab.host.start("nft", "-i")

    def tell(commands: str) -> None:
        assert holder.stdin is not None
        holder.stdin.write(commands)
        holder.stdin.flush()

    yield tell
    finish(holder)


HELD = """add table inet held { flags owner; }
add chain inet held forward { type filter hook forward priority 5; policy drop; }
"""


def test_what_cannot_be_done_is_refused_before_anything_changes(lab: Lab, say: Callable[[str], None]) -> None:
    with Daemon(lab.host) as daemon:
        vip = Services(daemon).add(lab.backends)
        lab.host.run("iptables-nft", "-P", "FORWARD", "DROP")
        say(HELD)
        # Its chain comes last.
        daemon.wait_until(lambda: "filter + 5" in lab.host.run("nft", "list", "ruleset").stdout, True)
        before = everything(lab.host)
        refused = daemon.vipctl("set-dataplane", "nftables", check=False)
        assert refused.returncode == 1
        assert "chain forward of table inet held drops flows" in refused.stderr
        assert "another process owns this table" in refused.stderr
        assert daemon.status()["dataplane"]["name"] == "iptables"
        assert everything(lab.host) == before
        say("add rule inet held forward ct status dnat accept\n")
        daemon.wait_until(lambda: daemon.vipctl("set-dataplane", "nftables", check=False).returncode, 0)
        lab.client.send(*vip, count=5).all_answered()


def test_a_start_with_what_cannot_be_done_warns_in_the_first_step(
    lab: Lab, say: Callable[[str], None]
) -> None:
    say(HELD)
    declared = "  - {name: web, address: 10.96.0.1, ports: [80], backends: [10.244.0.11]}\n"
    daemon = Daemon(lab.host, declared, dataplane="nftables")
    daemon.wait_until(lambda: "forward" in lab.host.run("nft", "list", "chains").stdout, True)
    with daemon:
        (warning,) = [w for w in daemon.status()["warnings"] if "inet held" in w]
        assert "another process owns this table" in warning


def test_without_leave_to_accept_nothing_is_written(lab: Lab) -> None:
    ufw(lab.host)
    with Daemon(lab.host, dataplane="nftables", accept_forwarded=False) as daemon:
        vip = Services(daemon).add(lab.backends)
        assert not ours(lab.host)
        lab.client.send(*vip, timeout=0.5).all_failed("timeout")
        assert daemon.vipctl("set-dataplane", "iptables").returncode == 0


@pytest.mark.parametrize("shape", [ufw, pytest.param(own_table, marks=pytest.mark.nightly)])
def test_flows_of_kube_proxys_exact_rules_go_on(lab: Lab, shape: Callable[[Node], None]) -> None:
    shape(lab.host)
    with Daemon(lab.host, compat="kube-proxy", chain_prefix="KUBE") as daemon:
        vip = Services(daemon).add(lab.backends, "--masquerade", "always")
        with lab.client.open(*vip) as flow, steady_client(lab.client, vip.address, vip.port) as outcome:
            first = flow.ask()
            for name in ("nftables", "iptables"):
                daemon.vipctl("set-dataplane", name)
                assert flow.ask() == first
        assert outcome["failed"] == {}


@pytest.mark.nightly(each_time="iptables")
@pytest.mark.parametrize("variant", ["nft", "legacy"])
@pytest.mark.parametrize("name", ["iptables", "nftables"])
def test_a_dropping_mangle_table_is_reported(lab: Lab, name: str, variant: str) -> None:
    """vipd writes no accept there; status and doctor say what to do, and nothing is refused for it."""
    host, tool = lab.host, f"iptables-{variant}"
    other = "nftables" if name == "iptables" else "iptables"
    with Daemon(host, dataplane=name) as daemon:
        vip = Services(daemon).add(lab.backends)

        def warned() -> bool:
            return any(f"-t mangle, {tool} drops" in warning for warning in daemon.status()["warnings"])

        assert not warned()
        host.run(tool, "-t", "mangle", "-P", "FORWARD", "DROP")
        try:
            daemon.wait_until(warned, True)
            assert f"{tool} -t mangle -I FORWARD" in daemon.vipctl("doctor", check=False).stdout
            daemon.vipctl("set-dataplane", other)
            daemon.wait_until(warned, True)
            for state in ("DNAT", "ESTABLISHED"):
                match = ("-m", "conntrack", "--ctstate", state)
                host.run(tool, "-t", "mangle", "-I", "FORWARD", *match, "-j", "ACCEPT")
            daemon.wait_until(warned, False)
            lab.client.send(*vip, count=5).all_answered()
        finally:
            host.run(tool, "-t", "mangle", "-P", "FORWARD", "ACCEPT")
            host.run(tool, "-t", "mangle", "-F", "FORWARD")
