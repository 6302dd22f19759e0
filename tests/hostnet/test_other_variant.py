"""Rules in the iptables variant that vipd does not write with, in a real kernel."""

from __future__ import annotations

import time

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.services import Services

pytestmark = pytest.mark.root

FOREIGN = "*nat\n-A PREROUTING -p tcp --dport 2222 -j REDIRECT --to-ports 22\nCOMMIT\n"
SOON = 9.0
"""Seconds: the host is first looked at five seconds after the start."""
OTHER = {"nft": "legacy", "legacy": "nft"}


@pytest.fixture(params=["nft", "legacy"])
def variant(request: pytest.FixtureRequest) -> str:
    """The variant that vipd uses."""
    return str(request.param)


def rules(lab: Lab, variant: str, stem: str = "iptables") -> list[str]:
    """The rules of one variant."""
    lines = lab.host.run(f"{stem}-{variant}-save").stdout.splitlines()
    return [line for line in lines if line.startswith("-A")]


def legacy_tables(lab: Lab) -> str:
    return lab.host.run("cat", "/proc/net/ip_tables_names", check=False).stdout


def test_foreign_rules_are_told_and_kept(lab: Lab, variant: str) -> None:
    other = OTHER[variant]
    lab.host.run(f"iptables-{other}-restore", "--noflush", text=FOREIGN)
    before = rules(lab, other)
    with Daemon(lab.host, iptables_variant=variant) as daemon:
        Services(daemon).add(lab.backends)
        daemon.wait_until(lambda: len(daemon.status()["warnings"]), 1, SOON)
        (warning,) = daemon.status()["warnings"]
        assert f"iptables-{other} holds rules of other programs (ipv4 nat)" in warning
    assert rules(lab, other) == before


def test_own_rules_of_the_former_variant_go_without_a_gap(lab: Lab, variant: str) -> None:
    other = OTHER[variant]
    with Daemon(lab.host, iptables_variant=other) as daemon:
        services = Services(daemon)
        vips = [services.add(lab.backends, family=family) for family in (4, 6)]
        daemon.stop()
        daemon.config.write_text(
            daemon.config.read_text().replace(f"iptables_variant: {other}", f"iptables_variant: {variant}")
        )
        daemon.start()
        for stem in ("iptables", "ip6tables"):
            daemon.wait_until(lambda stem=stem: rules(lab, other, stem), [], SOON)  # type: ignore[misc]
            assert any("VIPD-SERVICES" in rule for rule in rules(lab, variant, stem))
        for vip in vips:
            lab.client.send(*vip, count=8).all_answered()
        assert daemon.status()["warnings"] == []
        assert "removed vipd's former ipv4 rules" in daemon.log


def test_looking_makes_no_legacy_table(lab: Lab) -> None:
    with Daemon(lab.host, iptables_variant="nft") as daemon:
        Services(daemon).add(lab.backends)
        time.sleep(SOON - 3)
        assert legacy_tables(lab) == ""
        assert daemon.status()["warnings"] == []
