"""Every golden case, whole: what `vipctl render` makes of the manifest is what kube-proxy wrote for it.

Both are read back from a kernel by iptables-save. Not compared, as tests/golden/README.md says: the canary
chains and the order of services within the chains that all share; the order of one service's rules is.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.dataplane.namespace import Namespace
from tests.lab.fork_server import fork_server

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/case.json"))

MIXED = {"KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-EXTERNAL-SERVICES", "KUBE-PROXY-FIREWALL"}
"""Chains in which kube-proxy's order of services is random."""

SERVICE = re.compile(r'--comment "?([a-z0-9./-]+(?::[a-z0-9-]+)?)')

Chains = dict[tuple[str, str], dict[str, list[str]]]


def chains(saved: str) -> Chains:
    """The rules by table and chain, then by service where services are mixed, else under one name."""
    found: Chains = {}
    table = ""
    for line in saved.splitlines():
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith(":") and "CANARY" not in line:
            found[table, line[1:].split()[0]] = defaultdict(list)
        elif line.startswith("-A "):
            _, chain, rule = line.split(" ", 2)
            found[table, chain][service_of(rule) if chain in MIXED else ""].append(rule)
    return found


def service_of(rule: str) -> str:
    """The service port that a rule's comment names."""
    match = SERVICE.search(rule)
    return match[1] if match else ""


def render(case: Path, settings: dict[str, object], family: str, directory: Path) -> str:
    """What the command prints for a case's manifest under its settings."""
    file = directory / "settings.json"
    file.write_text(json.dumps(settings))
    argv = [sys.executable, "-m", "vipd.cli.main", "render", "--family", family, "--settings", str(file)]
    done = fork_server(argv[2]).run("", [*argv, str(case / "manifest.json")], None, 120, {})
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(text: str, family: str) -> str:
    """What a fresh namespace's iptables-save prints after loading a restore input."""
    stem = "ip6tables" if family == "IPv6" else "iptables"
    with Namespace() as namespace:
        inside = ["ip", "netns", "exec", namespace.name]
        subprocess.run([*inside, f"{stem}-nft-restore"], input=text, text=True, check=True)
        saved = subprocess.run([*inside, f"{stem}-nft-save"], capture_output=True, text=True, check=True)
        return saved.stdout


@pytest.mark.root
@pytest.mark.parametrize("name", CASES)
def test_the_rules_are_those_of_kube_proxy(name: str, tmp_path: Path) -> None:
    told = json.loads((GOLDEN / name / "case.json").read_text())
    compare(GOLDEN / name, told["settings"], told["family"], tmp_path)


@pytest.mark.root
def test_no_setting_is_needed_to_masquerade_as_kube_proxy_does(tmp_path: Path) -> None:
    case = GOLDEN / "no-cluster-cidr"
    told = json.loads((case / "case.json").read_text())
    assert told["settings"].pop("masquerade") == "hairpin"
    compare(case, told["settings"], told["family"], tmp_path)


def compare(case: Path, settings: dict[str, object], family: str, directory: Path) -> None:
    """Assert that under these settings a case's rules are those that kube-proxy wrote."""
    ours = chains(loaded(render(case, settings, family, directory), family))
    theirs = chains("".join((case / f"{table}.rules").read_text() for table in ("nat", "filter")))
    assert ours.keys() == theirs.keys()
    for chain, rules in theirs.items():
        assert ours[chain] == rules, chain


def test_a_difference_is_seen() -> None:
    golden = (GOLDEN / "kube-dns" / "nat.rules").read_text()
    for before, after in (
        ("0.50000000000", "0.40000000000"),
        ("KUBE-MARK-MASQ -j", "KUBE-MARK-MASQ -p tcp -j"),
    ):
        assert chains(golden) != chains(golden.replace(before, after)), before
