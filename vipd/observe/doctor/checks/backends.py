"""Backends: whether this host can reach them, and backends on this host. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address, ip_network

from vipd.model.service import Protocol, socket_text
from vipd.observe.doctor.checks.kernel_settings import ipv6_is_disabled
from vipd.observe.doctor.facts import Facts, Route
from vipd.observe.doctor.finding import MAX_FIXES, Check, CheckResult, listed, problem, warning

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


CHECKS = (
    Check("backend-route", GROUP, "routes lead to every backend", check_routes, Facts.network_unread),
    Check("local-backend", GROUP, "backends on this host listen", check_local, Facts.listeners_unread),
)
