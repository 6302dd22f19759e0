"""`on_remove: reset`: a client of what was removed gets a reset, whoever removed it, and nobody else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import yaml

from tests.lab.cached import cached
from tests.lab.daemon import Daemon
from tests.lab.flow import Flow, finish
from tests.lab.node import Node
from tests.lab.topology import Lab
from tests.lab.traffic import Answer
from tests.packets.services import SERVED_PORT, Services, backend_text
from vipd.model.service import Frontend

pytestmark = pytest.mark.root

both_families = pytest.mark.parametrize("family", [4, 6])
NODE_PORT = 30777


def spec(vip: Frontend, *backends: Node, **more: Any) -> dict[str, Any]:
    """A service of one TCP port with `on_remove: reset`."""
    named = [backend_text(node, 6 if ":" in vip.address else 4) for node in backends]
    return {
        "name": "ending",
        "address": vip.address,
        "ports": [{"port": vip.port}],
        "backends": named,
        "on_remove": "reset",
        **more,
    }


def say(daemon: Daemon, *services: Mapping[str, Any]) -> None:
    daemon.declare(yaml.safe_dump(list(services)) if services else "  []\n", "ending.yaml")


def reset_seen(daemon: Daemon, flow: Flow) -> None:
    """The very outcome that ended it is a reset."""
    outcome: Answer | str = ""

    def ended() -> bool:
        nonlocal outcome
        outcome = flow.try_ask(5)
        return not isinstance(outcome, Answer)

    daemon.wait_until(ended, True)
    assert outcome == "ECONNRESET"


@pytest.fixture(autouse=True)
def _nothing_left(daemon: Daemon) -> Iterator[None]:
    yield
    for path in daemon.services_dir.glob("*.yaml"):
        path.unlink()
    daemon.reload()


def by_file(daemon: Daemon, vip: Frontend) -> None:
    (daemon.services_dir / "ending.yaml").unlink()


def by_content(daemon: Daemon, vip: Frontend) -> None:
    say(daemon)


def by_reload(daemon: Daemon, vip: Frontend) -> None:
    by_file(daemon, vip)
    daemon.reload()


def while_away(daemon: Daemon, vip: Frontend) -> None:
    daemon.kill()
    by_file(daemon, vip)
    daemon.start()


REMOVALS: dict[str, Callable[[Daemon, Frontend], None]] = {
    "file deleted": by_file,
    "file emptied": by_content,
    "reload": by_reload,
    "while vipd was away": while_away,
}


@both_families
@pytest.mark.parametrize("how", list(REMOVALS))
def test_a_service_removed_whole(lab: Lab, daemon: Daemon, services: Services, family: int, how: str) -> None:
    vip, other = services.vip(family), services.add(lab.backends[:1], family=family)
    say(daemon, spec(vip, lab.backends[0]))
    daemon.wait_until(lambda: vip.address in str(cached(daemon.state_dir, "flow_target")), True)
    direct = lab.backends[0].address(family)
    with (
        lab.client.open(*vip) as flow,
        lab.client.open(*other) as same_backend,
        lab.client.open(direct, SERVED_PORT) as beside,
    ):
        before = [each.ask() for each in (flow, same_backend, beside)]
        REMOVALS[how](daemon, vip)
        reset_seen(daemon, flow)
        assert [each.ask() for each in (same_backend, beside)] == before[1:]
        lab.client.send(*other, count=5).all_answered()
        lab.client.send(direct, SERVED_PORT, count=5).all_answered()
    assert all(not service["name"].startswith("removed ") for service in daemon.get("services")["services"])


@both_families
def test_a_service_of_the_store_removed(lab: Lab, daemon: Daemon, services: Services, family: int) -> None:
    vip = services.vip(family)
    say(daemon, spec(vip, lab.backends[0]))
    text = (daemon.services_dir / "ending.yaml").read_text()
    (daemon.services_dir / "ending.yaml").unlink()
    daemon.reload()
    path = daemon.directory / "given.yaml"
    path.write_text(text)
    daemon.vipctl("apply", str(path))
    with lab.client.open(*vip) as flow:
        flow.ask()
        daemon.vipctl("remove", "ending")
        reset_seen(daemon, flow)


@both_families
def test_a_port_removed(lab: Lab, daemon: Daemon, services: Services, family: int) -> None:
    vip = services.vip(family)
    two = {"ports": [{"port": vip.port, "name": "a"}, {"port": 90, "name": "b", "target": SERVED_PORT}]}
    say(daemon, spec(vip, lab.backends[0], **two))
    with lab.client.open(*vip) as flow, lab.client.open(vip.address, 90) as staying:
        flow.ask()
        before = staying.ask()
        say(daemon, spec(vip, lab.backends[0], ports=two["ports"][1:]))
        reset_seen(daemon, flow)
        assert staying.ask() == before
        lab.client.send(*vip, count=3).all_failed("refused").at_once()


@both_families
def test_a_node_port_removed_where_the_host_takes_nothing_in(
    lab: Lab, daemon: Daemon, services: Services, family: int
) -> None:
    vip = services.vip(family)
    with_port = [{"port": vip.port, "node_port": NODE_PORT}]
    say(daemon, spec(vip, lab.backends[0], ports=with_port))
    program = "iptables" if family == 4 else "ip6tables"
    rule = ("INPUT", "-p", "tcp", "--dport", str(NODE_PORT), "-j", "DROP")
    with lab.client.open(lab.host.address(family), NODE_PORT) as flow:
        flow.ask()
        lab.host.run(program, "-A", *rule)
        try:
            say(daemon, spec(vip, lab.backends[0]))
            reset_seen(daemon, flow)
        finally:
            lab.host.run(program, "-D", *rule)


@both_families
def test_backends_removed(lab: Lab, daemon: Daemon, services: Services, family: int) -> None:
    vip = services.vip(family)
    say(daemon, spec(vip, lab.backends[0]))
    with lab.client.open(*vip) as flow:
        flow.ask()
        say(daemon, spec(vip, lab.backends[1]))
        reset_seen(daemon, flow)
    with lab.client.open(*vip) as flow:
        flow.ask()
        say(daemon, spec(vip))
        reset_seen(daemon, flow)


@both_families
def test_the_last_backend_removed_where_new_flows_meet_silence(
    lab: Lab, daemon: Daemon, services: Services, family: int
) -> None:
    vip = services.vip(family)
    say(daemon, spec(vip, lab.backends[0], fallback="drop"))
    with lab.client.open(*vip) as flow:
        flow.ask()
        say(daemon, spec(vip, fallback="drop"))
        reset_seen(daemon, flow)
        lab.client.send(*vip, timeout=0.9).all_failed("timeout")
        explained = daemon.vipctl("explain", "--from", lab.client.address(family), str(vip), check=False)
        assert "dropped" in explained.stdout, explained


@both_families
def test_it_comes_back_at_once(lab: Lab, daemon: Daemon, services: Services, family: int) -> None:
    vip = services.vip(family)
    for _ in range(3):
        say(daemon, spec(vip, lab.backends[0]))
        lab.client.send(*vip, count=10).all_answered().at_once()
        with lab.client.open(*vip) as flow:
            before = flow.ask()
            say(daemon, spec(vip, lab.backends[0], affinity="1m"))
            assert flow.ask() == before
            say(daemon)
    say(daemon, spec(vip, lab.backends[1], on_remove="keep"))
    assert set(lab.client.send(*vip, count=10).all_answered().at_once().backends) == {"b2"}


@both_families
def test_an_address_that_others_serve_then_is_left_to_them(
    lab: Lab, daemon: Daemon, services: Services, family: int
) -> None:
    """Once vipd has nothing at an address, it goes where routes lead."""
    vip, owner = services.vip(family), lab.backends[2]
    say(daemon, spec(vip, lab.backends[0]))
    lab.client.send(*vip).all_answered()
    length = 32 if family == 4 else 128
    with lab.client.open(*vip) as flow:
        flow.ask()
        say(daemon)
        reset_seen(daemon, flow)
    lab.host.run("ip", f"-{family}", "route", "add", vip.address, "via", owner.address(family))
    owner.run("ip", f"-{family}", "address", "add", f"{vip.address}/{length}", "dev", "lo")
    served = owner.serve(tcp=[vip.port], name="owner")
    assert set(lab.client.send(*vip, count=10).all_answered().at_once().backends) == {"owner"}
    with lab.client.open(*vip) as flow:
        assert [flow.ask().backend for _ in range(5)] == ["owner"] * 5
    finish(served)


@both_families
def test_it_survives_a_restart_and_goes_with_vipd(
    lab: Lab, daemon: Daemon, services: Services, family: int
) -> None:
    vip = services.vip(family)
    say(daemon, spec(vip, lab.backends[0]))
    with lab.client.open(*vip) as flow:
        flow.ask()
        say(daemon)
        daemon.wait_until(lambda: f'"{vip.address}"' in str(cached(daemon.state_dir, "flow_target")), True)
        daemon.kill()
        daemon.start()
        reset_seen(daemon, flow)
        daemon.stop()
        daemon.cleanup()
    rules = lab.host.run("nft", "list", "ruleset").stdout
    daemon.start()
    assert vip.address not in rules
