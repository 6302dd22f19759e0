"""Who gets new flows, and with what share. Pure.

The seam between what is declared and what a dataplane does: one `Forwarding` for each port of a service in
each of its address families. It covers all of the service's addresses of that family, because kube-proxy's
chains do (contract 1.5): affinity is then shared by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vipd.model import (
    Backend,
    Endpoint,
    Family,
    Forwarding,
    ForwardingKey,
    Masquerade,
    Service,
    ServicePort,
    family_of,
    port_names,
)


@dataclass(frozen=True, slots=True)
class SelectionPolicy:
    """What the daemon's settings say where a service is silent."""

    masquerade: Mapping[Family, Masquerade]


def choose(service: Service, policy: SelectionPolicy) -> tuple[Forwarding, ...]:
    """Every forwarding of a service.

    Backends of weight 0 take no new flows. When none is left the fallback's backends serve; without those
    the flow meets the service's refusal.
    """
    families = sorted({family_of(address) for address in service.addresses})
    names = port_names(service.ports)
    return tuple(
        _forwarding(service, port, ForwardingKey(service.name, name, port.protocol, family), policy)
        for family in families
        for port, name in zip(service.ports, names, strict=True)
    )


def _forwarding(
    service: Service, port: ServicePort, key: ForwardingKey, policy: SelectionPolicy
) -> Forwarding:
    known = _endpoints(service.backends, port, key.family)
    serving = tuple(e for e in known if e.weight)
    resting = tuple(e for e in known if not e.weight)
    fallback = _endpoints(service.fallback, port, key.family)
    endpoints, idle = (serving, fallback) if serving else (tuple(e for e in fallback if e.weight), ())
    return Forwarding(
        key=key,
        addresses=tuple(a for a in service.addresses if family_of(a) is key.family),
        port=port.port,
        endpoints=endpoints,
        masquerade=service.masquerade or policy.masquerade[key.family],
        affinity_timeout=service.affinity.timeout if service.affinity else None,
        refusal=service.refusal,
        resting=resting + tuple(e._replace(weight=0) for e in idle),
    )


def _endpoints(backends: tuple[Backend, ...], port: ServicePort, family: Family) -> tuple[Endpoint, ...]:
    default = port.target or port.port
    found = [
        Endpoint(b.address, b.port or default, b.weight) for b in backends if family_of(b.address) is family
    ]
    return tuple(sorted(found, key=str))
