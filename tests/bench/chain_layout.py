"""A table of nftables with a chain for each service and one for each endpoint, as text for `nft -f`.

It is laid out as kube-proxy's nftables mode does it: a verdict map from address, protocol and port to the
service's chain, which draws one of its endpoints' chains at random, which marks hairpin flows and translates.
The names are as long as kube-proxy's. It is not kube-proxy: written here anew, for comparison.
"""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from vipd.model.service import Service
from vipd.observe.bench.declared import PORT, TARGET

TABLE = "ip layout"

FRAME = f"""\
table {TABLE} {{
    map service-ips {{
        type ipv4_addr . inet_proto . inet_service : verdict
    }}
    chain mark-for-masquerade {{
        meta mark set meta mark or 0x4000
    }}
    chain services {{
        ip daddr . meta l4proto . th dport vmap @service-ips
    }}
    chain nat-prerouting {{
        type nat hook prerouting priority dstnat; policy accept;
        jump services
    }}
    chain nat-output {{
        type nat hook output priority -100; policy accept;
        jump services
    }}
    chain nat-postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        meta mark and 0x4000 == 0 return
        meta mark set meta mark xor 0x4000
        masquerade fully-random
    }}
}}
"""


def whole_table(services: Iterable[Service]) -> str:
    """The frame, and all services, in one transaction."""
    return FRAME + "".join(map(_added, services))


def changed_service(service: Service) -> str:
    """One service's chain written anew, and chains for its endpoints; those that it had stay for later."""
    chain = service_chain(service)
    return "\n".join([f"flush chain {TABLE} {chain}", *_chains(service), ""])


def service_chain(service: Service) -> str:
    """The name of its chain."""
    return f"service-{_digest(service.name)}-{service.name}/tcp/http"


def _added(service: Service) -> str:
    place = f"{service.addresses[0]} . tcp . {PORT}"
    chain = service_chain(service)
    element = f"add element {TABLE} service-ips {{ {place} : goto {chain} }}"
    return "\n".join([f"add chain {TABLE} {chain}", *_chains(service), element, ""])


def _chains(service: Service) -> Iterable[str]:
    chain, address = service_chain(service), service.addresses[0]
    endpoints = {backend.address: _endpoint_chain(service, backend.address) for backend in service.backends}
    for endpoint, own in endpoints.items():
        yield f"add chain {TABLE} {own}"
        yield f"flush chain {TABLE} {own}"
        yield f"add rule {TABLE} {own} ip saddr {endpoint} jump mark-for-masquerade"
        yield f"add rule {TABLE} {own} meta l4proto tcp dnat to {endpoint}:{TARGET}"
    slots = ", ".join(f"{number} : goto {own}" for number, own in enumerate(endpoints.values()))
    masquerade = f"ip daddr {address} tcp dport {PORT} ip saddr != 10.128.0.0/9 jump mark-for-masquerade"
    yield f"add rule {TABLE} {chain} {masquerade}"
    yield f"add rule {TABLE} {chain} numgen random mod {len(endpoints)} vmap {{ {slots} }}"


def _endpoint_chain(service: Service, address: str) -> str:
    return f"endpoint-{_digest(service.name + address)}-{service.name}/tcp/http__{address}/{TARGET}"


def _digest(text: str) -> str:
    return f"{crc32(text.encode()):08X}"
