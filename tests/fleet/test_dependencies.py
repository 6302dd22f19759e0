"""What vipd itself depends on, etcd, name servers and gateways, is nobody's to claim, whatever the source; as
backends they serve."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.fleet.network import HUB, FleetLab, HostDaemon
from tests.fleet.test_two_hosts import endpoints
from tests.lab.name_server import NEEDED, PORT, NameServer
from tests.lab.topology import ip

pytestmark = pytest.mark.root

NAMES, GATEWAY, OWN = "10.77.0.253", "10.77.0.252", "10.77.0.1"
DEPENDENCIES = {
    HUB: f"{HUB} is an address of etcd, which feeds this host",
    NAMES: f"{NAMES} is a name server that vipd asks (dns_servers)",
    GATEWAY: f"{GATEWAY} is a gateway of this host, on eth0",
}
ETCD_PORT = "node port 2379/tcp is the port of etcd, which feeds this host"
CLUSTER = """\
apiVersion: v1
kind: Service
metadata: {{name: {0}, namespace: default}}
spec:
  type: LoadBalancer
  clusterIP: {1}
  ports: [{{port: 80}}]
status: {{loadBalancer: {{ingress: [{{ip: {2}}}]}}}}
---
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetLab]:
    with FleetLab(tmp_path_factory.mktemp("dependencies"), 1) as made:
        ip("-n", made.hosts[0].namespace, "route", "add", "default", "via", GATEWAY)
        yield made


@pytest.fixture(scope="module")
def daemon(lab: FleetLab) -> Iterator[HostDaemon]:
    urls = [*lab.etcd.urls, f"http://[::ffff:{OWN}]:2379"]
    with lab.daemon(lab.hosts[0], {"dns_servers": NAMES}, endpoints=urls) as running:
        yield running


def problems(daemon: HostDaemon) -> str:
    return "\n".join(p for source in daemon.status()["sources"] for p in source["problems"])


def spec(name: str, address: str, **more: object) -> dict[str, object]:
    return {"name": name, "address": address, "ports": [80], "backends": ["10.244.0.5"], **more}


CLAIMS = {
    **{f"address {a}": (spec("thief", a), words) for a, words in DEPENDENCIES.items()},
    **{
        f"{key} {a}": (spec("thief", "10.96.1.1", **{key: [a]}), words)
        for key in ("external_addresses", "load_balancer_addresses")
        for a, words in DEPENDENCIES.items()
    },
    "node port": (spec("thief", "10.96.1.1", node_port=2379), ETCD_PORT),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_it_cannot_be_claimed(lab: FleetLab, daemon: HostDaemon, claim: str, tmp_path: Path) -> None:
    service, words = CLAIMS[claim]
    file = tmp_path / "thief.yaml"
    file.write_text(yaml.safe_dump({"apiVersion": "vipd/v1", "services": [service]}))
    refused = daemon.vipctl("apply", "-f", str(file), check=False)
    assert (refused.returncode, words in refused.stderr) == (1, True), refused.stderr
    daemon.write(yaml.safe_dump([service]), "thief.yaml")
    daemon.vipctl("reload", check=False)
    assert f"thief: {words}" in problems(daemon)
    (daemon.services_dir / "thief.yaml").unlink()
    daemon.vipctl("reload")
    value = {key: v for key, v in service.items() if key != "name"}
    lab.put("services/thief", json.dumps(value))
    expected = words if "node_port" not in service else "node port 2379/tcp lies outside node_port_range"
    daemon.wait_until(lambda: f"thief: {expected}" in problems(daemon), True)
    assert "service" not in daemon.get("services/thief")
    lab.delete("services/thief")  # which arrives, as etcd can be reached
    daemon.wait_until(lambda: problems(daemon), "")


def test_of_a_cluster_one_object_or_address_is_refused_and_the_rest_serves(daemon: HostDaemon) -> None:
    text = CLUSTER.format("thief", HUB, "203.0.113.1") + CLUSTER.format("honest", "10.96.2.2", NAMES)
    (daemon.services_dir / "cluster.yaml").write_text(text)
    daemon.vipctl("reload", check=False)
    assert DEPENDENCIES[HUB] in problems(daemon)
    assert f"{DEPENDENCIES[NAMES]}: it is left out" in problems(daemon)
    assert daemon.vipctl("list", "-q").stdout.split() == ["default/honest"]
    (daemon.services_dir / "cluster.yaml").unlink()
    daemon.vipctl("reload", check=False)
    daemon.vipctl("accept-removal", check=False)


@NEEDED
def test_as_backends_they_serve(lab: FleetLab, daemon: HostDaemon, tmp_path: Path) -> None:
    server = NameServer(lab.hub, tmp_path, address=HUB)
    try:
        server.addresses("web.internal", ["10.244.9.9"])
        daemon.vipctl("add", "10.96.0.53:53/udp", f"{HUB}:{PORT}", "--name", "dns")
        daemon.vipctl("add", "10.96.0.79:2379/tcp", f"{HUB}:2379", "--name", "etcd")
        lab.put(
            "services/of-etcd", json.dumps({"address": "10.96.0.80", "ports": [80], "backends": [HUB, NAMES]})
        )
        daemon.wait_until(lambda: endpoints(daemon, "of-etcd"), {f"{HUB}:80", f"{NAMES}:80"})
        asks = (
            "import dns.message, dns.query, urllib.request as u;"
            "print(dns.query.udp(dns.message.make_query('web.internal', 'A'), '10.96.0.53', 5).answer[0][0]);"
            "print(u.urlopen('http://10.96.0.79:2379/version', timeout=5).status)"
        )
        assert lab.hosts[0].run(sys.executable, "-c", asks).stdout.split() == ["10.244.9.9", "200"]
    finally:
        server.die()
        lab.delete("services/of-etcd")
        for name in ("dns", "etcd"):
            daemon.vipctl("remove", name, check=False)


def test_what_becomes_one_later_goes_on_serving_but_for_etcds_address(
    lab: FleetLab, daemon: HostDaemon
) -> None:
    for number, name in enumerate(("names", "gate", "feeds")):
        daemon.vipctl("add", f"10.77.1.{number}:80/tcp", "10.244.0.5", "--name", name)
    daemon.vipctl("add", "10.96.3.3:80/tcp", "10.244.0.5", "--name", "port", "--node-port", "2479")
    daemon.stop()
    settings = yaml.safe_load(daemon.config.read_text())
    more = ["http://10.77.1.2:2379", f"http://{OWN}:2479"]
    etcd = {**settings["etcd"], "endpoints": [*lab.etcd.urls, *more]}
    daemon.config.write_text(yaml.safe_dump({**settings, "etcd": etcd, "dns_servers": "10.77.1.0"}))
    daemon.start()
    host = lab.hosts[0].namespace
    ip("-n", host, "route", "add", "198.51.100.0/24", "via", "10.77.1.1", "dev", "eth0", "onlink")
    daemon.wait_until(lambda: set(daemon.vipctl("list", "-q").stdout.split()), {"names", "gate"})
    found = problems(daemon)
    assert "feeds: 10.77.1.2 is an address of etcd, which feeds this host" in found
    assert "port: node port 2479/tcp is the port of etcd, which feeds this host" in found
    expected = (
        "service names: 10.77.1.0: a name server that vipd asks (dns_servers); hint:",
        "service gate: 10.77.1.1: a gateway of this host, on eth0; hint:",
    )
    daemon.wait_until(lambda: all(each in str(daemon.status()["warnings"]) for each in expected), True)
    # They can still be changed, and what is refused keeps nobody else from that.
    daemon.vipctl("set", "names", "--check", "tcp")
