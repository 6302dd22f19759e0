"""What others do to vipd's rules is undone, whoever it is and however."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab, Wiring

pytestmark = pytest.mark.root

PATIENCE = 10.0
"""Seconds. The promise is one second; the machine may be busy."""

SERVICES = """\
  - {name: web, address: 10.96.0.1, ports: 80, backends: [{address: 10.244.0.11, port: 8080}]}
  - {name: empty, address: 10.96.0.2, ports: 80}
"""

FOREIGN = "-A PREROUTING -j ACCEPT"

DEEDS = {
    "nat flushed": [["iptables", "-t", "nat", "-F"]],
    "nat flushed, chains deleted": [["iptables", "-t", "nat", "-F"], ["iptables", "-t", "nat", "-X"]],
    "filter flushed, chains deleted": [["iptables", "-F"], ["iptables", "-X"]],
    "jump deleted": [["iptables", "-t", "nat", "-D", "PREROUTING", "1"]],
    "rule ahead of our jump": [["iptables", "-t", "nat", "-I", "PREROUTING", "1", "-j", "ACCEPT"]],
    "dispatch emptied": [["iptables", "-t", "nat", "-F", "VIPD-SERVICES"]],
    "ruleset flushed": [["nft", "flush", "ruleset"]],
}


def rules(lab: Lab, variant: str) -> list[str]:
    """Every rule and chain of ours as they stand. A foreign rule counts only while it is ahead of ours."""
    saved = lab.host.run(f"iptables-{variant}-save").stdout.splitlines()
    kept = [line for line in saved if line.startswith(("-A", ":VIPD"))]
    first = next((line for line in kept if line.startswith("-A PREROUTING")), "")
    return [line for line in kept if line != FOREIGN or line == first]


def seconds_until(lab: Lab, variant: str, wanted: list[str]) -> float:
    """How long the rules take to be as wanted; AssertionError after PATIENCE."""
    began = time.monotonic()
    while (found := rules(lab, variant)) != wanted:
        assert time.monotonic() - began < PATIENCE, "not repaired:\n" + "\n".join(found)
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.fixture(scope="module", params=["nft", "legacy"])
def world(request: pytest.FixtureRequest) -> Iterator[tuple[Lab, str]]:
    variant = str(request.param)
    with Lab(Wiring(backends=1)) as lab:
        lab.serve_everywhere(8080)
        with Daemon(lab.host, SERVICES, iptables_variant=variant):
            yield lab, variant


@pytest.mark.parametrize("deed", DEEDS)
def test_it_is_undone(world: tuple[Lab, str], deed: str) -> None:
    lab, variant = world
    if variant == "legacy" and deed == "ruleset flushed":
        pytest.skip("nft does not touch legacy tables")
    wanted = rules(lab, variant)
    assert any("VIPD-SVC" in rule for rule in wanted)
    for program, *arguments in DEEDS[deed]:
        lab.host.run(program.replace("iptables", f"iptables-{variant}"), *arguments)
    print(f"{variant}, {deed}: repaired after {seconds_until(lab, variant, wanted):.2f} s")
    lab.client.send("10.96.0.1", 80, count=3).all_answered()


def test_one_changed_rule_of_an_endpoint_is_undone(world: tuple[Lab, str]) -> None:
    lab, variant = world
    wanted = rules(lab, variant)
    chain = next(rule.split()[1] for rule in wanted if "-j DNAT" in rule)
    elsewhere = ["-p", "tcp", "-j", "DNAT", "--to-destination", "10.244.0.99:1"]
    lab.host.run(f"iptables-{variant}", "-t", "nat", "-R", chain, "2", *elsewhere)
    seconds_until(lab, variant, wanted)


def test_somebody_who_keeps_undoing_it_is_named() -> None:
    with Lab(Wiring(backends=1)) as lab, Daemon(lab.host, SERVICES) as daemon:
        script = "for n in 1 2 3 4 5 6 7; do iptables -t nat -F; sleep 0.4; done"
        lab.host.run("bash", "-c", script)
        daemon.wait_until(lambda: any("has undone" in w for w in daemon.status()["warnings"]), True)
        daemon.wait_until(lambda: any("VIPD-SVC" in r for r in rules(lab, "nft")), True, timeout=PATIENCE)
