"""Virtual IPs and node ports: reachable, without another owner, not resolved by neighbours. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from vipd.model.service import Family, family_of
from vipd.observe.doctor.checks.kernel_settings import ipv6_is_disabled
from vipd.observe.doctor.facts import Facts, HostAddress, Link, Listener, Route
from vipd.observe.doctor.finding import MAX_FIXES, Check, CheckResult, listed, problem, unchecked, warning

GROUP = "Addresses"
ARP_DEVICE = "vipd-arp"
WILDCARDS = ("0.0.0.0", "::")  # noqa: S104  (compared with, not listened on)


def check_network(facts: Facts) -> Iterator[CheckResult]:
    """Reports why the facts for the checks of addresses and backends are missing."""
    fault = facts.network.fault
    if fault:
        repair = ["apt install iproute2"] if "No such file" in fault else []
        yield unchecked("routes and addresses were not looked at", fault, *repair)


def check_owned(facts: Facts) -> Iterator[CheckResult]:
    """An address that this host has reaches its own programs, not only the service."""
    if facts.settings.compat == "kube-proxy":
        return
    vips = facts.vips()
    owned = [own for own in facts.network.addresses if own.address in vips]
    if "keepalived" in (facts.programs_running or ()):
        # It gives external addresses that vipd does not announce to one host at a time (docs/announce.md).
        owned = [own for own in owned if own.address not in vips[own.address].vrrp_addresses]
    if owned:
        places = listed([f"{own.address} ({own.device})" for own in owned])
        cause = f"this host has {places}: its programs answer there, and vipd refuses such addresses"
        hint = "give the service another address; or take it off the device, if nothing else uses it"
        yield problem("a virtual IP is this host's own address", cause, hint=hint)


def check_foreign(facts: Facts) -> Iterator[CheckResult]:
    """An address that another host has, is that host's: here it would not be reached any more."""
    taken = _taken(facts)
    if taken:
        places = listed([f"{vip} is {what}" for vip, what in taken.items()])
        cause = f"{places}: this host would not reach it any more, and two would answer for it"
        yield problem(
            "a virtual IP is another host's address", cause, hint="give the service another address"
        )


def _taken(facts: Facts) -> dict[str, str]:
    """Virtual IPs with another known owner, with a description of it."""
    backends = dict.fromkeys(facts.backends(), "a declared backend")
    others = {**backends, **facts.network.foreign_addresses}
    return {vip: others[vip] for vip in facts.vips() if vip in others}


def check_in_subnet(facts: Facts) -> Iterator[CheckResult]:
    """Neighbours resolve an address of their own network instead of sending it to a router."""
    taken = _taken(facts)
    vips = [(vip, ip_address(vip)) for vip in facts.vips() if vip not in taken]
    found = [
        (vip, own)
        for own in facts.network.addresses
        if _has_neighbours(own, facts.network.link(own.device))
        for network in [_network(own)]
        for vip, parsed in vips
        if parsed in network
        and vip != own.address
        and (vip, own.device) not in facts.network.proxy_neighbours
    ]
    if found:
        places = listed([f"{vip} in {_network(own)} of {own.device}" for vip, own in found])
        yield warning(
            "a virtual IP lies in a network of this host",
            f"{places}: neighbours there ask who has it instead of sending it here, and nobody answers",
            *_proxied_result(found),
            hint="make sure first that no host has it, also none that is off now; better is an address "
            "outside of every network, and a route to it through this host",
        )


def _proxied_result(found: list[tuple[str, HostAddress]]) -> Iterator[str]:
    """This host answers for an address that it has another route to: over a device that swallows it."""
    yield f"ip link add {ARP_DEVICE} type bridge"
    yield f"ip link set {ARP_DEVICE} up"
    for vip, own in found[:MAX_FIXES]:
        yield f"ip route add {vip}/{family_of(vip).bits} dev {ARP_DEVICE}"
        yield f"ip neighbour add proxy {vip} dev {own.device}"
        if ":" in vip:
            yield f"sysctl -w net.ipv6.conf.{own.device}.proxy_ndp=1"


def _has_neighbours(own: HostAddress, link: Link | None) -> bool:
    """Whether other hosts are in the network of an address, and resolve addresses there."""
    if link is not None and (not link.uses_neighbour_discovery or link.name == "lo"):
        return False
    return not _network(own).is_loopback


def _network(own: HostAddress) -> IPv4Network | IPv6Network:
    return ip_network(f"{own.address}/{own.length}", strict=False)


def check_routes(facts: Facts) -> Iterator[CheckResult]:
    """Routing precedes translation: programs of this host need a route to a VIP."""
    ways = facts.network.routes
    without = [
        vip
        for vip, port in facts.vips().items()
        if not ways.get(vip, Route("unknown")).device
        and facts.has_vipd_rules(port.family)
        and not (port.family is Family.IPV6 and ipv6_is_disabled(facts))
    ]
    if without:
        cause = (
            f"no route leads to {listed(without)}: programs of this host get 'network is unreachable', and a "
            f"service without backends answers so"
        )
        yield problem("there is no route to a virtual IP", cause, *_make_routes(without, facts))


def _make_routes(vips: list[str], facts: Facts) -> Iterator[str]:
    device = facts.settings.vip_device or "vipd0"
    if facts.settings.vip_device and facts.daemon.status:
        yield "vipctl reload"
        return
    if not facts.network.link(device):
        yield f"ip link add {device} type bridge"
    yield f"ip link set {device} up"
    yield from (f"ip route add {vip}/{family_of(vip).bits} dev {device}" for vip in vips[:MAX_FIXES])


def check_node_ports(facts: Facts) -> Iterator[CheckResult]:
    """A program that listens on a node port gets nothing any more from other hosts."""
    ports = {(p.protocol, p.node_port): p for p in facts.services if p.node_port}
    own = {address.address for address in facts.network.addresses}
    for listener in facts.network.listeners:
        port = ports.get((listener.protocol, listener.port))
        if port and (listener.address in WILDCARDS or listener.address in own):
            who = f"{listener.program} (pid {listener.pid})" if listener.pid else "a program"
            cause = f"{who} listens on {listener.port}/{listener.protocol}, and other hosts reach "
            cause += f"{port.service} there instead"
            title = f"node port {listener.port} of {port.service} is taken"
            yield warning(title, cause, hint=f"give the service another node port{_or_stop(listener)}")


def _or_stop(listener: Listener) -> str:
    """A user may depend on the program that holds a port: no pasted command stops it."""
    return f", or stop {listener.unit} if nobody needs it" if listener.unit else ""


CHECKS = (
    Check("network-readable", GROUP, "routes and addresses could be read", check_network),
    Check(
        "vip-owned",
        GROUP,
        "no virtual IP is an address of this host",
        check_owned,
        Facts.network_unread,
    ),
    Check(
        "vip-foreign",
        GROUP,
        "no virtual IP is known to be another host's",
        check_foreign,
        Facts.network_unread,
    ),
    Check(
        "vip-in-subnet",
        GROUP,
        "no virtual IP lies in a network of this host",
        check_in_subnet,
        Facts.network_unread,
    ),
    Check("vip-route", GROUP, "routes lead to every virtual IP", check_routes, Facts.routes_unread),
    Check(
        "node-port-taken",
        GROUP,
        "no program listens on a node port",
        check_node_ports,
        Facts.listeners_unread,
    ),
)
