"""Every golden case, whole: what `vipctl render` makes of the manifest is what kube-proxy wrote for it.

Both are read back from a kernel by iptables-save. Not compared, as tests/golden/README.md says: the canary
chains and the order of services within the chains that all share; the order of one service's rules is.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.dataplane.namespace import Namespace
from tests.lab.fork_server import fork_server

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/case.json"))
NODE_SAVED = Path(__file__).with_name("node-saved.rules")

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


def render(declaration: Path, settings: dict[str, object], family: str, directory: Path) -> str:
    """What the command prints for a declaration under its settings."""
    file = directory / "settings.json"
    file.write_text(json.dumps(settings))
    argv = [sys.executable, "-m", "vipd.cli.main", "render", "--family", family, "--settings", str(file)]
    done = fork_server(argv[2]).run("", [*argv, str(declaration)], None, 120, {})
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(text: str, family: str = "IPv4") -> str:
    """What a fresh namespace's iptables-save prints after loading a restore input."""
    stem = "ip6tables" if family == "IPv6" else "iptables"
    with Namespace() as namespace:
        namespace.do(f"{stem}-nft-restore", text=text)
        return namespace.do(f"{stem}-nft-save")


@pytest.mark.root
@pytest.mark.parametrize("name", CASES)
def test_the_rules_are_those_of_kube_proxy(name: str, tmp_path: Path) -> None:
    case = json.loads((GOLDEN / name / "case.json").read_text())
    compare(GOLDEN / name, case["settings"], case["family"], tmp_path)


@pytest.mark.root
def test_no_setting_is_needed_to_masquerade_as_kube_proxy_does(tmp_path: Path) -> None:
    case = GOLDEN / "no-cluster-cidr"
    settings = json.loads((case / "case.json").read_text())["settings"]
    assert settings.pop("masquerade") == "hairpin"
    compare(case, settings, "IPv4", tmp_path)


def compare(case: Path, settings: dict[str, object], family: str, directory: Path) -> None:
    """Assert that under these settings a case's rules are those that kube-proxy wrote."""
    ours = chains(loaded(render(case / "manifest.json", settings, family, directory), family))
    theirs = chains("".join((case / f"{table}.rules").read_text() for table in ("nat", "filter")))
    assert ours.keys() == theirs.keys()
    for chain, rules in theirs.items():
        assert ours[chain] == rules, chain


ON_A_NODE = """
apiVersion: vipd/v1
services:
  - name: kube-system/kube-dns
    address: 10.96.0.10
    ports: [{name: dns, port: 53, protocol: udp}, {name: dns-tcp, port: 53}, {name: metrics, port: 9153}]
    backends: [10.244.0.5, 10.244.2.21]
  - name: default/my-nginx-svc
    address: 10.98.69.149
    ports: {port: 3000, target: 80}
    backends: 10.244.3.38
  - name: default/kubernetes
    address: 10.96.0.1
    ports: {name: https, port: 443, target: 6443}
    backends: 192.168.100.1
"""


@pytest.mark.root
def test_the_rules_are_those_saved_on_a_kubernetes_node(tmp_path: Path) -> None:
    """A v1.22 node, whose ladder comments did not name the endpoint yet; the newer form is vipd's."""
    settings = json.loads((GOLDEN / "kube-dns" / "case.json").read_text())["settings"]
    settings["cluster_cidrs"] = ["10.244.0.0/16"]
    node = tmp_path / "services.yaml"
    node.write_text(ON_A_NODE)
    ours = loaded(render(node, settings, "IPv4", tmp_path))
    assert " -> " in ours
    compared = re.compile(r"KUBE-(SERVICES|MARK-MASQ|POSTROUTING|(SVC|SEP)-.*)$")
    older, saved = (
        {key: rules for key, rules in chains(text).items() if key[0] == "nat" and compared.match(key[1])}
        for text in (re.sub(r' -> [^"]+"', '"', ours), NODE_SAVED.read_text())
    )
    assert older == saved
