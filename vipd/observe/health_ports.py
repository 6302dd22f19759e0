"""A port for each service that reports whether this host has a ready backend of it (contract 6).

External load balancers query it to choose hosts for a service's traffic: kube-proxy's healthCheckNodePort.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from aiohttp import web

from vipd.control.progress import healthy
from vipd.control.reconciler import Reconciler
from vipd.host.observer import Observer
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family
from vipd.observe.listeners import ListenAddress, Listeners, is_family_supported

ANY_ADDRESS = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}  # noqa: S104 (outer load balancers are elsewhere)

NodeAddresses = Callable[[Family, frozenset[str]], tuple[str, ...] | None]
"""Returns the host's addresses of a family that answer on node ports; None: all."""


@dataclass(frozen=True, slots=True)
class HealthPort:
    """The report of a health port about its service."""

    service: str
    ready_local: int
    """Distinct addresses of ready backends on this host."""

    def body(self, vipd_healthy: bool) -> dict[str, object]:
        """kube-proxy's answer. The name that vipd makes of a frontend has a slash but no namespace."""
        namespace, slash, name = self.service.partition("/")
        if not slash or ":" in self.service:
            namespace, name = "", self.service
        return {
            "service": {"namespace": namespace, "name": name},
            "localEndpoints": self.ready_local,
            "serviceProxyHealthy": vipd_healthy,
        }


def wanted_health_ports(forwardings: Iterable[Forwarding]) -> dict[int, HealthPort]:
    """The health ports to have open. A backend that serves several ports of a service counts once."""
    ready: dict[int, set[str]] = {}
    owners: dict[int, str] = {}
    for forwarding in forwardings:
        if forwarding.health_port:
            owners[forwarding.health_port] = forwarding.key.service
            ready.setdefault(forwarding.health_port, set()).update(forwarding.ready_local)
    return {port: HealthPort(owners[port], len(addresses)) for port, addresses in ready.items()}


def health_answer(port: HealthPort, vipd_healthy: bool) -> web.Response:
    """200 when this host can take the service's traffic, else 503."""
    return web.Response(
        body=json.dumps(port.body(vipd_healthy)).encode(),
        status=200 if port.ready_local and vipd_healthy else 503,
        content_type="application/json",
        headers={
            "X-Content-Type-Options": "nosniff",
            "X-Load-Balancing-Endpoint-Weight": str(port.ready_local),
        },
    )


class HealthPorts(Observer):
    """The health ports of a reconciler's services, on the addresses of node ports."""

    def __init__(
        self,
        reconciler: Reconciler,
        node_addresses: NodeAddresses,
        in_maintenance: Callable[[], bool] = lambda: False,
    ) -> None:
        """`in_maintenance`: whether this host must get no new traffic."""
        self._reconciler, self._node_addresses = reconciler, node_addresses
        self._in_maintenance = in_maintenance
        self._families = [family for family in Family if is_family_supported(family)]
        self._forwardings: dict[ForwardingKey, Forwarding] = {}
        """Those with a health port."""
        self._ports: dict[int, HealthPort] = {}
        self.listeners = Listeners(self.answer)

    def services_changed(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Add new forwardings, and remove those that are None."""
        for key, forwarding in changes.items():
            self._forwardings.pop(key, None)
            if forwarding is not None and forwarding.health_port:
                self._forwardings[key] = forwarding

    def stepped(self) -> None:
        """Open the ports of the current services, whether or not the kernel has their rules: the
        answer reports that."""
        self._ports = wanted_health_ports(self._forwardings.values())
        addresses = [a for family in self._families for a in self._addresses(family)] if self._ports else []
        places = {
            ListenAddress(address, port): health.service
            for port, health in self._ports.items()
            for address in addresses
        }
        services = self._reconciler.services
        self.listeners.set_addresses(
            {place: f"the health port of {service}" for place, service in places.items()},
            {
                place: services[service].origin.author
                for place, service in places.items()
                if service in services
            },
        )

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """The answer of the port at which a request came in; the path does not matter."""
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, headers={"Allow": "GET, HEAD"})
        here = request.get_extra_info("sockname")
        port = self._ports.get(here[1]) if here else None
        if port is None:  # closed while the request was on its way
            return web.Response(status=503)
        progress = self._reconciler.progress
        vipd_healthy, _ = healthy(progress, self._reconciler.clock())
        vipd_healthy = vipd_healthy and not self._in_maintenance()
        # A quarantined service is vipd's failure for its own clients, and no other service's.
        return health_answer(port, vipd_healthy and port.service not in progress.quarantined)

    def _addresses(self, family: Family) -> tuple[str, ...]:
        named = self._node_addresses(family, self._reconciler.host_addresses)
        if named is None:
            return (ANY_ADDRESS[family],)
        # A link-local IPv6 address cannot be bound without its interface, which no setting names.
        return tuple(a for a in named if family is Family.IPV4 or not ip_address(a).is_link_local)
