"""Each fault is put into a real host, is found, and is gone after the commands that the doctor names."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.lab.flow import finish
from tests.observe.doctor.patient import Doctor, Patient
from tests.observe.resident import PATIENCE_SECONDS

pytestmark = pytest.mark.root

VIP = "10.96.0.10"
WRONG = ("problem", "warning")
JUMP = '-A PREROUTING -m comment --comment "vipd services" -j'
TWICE = ("iptables-legacy -t nat -N VIPD-PREROUTING", f"iptables-legacy -t nat {JUMP} VIPD-PREROUTING")
NFT_DROP = (
    "nft add table inet filter",
    "nft 'add chain inet filter forward { type filter hook forward priority 0; policy drop; }'",
    "nft add rule inet filter forward ct state established,related accept",
)
OF_OTHERS = (
    *TWICE,
    "iptables-legacy -t nat -A PREROUTING -p tcp --dport 2222 -j REDIRECT --to-ports 22",
    "iptables -t nat -N OLD-PREROUTING",
    f"iptables -t nat {JUMP} OLD-PREROUTING",
    "iptables -t nat -N KUBE-SERVICES",
    "iptables -t nat -A OUTPUT -j KUBE-SERVICES",
    "iptables -t mangle -N KUBE-PROXY-CANARY",
    f"iptables -t nat -A PREROUTING -d {VIP} -p tcp -j DNAT --to-destination 10.244.0.12",
    f"ip address add {VIP}/32 dev lo",
)


@pytest.fixture
def bound(patient: Patient) -> Iterator[Patient]:
    """One whose vipd may not accept in FORWARD, and so mend by itself what these tests harm."""
    config = patient.daemon.config
    before = config.read_text()
    patient.daemon.stop()
    config.write_text(f"{before}accept_forwarded: false\n")
    patient.daemon.start()
    yield patient
    patient.daemon.stop()
    config.write_text(before)
    patient.daemon.start()


def test_settings_of_the_kernel(patient: Patient) -> None:
    off = ("ipv4.ip_forward", "ipv6.conf.all.forwarding", "netfilter.nf_conntrack_tcp_be_liberal")
    patient.shell(*(f"sysctl -w net.{name}=0" for name in off), "sysctl -w net.ipv4.conf.cluster.rp_filter=1")
    found = [finding for finding in patient.doctor.ask() if finding["severity"] in WRONG]
    of_severity = {"problem": ["ip-forward"] * 2, "warning": ["rp-filter", "tcp-be-liberal"]}
    for severity, names in of_severity.items():
        assert sorted(each["id"] for each in found if each["severity"] == severity) == names
    patient.lab.client.send(VIP, 80, timeout=0.3).all_failed("timeout")
    for finding in found:
        patient.repair(finding)
    assert patient.faults() == {}
    patient.lab.client.send(VIP, 80).all_answered()
    patient.shell("sysctl -w net.ipv4.conf.cluster.rp_filter=0")


def test_rules_and_an_address_of_others(patient: Patient) -> None:
    """No command knows what is right, and people do."""
    patient.shell(*OF_OTHERS)
    found = patient.faults()
    if "rules-twice" not in found:
        # Once a minute vipd looks itself, and mends this by itself: not twice in a moment.
        assert "VIPD-" not in patient.host.run("iptables-legacy-save").stdout
        patient.shell(*TWICE)
        found = patient.faults()
    found.pop("daemon-warnings", None)  # vipd sees the address too, within seconds
    assert severities(found) == {
        **dict.fromkeys(("rules-twice", "other-vipd", "vip-owned"), "problem"),
        **dict.fromkeys(("mixed-variants", "kube-proxy", "foreign-claims"), "warning"),
    }
    assert all(each["hint"] or each["mend"] == ["systemctl restart vipd"] for each in found.values())
    patient.shell(
        f"ip address del {VIP}/32 dev lo",
        "iptables-legacy -t nat -F",
        "iptables-legacy -t nat -X",
        "iptables-save | grep -v -e KUBE- -e OLD- -e 'to-destination 10.244.0.12$' | iptables-restore",
    )
    patient.daemon.wait_until(lambda: patient.daemon.status()["warnings"], [])
    assert patient.faults() == {}


def test_a_healthy_host(patient: Patient) -> None:
    findings = patient.doctor.ask()
    assert patient.doctor.code == 0
    assert {finding["severity"] for finding in findings} == {"ok"}
    assert all(finding["title"] and not finding["mend"] for finding in findings)
    assert patient.doctor.run("doctor", "-q") == (0, "")


def test_a_forward_policy_of_the_other_variant_and_a_chain_of_nft(bound: Patient) -> None:
    """Its DROP is a verdict that no rule of vipd's variant can take back. Then a chain of nft drops."""
    patient = bound
    patient.shell("iptables-legacy -P FORWARD DROP")
    found = patient.faults()
    assert found.keys() == {"forward-policy", "mixed-variants"}
    patient.lab.client.send(VIP, 80, timeout=0.3).all_failed("timeout")
    patient.repair(found["forward-policy"])
    patient.lab.client.send(VIP, 80).all_answered()
    found = patient.faults()
    assert found.keys() == {"mixed-variants"}
    # Whose rules they are is not known here: no command takes them away.
    assert (found["mixed-variants"]["mend"], bool(found["mixed-variants"]["hint"])) == ([], True)
    patient.shell("iptables-legacy -P FORWARD ACCEPT", "iptables-legacy -F", *NFT_DROP)
    found = patient.faults()
    assert severities(found) == {"forward-chains": "warning"}
    patient.lab.client.send(VIP, 80, timeout=0.3).all_failed("timeout")
    patient.repair(found["forward-chains"])
    assert patient.faults() == {}
    patient.lab.client.send(VIP, 80).all_answered()
    patient.shell("nft delete table inet filter")


def test_a_backend_that_cannot_reach_its_own_address(patient: Patient) -> None:
    backend = patient.lab.backends[0]
    try:
        patient.shell("sysctl -w net.bridge.bridge-nf-call-iptables=1")
    except AssertionError as error:
        pytest.skip(f"this kernel has no br_netfilter: {error}")
    found = patient.faults()
    assert found.keys() == {"bridge-hairpin"}
    backend.send("10.96.0.11", 80, timeout=0.3).all_failed("timeout")
    patient.repair(found["bridge-hairpin"])
    assert patient.faults() == {}
    backend.send("10.96.0.11", 80).all_answered()
    patient.shell("sysctl -w net.bridge.bridge-nf-call-iptables=0")
    patient.shell(*(f"ip link set b{n} type bridge_slave hairpin off" for n in (1, 2)))


def test_answers_within_a_bridge(patient: Patient) -> None:
    plain = """
  - name: plain
    address: 10.96.0.12
    ports: [{port: 80, target: 8080}]
    backends: [10.244.0.11]
    masquerade: hairpin
"""
    with patient.declared(plain):
        found = patient.faults()
        assert found.keys() == {"bridge-replies"}
        other = patient.lab.backends[1]
        other.send("10.96.0.12", 80, timeout=0.3).all_failed("timeout")
        assert "net.bridge.bridge-nf-call-iptables=1" in found["bridge-replies"]["hint"]
        patient.shell("modprobe br_netfilter || true", "sysctl -w net.bridge.bridge-nf-call-iptables=1")
        other.send("10.96.0.12", 80).all_answered()
        assert "bridge-replies" not in patient.faults()
    patient.shell("sysctl -w net.bridge.bridge-nf-call-iptables=0")


def test_a_virtual_ip_in_the_network_of_clients(patient: Patient) -> None:
    vips = "10.10.0.100", "fd00:10::100"
    near = """
  - name: near
    address: [10.10.0.100, "fd00:10::100"]
    ports: [{port: 80, target: 8080}]
    backends: [10.244.0.11, "fd00:244::11"]
"""
    with patient.declared(near):
        found = patient.faults()
        assert severities(found) == {"vip-in-subnet": "warning"}
        assert not any(patient.lab.client.send(vip, 80, timeout=0.3).answers for vip in vips)
        patient.repair(found["vip-in-subnet"])
        assert patient.faults() == {}
        patient.lab.client.run("ip", "neighbour", "flush", "dev", "eth0")
        for vip in vips:
            patient.lab.client.send(vip, 80).all_answered()
    patient.shell(*(f"ip neighbour del proxy {vip} dev clients" for vip in vips), "ip link delete vipd-arp")


def test_an_address_of_another_host(patient: Patient) -> None:
    """A next hop, a neighbour, the addresses of a network: no command takes it, or answers for it."""
    client = patient.lab.client
    patient.shell(f"ping -c 1 -W 5 {client.ipv4}", "ip route add 198.18.0.0/15 via 10.10.0.77")
    taken = {client.ipv4: "a neighbour on clients", "10.10.0.77": "the next hop to 198.18.0.0/15"}
    declaration = "".join(
        f"  - {{name: s{number}, address: {vip}, ports: [80], backends: [10.244.0.11]}}\n"
        for number, vip in enumerate(taken)
    )
    try:
        with patient.declared(declaration):
            served = patient.doctor.run("list")[1]
            found = patient.doctor.ask()
    finally:
        patient.shell("ip route del 198.18.0.0/15")
    commands = " ".join(command for finding in found for command in finding["mend"])
    foreign = next(finding for finding in found if finding["id"] == "vip-foreign")
    # A daemon that refuses such an address leaves nothing to be found.
    left = {vip: what for vip, what in taken.items() if vip in served}
    assert foreign["severity"] == ("problem" if left else "ok")
    for vip, what in left.items():
        assert f"{vip} is {what}" in foreign["cause"]
    assert not [vip for vip in taken if vip in commands]


@pytest.mark.parametrize("rule", ["iif clients lookup 100", "from 10.10.0.2 blackhole"])
def test_a_routing_rule_that_takes_clients_packets_elsewhere(patient: Patient, rule: str) -> None:
    patient.shell("ip route add default dev clients table 100", f"ip rule add {rule} priority 100")
    try:
        found = patient.faults()
        assert severities(found) == {"backend-policy-route": "warning"}
        assert rule.replace("0.2 b", "0.2/32 b") in found["backend-policy-route"]["cause"]
        patient.lab.client.send(VIP, 80, timeout=0.3).all_failed("timeout")
        advice = found["backend-policy-route"]["hint"].partition(": ")[2]
        patient.shell(advice, advice.replace("0.11", "0.12"))
        assert patient.faults() == {}
        patient.lab.client.send(VIP, 80).all_answered()
    finally:
        patient.shell(
            "ip rule del priority 100", "ip route flush table 100", "ip rule del priority 99 || true"
        )
        patient.shell("ip rule del priority 99 || true")
    assert patient.faults() == {}


def test_a_routing_rule_that_harms_nothing(patient: Patient) -> None:
    """One whose table has no route, one after the main table, one for every packet."""
    rules = "from 10.10.0.0/24 lookup 101 pref 100", "iif clients blackhole pref 40000", "lookup 101 pref 101"
    patient.shell(*(f"ip rule add {rule}" for rule in rules))
    assert patient.faults() == {}
    patient.lab.client.send(VIP, 80).all_answered()
    patient.shell("ip rule del pref 100", "ip rule del pref 40000", "ip rule del pref 101")


def test_masqueraded_flows_are_counted(patient: Patient, tmp_path: Path) -> None:
    lines = [
        f"-A -t 100 -u SEEN_REPLY -s 10.10.0.2 -d 10.96.0.10 -p udp --sport {port} --dport 80 "
        f"--reply-port-src 8080 --reply-port-dst {port} -r 10.244.0.11 -q 10.244.0.1"
        for port in range(1000, 53_500)
    ]
    (tmp_path / "flows").write_text("\n".join(lines) + "\n")
    patient.host.run("conntrack", "-R", str(tmp_path / "flows"))
    found = patient.faults()
    patient.host.run("conntrack", "-F")
    assert severities(found) == {"snat-ports": "warning"}
    assert "10.244.0.11:8080" in found["snat-ports"]["cause"]


def test_a_backend_on_this_host(patient: Patient) -> None:
    """And the question after one service."""
    local = """
  - name: local
    address: 10.96.0.13
    ports: [{port: 80, target: 9999}]
    backends: [10.244.0.1]
"""
    with patient.declared(local):
        found = patient.faults()
        assert severities(found) == {"local-backend": "warning"}, found
        with listening(patient, "127.0.0.1", 9999):
            found = patient.faults()
            assert severities(found) == {"local-backend": "problem"}
        with listening(patient, "10.244.0.1", 9999):
            assert patient.faults() == {}
        assert patient.faults(target="web") == {}
        assert patient.faults(target="10.96.0.13:80/tcp").keys() == {"local-backend"}
        assert patient.doctor.run("doctor", "nobody")[0] == 3


def test_backends_that_refuse_or_do_not_answer_are_named(patient: Patient) -> None:
    declared = """
  - name: dead
    address: 10.96.0.14
    ports: [{port: 80, target: 8080}]
    backends: ["10.244.0.11:9", "10.244.0.12:8080", 10.244.0.99, 10.244.0.11]
  - name: checked
    address: 10.96.0.15
    ports: [{port: 80, target: 9}]
    backends: [10.244.0.12]
    check: {type: tcp, port: 8080, interval: 1s}
  - name: asked
    address: 10.96.0.16
    ports: [{port: 53, protocol: udp}]
    backends: [10.244.0.11]
"""
    drop = ("iptables", "-p", "tcp", "--dport", "8080", "-j", "DROP")
    second = patient.lab.backends[1]
    with patient.declared(declared):
        second.run(drop[0], "-I", "INPUT", *drop[1:])
        try:
            found = patient.faults()
            assert severities(found) == dict.fromkeys(("backend-contact", "backend-neighbour"), "problem"), (
                found
            )
            contact = found["backend-contact"]["cause"]
            assert "10.244.0.11:9/tcp of dead (connection refused)" in contact
            assert "10.244.0.12:8080/tcp of" in contact, found
            assert "no answer within 2 s" in contact
            assert "10.244.0.11:8080" not in contact
            assert "10.244.0.12:9/" not in contact, "a check looks at it"
            assert "/udp" not in contact, "it would take a datagram"
            assert "10.244.0.99 of dead" in found["backend-neighbour"]["cause"]
            assert patient.doctor.code == 1
        finally:
            second.run(drop[0], "-D", "INPUT", *drop[1:])
        asked = patient.faults(target="asked")["backend-contact"]["cause"]
        assert "10.244.0.11:53/udp of asked (connection refused)" in asked
        asked = patient.faults(target="checked")["backend-contact"]["cause"]
        assert "10.244.0.12:9/tcp of checked (connection refused)" in asked
        assert "dead" not in asked


def test_small_faults_at_once_are_each_found_and_mended(patient: Patient) -> None:
    daemon, host = patient.daemon, patient.host
    assert patient.doctor.run("add", "10.96.0.20:80/tcp", "10.244.0.11:8080", "--name", "stored")[0] == 0
    daemon.write("  - name: bad\n    address: 10.96.0.300\n    ports: [80]\n", "bad.yaml")
    patient.reload()
    # The daemon reads it when it starts; the doctor reads it itself.
    (daemon.state_dir / "state.db").write_text("garbage")
    server = patient.lab.host.serve(tcp=[30080], udp=[30080])
    namespace = Path("/run/netns", patient.lab.host.namespace).stat().st_ino
    lock = Path("/run/vipd") / f"netns-{namespace}-OTHER.lock"
    patient.shell(f"chmod 0666 {daemon.socket}", f"chmod 0777 {daemon.state_dir}")
    patient.shell("ip link set b1 mtu 1400", "ip link set cluster mtu 1500")
    try:
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            found = patient.faults()
    finally:
        finish(server)
        lock.unlink(missing_ok=True)  # a vipd that starts removes locks that nobody holds
    of_problems = ("refused-declarations", "backend-mtu", "store", "state-dir")
    of_warnings = ("other-vipd", "node-port-taken", "socket-permissions")
    assert found.keys() == {*of_problems, *of_warnings}
    assert (patient.doctor.code, {found[name]["severity"] for name in of_warnings}) == (1, {"warning"})
    assert "bad.yaml:4" in found["refused-declarations"]["cause"]
    shown = host.run("sh", "-c", found["refused-declarations"]["mend"][0], check=False)
    assert "10.96.0.300" in shown.stderr + shown.stdout
    taken = found["node-port-taken"]
    assert f"(pid {server.pid})" in taken["cause"]
    assert (taken["mend"], "another node port" in taken["hint"]) == ([], True)
    (daemon.services_dir / "bad.yaml").unlink()
    for name in ("backend-mtu", "store", "state-dir", "socket-permissions"):
        patient.repair(found[name])
    patient.shell("ip link set b1 mtu 1500", "ip link set cluster mtu 1500")
    patient.reload()
    assert patient.faults() == {}
    assert patient.doctor.run("remove", "stored")[0] == 0


def test_a_group_a_route_and_a_device_on_the_way_to_backends(patient: Patient) -> None:
    patient.shell(f"chgrp root {patient.daemon.socket}", "ip route add 10.244.0.12/32 dev cluster mtu 1300")
    found = patient.faults()
    assert severities(found) == {"socket-permissions": "warning", "backend-mtu": "warning"}
    assert "10.244.0.12 (cluster, 1300)" in found["backend-mtu"]["cause"]
    patient.repair(found["socket-permissions"])
    patient.shell(
        "ip route del 10.244.0.12/32",
        "sysctl -w net.ipv6.conf.cluster.keep_addr_on_down=1",
        "ip link set cluster down",
    )
    found = patient.faults()
    assert found.keys() == {"backend-route"}
    assert found["backend-route"]["mend"] == ["ip link set cluster up"]
    patient.repair(found["backend-route"])
    assert patient.faults() == {}


def test_rules_that_the_kernel_does_not_take(patient: Patient) -> None:
    odd = "  - name: odd\n    address: 10.96.0.66\n    ports: 80:8080\n    backends: [10.244.0.11]\n"
    with patient.tools.refusing("10.96.0.66"):
        patient.daemon.write(odd, "odd.yaml")
        patient.reload()
        patient.daemon.wait_until(lambda: patient.daemon.status()["state"], "degraded", PATIENCE_SECONDS)
        found = patient.faults()
    assert found.keys() == {"quarantined"}
    assert "odd" in found["quarantined"]["title"]
    patient.repair(found["quarantined"])
    assert patient.faults() == {}
    (patient.daemon.services_dir / "odd.yaml").unlink()
    patient.reload()


def test_a_daemon_that_cannot_write(patient: Patient) -> None:
    with patient.tools.being("broken"):
        patient.daemon.write("", "empty.yaml")
        patient.shell("iptables -t nat -F VIPD-SERVICES")
        patient.reload()
        found = patient.faults()
    assert {"daemon-state", "kernel-features"} == found.keys()
    assert found["daemon-state"]["severity"] == "problem"
    (patient.daemon.services_dir / "empty.yaml").unlink()
    patient.repair(found["daemon-state"])
    patient.daemon.wait_in_sync()


def test_a_kernel_without_affinity(patient: Patient) -> None:
    with patient.tools.refusing("-m recent"):
        found = patient.faults(target="own")
        assert found.keys() == {"kernel-features"}
        assert found["kernel-features"]["mend"][0] == "modprobe xt_recent"
    with patient.tools.refusing("-m statistic"):
        found = patient.faults(target="own")
        assert found["kernel-features"]["severity"] == "problem"
        assert found["kernel-features"]["mend"] == ["modprobe xt_statistic"]


def test_files_tell_the_same_services_as_the_daemon(patient: Patient) -> None:
    odd = """
  - name: near
    address: [10.10.0.100, "fd00:10::100"]
    ports: [{port: 80, target: 9999, node_port: 30081}, {port: 53, protocol: udp}]
    backends: [10.244.0.1, {address: 10.244.0.99, weight: 0}]
    external_addresses: [198.51.100.9]
    masquerade: hairpin
"""
    alone = Doctor(patient.daemon.host, patient.daemon.socket.with_name("nobody"))
    with patient.declared(odd):
        told, read = patient.doctor.ask(), alone.ask("--settings", str(patient.daemon.config))
    alone.end()
    of_services = [
        [
            (f["id"], f["severity"], f["cause"], f["hint"])
            for f in found
            if f["severity"] in WRONG and f["id"] != "daemon-running"
        ]
        for found in (told, read)
    ]
    assert of_services[0] == of_services[1]
    assert {"vip-in-subnet", "local-backend"} <= {f["id"] for f in told if f["severity"] == "warning"}


def test_the_daemon_of_another_namespace(patient: Patient) -> None:
    """And nothing is made where it looks: not an empty table, though every form of rule was tried."""
    client = patient.lab.client
    doctor = Doctor(client, patient.daemon.socket)
    try:
        found = doctor.faults("--settings", str(patient.daemon.config))
        assert "another network namespace" in found["daemon-running"]["title"]
    finally:
        doctor.end()
    assert client.run("nft", "list", "ruleset").stdout == ""
    assert client.run("cat", "/proc/net/ip_tables_names", "/proc/net/ip6_tables_names").stdout == ""


def test_without_root(patient: Patient) -> None:
    """Nothing fails, and what only root sees is named."""
    program = (
        # What the verb needs is imported while it may be read.
        "import os, sys, concurrent.futures.thread, pyroute2, vipd.cli.doctor\n"
        "from vipd.cli.main import run\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sys.exit(run(sys.argv[1:]))"
    )
    words = ("--socket", str(patient.daemon.socket), "doctor")
    ended = patient.host.run(sys.executable, "-c", program, *words, check=False, timeout=PATIENCE_SECONDS)
    assert "Traceback" not in ended.stderr
    assert "Not checked" in ended.stdout
    for name in ("forward-policy", "mixed-variants", "kernel-features", "conntrack-netlink", "store"):
        assert f"[{name}]" in ended.stdout.partition("Not checked")[2]
    assert max(map(len, ended.stdout.splitlines())) <= 80


def test_without_a_daemon(patient: Patient) -> None:
    """Last in this file: it stops the daemon, and starts it again."""
    daemon = patient.daemon
    settings = ("--settings", str(daemon.config))
    daemon.stop()
    found = patient.faults(*settings)
    assert found.keys() == {"daemon-running"}
    assert (found["daemon-running"]["severity"], found["daemon-running"]["mend"]) == (
        "warning",
        ["systemctl start vipd"],
    )
    patient.shell("ip route del default")
    found = patient.faults(*settings)
    assert found.keys() == {"daemon-running", "vip-route"}
    patient.repair(found["vip-route"])
    assert patient.faults(*settings).keys() == {"daemon-running"}
    patient.host.send(VIP, 80).all_answered()
    assert patient.doctor.run("cleanup", "--state-dir", str(daemon.state_dir))[0] == 0
    patient.shell("ip link delete vipd0", "ip route add default via 192.0.2.1")
    assert severities(patient.faults(*settings)) == {"daemon-running": "problem"}
    assert patient.doctor.code == 1
    daemon.start()


def severities(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: str(finding["severity"]) for name, finding in found.items()}


@contextmanager
def listening(patient: Patient, address: str, port: int) -> Iterator[None]:
    program = (
        f"import socket, sys; s = socket.socket(); s.bind(('{address}', {port})); s.listen(); "
        "print('READY', flush=True); sys.stdin.read()"
    )
    process = patient.lab.host.start(sys.executable, "-c", program)
    try:
        assert process.stdout
        assert process.stdout.readline() == "READY\n"
        yield
    finally:
        finish(process)
