"""No declaration takes an address from its owner: not the host's own, none outside `allowed_addresses`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import yaml

from tests.lab.daemon import Daemon
from tests.lab.stored import stored
from tests.lab.topology import Lab, Wiring
from tests.packets.services import SERVED_PORT, Services, backend_text

pytestmark = [pytest.mark.root, pytest.mark.nightly(each_time="nftables")]

ALLOWED = ("10.96.0.0/16", "fd00:96::/64")
STRANGERS = {
    # A claim: the words in which it is refused.
    "10.10.0.1": "is an address of this host itself",
    "fd00:10::1": "is an address of this host itself",
    "192.0.2.2": "is an address of this host itself",
    "10.97.0.1": "lies outside allowed_addresses",
    "fd00:97::1": "lies outside allowed_addresses",
}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(Wiring(backends=2)) as built:
        built.serve_everywhere(SERVED_PORT)
        yield built


@pytest.fixture(scope="module")
def daemon(lab: Lab) -> Iterator[Daemon]:
    with Daemon(lab.host, allowed_addresses=list(ALLOWED)) as running:
        yield running


def declaration(lab: Lab, address: str, name: str) -> str:
    family = 6 if ":" in address else 4
    backends = [backend_text(backend, family) for backend in lab.backends]
    return yaml.safe_dump([{"name": name, "address": address, "ports": ["80/tcp"], "backends": backends}])


def problems(daemon: Daemon) -> list[str]:
    return [problem for source in daemon.status()["sources"] for problem in source["problems"]]


def translated(lab: Lab) -> set[str]:
    """Every single address that a rule of iptables names as a destination."""
    saved = "".join(lab.host.run(tool).stdout for tool in ("iptables-save", "ip6tables-save"))
    return set(re.findall(r" -d (\S+)/(?:32|128) ", saved))


def names(daemon: Daemon) -> set[str]:
    return set(daemon.vipctl("list", "-q").stdout.split())


def test_files_that_claim_it_are_refused_and_others_serve(
    lab: Lab, daemon: Daemon, services: Services
) -> None:
    vips = [services.add(lab.backends, family=family) for family in (4, 6)]
    honest, complaints, free = services.vip(), dict[str, str](), set(STRANGERS)
    daemon.declare(declaration(lab, honest.address, "honest"), "honest.yaml")
    for number, (address, why) in enumerate(STRANGERS.items()):
        path, other = daemon.services_dir / f"thief-{number}.yaml", services.vip(6 if ":" in address else 4)
        # In one step: what stood there for a moment alone would be taken, and go on.
        first = declaration(lab, other.address, f"first-{number}")
        daemon.write(first + declaration(lab, address, f"thief-{number}"), path.name)
        line = path.read_text().splitlines().index(f"- address: {address}") + 1
        complaints[address] = f"{path}:{line}: thief-{number}: {address} {why}"
        free.add(other.address)

    def only_others_serve() -> None:
        reported = "\n".join(problems(daemon))
        assert [address for address, text in complaints.items() if text not in reported] == []
        # A file is taken as a whole or not at all.
        assert names(daemon) == {*map(str, vips), "honest"}
        for frontend in (*vips, honest):
            lab.client.send(*frontend, count=10).all_answered()
        # The address is as free, or as unreachable, as it was.
        assert translated(lab) >= {honest.address, *(vip.address for vip in vips)}
        assert not translated(lab) & free

    said = daemon.vipctl("reload", check=False)
    assert said.returncode == 1
    assert [address for address, text in complaints.items() if text not in said.stderr] == []
    only_others_serve()
    daemon.stop()
    daemon.start()
    only_others_serve()
    for path in daemon.services_dir.glob("thief-*.yaml"):
        path.unlink()
    daemon.reload()


def test_vipctl_add_of_it_is_refused_and_not_stored(lab: Lab, daemon: Daemon, services: Services) -> None:
    vip = services.add(lab.backends)
    before = stored(daemon.state_dir)
    for address, why in STRANGERS.items():
        family = 6 if ":" in address else 4
        target = f"[{address}]:80/tcp" if family == 6 else f"{address}:80/tcp"
        said = daemon.vipctl("add", target, backend_text(lab.backends[0], family), check=False)
        assert said.returncode == 1
        assert f"{address} {why}" in said.stderr
        assert target not in names(daemon)
    assert stored(daemon.state_dir) == before
    lab.client.send(*vip, count=5).all_answered()


def test_a_mended_file_serves(lab: Lab, daemon: Daemon, services: Services) -> None:
    vip = services.vip()
    daemon.write(declaration(lab, "10.97.0.1", "mended"), "mended.yaml")
    assert daemon.vipctl("reload", check=False).returncode == 1
    daemon.declare(declaration(lab, vip.address, "mended"), "mended.yaml")
    assert not problems(daemon)
    lab.client.send(*vip, count=5).all_answered()


def test_a_served_version_goes_on_when_a_file_starts_to_claim(
    lab: Lab, daemon: Daemon, services: Services
) -> None:
    vip = services.vip()
    daemon.declare(declaration(lab, vip.address, "turning"), "turning.yaml")
    daemon.write(declaration(lab, lab.host.ipv4, "turning"), "turning.yaml")
    assert daemon.vipctl("reload", check=False).returncode == 1
    lab.client.send(*vip, count=5).all_answered()
    daemon.kill()
    daemon.start()
    lab.client.send(*vip, count=5).all_answered()
    lab.client.send(lab.host.ipv4, 80).all_failed("refused")
    (daemon.services_dir / "turning.yaml").unlink()
    daemon.reload()


def test_networks_narrowed_later_end_what_lies_outside(lab: Lab, daemon: Daemon) -> None:
    daemon.stop()
    try:
        with Daemon(lab.host) as open_to_all:
            wide, kept = "10.97.0.9", "10.96.200.9"
            for address in (wide, kept):
                open_to_all.vipctl("add", f"{address}:80/tcp", backend_text(lab.backends[0]))
                lab.client.send(address, 80).all_answered()
            open_to_all.stop()
            settings = yaml.safe_load(open_to_all.config.read_text())
            open_to_all.config.write_text(yaml.safe_dump({**settings, "allowed_addresses": list(ALLOWED)}))
            open_to_all.start()
            assert names(open_to_all) == {f"{kept}:80/tcp"}
            assert any(f"{wide} lies outside allowed_addresses" in p for p in problems(open_to_all))
            lab.client.send(kept, 80, count=5).all_answered()
            assert kept in translated(lab)
            assert wide not in translated(lab)
    finally:
        daemon.start()


def test_a_virtual_ip_is_no_backend(lab: Lab, daemon: Daemon, services: Services) -> None:
    vip = services.add(lab.backends)
    refused = daemon.vipctl("add", "10.96.9.1:80", f"{vip.address}:80", check=False)
    assert refused.returncode != 0
    assert f"the backend {vip.address} is a virtual IP, that of {vip}" in refused.stderr
    assert f"name the backends of {vip} instead: {backend_text(lab.backends[0])}" in refused.stderr
    spec = {"name": "chained", "address": "10.96.9.2", "ports": ["80/tcp"], "backends": [f"{vip.address}:80"]}
    daemon.write(yaml.safe_dump([spec]), "chained.yaml")
    daemon.vipctl("reload", check=False)
    assert any(f"the backend {vip.address} is a virtual IP" in problem for problem in problems(daemon))
    assert "chained" not in names(daemon)
    lab.client.send(*vip, count=5).all_answered()
    daemon.vipctl("remove", str(vip))
    daemon.wait_in_sync()
    assert "chained" in names(daemon)
    daemon.vipctl("add", str(vip), backend_text(lab.backends[0]))  # a backend of others is in nobody's way
    lab.client.send(*vip, count=5).all_answered()
    listed = daemon.vipctl("list").stdout
    assert re.search(r"chained .*degraded", listed), listed
    assert (
        f"{vip.address} also a virtual IP of another service" in daemon.vipctl("describe", "chained").stdout
    )
    assert any(
        warning.startswith(f"{vip.address}: both a virtual IP") for warning in daemon.status()["warnings"]
    )
    assert daemon.status()["serving"]["services"]["degraded"] == 1
    daemon.vipctl("remove", str(vip))
    daemon.wait_in_sync()
    assert daemon.status()["serving"]["services"]["degraded"] == 0
    (daemon.services_dir / "chained.yaml").unlink()
    daemon.reload()
