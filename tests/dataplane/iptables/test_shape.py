"""What `vipctl render` prints under the prefix KUBE, as the kernel gives it back, beside kube-proxy's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dataplane.namespace import Namespace

GOLDEN = Path(__file__).parents[2] / "golden"
NODE_SAVED = Path(__file__).with_name("node-saved.rules")

KUBE_DNS = """
  - name: kube-system/kube-dns
    address: 10.96.0.10
    ports:
      - {name: dns, port: 53, protocol: udp}
      - {name: dns-tcp, port: 53, protocol: tcp}
      - {name: metrics, port: 9153, protocol: tcp}
    backends: [10.244.0.5, 10.244.2.21]
"""
MY_NGINX = """
  - name: default/my-nginx-svc
    address: 10.98.69.149
    ports: [{port: 3000, protocol: tcp, target: 80}]
    backends: [10.244.3.38]
"""
KUBERNETES = """
  - name: default/kubernetes
    address: 10.96.0.1
    ports: [{name: https, port: 443, protocol: tcp, target: 6443}]
    backends: [192.168.100.1]
"""


def web(address: str, *backends: str, more: str = "") -> str:
    """The service that most golden cases declare."""
    return f"""
  - name: default/web
    address: "{address}"
    ports: [{{name: http, port: 80, protocol: tcp, target: 8080}}]
    backends: {json.dumps(backends)}
{more}"""


CASES = {
    "kube-dns": KUBE_DNS,
    "my-nginx": MY_NGINX,
    "clusterip-1ep": web("10.96.0.20", "10.244.1.10"),
    "clusterip-3ep": web("10.96.0.20", "10.244.1.10", "10.244.2.11", "10.244.3.12"),
    "affinity-default": web(
        "10.96.0.20", "10.244.1.10", "10.244.2.11", "10.244.3.12", more="    affinity: client-ip\n"
    ),
    "ipv6-clusterip": web("fd00:10:96::20", "fd00:10:244:1::a", "fd00:10:244:2::b"),
    "masquerade-all": web("10.96.0.20", "10.244.1.10", "10.244.2.11"),
    "no-cluster-cidr": web("10.96.0.20", "10.244.1.10", "10.244.2.11"),
    "no-endpoints": web("10.96.0.20"),
}
"""Golden cases that have ClusterIPs only; not `large-cluster`, where kube-proxy leaves comments out."""

COMPARED = re.compile(r"KUBE-(SERVICES|MARK-MASQ|POSTROUTING|(SVC|SEP)-.*)$")

Chains = dict[str, list[str]]


def render(services: str, settings: dict[str, object], directory: Path) -> str:
    """What the command prints for a declaration."""
    declaration = directory / "services.yaml"
    declaration.write_text(f"apiVersion: vipd/v1\nservices:{services}")
    empty = directory / "settings.yaml"
    empty.write_text("{}")
    flags = [flag for key, value in settings.items() for flag in ("--set", f"{key}={json.dumps(value)}")]
    argv = [
        sys.executable,
        "-m",
        "vipd.cli.main",
        "render",
        "--settings",
        str(empty),
        *flags,
        str(declaration),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def load(rules: str, stem: str) -> str:
    """What the save program prints after a restore into an empty namespace."""
    with Namespace() as namespace:
        inside = ["ip", "netns", "exec", namespace.name]
        done = subprocess.run([*inside, f"{stem}-restore"], input=rules, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return subprocess.run([*inside, f"{stem}-save"], text=True, capture_output=True, check=True).stdout


def chains(saved: str, table: str) -> Chains:
    """The compared chains of a table, each with its rules in order; services may come in any order."""
    found: Chains = {}
    here = ""
    for line in saved.splitlines():
        if line.startswith("*"):
            here = line[1:]
        elif here == table and line.startswith(":"):
            found[line[1:].split()[0]] = []
        elif here == table and line.startswith("-A "):
            name, _, rule = line[3:].partition(" ")
            found[name].append(rule)
    kept = {name: rules for name, rules in found.items() if COMPARED.match(name)}
    kept["KUBE-SERVICES"] = [*sorted(kept["KUBE-SERVICES"][:-1]), *kept["KUBE-SERVICES"][-1:]]
    return kept


def settings_of(case: str) -> dict[str, object]:
    """The golden case's host, as far as it bears on ClusterIPs."""
    known = ("chain_prefix", "cluster_cidrs", "masquerade", "localhost_node_ports")
    settings: dict[str, object] = json.loads((GOLDEN / case / "case.json").read_text())["settings"]
    return {key: value for key, value in settings.items() if key in known}


@pytest.mark.root
@pytest.mark.parametrize("case", CASES)
def test_golden_case(case: str, tmp_path: Path) -> None:
    stem = "ip6tables" if "ipv6" in case else "iptables"
    saved = load(render(CASES[case], settings_of(case), tmp_path), stem)
    expected = (GOLDEN / case / "nat.rules").read_text()
    assert chains(saved, "nat") == chains(expected, "nat")


@pytest.mark.root
def test_golden_case_without_endpoints_is_refused_in_filter(tmp_path: Path) -> None:
    saved = load(render(CASES["no-endpoints"], settings_of("no-endpoints"), tmp_path), "iptables")
    expected = chains((GOLDEN / "no-endpoints" / "filter.rules").read_text(), "filter")
    assert chains(saved, "filter")["KUBE-SERVICES"] == expected["KUBE-SERVICES"]
    assert "REJECT" in str(expected)


@pytest.mark.root
def test_rules_saved_on_a_kubernetes_node(tmp_path: Path) -> None:
    """A v1.22 node, whose ladder comments did not name the endpoint yet; the newer form is vipd's."""
    settings = {**settings_of("kube-dns"), "cluster_cidrs": ["10.244.0.0/16"]}
    saved = load(render(KUBE_DNS + MY_NGINX + KUBERNETES, settings, tmp_path), "iptables")
    assert " -> " in saved
    older = re.sub(r' -> [^"]+"', '"', saved)
    assert chains(older, "nat") == chains(NODE_SAVED.read_text(), "nat")


@pytest.mark.root
@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_both_variants_give_the_same_text_back(variant: str, tmp_path: Path) -> None:
    """Rules are compared as text after a restart, so both must print what was written."""
    text = render(KUBE_DNS + MY_NGINX + KUBERNETES, {}, tmp_path)
    written = re.sub(r"--probability 0.5000000000(?=\s)", "--probability 0.50000000000", text)
    saved = load(text, f"iptables-{variant}")
    assert {line for line in saved.splitlines() if line.startswith("-A")} == {
        line for line in written.splitlines() if line.startswith("-A")
    }
