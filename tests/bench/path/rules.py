"""Many services as vipd compiles them, and loading its rules without a daemon beside the traffic."""

from __future__ import annotations

from functools import cache
from ipaddress import IPv4Address

from tests.bench.ipvs_rules import all_services
from tests.bench.kube_proxy_nft import whole_table
from tests.bench.path.programs import PORTS
from tests.lab.node import Node
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.plan import Installed, make_plan
from vipd.dataplane.iptables.ruleset import Ruleset
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.render import render as render_table
from vipd.declaration.reader import parse_declaration
from vipd.host.settings.settings import Settings, load_settings
from vipd.model.forwarding import Forwarding
from vipd.model.service import Family

VIPS = "10.96.0.0/15"
BACKENDS = tuple(f"10.244.0.{n}" for n in range(11, 16))
"""Addresses of the one real backend: each service has five, as a ladder of rules has five steps."""
CLUSTER = ("10.10.0.0/24", "10.244.0.0/24")
"""The client's network and the backends': replies come back through the host, so nothing is masqueraded."""
LOAD_SECONDS = 900.0


def vip(index: int) -> str:
    """The address of a service; 250 in each network of 256."""
    return str(IPv4Address("10.96.0.1") + index // 250 * 256 + index % 250)


def declaration(services: int) -> str:
    """So many services of five backends, sorted by name as by address. The first and the last lead to the
    real backend at all of its ports; the others have one TCP port, and backends that are nowhere."""
    blocks = [_service(index, real=index in (0, services - 1)) for index in range(services)]
    return "apiVersion: vipd/v1\nservices:\n" + "".join(blocks)


def filler_backends(index: int) -> tuple[str, ...]:
    return tuple(str(IPv4Address("10.128.0.1") + index * 5 + n) for n in range(5))


def _service(index: int, real: bool) -> str:
    ports = [f"{port}/tcp" for port in (PORTS.tcp if real else (PORTS.closing,))]
    ports += [f"{port}/udp" for port in PORTS.udp] if real else []
    backends = BACKENDS if real else filler_backends(index)
    return (
        f"  - name: bench/web-{index:06}\n"
        f"    address: {vip(index)}\n"
        f"    ports: [{', '.join(ports)}]\n"
        f"    backends: [{', '.join(backends)}]\n"
    )


def settings_for(compat: str = "none", masquerade: str = "auto") -> Settings:
    """vipd's settings, with the lab's networks as the cluster unless everything forwarded is masqueraded."""
    clusters = CLUSTER if masquerade == "auto" else ()
    return load_settings(
        flags={"compat": compat, "masquerade": masquerade, "cluster_cidrs": clusters, "host_addresses": ()}
    )


@cache
def _forwardings(services: int, compat: str, masquerade: str) -> tuple[Forwarding, ...]:
    policy = SelectionPolicy.of(settings_for(compat, masquerade), ())
    parsed = parse_declaration(declaration(services), "bench.yaml").services
    return tuple(forwarding for service in parsed for forwarding in select_backends(service, policy))


@cache
def _restores(services: int, compat: str) -> tuple[str, ...]:
    """The restores that vipd would make, in their order."""
    options = RuleOptions.of(settings_for(compat), Family.IPV4, random_fully=True)
    ruleset = Ruleset(options)
    for forwarding in _forwardings(services, compat, "auto"):
        ruleset.update(forwarding.key, forwarding)
    return make_plan(ruleset.whole({}), Installed(), options.names).restores


def load_iptables(host: Node, services: int, variant: str, compat: str) -> None:
    for text in _restores(services, compat):
        host.run(f"iptables-{variant}-restore", "--noflush", text=text, timeout=LOAD_SECONDS)


def load_nftables(host: Node, services: int, masquerade: str = "auto") -> None:
    options = TableOptions.of(settings_for(masquerade=masquerade), Family.IPV4)
    text = render_table(_forwardings(services, "none", masquerade), options)
    host.run("nft", "-f", "-", text=text, timeout=LOAD_SECONDS)


def load_kube_proxy_nft(host: Node, services: int) -> None:
    parsed = parse_declaration(declaration(services), "bench.yaml").services
    host.run("nft", "-f", "-", text=whole_table(parsed, CLUSTER), timeout=LOAD_SECONDS)


def load_ipvs(host: Node, services: int) -> None:
    """By one `ipvsadm --restore`. IPVS takes what comes to the host's addresses, so the VIPs are local."""
    parsed = parse_declaration(declaration(services), "bench.yaml").services
    host.run("ip", "route", "add", "local", VIPS, "dev", "lo")
    host.run("ipvsadm", "--restore", text=all_services(parsed), timeout=LOAD_SECONDS)
    # Seconds that idle flows, those that end and those of UDP are kept; 0: the kernel's own.
    host.run("ipvsadm", "--set", "0", "1", "1")
