"""Rules in the iptables variant that vipd does not write with, in a real kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dataplane.namespace import Namespace
from tests.lab.daemon import Daemon
from tests.lab.node import Node

pytestmark = pytest.mark.root

FOREIGN = "*nat\n-A PREROUTING -p tcp --dport 2222 -j REDIRECT --to-ports 22\nCOMMIT\n"
OTHER = {"nft": "legacy", "legacy": "nft"}
OWN = """*nat
:VIPD-SERVICES - [0:0]
:VIPD-SVC-TCOU7JCQXEZGVUNU - [0:0]
-A PREROUTING -m comment --comment "vipd services" -j VIPD-SERVICES
-A VIPD-SERVICES -j VIPD-SVC-TCOU7JCQXEZGVUNU
COMMIT
"""
WEB = "  - {name: web, address: 10.96.0.1, ports: [80], backends: [10.244.0.1]}\n"


@pytest.fixture
def host() -> Iterator[Node]:
    """A host of each test's own."""
    with Namespace() as made:
        yield Node(made.name, "host", "", "")


def put(host: Node, variant: str, text: str) -> None:
    """Add rules with a variant's program."""
    host.run(f"iptables-{variant}-restore", "--noflush", "-w", text=text)


def rules(host: Node, variant: str) -> list[str]:
    """The rules that a variant holds."""
    saved = host.run(f"iptables-{variant}-save").stdout
    return [line for line in saved.splitlines() if line.startswith("-A")]


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_foreign_rules_are_told_and_kept_and_own_ones_go_once_those_in_use_stand(
    host: Node, variant: str
) -> None:
    other = OTHER[variant]
    put(host, other, OWN)
    put(host, other, FOREIGN)
    with Daemon(host, WEB, iptables_variant=variant) as daemon:
        daemon.wait_until(lambda: ["--dport 2222" in rule for rule in rules(host, other)], [True])
        assert any("VIPD-SVC-" in rule for rule in rules(host, variant))
        told = f"iptables-{other} holds rules of other programs (ipv4 nat)"
        daemon.wait_until(lambda: any(told in text for text in daemon.status()["warnings"]), True)


def test_looking_makes_no_legacy_table(host: Node) -> None:
    put(host, "nft", FOREIGN)
    with Daemon(host, WEB, iptables_variant="nft") as daemon:
        assert daemon.status()["warnings"] == []
        assert host.run("cat", "/proc/net/ip_tables_names", check=False).stdout == ""
