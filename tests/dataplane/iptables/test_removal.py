"""`vipctl cleanup` removes every rule of a prefix, of both variants and families, and nothing of others."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.dataplane.declared import kube_like_services, numbered
from tests.dataplane.namespace import Namespace
from tests.dataplane.watched_programs import Instead, WatchedPrograms
from tests.lab.inside import synced
from tests.lab.node import Node

pytestmark = pytest.mark.root

VARIANTS = ("nft", "legacy")
STEMS = ("iptables", "ip6tables")
FOREIGN = """\
*filter
:FOREIGN - [0:0]
-A FOREIGN -j RETURN
-A INPUT -j FOREIGN
COMMIT
*nat
:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]
:VIPD-MINE - [0:0]
-A PREROUTING -j VIPD-MINE
COMMIT
"""
SERVICES = [*kube_like_services(), numbered(1, "10.244.0.1")]


class Host:
    """A host on which vipd has been at work."""

    def __init__(self, namespace: Namespace, directory: Path) -> None:
        self.namespace, self.directory = namespace, directory
        self._node = Node(namespace.name, "host", "", "")

    def write(self, *variants: str, **settings: Any) -> None:
        """A vipd writes services with these variants, each as if the other one were not installed."""
        for variant in variants:
            other = "legacy" if variant == "nft" else "nft"
            vipd = synced(
                "iptables",
                self.namespace.name,
                self.directory,
                through=WatchedPrograms(without(f"-{other}")),
                iptables_variant=variant,
                **settings,
            )
            vipd.become(*SERVICES)

    def cleanup(self, *options: str, programs: str = "") -> list[str]:
        """What vipctl says that it removes, with programs of this directory."""
        command = (sys.executable, "-m", "vipd.cli.main", "cleanup", "--state-dir", str(self.directory))
        node = self._node.with_environment(PATH=programs) if programs else self._node
        return node.run(*command, *options).stdout.splitlines()

    def saved(self) -> dict[str, str]:
        """What each save program prints, without comments and counters."""
        found = {}
        for program in (f"{stem}-{variant}-save" for variant in VARIANTS for stem in STEMS):
            text = re.sub(r"(?m)^#.*\n", "", self.namespace.do(program))
            tables = re.findall(r"(?ms)^\*.*?^COMMIT\n", re.sub(r"\[\d+:\d+\]", "[0:0]", text))
            found[program] = "".join(sorted(tables))
        return found


def without(part: str) -> Instead:
    """No program with this in its name is installed."""

    def look(argv: Sequence[str], stdin: str) -> None:
        if part in argv[0]:
            raise FileNotFoundError(argv[0])

    return look


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with Namespace() as namespace:
        yield Host(namespace, tmp_path)


def test_rules_of_both_variants_and_families_go_and_foreign_ones_stay(host: Host) -> None:
    for program in (f"{stem}-{variant}-restore" for variant in VARIANTS for stem in STEMS):
        host.namespace.do(program, "--noflush", "-w", text=FOREIGN)
    before = host.saved()
    host.write(*VARIANTS)
    assert all("VIPD-SVC-" in text for text in host.saved().values())
    host.cleanup()
    assert host.saved() == before
    assert host.cleanup() == ["there was nothing of vipd in the kernel"]


def test_each_prefix_is_removed_alone(host: Host, tmp_path: Path) -> None:
    host.write(*VARIANTS, chain_prefix="ONE")
    before = host.saved()
    other = Host(host.namespace, tmp_path / "other")
    other.write(*VARIANTS, chain_prefix="TWO")
    other.cleanup("--prefix", "THREE")
    assert host.saved() == before
    host.cleanup("--prefix", "TWO")
    assert not re.search("ONE-|TWO-", str(host.saved()))


def test_half_removed_rules_are_removed_wholly(host: Host) -> None:
    """Jumps gone and a chain emptied by someone else; a jump doubled."""
    host.write("nft")
    jump = '-m comment --comment "vipd postrouting rules" -j VIPD-POSTROUTING'
    lines = [f"-D POSTROUTING {jump}", "-F VIPD-SERVICES", "-A PREROUTING -j VIPD-SERVICES"]
    text = "\n".join(["*nat", *lines, "-A PREROUTING -j VIPD-SERVICES", "COMMIT", ""])
    host.namespace.do("iptables-nft-restore", "--noflush", text=text)
    host.cleanup()
    assert "VIPD" not in str(host.saved())


@pytest.mark.parametrize(
    "by_another",
    [
        "*filter\n-A INPUT -j ACCEPT\nCOMMIT\n",
        "*filter\n:OTHER - [0:0]\nCOMMIT\n",
        "*filter\n:FORWARD DROP [0:0]\nCOMMIT\n",
    ],
    ids=["a rule", "a chain", "a policy"],
)
def test_tables_that_others_use_since_stay(by_another: str, host: Host) -> None:
    host.write("nft")
    host.namespace.do("iptables-nft-restore", "--noflush", text=by_another)
    for option, words in (("--dry-run", "would remove"), ("--force", "removed")):
        said = [line for line in host.cleanup(option) if line.startswith(f"{words} the empty table ip ")]
        assert said == [f"{words} the empty table ip nat"]
    assert "*filter" in host.saved()["iptables-nft-save"]


def test_a_table_of_nftables_lets_nobody_in_before_it_goes(host: Host, tmp_path: Path) -> None:
    synced("nftables", host.namespace.name, host.directory).become(*SERVICES)
    programs, log = tmp_path / "programs", tmp_path / "log"
    programs.mkdir()
    (programs / "nft").write_text(f'#!/bin/sh\n/usr/bin/tee -a {log} | /usr/sbin/nft "$@"\n')
    (programs / "nft").chmod(0o755)
    host.cleanup(programs=str(programs))
    before, deleted, _ = log.read_text().partition("delete table ip vipd\n")
    assert deleted
    assert {"flush chain ip vipd prerouting", "flush chain ip vipd output"} <= {*before.splitlines()}
    assert "vipd" not in host.namespace.do("nft", "list", "tables")
