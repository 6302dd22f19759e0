"""Backends: whether this host can reach them, and backends on this host. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address, ip_network

from vipd.model.formatting import counted
from vipd.model.service import Protocol, socket_text
from vipd.observe.doctor.checks.kernel_settings import ipv6_is_disabled
from vipd.observe.doctor.facts import Facts, Link, Route, ServedPort
from vipd.observe.doctor.finding import (
    MAX_FIXES,
    Check,
    CheckResult,
    listed,
    ok,
    problem,
    unchecked,
    warning,
)

GROUP = "Backends"
WILDCARDS = ("0.0.0.0", "::")  # noqa: S104  (compared with, not listened on)


def check_routes(facts: Facts) -> Iterator[CheckResult]:
    """Flows to a backend without a route end here; behind a device that is down they take a wrong one."""
    behind = _behind_devices_that_are_down(facts)
    if behind:
        devices = sorted(set(behind.values()))
        cause = f"{listed(list(behind))}: their network is that of {listed(devices)}, which is down"
        repair = (f"ip link set {device} up" for device in devices[:MAX_FIXES])
        yield problem("the device towards a backend is down", cause, *repair)
    ways = facts.network.routes
    without = [a for a in facts.backends() if not ways.get(a, Route("unknown")).device and a not in behind]
    if ipv6_is_disabled(facts):
        without = [address for address in without if ":" not in address]
    if without:
        cause = f"no route leads to {listed(without)}: flows there fail"
        hint = "add a route to its network: ip route add NETWORK via ROUTER"
        yield problem("there is no route to a backend", cause, hint=hint)


def _behind_devices_that_are_down(facts: Facts) -> dict[str, str]:
    """Backends in the network of a device that is down: its route is gone too."""
    down = {link.name for link in facts.network.links if not link.up}
    return {
        backend: own.device
        for own in facts.network.addresses
        if own.device in down
        for backend in facts.backends()
        if ip_address(backend) in ip_network(f"{own.address}/{own.length}", strict=False)
    }


def check_mtu(facts: Facts) -> Iterator[CheckResult]:
    """A sender learns by an ICMP error that its packets are too large for the way to a backend, and not all
    senders receive these; a bridge sends none."""
    clients = [link for link in facts.network.links if link.mtu and _faces_clients(link, facts)]
    largest = max(clients, key=lambda link: link.mtu, default=None)
    narrow: dict[str, str] = {}
    for backend in facts.backends():
        way = facts.network.routes.get(backend)
        device = facts.network.link(way.device) if way and not way.local else None
        if way is None or device is None:
            continue
        mtu = min(filter(None, (way.mtu, device.mtu)), default=0)
        if largest and mtu and mtu < largest.mtu:
            narrow[backend] = f"{backend} ({device.name}, {mtu})"
    if largest and narrow:
        cause = (
            f"{largest.name} takes packets of {largest.mtu} bytes, and the way to "
            f"{listed(list(narrow.values()))} only smaller ones: clients that get no ICMP errors hang on "
            "large requests"
        )
        repair = "iptables -t mangle -A FORWARD -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu"
        hint = f"give all devices of the way the same MTU; for TCP alone (ip6tables for IPv6): {repair}"
        yield warning("packets may be too large for the way to backends", cause, hint=hint)
    yield from _narrow_ports(facts)


def _faces_clients(link: Link, facts: Facts) -> bool:
    """Whether packets of clients may arrive there: it has an address, and leads to other hosts."""
    addressed = any(own.device == link.name for own in facts.network.addresses)
    return link.up and addressed and link.name != "lo" and link.kind not in ("bridge", "dummy")


def _narrow_ports(facts: Facts) -> Iterator[CheckResult]:
    """Ports of a bridge towards backends that drop what the bridge lets pass, without an error."""
    ways = {way.device for address in facts.backends() if (way := facts.network.routes.get(address))}
    for bridge in facts.network.links:
        ports = [
            f"{link.name} ({link.mtu})"
            for link in facts.network.links
            if link.master == bridge.name and 0 < link.mtu < bridge.mtu
        ]
        if bridge.kind == "bridge" and bridge.name in ways and ports:
            cause = (
                f"{bridge.name} has {bridge.mtu}, and its ports {listed(ports)} silently drop what is larger"
            )
            smallest = min(link.mtu for link in facts.network.links if link.master == bridge.name)
            repair = f"ip link set {bridge.name} mtu {smallest}"
            yield problem("ports of a bridge have a smaller MTU than the bridge", cause, repair)


def check_policy_rules(facts: Facts) -> Iterator[CheckResult]:
    """Packets are routed by the backend's address, after translation: a rule for their source, mark or device
    sends them elsewhere than programs of this host see."""
    for rule in facts.network.policy_rules:
        elsewhere = {
            backend: way.device or "nowhere"
            for backend in facts.backends()
            if (way := rule.routes.get(backend)) is not None
            and way.device != facts.network.routes.get(backend, Route()).device
        }
        if elsewhere:
            places = listed([f"{backend} to {device}" for backend, device in elsewhere.items()])
            usual = listed(
                sorted({facts.network.routes.get(b, Route()).device or "nowhere" for b in elsewhere})
            )
            cause = f"{rule.text} sends packets for {places}, and not to {usual} as others"
            first = next(iter(elsewhere))
            hint = (
                "if clients' packets match it, let backends be routed by the main table before it: "
                f"ip rule add to {first} lookup main priority {max(rule.priority - 1, 1)}"
            )
            yield warning("a routing rule takes packets for backends elsewhere", cause, hint=hint)


def check_local(facts: Facts) -> Iterator[CheckResult]:
    """A backend on this host must listen on the address that flows are translated to."""
    if facts.network.listeners_fault:
        return
    found = {}
    for port in facts.services:
        for address, number in port.backends:
            way = facts.network.routes.get(address)
            if way and way.local and port.protocol is not Protocol.SCTP:
                found[port.protocol, address, number] = port.service
    for (protocol, address, number), service in found.items():
        at = {
            listener.address
            for listener in facts.network.listeners
            if (listener.protocol, listener.port) == (protocol, number)
        }
        if address in at or at.intersection(WILDCARDS):
            continue
        place = f"{socket_text(address, number)}/{protocol}"
        hint = f"let the program listen on {address}"
        if any(ip_address(each).is_loopback for each in at):
            cause = f"{place} of {service} is this host, and the program listens on loopback only"
            yield problem("a backend listens on loopback only", cause, hint=hint)
        else:
            cause = f"{place} of {service} is this host, and nothing listens there"
            yield warning("a backend on this host does not listen", cause, hint=hint)


def check_contacts(facts: Facts) -> Iterator[CheckResult]:
    """A backend that refuses or does not answer costs its share of new flows."""
    contacts, ports = facts.contacts, _ports_by_place(facts)
    explained = _behind_devices_that_are_down(facts)
    silent, taking, answered = list[str](), list[ServedPort](), 0
    for place, fault in contacts.results.items():
        protocol, address, number = place
        way = facts.network.routes.get(address, Route("unknown"))
        if not fault:
            answered += protocol is not Protocol.UDP
        elif way.device and not way.local and address not in (*explained, *contacts.unresolved):
            port = ports[place]
            silent.append(f"{socket_text(address, number)}/{protocol} of {port.service} ({fault})")
            taking += [port] if (address, number) in port.new_flows else []
    if silent:
        named = listed(silent, MAX_FIXES)
        title = "backends refuse connections or do not answer"
        if not taking:
            cause = f"this host cannot connect to {named}, which take no new flows"
            yield warning(title, cause, hint="start the server there")
        else:
            cause = f"this host cannot connect to {named}: clients that are sent there fail"
            name = taking[0].service
            hint = (
                f"start the server, or take it out: vipctl drain {name} BACKEND; a check does that by itself"
            )
            yield problem(title, cause, hint=hint)
    elif answered:
        yield ok(f"{counted(answered, 'backend')} answered a connection of this host")
    if contacts.left_out:
        what = f"whether {counted(contacts.left_out, 'more backend')} would answer"
        cause = "one run connects to a limited number, and by SCTP only where the kernel has loaded it"
        yield unchecked(
            what, cause + ("" if contacts.named else "; vipctl doctor SERVICE connects to all of it")
        )


def _ports_by_place(facts: Facts) -> dict[tuple[Protocol, str, int], ServedPort]:
    """A served port of each backend; one in which it takes new flows first."""
    known = dict[tuple[Protocol, str, int], ServedPort]()
    for port in facts.services:
        for backend in port.backends:
            place = (port.protocol, *backend)
            if place not in known or backend in port.new_flows:
                known[place] = port
    return known


def check_neighbours(facts: Facts) -> Iterator[CheckResult]:
    """Packets for an address that nobody on its network has end on this host."""
    unresolved = facts.contacts.unresolved
    if unresolved:
        services = facts.backends()
        places = [
            f"{address} of {services[address].service} ({state})" for address, state in unresolved.items()
        ]
        cause = f"no host on its network answers for {listed(places, MAX_FIXES)}: flows there get no answer"
        hint = "start that host, correct the backend's address, or take it out: vipctl drain SERVICE BACKEND"
        yield problem("nobody has the address of a backend", cause, hint=hint)


CHECKS = (
    Check("backend-route", GROUP, "routes lead to every backend", check_routes, Facts.network_unread),
    Check(
        "backend-mtu",
        GROUP,
        "the way to backends takes packets of any client",
        check_mtu,
        Facts.network_unread,
    ),
    Check(
        "backend-policy-route",
        GROUP,
        "no routing rule takes packets for backends elsewhere",
        check_policy_rules,
        Facts.network_unread,
    ),
    Check(
        "backend-contact",
        GROUP,
        "no backend without a check refuses this host's connections",
        check_contacts,
        Facts.contacts_unread,
    ),
    Check(
        "backend-neighbour",
        GROUP,
        "some host has the address of each backend in a connected network, as far as the kernel knows",
        check_neighbours,
        Facts.neighbours_unread,
    ),
    Check("local-backend", GROUP, "backends on this host listen", check_local, Facts.listeners_unread),
)
