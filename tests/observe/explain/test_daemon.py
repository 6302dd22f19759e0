"""`explain` of a real daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.lab.daemon import Daemon
from tests.lab.inside import DATAPLANES
from tests.lab.topology import UPLINK, Lab
from tests.packets.services import SERVED_PORT, backend_text

pytestmark = pytest.mark.root


@pytest.fixture(scope="module", params=DATAPLANES)
def dataplane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as built:
        built.serve_everywhere(SERVED_PORT)
        yield built


@pytest.fixture(scope="module")
def daemon(lab: Lab, dataplane: str) -> Iterator[Daemon]:
    with Daemon(lab.host, dataplane=dataplane) as running:
        yield running


def test_a_daemon_knows_its_dataplane_its_services_and_the_addresses_of_its_host(
    lab: Lab, daemon: Daemon, dataplane: str
) -> None:
    backend, (here, client) = backend_text(lab.backends[0]), (UPLINK[4], lab.client.ipv4)
    daemon.write(f"""
  - name: web
    address: 10.96.0.20
    ports: [{{port: 80, node_port: 30080}}]
    backends: ['{backend}']
""")
    daemon.wait_until(lambda: daemon.endpoints("web"), [backend])

    def asked(source: str, target: str) -> tuple[str, str, list[bool]]:
        said = daemon.vipctl("explain", "-o", "json", "--from", source, target)
        view = json.loads(said.stdout)["explanation"]
        tables = {rule["table"] for outcome in view["outcomes"] for rule in outcome["rules"]}
        assert ({"ip vipd", "nat"} & tables) == {"nat" if dataplane == "iptables" else "ip vipd"}
        return view["packet"]["arriving"], view["verdict"], [b["masqueraded"] for b in view["backends"]]

    assert asked("local", "web") == asked(here, "web") == ("local", "delivered", [False])
    assert asked(client, "web")[1:] == ("delivered", [True])
    assert asked(client, f"{here}:30080/tcp")[1:] == ("delivered", [True])
    assert asked(client, f"{lab.backends[0].ipv4}:30080/tcp")[1:] == ("unchanged", [])
    missing = daemon.vipctl("explain", "--from", "local", "nope", check=False)
    assert (missing.returncode, "no service nope" in missing.stderr) == (3, True)
