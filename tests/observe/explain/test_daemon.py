"""`vipctl explain` of a real daemon: its services, its settings, its host's addresses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import UPLINK, Lab, Wiring

pytestmark = pytest.mark.root

DECLARED = """
  - name: web
    address: 10.96.0.20
    ports: [{port: 80, target: 8080, node_port: 30080}]
    backends: [10.244.0.11]
"""


@pytest.mark.parametrize(("dataplane", "table"), [("iptables", "nat"), ("nftables", "ip vipd")])
def test_the_daemon_s_own_view(dataplane: str, table: str) -> None:
    with Lab(Wiring(backends=1)) as lab, Daemon(lab.host, DECLARED, dataplane=dataplane) as daemon:

        def explanation_of(source: str, target: str) -> dict[str, Any]:
            ended = daemon.vipctl("explain", "--from", source, target, "-o", "json")
            found: dict[str, Any] = json.loads(ended.stdout)["explanation"]
            return found

        def masqueraded(source: str, target: str) -> list[bool]:
            return [backend["masqueraded"] for backend in explanation_of(source, target)["backends"]]

        assert table in {rule["table"] for rule in explanation_of("local", "web")["outcomes"][0]["rules"]}
        assert explanation_of("local", "web")["packet"]["arriving"] == "local"
        assert explanation_of(UPLINK[4], "web")["packet"]["arriving"] == "local"
        assert (masqueraded(lab.client.ipv4, "web"), masqueraded("local", "web")) == ([True], [False])
        assert masqueraded(lab.client.ipv4, f"{UPLINK[4]}:30080/tcp") == [True]
        assert explanation_of(lab.client.ipv4, "10.244.0.11:30080/tcp")["verdict"] == "unchanged"
        missing = daemon.vipctl("explain", "--from", "local", "nope", check=False)
        assert (missing.returncode, "no service nope" in missing.stderr) == (3, True)
