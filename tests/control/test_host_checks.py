from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from vipd.control.host_checks import (
    CHECK_SECONDS,
    HostChecks,
    affinity_warning,
    mixed_warning,
    tables_with_rules,
)
from vipd.dataplane.iptables.names import Names
from vipd.host.process import ProgramResult
from vipd.host.requirements import HostRequirements
from vipd.host.settings.settings import load_settings
from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.service import Family, Masquerade, Protocol

SAVED = """*nat
:PREROUTING ACCEPT [0:0]
:VIPD-SERVICES - [0:0]
-A PREROUTING -m comment --comment "vipd services" -j VIPD-SERVICES
-A VIPD-SERVICES -j RETURN
COMMIT
*filter
:FORWARD ACCEPT [0:0]
COMMIT
"""
ENDPOINTS = (Endpoint("10.244.0.5", 80), Endpoint("10.244.0.6", 80))


def pinned(service: str, seconds: int | None = 60) -> Forwarding:
    key = ForwardingKey(service, "", Protocol.TCP, Family.IPV4)
    return Forwarding(key, ("10.96.0.1",), 80, ENDPOINTS, Masquerade.FORWARDED, affinity_timeout=seconds)


@dataclass
class Machine:
    """A directory that stands for `/`, programs that answer, and a clock."""

    root: Path
    outputs: dict[str, str] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    now: float = 1000.0

    def checks(self, **flags: object) -> HostChecks:
        """Checks of this machine."""
        return HostChecks(load_settings(flags=flags), self.run, self.root, lambda: self.now)

    async def run(self, argv: Sequence[str], stdin: str) -> ProgramResult:
        """A program; those without an output are not installed."""
        self.ran.append(" ".join(argv))
        if " ".join(argv) not in self.outputs:
            raise FileNotFoundError(argv[0])
        return ProgramResult(0, self.outputs[" ".join(argv)], "")

    def has(self, path: str, text: str) -> None:
        """Write a file."""
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """nft by default, legacy beside it."""
    legacy, nft = "iptables v1.8.9 (legacy)", "iptables v1.8.9 (nf_tables)"
    versions = {"iptables --version": nft, "iptables-nft --version": nft, "iptables-legacy --version": legacy}
    return Machine(tmp_path, {**versions, "iptables-legacy-save": "", "iptables-nft-save": ""})


def checked_a_minute_later(
    machine: Machine, checks: HostChecks, *forwardings: Forwarding
) -> tuple[bool, str]:
    """Look, a minute after the last time."""
    machine.now += CHECK_SECONDS
    needs = HostRequirements(forwardings)
    changed = asyncio.run(checks.refresh(needs))
    return changed, " | ".join(checks.warnings(needs))


def test_tables_with_rules() -> None:
    assert tables_with_rules(SAVED, "VIPD") == ()
    assert tables_with_rules(SAVED, "") == ("nat",)
    assert tables_with_rules(SAVED, "LB") == ("nat",)
    assert tables_with_rules(SAVED.replace("FORWARD ACCEPT", "FORWARD DROP"), "VIPD") == ("filter",)
    assert tables_with_rules(SAVED + "*mangle\n-A INPUT -j ACCEPT\n", "VIPD") == ("mangle",)
    assert tables_with_rules("", "VIPD") == ()


def test_legacy_rules_beside_nft_are_told_once(machine: Machine) -> None:
    machine.has("proc/net/ip_tables_names", "filter\n")
    machine.outputs["iptables-legacy-save"] = "*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -j ACCEPT\nCOMMIT\n"
    checks = machine.checks()
    changed, warning = checked_a_minute_later(machine, checks, pinned("web", None))
    assert changed
    assert "ipv4 filter" in warning
    assert "look: iptables-legacy-save;" in warning
    assert checked_a_minute_later(machine, checks, pinned("web", None)) == (False, warning)
    machine.outputs["iptables-legacy-save"] = ""
    assert checked_a_minute_later(machine, checks, pinned("web", None)) == (True, "")


def test_nft_rules_beside_legacy_are_told(machine: Machine) -> None:
    machine.outputs["iptables-nft-save"] = "*nat\n-A PREROUTING -j DOCKER\nCOMMIT\n"
    _, warning = checked_a_minute_later(
        machine, machine.checks(iptables_variant="legacy"), pinned("web", None)
    )
    assert "iptables-nft holds rules" in warning
    assert "ipv4 nat" in warning


@pytest.mark.parametrize("names", [None, ""])
def test_legacy_programs_are_not_run_while_no_legacy_table_exists(
    machine: Machine, names: str | None
) -> None:
    if names is not None:
        machine.has("proc/net/ip_tables_names", names)
    assert checked_a_minute_later(machine, machine.checks(), pinned("web", None)) == (False, "")
    assert machine.ran == ["iptables --version"]


def test_a_kube_proxys_chains_are_never_removed(machine: Machine) -> None:
    machine.has("proc/net/ip_tables_names", "nat\n")
    text = SAVED.replace("VIPD-", "KUBE-").replace(":PREROUTING", ":KUBE-PROXY-CANARY - [0:0]\n:PREROUTING")
    machine.outputs["iptables-legacy-save"] = text
    _, warning = checked_a_minute_later(machine, machine.checks(chain_prefix="KUBE"), pinned("web", None))
    assert "ipv4 nat" in warning
    assert not [argv for argv in machine.ran if "restore" in argv]


def test_nothing_is_looked_at_within_a_minute(machine: Machine) -> None:
    checks = machine.checks()
    checked_a_minute_later(machine, checks, pinned("web"))
    machine.ran.clear()
    machine.now += CHECK_SECONDS - 1
    assert asyncio.run(checks.refresh(HostRequirements([pinned("web")]))) is False
    assert machine.ran == []


def test_mixed_warning_names_both_commands() -> None:
    assert mixed_warning("nft", {}) == ""
    text = mixed_warning(
        "nft", {"iptables-legacy-save": "ipv4 nat, filter", "ip6tables-legacy-save": "ipv6 nat"}
    )
    assert "(ipv4 nat, filter; ipv6 nat)" in text
    assert "iptables-legacy-save and ip6tables-legacy-save" in text


@pytest.mark.parametrize(
    ("limit", "services", "full", "words"),
    [
        (None, {"a"}, (), []),
        (100, (), (), []),
        (5000, {"a"}, (), []),
        (100, {"a"}, (), ["affinity of a:", "100 clients", "ip_list_tot=10000", "/etc/modprobe.d/vipd.conf"]),
        (100, {"e", "d", "c", "b", "a"}, (), ["of a, b, c and 2 more:"]),
        (100, {"a", "b"}, ("b",), ["of b:", "a list is full"]),
        (5000, {"a", "b"}, ("b",), ["of b:", "5000 clients", "ip_list_tot=50000"]),
    ],
)
def test_affinity_warning(
    limit: int | None, services: set[str], full: tuple[str, ...], words: list[str]
) -> None:
    text = affinity_warning(limit, services, full)
    assert bool(text) is bool(words)
    assert [word for word in words if word not in text] == []


def test_full_lists_are_those_of_our_own_chains(machine: Machine) -> None:
    machine.has("sys/module/xt_recent/parameters/ip_list_tot", "3\n")
    chain = Names("VIPD").endpoint(pinned("web").key, ENDPOINTS[1])
    machine.has("proc/net/xt_recent/SSH", "src=10.0.0.1\n" * 3)
    machine.has(f"proc/net/xt_recent/{chain}", "src=10.0.0.1\n" * 2)
    checks = machine.checks()
    both = (pinned("web"), pinned("other"), pinned("free", None))
    assert checked_a_minute_later(machine, checks, *both) == (False, "")
    machine.has(f"proc/net/xt_recent/{chain}", "src=10.0.0.1\n" * 3)
    changed, warning = checked_a_minute_later(machine, checks, *both)
    assert changed
    assert "affinity of web: " in warning
    assert checks.warnings(HostRequirements([pinned("other")])) == ()


def test_after_a_switch_to_nftables_mixed_variants_are_told_no_more(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none() -> tuple[()]:
        return ()

    monkeypatch.setattr("vipd.control.host_checks.dropping_chains", none)
    machine.has("proc/net/ip_tables_names", "filter\n")
    machine.outputs["iptables-legacy-save"] = "*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -j ACCEPT\nCOMMIT\n"
    checks, needs = machine.checks(), HostRequirements((pinned("web", None),))
    _, warning = checked_a_minute_later(machine, checks, pinned("web", None))
    assert "iptables-legacy holds rules" in warning
    checks.dataplane = lambda: "nftables"
    assert checks.warnings(needs) == ()
    assert asyncio.run(checks.refresh(needs)), "at once, and the warning is gone"
    checks.dataplane = lambda: "iptables"
    assert asyncio.run(checks.refresh(needs)), "and so it is looked at again"
    assert "iptables-legacy holds rules" in checks.warnings(needs)[0]


def test_own_rules_in_the_other_variant_ask_for_a_step_and_are_left_alone(machine: Machine) -> None:
    machine.has("proc/net/ip_tables_names", "nat\n")
    machine.outputs["iptables-legacy-save"] = SAVED
    found = list[str]()
    checks = HostChecks(
        load_settings(flags={}),
        machine.run,
        machine.root,
        lambda: machine.now,
        found_own=lambda: found.append("own"),
    )
    assert checked_a_minute_later(machine, checks, pinned("web", None)) == (True, "")
    assert found == ["own"]
    assert not [argv for argv in machine.ran if "restore" in argv]
