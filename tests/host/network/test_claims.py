"""What a service must not take from others of this host's networks, and from programs of this host."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.lab.daemon import Daemon
from tests.lab.flow import Process
from tests.lab.node import Node
from tests.lab.topology import Lab, Wiring, ip

pytestmark = pytest.mark.root

BACKENDS = {4: "10.244.0.11", 6: "fd00:244::11"}
VIPS = {4: "10.96.0.10", 6: "fd00:96::10"}
LISTEN = """
import os, socket, sys
os.setuid(int(sys.argv[3]))
kept = []
for kind, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
    made = socket.socket(kind, socket.SOCK_STREAM if sys.argv[2] == "tcp" else socket.SOCK_DGRAM)
    if kind == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    made.bind((address, int(sys.argv[1])))
    if sys.argv[2] == "tcp":
        made.listen()
    kept.append(made)
print("READY", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A host with a default route, a subnet of backends and one of clients."""
    with Lab(Wiring(backends=1)) as built:
        yield built


@pytest.fixture(scope="module")
def spare() -> Iterator[Lab]:
    """The same for daemons of tests' own."""
    with Lab(Wiring(backends=1)) as built:
        yield built


@pytest.fixture(scope="module")
def long_running(lab: Lab) -> Iterator[Daemon]:
    with Daemon(lab.host) as running:
        yield running


@pytest.fixture
def daemon(long_running: Daemon) -> Iterator[Daemon]:
    yield long_running
    (long_running.services_dir / "services.yaml").unlink(missing_ok=True)
    long_running.vipctl("remove", "web", check=False)
    long_running.reload()
    assert long_running.get("services")["services"] == []


def listen(
    host: Node, directory: Path, name: str, port: int, protocol: str = "tcp", user: int = 0
) -> Process:
    """A program of this name that listens on a port of all addresses."""
    directory.mkdir(exist_ok=True)
    program = directory / name
    program.unlink(missing_ok=True)
    program.symlink_to(sys.executable)
    process = host.start(str(program), "-I", "-c", LISTEN, str(port), protocol, str(user))
    assert process.stdout is not None
    assert process.stdout.readline() == "READY\n"
    return process


def end(process: Process) -> None:
    """End a program that listens, so that its port is free when this returns."""
    assert process.stdin is not None
    process.stdin.close()
    process.wait(30)


def frontend(address: str, port: int = 80) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def add(daemon: Daemon, address: str, *more: str, family: int = 0) -> subprocess.CompletedProcess[str]:
    version = family or (6 if ":" in address else 4)
    spec = (frontend(address), BACKENDS[version], "--name", "web", "--check", "none", *more)
    return daemon.vipctl("add", *spec, check=False)


def warnings(daemon: Daemon) -> list[str]:
    return [each for each in daemon.status()["warnings"] if each.startswith("service web: ")]


OF_THE_NETWORK = {
    "192.0.2.1": "is a gateway of this host, on uplink",
    "fd00:99::1": "is a gateway of this host, on uplink",
    "10.244.0.0": "is the network address of 10.244.0.0/24 on cluster",
    "10.244.0.255": "is the broadcast address of 10.244.0.0/24 on cluster",
    "fd00:244::": "is the network address of fd00:244::/64 on cluster",
}


def test_what_this_hosts_own_network_needs_is_refused(daemon: Daemon) -> None:
    for address, what in OF_THE_NETWORK.items():
        done = add(daemon, address)
        assert done.returncode == 1
        assert f"{address} {what}; hint: choose an address that no host has" in done.stderr
    assert daemon.get("services")["services"] == []


def test_a_file_is_refused_with_its_line_and_accepted_once_the_gateway_is_another(
    lab: Lab, daemon: Daemon
) -> None:
    host = lab.host.namespace
    ip("-n", host, "route", "add", "203.0.113.0/24", "via", "10.244.0.77")
    # A file is held to the last look at the host, and each change by vipctl looks.
    assert add(daemon, "10.244.0.77", "--dry-run").returncode == 1
    daemon.write("  - {name: web, address: 10.244.0.77, ports: [80/tcp], backends: [10.244.0.11]}\n")

    def problems() -> list[str]:
        return [each for source in daemon.status()["sources"] for each in source["problems"]]

    path = daemon.services_dir / "services.yaml"
    expected = f"{path}:3: web: 10.244.0.77 is a gateway of this host, on cluster; choose"
    daemon.wait_until(lambda: [each[: len(expected)] for each in problems()], [expected])
    assert expected in daemon.vipctl("list").stderr + daemon.vipctl("status").stdout
    ip("-n", host, "route", "del", "203.0.113.0/24")
    daemon.wait_until(problems, [])
    daemon.wait_until(lambda: daemon.endpoints("web"), ["10.244.0.11:80"])


def test_what_vipctl_added_can_be_relieved_of_a_backend_whatever_the_host_has_become(
    lab: Lab, daemon: Daemon
) -> None:
    host = lab.host.namespace
    assert add(daemon, VIPS[4], "10.244.0.12").returncode == 0
    ip("-n", host, "route", "add", "203.0.113.0/24", "via", VIPS[4], "dev", "uplink", "onlink")
    try:
        done = daemon.vipctl("remove-backend", "web", "10.244.0.12")
        assert f"warning: service web: {VIPS[4]}: a gateway of this host" in done.stderr
        assert daemon.endpoints("web") == ["10.244.0.11:80"]
    finally:
        ip("-n", host, "route", "del", "203.0.113.0/24")


def test_addresses_that_this_host_gets_are_told_until_they_are_gone_but_for_those_of_keepalived(
    lab: Lab, daemon: Daemon, tmp_path: Path
) -> None:
    services = {VIPS[4]: "web", "203.0.113.10": "edge"}
    ports = {"ports": ["80/tcp"], "backends": [BACKENDS[4]]}
    declared = [
        {"name": "web", "address": VIPS[4], **ports},
        {"name": "edge", "external_addresses": ["203.0.113.10"], **ports},
    ]
    daemon.declare(yaml.safe_dump(declared))

    def change(verb: str) -> None:
        for vip in services:
            lab.host.run("ip", "address", verb, f"{vip}/32", "dev", "cluster")

    def warned() -> list[str]:
        warnings = "\n".join(daemon.status()["warnings"])
        assert VIPS[4] not in warnings or f"ip address del {VIPS[4]}/32 dev cluster" in warnings
        return [vip for vip in services if f"{vip}: an address of this host itself" in warnings]

    def told_in_both(expected: list[str]) -> None:
        daemon.wait_until(warned, expected)
        rows = daemon.vipctl("list", "--no-headers").stdout
        assert [vip for vip in services if f"{vip} on a device of this host itself" in rows] == expected

    told_in_both([])
    change("add")
    try:
        told_in_both([*services])
        change("del")
        told_in_both([])
        vrrp = listen(lab.host, tmp_path, "keepalived", 7777)
        change("add")
        told_in_both([VIPS[4]])
        vrrp.kill()
    finally:
        lab.host.run("ip", "address", "flush", "to", f"{VIPS[4]}/32")
        lab.host.run("ip", "address", "flush", "to", "203.0.113.10/32")
        daemon.wait_until(warned, [])  # else services of other tests would be refused


@pytest.mark.parametrize(
    ("address", "subnet", "asked"),
    [("10.244.0.200", "10.244.0.0/24", "ARP"), ("fd00:244::200", "fd00:244::/64", "neighbour discovery")],
)
def test_an_address_of_a_connected_subnet_is_warned_of_at_once(
    lab: Lab, daemon: Daemon, address: str, subnet: str, asked: str
) -> None:
    """External ones are meant to be there."""
    done = add(daemon, address)
    assert done.returncode == 0
    (warning,) = done.stderr.splitlines()
    assert warning.startswith(f"warning: service web: {address}: lies in {subnet} on cluster, where hosts")
    assert f"hosts ask for it by {asked}, which vipd does not answer; hint: choose" in warning
    assert [f"warning: {each}" for each in warnings(daemon)] == [warning]
    assert add(daemon, address).stderr == done.stderr, "the same again is warned of again"
    assert daemon.vipctl("set", "web", "--affinity", "10m").stderr == done.stderr
    assert daemon.vipctl("set", "web", "--affinity", "none", "-q").stderr == ""
    proxy = ("neighbour", "add", "proxy", address, "dev", "cluster")
    ip("-n", lab.host.namespace, *proxy)
    assert add(daemon, address).stderr == "", "this host answers for it"
    daemon.wait_until(lambda: warnings(daemon), [])
    ip("-n", lab.host.namespace, *(word.replace("add", "del") for word in proxy))
    daemon.vipctl("remove", "web")
    external = written(daemon, 6 if ":" in address else 4, external_addresses=[address])
    assert daemon.vipctl("apply", str(external)).stderr == ""
    assert warnings(daemon) == []


@pytest.mark.parametrize("family", [4, 6])
def test_a_neighbours_address_is_warned_of_though_it_is_an_external_one(
    lab: Lab, daemon: Daemon, family: int
) -> None:
    vip = {4: "10.244.0.99", 6: "fd00:244::99"}[family]
    host = lab.host.namespace
    ip("-n", host, "neighbour", "add", vip, "lladdr", "02:00:00:00:00:11", "dev", "cluster", "nud", "stale")
    try:
        path = written(daemon, family, external_addresses=[vip])
        done = daemon.vipctl("apply", str(path), "-o", "json")
        (warning,) = json.loads(done.stdout)["warnings"]
        assert warning == (
            f"service web: {vip}: another host has it (02:00:00:00:00:11 on cluster) and loses what passes "
            "here; hint: choose an address that no host has"
        )
        assert done.stderr == ""
        assert warnings(daemon) == [warning]
    finally:
        ip("-n", host, "neighbour", "del", vip, "dev", "cluster")


def test_the_port_of_the_ssh_server_is_refused_and_another_programs_too(lab: Lab, daemon: Daemon) -> None:
    for name, port, family in (("sshd", 22, 4), ("sshd", 2222, 6), ("dropbear", 22, 4)):
        program = listen(lab.host, daemon.directory / "bin", name, port)
        done = apply_node_port(daemon, family, port)
        end(program)
        assert done.returncode == 1
        assert f"web: node port {port}/tcp is the port of the SSH server of this host; hint: " in done.stderr
    program = listen(lab.host, daemon.directory / "bin", "gitea", 22)
    done = apply_node_port(daemon, 6, 22)
    end(program)
    assert done.returncode == 1
    assert "web: node port 22/tcp is in use: gitea listens here; hint: choose another" in done.stderr
    assert "ss -ltnp shows who" in done.stderr


def test_a_file_gets_its_node_port_once_the_program_there_has_ended(lab: Lab, daemon: Daemon) -> None:
    program = listen(lab.host, daemon.directory / "bin", "gitea", 3000)
    # A file is held to the last look at the host, and each change by vipctl looks.
    assert apply_node_port(daemon, 4, 3000).returncode == 1
    written(daemon, 4, ports=[{"port": 80, "node_port": 3000}]).rename(daemon.services_dir / "services.yaml")
    assert "node port 3000/tcp is in use: gitea listens here" in daemon.vipctl("reload", check=False).stderr
    assert daemon.get("services")["services"] == []
    end(program)
    daemon.wait_until(lambda: daemon.endpoints("web"), ["10.244.0.11:80"])
    # What is served goes on, also over a restart; the program is what is told of.
    program = listen(lab.host, daemon.directory / "bin", "gitea", 3000)
    what = "node port 3000/tcp is in use: gitea listens here, and gets no connections any more"
    daemon.wait_until(lambda: warnings(daemon), [f"service web: {what}; hint: ss -ltnp shows who"])
    daemon.reload()
    assert daemon.endpoints("web") == ["10.244.0.11:80"]
    end(program)
    daemon.wait_until(lambda: warnings(daemon), [])


def test_an_ordinary_users_program_keeps_no_service_from_its_port(lab: Lab, daemon: Daemon) -> None:
    program = listen(lab.host, daemon.directory / "bin", "squatter", 30080, user=1000)
    done = apply_node_port(daemon, 4, 30080)
    assert done.returncode == 0, done.stderr
    assert "node port 30080/tcp is in use: squatter listens here, and gets no connections" in done.stderr
    end(program)


def test_a_udp_socket_counts_for_udp_alone(lab: Lab, daemon: Daemon) -> None:
    program = listen(lab.host, daemon.directory / "bin", "resolver", 5300, "udp")
    assert apply_node_port(daemon, 4, 5300).stderr == ""
    done = apply_node_port(daemon, 4, 5300, "udp")
    assert done.returncode == 1
    assert "node port 5300/udp is in use: resolver listens here" in done.stderr
    assert "ss -lunp" in done.stderr
    end(program)


def test_the_port_over_which_the_user_is_logged_in_is_refused(lab: Lab, daemon: Daemon) -> None:
    session = f"SSH_CONNECTION={lab.client.ipv4} 50000 {lab.host.ipv4} 4022"
    path = written(daemon, 4, ports=[{"port": 80, "node_port": 4022}])
    command = (sys.executable, "-m", "vipd.cli.main", "--socket", str(daemon.socket), "apply", str(path))
    refusal = "web: node port 4022/tcp is the port of your own session"
    done = lab.host.run("env", session, *command, check=False)
    assert done.returncode == 1
    assert refusal in done.stderr
    # As with sudo: the variable is gone, and the shell above still has it.
    inner = f"env -u SSH_CONNECTION {' '.join(command)}; exit $?"
    assert refusal in lab.host.run("env", session, "sh", "-c", inner, check=False).stderr
    assert lab.host.run(*command).stderr == ""


def test_where_vipd_itself_answers_no_service_does(spare: Lab) -> None:
    with Daemon(spare.host, health_address="0.0.0.0:10256", metrics_address=9117) as daemon:
        done = apply_node_port(daemon, 4, 10256)
        assert "web: node port 10256/tcp is the port of vipd itself (health_address)" in done.stderr
        done = apply_node_port(daemon, 4, 9117)
        assert (done.returncode, done.stderr) == (0, ""), "a node port takes nothing of loopback"


def test_with_compat_any_address_may_be_claimed_and_ports_of_this_host_are_warned_of(spare: Lab) -> None:
    with Daemon(spare.host, compat="kube-proxy") as daemon:
        done = add(daemon, "192.0.2.1")
        assert done.returncode == 0
        what = "a gateway of this host, on uplink; hint: choose an address that no host has"
        assert done.stderr == f"warning: service web: 192.0.2.1: {what}\n"
        daemon.vipctl("remove", "web")
        program = listen(spare.host, daemon.directory / "bin", "nginx", 80)
        done = add(daemon, spare.host.ipv4)
        assert f"{spare.host.ipv4}:80/tcp is in use: nginx listens here" in done.stderr
        daemon.vipctl("remove", "web")
        done = apply_node_port(daemon, 4, 80)
        assert done.returncode == 0, done.stderr
        assert "node port 80/tcp is in use: nginx listens here" in done.stderr
        end(program)


def test_vipd_check_and_vipctl_check_know_the_same(lab: Lab, daemon: Daemon) -> None:
    written(daemon, 4, address="192.0.2.1").rename(daemon.services_dir / "services.yaml")
    what = "web: 192.0.2.1 is a gateway of this host, on uplink"
    argv = ("-m", "vipd", "--config", str(daemon.config), "--check")
    assert what in lab.host.run(sys.executable, *argv, check=False).stderr
    assert what in daemon.vipctl("check", str(daemon.services_dir), check=False).stderr


def test_vipd_check_and_vipctl_check_judge_by_the_dataplane_that_was_chosen(spare: Lab) -> None:
    with Daemon(spare.host, dataplane="iptables") as daemon:
        written(daemon, 4, balance="source-hash").rename(daemon.services_dir / "services.yaml")
        argv = (sys.executable, "-m", "vipd", "--config", str(daemon.config), "--check")
        check = ("check", str(daemon.services_dir), "--settings", str(daemon.config))
        assert "cannot do balance: source-hash" in spare.host.run(*argv, check=False).stderr
        assert "cannot do balance: source-hash" in daemon.vipctl(*check, check=False).stderr
        daemon.vipctl("set-dataplane", "nftables")
        assert spare.host.run(*argv).stdout == "ok: 1 service\n"
        assert daemon.vipctl(*check).stdout.startswith("ok: 1 service in 1 file")


def written(daemon: Daemon, family: int, **fields: object) -> Path:
    service = {"name": "web", "address": VIPS[family], "ports": ["80/tcp"], "backends": [BACKENDS[family]]}
    path = daemon.directory / "web.yaml"
    path.write_text(yaml.safe_dump({"apiVersion": "vipd/v1", "services": [service | fields]}))
    return path


def apply_node_port(
    daemon: Daemon, family: int, port: int, protocol: str = "tcp"
) -> subprocess.CompletedProcess[str]:
    ports = [{"port": 80, "protocol": protocol, "node_port": port}]
    return daemon.vipctl("apply", str(written(daemon, family, ports=ports)), check=False)
