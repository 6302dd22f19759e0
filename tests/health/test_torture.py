"""Backends that die and return while vipd is killed and started again, at moments that a seed chooses."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Iterator

import pytest

from tests.dataplane.namespace import Namespace
from tests.lab.daemon import Daemon
from tests.lab.node import Node
from tests.lab.waiting import wait_until

pytestmark = pytest.mark.root

BACKENDS = 100
ROUNDS = 5
PORT = 9000
CHECK = "interval: 300ms, timeout: 300ms, rise: 2"
ADDRESSES = [f"10.244.7.{n}" for n in range(1, BACKENDS + 1)]
SERVICES = f"""\
  - {{name: tcp, address: 10.96.7.1, ports: [{PORT}], backends: [{", ".join(ADDRESSES)}],
     check: {{type: tcp, {CHECK}, fall: 2}}}}
  - {{name: patient, address: 10.96.7.2, ports: [{PORT}], backends: [{", ".join(ADDRESSES[::10])}],
     check: {{type: tcp, {CHECK}, fall: 4}}}}
  - {{name: http, address: 10.96.7.3, ports: [{PORT}], backends: [{", ".join(ADDRESSES[::10])}],
     check: {{type: http, {CHECK}, fall: 2}}}}
"""


class Servers:
    """Listeners on a host, of which some are dead. None of them speaks HTTP."""

    def __init__(self, host: Node) -> None:
        self._host = host
        self._alive: dict[str, socket.socket] = {}

    def revive(self, *addresses: str) -> None:
        with self._host.entered():
            for address in addresses:
                self._alive[address] = socket.create_server((address, PORT), backlog=512)

    def kill(self, *addresses: str) -> None:
        for address in addresses:
            self._alive.pop(address).close()

    def close(self) -> None:
        """End all."""
        self.kill(*self._alive.copy())

    def flap(self, chance: random.Random) -> None:
        """Some die, and some of the dead return."""
        chosen = set(chance.sample(ADDRESSES, BACKENDS // 5))
        self.kill(*(alive := chosen & self._alive.keys()))
        self.revive(*chosen - alive)

    def dead(self) -> set[str]:
        """What cannot serve, as `service address`."""
        bad = {address for address in ADDRESSES if address not in self._alive}
        tcp = {f"{name} {address}" for name, some in SERVED.items() for address in some if address in bad}
        return tcp | {f"http {address}" for address in ADDRESSES[::10]}


SERVED = {"tcp": ADDRESSES, "patient": ADDRESSES[::10]}


@pytest.fixture
def host() -> Iterator[Node]:
    with Namespace() as made:
        node = Node(made.name, "host", "", "")
        node.run("ip", "link", "add", "backends", "type", "bridge")
        node.run("ip", "link", "set", "backends", "up")
        node.run("ip", "link", "set", "lo", "up")
        for address in ADDRESSES:
            node.run("ip", "address", "add", f"{address}/24", "dev", "backends")
        yield node


def seen(daemon: Daemon) -> dict[str, dict[str, str]]:
    """The health of each backend and its reason, as `service address`, by the state that it is in."""
    found: dict[str, dict[str, str]] = {"healthy": {}, "unhealthy": {}, "unknown": {}}
    for name in ("tcp", "patient", "http"):
        for forwarding in daemon.get(f"services/{name}")["service"]["forwardings"]:
            for endpoint in forwarding["endpoints"]:
                found[endpoint["health"]][f"{name} {endpoint['address']}"] = endpoint["check"]
    return found


def amiss(daemon: Daemon, servers: Servers) -> set[str]:
    """Verdicts that are not what the backends say; one that flapped may be held down for a while."""
    found, dead = seen(daemon), servers.dead()
    held = {place for place, why in found["unhealthy"].items() if "held down" in why}
    return (found["unhealthy"].keys() - held) ^ (dead - held) | found["unknown"].keys()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_no_dead_backend_serves_after_a_restart_for_longer_than_its_check_needs(
    seed: int, host: Node
) -> None:
    chance, servers, kills = random.Random(seed), Servers(host), 0
    servers.revive(*ADDRESSES)
    with contextlib.closing(servers), Daemon(host, SERVICES) as daemon:

        def settle() -> None:
            wait_until(lambda: not amiss(daemon, servers), lambda: str(sorted(amiss(daemon, servers))[:5]))

        def kill() -> None:
            nonlocal kills
            daemon.kill()
            daemon.start()
            kills += 1

        for _ in range(ROUNDS):
            settle()
            time.sleep(1)  # a bad verdict is on disk a tenth of a second later
            dead = servers.dead()
            kill()
            first = seen(daemon)["unhealthy"].keys()
            assert dead <= first, "what was known before the crash"
            # In the middle of it: what is on disk counts, the rest is found out anew.
            servers.flap(chance)
            for _ in range(chance.randrange(3)):
                time.sleep(chance.random())
                kill()
        settle()
        print(f"{kills} kills")
