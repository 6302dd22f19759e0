"""Rules in the iptables variant that vipd does not write with, in a real kernel."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dataplane.declared import numbered
from tests.dataplane.namespace import Namespace
from tests.lab.inside import synced
from vipd.control.host_checks import OtherVariant
from vipd.dataplane.iptables import other_variant
from vipd.host.settings.settings import load_settings
from vipd.model.service import Family

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


class EmptyNamespace:
    """An empty namespace with a process in it, whose /proc shows the namespace's tables."""

    def __init__(self, namespace: Namespace, pid: int) -> None:
        self._namespace, self._proc = namespace, Path(f"/proc/{pid}")
        self.run = namespace.run
        self.told: list[str] = []
        """The variants in use when rules of vipd's were found in the other one."""

    def check(self, variant: str) -> str:
        """The warning of a vipd that uses this variant."""
        settings = load_settings(flags={"iptables_variant": variant})
        found_own = lambda: self.told.append(variant)  # noqa: E731
        other = OtherVariant(settings, self._namespace.run, self._proc, found_own)
        return asyncio.run(other.check(Family))[0]

    def put(self, variant: str, text: str) -> None:
        """Add rules with a variant's program."""
        assert (
            asyncio.run(
                self._namespace.run([f"iptables-{variant}-restore", "--noflush", "-w"], text)
            ).exit_code
            == 0
        )

    def rules(self, variant: str) -> list[str]:
        """The rules that a variant holds."""
        saved = asyncio.run(self._namespace.run([f"iptables-{variant}-save"], "")).stdout
        return [line for line in saved.splitlines() if line.startswith("-A")]

    @property
    def legacy_tables(self) -> str:
        """The legacy tables that exist."""
        path = self._proc / "net/ip_tables_names"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def host() -> Iterator[EmptyNamespace]:
    """A host of each test's own."""
    with Namespace() as namespace:
        argv = ["ip", "netns", "exec", namespace.name, "cat"]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin
            assert process.stdout
            process.stdin.write(b"x")
            process.stdin.flush()
            process.stdout.read(1)  # only then is it inside
            yield EmptyNamespace(namespace, process.pid)
            process.stdin.close()


@pytest.fixture(params=["nft", "legacy"])
def variant(request: pytest.FixtureRequest) -> str:
    """The variant that vipd uses."""
    return str(request.param)


def test_foreign_rules_are_told_and_kept(host: EmptyNamespace, variant: str) -> None:
    other = OTHER[variant]
    assert host.check(variant) == ""
    host.put(other, FOREIGN)
    before = host.rules(other)
    assert f"iptables-{other} holds rules of other programs (ipv4 nat)" in host.check(variant)
    assert host.rules(other) == before


def test_own_rules_are_told_to_the_dataplane_and_left_alone(host: EmptyNamespace, variant: str) -> None:
    other = OTHER[variant]
    host.put(variant, OWN)
    assert host.check(variant) == ""
    assert host.told == []
    host.put(other, OWN)
    host.put(other, FOREIGN)
    assert "(ipv4 nat)" in host.check(variant)
    assert host.told == [variant]
    assert len(host.rules(other)) == 3, "a check only looks"


def test_own_rules_go_as_soon_as_those_in_use_stand(
    host: EmptyNamespace, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_variant, "has_legacy_tables", lambda *_: True)  # else asked of this namespace
    other = OTHER[variant]
    host.put(other, OWN)
    host.put(other, FOREIGN)
    machine = synced("iptables", host.run, tmp_path, iptables_variant=variant)
    machine.become(numbered(1, "10.244.0.1"))
    assert ["--dport 2222" in rule for rule in host.rules(other)] == [True]
    assert any("VIPD-SVC-" in rule for rule in host.rules(variant))


def test_looking_makes_no_legacy_table(host: EmptyNamespace) -> None:
    assert host.check("nft") == ""
    host.put("nft", FOREIGN)
    assert host.check("nft") == ""
    assert host.legacy_tables == ""
