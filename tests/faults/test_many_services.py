"""What holds up the event loop of a daemon with very many services: nothing that anybody asks or changes."""

from __future__ import annotations

import time

import pytest

from tests.faults.instrumented import too_long
from tests.faults.test_broken_declarations import InstrumentedDaemon
from tests.lab.topology import Lab, Wiring
from tests.model.samples import many_declared

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.nightly]

MANY = 8000
SMALL: dict[str, object] = {
    "name": "small",
    "address": "10.250.0.1",
    "ports": ["80/tcp"],
    "balance": "round-robin",
    "backends": ["10.246.0.1", "10.246.0.2"],
}


@pytest.mark.parametrize("dataplane", ["nftables", "iptables"])
def test_nothing_that_is_asked_or_changed_holds_up_the_loop(dataplane: str) -> None:
    _, _, services = many_declared(MANY, 3).partition("services:\n")
    every_kind = services.replace("    ports:", "    balance: round-robin\n    ports:")
    every_kind = every_kind.replace("name: http,", "name: http, node_port: 30080,", 1)
    with (
        Lab(Wiring(backends=1)) as lab,
        InstrumentedDaemon(
            lab.host, every_kind, dataplane=dataplane, node_port_addresses=["192.0.2.0/24"]
        ) as daemon,
    ):
        time.sleep(1)
        too_long(daemon.standstills())  # of the first load
        for request in ("stats", "services", "export", "events", "status", "diff"):
            assert "error" not in daemon.get(request)
            assert too_long(daemon.standstills()) == [], request
        assert daemon.post("/v1/services", {"service": SMALL})[1]["applied"]
        assert daemon.post("/v1/services/small/backends", {"backends": ["10.246.0.3"]})[1]["applied"]
        assert too_long(daemon.standstills()) == [], "a change"
        lab.host.run("ip", "address", "add", "192.0.2.77/24", "dev", "lo")
        reads = ("nft", "list", "ruleset") if dataplane == "nftables" else ("iptables-save", "-t", "nat")
        daemon.wait_until(lambda: "192.0.2.77" in lab.host.run(*reads).stdout, True)
        assert too_long(daemon.standstills()) == [], "an address"
