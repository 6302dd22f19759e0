"""Backends by name that etcd declares: every host asks its own name server and keeps its last good answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from tests.fleet.network import HUB, FleetLab, HostDaemon
from tests.lab.name_server import ADDRESS, NEEDED, PORT, NameServer

pytestmark = [pytest.mark.root, pytest.mark.slow, NEEDED]

NAME, SPARE = "web.internal", "sorry.internal"
WEB = f"""
address: 10.96.7.1
ports: 80/tcp
backends: [dns:{NAME}:8080]
fallback: dns:{SPARE}:8080
"""


class Names:
    """A name server in the hub, which all hosts but the last ask, and one of the last host's own."""

    def __init__(self, lab: FleetLab, directory: Path) -> None:
        self.own = NameServer(lab.hosts[-1], self._below(directory, "own"))
        self.shared = NameServer(lab.hub, self._below(directory, "shared"), address=HUB)

    def answer(self, *addresses: str) -> None:
        for server in (self.own, self.shared):
            tell(server, *addresses)

    @staticmethod
    def _below(directory: Path, name: str) -> Path:
        (directory / name).mkdir()
        return directory / name


def tell(server: NameServer, *addresses: str) -> None:
    """Answer with these addresses of the name, and always with the same one of the spare."""
    records = [f"host-record={NAME},{address}" for address in addresses]
    server.serve(*records, f"host-record={SPARE},10.244.9.9")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[FleetLab]:
    with FleetLab(tmp_path, 3) as found:
        yield found


@pytest.fixture
def names(lab: FleetLab, tmp_path: Path) -> Iterator[Names]:
    found = Names(lab, tmp_path)
    yield found
    found.own.die()
    found.shared.die()


def daemons_of(lab: FleetLab, stack: ExitStack) -> list[HostDaemon]:
    """A running daemon on each host."""
    prompt = {"dns_min_ttl": "1s", "dns_max_ttl": "1s", "dns_timeout": "400ms", "dns_hold": "0s"}
    last = lab.hosts[-1]
    return [
        stack.enter_context(
            lab.daemon(
                host,
                {
                    **prompt,
                    "allowed_names": {"etcd": ["internal"]},
                    "dns_servers": f"{ADDRESS if host is last else HUB}:{PORT}",
                },
            )
        )
        for host in lab.hosts
    ]


def serve(daemons: Sequence[HostDaemon], *addresses: str) -> None:
    """Wait until the rules of these hosts lead to these addresses, and to no others."""

    def translated(daemon: HostDaemon) -> list[str]:
        rules = daemon.host.run("iptables-save", "-t", "nat").stdout.split()
        found = {after for word, after in pairwise(rules) if word == "--to-destination"}
        return sorted(found)

    for daemon in daemons:
        daemon.wait_until(lambda: translated(daemon), [f"{address}:8080" for address in addresses])  # noqa: B023


def fault(daemon: HostDaemon) -> str:
    """What failed with the lookup of the service's own name."""
    return str(daemon.get("services/web")["service"]["names"][0]["fault"])


@pytest.mark.nightly
def test_all_hosts_follow_a_record_and_one_without_its_name_server_keeps_the_last_answer(
    lab: FleetLab, names: Names
) -> None:
    names.answer("10.244.0.1")
    lab.put("services/web", WEB)
    with ExitStack() as stack:
        daemons = daemons_of(lab, stack)
        *others, last = daemons
        serve(daemons, "10.244.0.1")
        names.answer("10.244.0.2", "10.244.0.3")
        serve(daemons, "10.244.0.2", "10.244.0.3")

        names.own.die()
        tell(names.shared, "10.244.0.4")
        serve(others, "10.244.0.4")
        last.wait_until(lambda: bool(fault(last)), True)
        lab.put("services/web", WEB.replace("10.96.7.1", "10.96.7.2"))
        last.wait_until(lambda: last.get("services/web")["service"]["spec"]["address"], "10.96.7.2")
        last.wait_in_sync()
        serve([last], "10.244.0.2", "10.244.0.3")
        assert any(NAME in warning for warning in last.status()["warnings"])
        assert not any(NAME in warning for daemon in others for warning in daemon.status()["warnings"])

        last.stop()
        last.start()
        serve([last], "10.244.0.2", "10.244.0.3")
        tell(names.own, "10.244.0.4")
        serve(daemons, "10.244.0.4")


def test_a_name_that_etcd_may_not_use_changes_nothing_on_any_host(lab: FleetLab, names: Names) -> None:
    names.answer("10.244.0.1")
    lab.put("services/web", WEB)
    with ExitStack() as stack:
        daemons = daemons_of(lab, stack)
        serve(daemons, "10.244.0.1")
        lab.put("services/web", WEB.replace(SPARE, "sorry.example.com"))
        for daemon in daemons:
            daemon.wait_until(lambda: "allowed_names" in str(daemon.status()["sources"]), True)  # noqa: B023
        serve(daemons, "10.244.0.1")
