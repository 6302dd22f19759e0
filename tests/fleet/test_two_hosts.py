"""Two hosts fed by one etcd, through vipctl: writes, conflicts, orders, registrations, no etcd."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.fleet.network import FleetLab
from tests.lab.daemon import Daemon, UnixConnection
from tests.sources.etcd.members import etcdctl

pytestmark = pytest.mark.root

WEB = "address: 10.96.0.80\nports: 80\nbackends: [10.244.0.11, 10.244.0.12]\n"
ROUNDS = 100


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetLab]:
    with FleetLab(tmp_path_factory.mktemp("two"), 3) as made:
        yield made


@pytest.fixture(scope="module")
def both(lab: FleetLab) -> Iterator[tuple[Daemon, Daemon]]:
    with lab.daemon(lab.hosts[0]) as first, lab.daemon(lab.hosts[1]) as second:
        yield first, second


def served(daemon: Daemon, vip: str) -> bool:
    """Whether the kernel has rules for an address."""
    return f"-d {vip}/32" in daemon.host.run("iptables-save", "-t", "nat").stdout


def endpoints(daemon: Daemon, name: str) -> set[str]:
    """The backends that take new flows."""
    answer = daemon.get(f"services/{name}")
    forwardings = answer["service"]["forwardings"] if "service" in answer else []
    return {e["endpoint"] for f in forwardings for e in f["endpoints"] if e["ready"]}


def on_all(daemons: Sequence[Daemon], value: Callable[[Daemon], object], expected: object) -> None:
    """Wait until `value` is the expected one for every daemon."""
    for daemon in daemons:
        daemon.wait_until(partial(value, daemon), expected)


def test_what_vipctl_writes_to_etcd_serves_on_every_host(lab: FleetLab, both: tuple[Daemon, Daemon]) -> None:
    first, second = both
    words = ("10.96.0.10:53/udp", "10.244.0.5", "10.244.0.6@2", "--name", "shop/dns", "--affinity", "10m")
    dry = first.vipctl("--store", "etcd", "add", *words, "--dry-run").stdout
    assert "\ncreated shop/dns" in dry
    assert "dry run" in dry
    assert second.get("services/shop%2Fdns").get("service") is None
    output = first.vipctl("--store", "etcd", "add", *words).stdout
    assert (found := re.search(r"stored in etcd /vipd/v1/services/shop/dns at revision (\d+)", output)), (
        output
    )
    assert served(first, "10.96.0.10"), "applied before the answer"
    second.wait_until(lambda: served(second, "10.96.0.10"), True)
    with lab.hub.entered():
        stored = etcdctl(lab.etcd.urls[0], "get", "/vipd/v1/services/shop/dns", "--print-value-only")
        written = json.loads(etcdctl(lab.etcd.urls[0], "get", "/vipd/v1/services/shop/dns", "-w", "json"))
    assert "name" not in stored
    assert written["kvs"][0]["mod_revision"] == int(found[1])
    assert first.vipctl("add", *words, "--store", "etcd").stdout.startswith("unchanged shop/dns")
    # A host that has only just heard of it changes it as well.
    second.vipctl("--store", "etcd", "add-backend", "shop/dns", "10.244.0.7")
    second.vipctl("set", "shop/dns/10.244.0.7", "--weight", "3", "--store", "etcd")
    second.vipctl("--store", "etcd", "remove-backend", "shop/dns", "10.244.0.5")
    first.wait_until(lambda: endpoints(first, "shop%2Fdns"), {"10.244.0.6:53", "10.244.0.7:53"})
    assert "weight: 3" in first.vipctl("describe", "shop/dns", "-o", "yaml").stdout
    assert "no longer in etcd" in first.vipctl("--store", "etcd", "remove", "shop/dns").stdout
    second.wait_until(lambda: served(second, "10.96.0.10"), False)


def test_files_are_applied_to_etcd_all_or_none(lab: FleetLab, both: tuple[Daemon, Daemon]) -> None:
    first, second = both
    file = first.directory / "apply.yaml"
    service = "- {{name: a{0}, address: 10.96.1.{0}, ports: [80], backends: [10.244.0.1]}}\n"

    def write(*numbers: int) -> None:
        file.write_text("apiVersion: vipd/v1\nservices:\n" + "".join(map(service.format, numbers)))

    write(1, 2, 3)
    assert "3 created; stored in etcd" in first.vipctl("apply", str(file), "--store", "etcd").stdout
    first.vipctl("add", "10.96.1.9:80/tcp", "10.244.0.1", "--name", "here")
    write(2, 4)
    output = first.vipctl("apply", str(file), "--store", "etcd", "--prune").stdout
    assert "1 created, 2 removed, 1 unchanged" in output
    names = {service["name"] for service in first.get("services")["services"]}
    assert {"a2", "a4", "here"} <= names, "what is this host's own stays"
    assert not {"a1", "a3"} & names
    second.wait_until(lambda: served(second, "10.96.1.4") and not served(second, "10.96.1.1"), True)
    write(*range(100, 230))
    refused = first.vipctl("apply", str(file), "--store", "etcd", check=False)
    assert refused.returncode == 1
    assert "too many operations" in refused.stderr
    assert "--max-txn-ops" in refused.stderr
    assert "a100" not in {service["name"] for service in first.get("services")["services"]}
    first.vipctl("remove", "here")


def test_refusals_say_the_way_out(lab: FleetLab, both: tuple[Daemon, Daemon]) -> None:
    first, _ = both
    lab.put("services/web", WEB)
    first.wait_until(lambda: served(first, "10.96.0.80"), True)
    own = first.vipctl("add-backend", "web", "10.244.0.13", check=False)
    assert "owned by etcd:/vipd/v1/services/web; hint: vipctl --store etcd" in own.stderr
    nameless = first.vipctl("--store", "etcd", "add", "10.96.0.11:80/tcp", "10.244.0.1", check=False)
    assert nameless.returncode == 1
    assert "hint: give --name" in nameless.stderr
    taken = first.vipctl(
        "add", "10.96.0.80:80/tcp", "10.244.0.1", "--store", "etcd", "--name", "x", check=False
    )
    assert taken.returncode == 1
    assert "owned by etcd:/vipd/v1/services/web" in taken.stderr
    # What another writes in the same moment, here by hand, makes a service that no host can serve.
    lab.put("services/bad", "address: nonsense\nports: 80\n")
    first.wait_until(lambda: first.status()["etcd"]["rejected"], ["/vipd/v1/services/bad"])
    status = first.vipctl("status").stdout
    assert "1 rejected" in status
    assert "etcd:/vipd/v1/services/bad" in status
    lab.delete("services/bad")


def test_two_who_change_the_same_do_not_undo_each_other(lab: FleetLab, both: tuple[Daemon, Daemon]) -> None:
    lab.put("services/race", "address: 10.96.0.90\nports: 80\nbackends: [10.244.9.1]\n")
    on_all(both, lambda daemon: served(daemon, "10.96.0.90"), True)
    wanted, conflicts = {"10.244.9.1:80"}, 0

    def add(daemon: Daemon, backend: str) -> tuple[int, str]:
        connection = UnixConnection(daemon.socket)
        body = json.dumps({"backends": [backend]})
        connection.request("POST", "/v1/services/race/backends?store=etcd", body)
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        return response.status, answer.get("error", {}).get("what", "")

    with ThreadPoolExecutor(2) as pool:
        for number in range(ROUNDS):
            backends = [f"10.244.{10 + side}.{number + 1}" for side in range(2)]
            for backend, (status, what) in zip(backends, pool.map(add, both, backends), strict=True):
                if status == 200:
                    wanted.add(f"{backend}:80")
                else:
                    assert status == 409
                    assert what == "/vipd/v1/services/race was changed by somebody else meanwhile"
                    conflicts += 1
            if conflicts > 2:
                break
    print(f"{conflicts} conflicts in {number + 1} rounds")
    assert conflicts, "the changes never met"
    on_all(both, lambda daemon: endpoints(daemon, "race"), wanted)


def test_an_order_for_the_fleet_holds_on_every_host(lab: FleetLab, both: tuple[Daemon, Daemon]) -> None:
    first, second = both
    lab.put("services/web", WEB)
    on_all(both, lambda daemon: len(endpoints(daemon, "web")), 2)
    output = first.vipctl("drain", "web/10.244.0.11", "--fleet", "--reason", "kernel").stdout
    assert "draining web/10.244.0.11 on every host" in output
    on_all(both, lambda daemon: endpoints(daemon, "web"), {"10.244.0.12:80"})
    second.vipctl("disable", "--address", "10.244.0.99", "--fleet", check=False)
    listed = second.vipctl("overrides").stdout
    assert re.search(r"web/10\.244\.0\.11 +draining +fleet +root \(pid \d+\) on h1 .*kernel", listed), listed
    kept = second.vipctl("resume", "web/10.244.0.11").stdout
    assert "there was no such order" in kept
    assert "hint: vipctl resume --fleet" in kept
    assert "resumed web/10.244.0.11" in second.vipctl("resume", "--fleet", "web/10.244.0.11").stdout
    first.wait_until(lambda: len(endpoints(first, "web")), 2)
    first.vipctl("disable", "web/10.244.0.12", "--fleet", "--for", "3s")
    on_all(both, lambda daemon: len(endpoints(daemon, "web")), 2)
    with lab.hub.entered():
        second.wait_until(lambda: etcdctl(lab.etcd.urls[0], "get", "--prefix", "/vipd/v1/overrides/"), "")


def test_the_fleet_shows_its_hosts(lab: FleetLab, both: tuple[Daemon, Daemon]) -> None:
    first, _ = both
    revision = lab.put("services/web", WEB)

    def hosts() -> dict[str, tuple[int, int]]:
        found = json.loads(first.vipctl("fleet", "status", "-o", "json").stdout)["hosts"]
        return {host["name"]: (host["revision"], host["behind"]) for host in found}

    first.wait_until(hosts, {"h1": (revision, 0), "h2": (revision, 0)})

    def table() -> tuple[str, ...]:
        lines = first.vipctl("fleet", "status").stdout.splitlines()
        titles = ["HOST", "VERSION", "REVISION", "LAG", "SERVICES", "ANNOUNCES", "PROBLEMS", "SEEN"]
        assert lines[0].split() == titles
        assert max(map(len, lines)) <= 80
        return re.sub(r"\d+s ago", "SEEN", lines[1]).split()[0], *lines[1].split()[3:7]

    # A host reports every two seconds, the number of its services perhaps a report later.
    first.wait_until(table, ("h1", "none", str(first.status()["services"]), "0", "0"))


def test_a_single_step_obeys_what_etcd_has_just_said(lab: FleetLab) -> None:
    """`vipd --once` waits for its answer, orders of the fleet too."""
    once = "address: 10.96.0.81\nports: 80\nbackends: [10.244.7.11, 10.244.7.12]\n"
    order = {"service": "once", "backend": "10.244.7.11", "admin": "draining", "by": "x"}
    host = lab.hosts[2]
    with lab.daemon(host) as daemon:
        daemon.stop()
        lab.put("services/once", once)
        lab.put("overrides/once", json.dumps({**order, "at": "2026-01-01T00:00:00+00:00"}))

        def served_once() -> list[bool]:
            host.run(sys.executable, "-m", "vipd", "--config", str(daemon.config), "--once", check=False)
            rules = host.run("iptables-save", "-t", "nat").stdout
            return [f"--to-destination 10.244.7.{n}:80" in rules for n in (11, 12)]

        # It waits for three seconds, which is little on a busy machine.
        daemon.wait_until(served_once, [False, True])
        lab.delete("overrides/once")
        lab.delete("services/once")
        daemon.cleanup()


def test_without_the_setting_there_is_nothing_of_etcd(lab: FleetLab) -> None:
    with Daemon(lab.hosts[2]) as daemon:
        assert [source["name"] for source in daemon.status()["sources"]] == ["files", "store"]
        assert "etcd" not in daemon.status()
        for words in (("--store", "etcd", "add", "10.96.0.1:80/tcp", "10.244.0.1"), ("fleet", "status")):
            refused = daemon.vipctl(*words, check=False)
            assert refused.returncode == 1
            assert "this host has no etcd; hint: name its endpoints" in refused.stderr
