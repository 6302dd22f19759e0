"""A service that the kernel does not take is set aside by name; all others are programmed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.faults.dataplanes import Equipment
from tests.faults.equipment import REFUSAL, FailingTools, ToolsOnlyDaemon
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.services import SERVED_PORT, backend_text

pytestmark = pytest.mark.root

MANY = 40
BAD_BACKEND = "10.244.0.66"
"""Whoever has this backend is refused by the tool."""
BAD = f"{BAD_BACKEND}:{SERVED_PORT}"


@pytest.fixture(scope="module")
def daemon(lab: Lab, tools: FailingTools, equipment: Equipment) -> Iterator[Daemon]:
    """Forty services of a file are served; whoever has the bad backend is refused."""
    with (
        tools.refusing(BAD_BACKEND),
        ToolsOnlyDaemon(tools.equip(lab.host), declaration(lab), **equipment.settings) as running,
    ):
        yield running


def declaration(lab: Lab, bad: int = 0) -> str:
    good = [backend_text(backend) for backend in lab.backends]
    return yaml.safe_dump(
        [
            {
                "name": f"s{number}",
                "address": vip(number),
                "ports": ["80/tcp"],
                "backends": [*good, BAD] if number == bad else good,
            }
            for number in range(1, MANY + 1)
        ]
    )


def vip(number: int) -> str:
    return f"10.96.1.{number}"


def carries(lab: Lab, *numbers: int) -> None:
    """Each of these services is answered by one of the good backends."""
    for number in numbers:
        lab.client.send(vip(number), 80).all_answered()


def named(daemon: Daemon, name: str) -> None:
    """The service is named as quarantined, with the tool's words, wherever an operator looks."""
    status = daemon.vipctl("status", check=False)
    assert status.returncode == 1
    assert "quarantined" in status.stdout
    listed = daemon.vipctl("list", "-o", "wide").stdout
    lines = [line for line in listed.splitlines() if "quarantined" in line]
    assert [line.split()[0] for line in lines] == [name]
    assert REFUSAL in lines[0]
    described = daemon.vipctl("describe", name).stdout
    assert "quarantined" in described
    assert REFUSAL in described


@pytest.mark.parametrize("number", [1, 40])
def test_one_of_forty_in_a_file(lab: Lab, daemon: Daemon, number: int) -> None:
    daemon.write(declaration(lab, bad=number))
    reloaded = daemon.vipctl("reload", check=False)
    try:
        assert reloaded.returncode == 1, reloaded.stdout
        assert f"s{number}" in reloaded.stderr
        named(daemon, f"s{number}")
        # It goes on as the kernel had it, and so does everybody else.
        carries(lab, *range(1, MANY + 1, 3), number)
    finally:
        daemon.declare(declaration(lab))


@pytest.mark.nightly(each_time="iptables")
def test_vipctl_add_of_a_bad_one_says_so_and_removing_it_mends(lab: Lab, daemon: Daemon) -> None:
    said = daemon.vipctl("add", "10.96.2.1:80/tcp", BAD, "--name", "bad", check=False)
    assert said.returncode == 1
    assert "quarantined" in said.stderr
    assert REFUSAL in said.stderr
    named(daemon, "bad")
    good = daemon.vipctl("add", "10.96.2.2:80/tcp", backend_text(lab.backends[0]), "--name", "good")
    assert "created good" in good.stdout
    lab.client.send("10.96.2.2", 80).all_answered()
    carries(lab, 1, 20, 40)
    daemon.vipctl("remove", "bad", "good")
    daemon.wait_in_sync()


@pytest.mark.nightly(each_time="iptables")
def test_reload_gives_it_another_chance(lab: Lab, daemon: Daemon, tools: FailingTools) -> None:
    with tools.refusing(BAD_BACKEND, "10.96.2.4"):
        good = backend_text(lab.backends[0])
        said = daemon.vipctl("add", "10.96.2.4:80/tcp", good, "--name", "later", check=False)
        assert said.returncode == 1
        named(daemon, "later")
    daemon.reload()
    daemon.wait_in_sync()
    lab.client.send("10.96.2.4", 80, count=5).all_answered()
    daemon.vipctl("remove", "later")


def test_a_kernel_that_remembers_nobody_balances_without_affinity(
    lab: Lab, daemon: Daemon, equipment: Equipment, tmp_path: Path
) -> None:
    daemon.stop()
    tools = FailingTools(tmp_path, equipment)
    host = tools.equip(lab.host)
    with tools.refusing(equipment.affinity), ToolsOnlyDaemon(host, **equipment.settings) as own:
        backends = [backend_text(backend) for backend in lab.backends]
        own.vipctl("add", "10.96.2.6:80/tcp", *backends, "--name", "plain")
        own.vipctl("add", "10.96.2.5:80/tcp", *backends, "--name", "sticky", "--affinity", "10m")
        balances_without_affinity(lab, own, equipment)
        own.stop()
        own.start()
        balances_without_affinity(lab, own, equipment)
    daemon.start()


def balances_without_affinity(lab: Lab, daemon: Daemon, equipment: Equipment) -> None:
    daemon.wait_in_sync()
    for address in ("10.96.2.5", "10.96.2.6"):
        assert len(lab.client.send(address, 80, count=30).all_answered().backends) == 2
    (warning,) = [text for text in daemon.status()["warnings"] if "no affinity" in text]
    assert "sticky" in warning
    assert "plain" not in warning
    assert equipment.lacking in daemon.vipctl("status").stdout
