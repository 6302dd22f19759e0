"""Every mistake in a declaration, given to a running daemon by every source: nothing else is held up by
any."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.broken_declarations import declaration, mistakes
from tests.faults.instrumented import too_long
from tests.fleet.network import FleetLab, HostDaemon

pytestmark = [pytest.mark.root, pytest.mark.slow]

BATCH = 60
APPLIED = 20
"""Of them in one request: the services of a request are judged at one go, a millisecond each."""

Named = tuple[str, dict[str, Any]]


class InstrumentedDaemon(HostDaemon):
    module = "tests.faults.instrumented"

    def standstills(self) -> list[str]:
        """What held up the loop, from now on anew."""
        path = self.directory / "standstills"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def post(self, path: str, body: object) -> tuple[int, dict[str, Any]]:
        return self.ask("POST", path.removeprefix("/v1/"), body)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetLab]:
    with FleetLab(tmp_path_factory.mktemp("broken"), 1) as made:
        yield made


@pytest.fixture(scope="module", params=["iptables", "nftables"])
def daemon(lab: FleetLab, request: pytest.FixtureRequest) -> Iterator[InstrumentedDaemon]:
    etcd = {"endpoints": list(lab.etcd.urls), "timeout": "20s"}
    made = InstrumentedDaemon(
        lab.hosts[0],
        node_name="h1",
        dataplane=request.param,
        etcd=etcd,
        log_level="info",
        node_port_range="any",
    )
    with made as running:
        yield running
    lab.delete("*")
    lab.hosts[0].run("nft", "flush", "ruleset")


def test_the_declaration_uses_every_key() -> None:
    service = declaration(0)
    schema = json.loads((Path(__file__).parents[2] / "docs/declaration.schema.json").read_text())[
        "definitions"
    ]
    assert set(schema["service"]["properties"]) - {"node_port"} == set(service), (
        "node_port has a service of its own"
    )
    every = [*[declaration(n)["check"] for n in range(6)], service["backends"][1]["check"]]
    assert {key for check in every for key in check} >= set(schema["check"]["properties"])


@pytest.fixture
def batches(request: pytest.FixtureRequest) -> list[Sequence[Named]]:
    """Every mistake at night, and every twelfth each time."""
    found = list(mistakes())[:: 1 if request.config.getoption("nightly") else 12]
    return [found[start : start + BATCH] for start in range(0, len(found), BATCH)]


def others_are_served(daemon: InstrumentedDaemon, number: int, batch: Sequence[Named]) -> None:
    """Another service is added, and in the kernel; then it is removed."""
    name = f"other-{number}"
    spec = {"name": name, "address": "10.97.255.1", "ports": ["80/tcp"], "backends": ["10.244.0.1"]}
    status, said = daemon.post("/v1/services", {"service": spec})
    names = f"with one of {batch[0][0]} .. {batch[-1][0]}"
    assert status == 200, (names, said)
    assert said["applied"], (names, said)
    daemon.vipctl("remove", name)
    about = daemon.status()
    assert about["state"] in ("in-sync", "degraded", "pending"), (names, about)
    assert "internal error" not in json.dumps(about), (names, about)


def not_held_up(daemon: InstrumentedDaemon) -> None:
    assert "Traceback" not in daemon.log
    assert "internal error" not in daemon.log
    assert too_long(daemon.standstills()) == []


@pytest.mark.nightly
def test_in_files(daemon: InstrumentedDaemon, batches: Sequence[Sequence[Named]]) -> None:
    daemon.standstills()
    for number, batch in enumerate(batches):
        for at, (_, service) in enumerate(batch):
            text = json.dumps({"apiVersion": "vipd/v1", "services": [service]})
            (daemon.services_dir / f"{at}.json").write_text(text)
        daemon.vipctl("reload", check=False)
        others_are_served(daemon, number, batch)
    for path in daemon.services_dir.glob("*.json"):
        path.unlink()
    daemon.reload()
    not_held_up(daemon)


@pytest.mark.nightly(each_time="nftables")
def test_by_the_api(daemon: InstrumentedDaemon, batches: Sequence[Sequence[Named]]) -> None:
    daemon.standstills()
    for number, batch in enumerate(batches):
        for what, service in batch:
            status, said = daemon.post("/v1/services?dry_run=1", {"service": service})
            assert status in (200, 400, 409, 422), (what, said)
        for start in range(0, len(batch), APPLIED):
            services = [service for _, service in batch[start : start + APPLIED]]
            status, said = daemon.post("/v1/apply", {"services": services})
            assert status in (200, 400, 409, 422), (batch[0][0], said)
        others_are_served(daemon, number, batch)
    not_held_up(daemon)


@pytest.mark.nightly
def test_in_etcd(daemon: InstrumentedDaemon, batches: Sequence[Sequence[Named]], lab: FleetLab) -> None:
    daemon.standstills()
    for number, batch in enumerate(batches):
        with lab.hub.entered():
            lab.etcd.put_all(
                {
                    f"/vipd/v1/services/all-{at}": json.dumps({**s, "name": f"all-{at}"})
                    for at, (_, s) in enumerate(batch)
                }
            )
        others_are_served(daemon, number, batch)
    lab.delete("services/*")
    not_held_up(daemon)
