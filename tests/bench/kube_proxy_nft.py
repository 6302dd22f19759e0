"""The table that kube-proxy's nftables mode writes since 1.36 for services without affinity, as text for nft.

A verdict map leads from address, protocol and port to the service's chain. Its one rule draws an endpoint at
random from a map of its own and translates: no endpoint has a chain. One rule marks what comes to ClusterIPs
from outside of the cluster; a set holds the endpoints' connections to themselves. Names are as long as
kube-proxy's.

It is not kube-proxy: written here anew, after pkg/proxy/nftables/proxier.go of Kubernetes 1.36.
"""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from vipd.model.service import Service, ServicePort

TABLE = "ip layout"
_HAIRPIN_KEY = "ip saddr . ip daddr . meta l4proto . th dport"
_FRAME = f"""\
table {TABLE} {{
    set cluster-ips {{ type ipv4_addr; }}
    set nodeport-ips {{ type ipv4_addr; }}
    set hairpin-connections {{ type ipv4_addr . ipv4_addr . inet_proto . inet_service; }}
    map firewall-ips {{ type ipv4_addr . inet_proto . inet_service : verdict; }}
    map no-endpoint-services {{ type ipv4_addr . inet_proto . inet_service : verdict; }}
    map no-endpoint-nodeports {{ type inet_proto . inet_service : verdict; }}
    map service-ips {{ type ipv4_addr . inet_proto . inet_service : verdict; }}
    map service-nodeports {{ type inet_proto . inet_service : verdict; }}
    chain firewall-check {{
        ip daddr . meta l4proto . th dport vmap @firewall-ips
    }}
    chain service-endpoints-check {{
        ip daddr . meta l4proto . th dport vmap @no-endpoint-services
    }}
    chain nodeport-endpoints-check {{
        ip daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports
    }}
    chain cluster-ips-check {{
        ip daddr @cluster-ips reject
    }}
    chain services {{
        ip daddr @cluster-ips ip saddr != {{ CLUSTER }} meta mark set meta mark or 0x4000
        ip daddr . meta l4proto . th dport vmap @service-ips
        ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports
    }}
    chain masquerading {{
        meta mark and 0x4000 != 0 meta mark set meta mark xor 0x4000 masquerade fully-random
        ct status dnat {_HAIRPIN_KEY} @hairpin-connections masquerade fully-random
    }}
    chain filter-prerouting-pre-dnat {{
        type filter hook prerouting priority -110; policy accept;
        ct state new jump firewall-check
    }}
    chain filter-output-pre-dnat {{
        type filter hook output priority -110; policy accept;
        ct state new jump firewall-check
    }}
    chain filter-input {{
        type filter hook input priority 0; policy accept;
        ct state new jump nodeport-endpoints-check
        ct state new jump service-endpoints-check
    }}
    chain filter-forward {{
        type filter hook forward priority 0; policy accept;
        ct state new jump service-endpoints-check
        ct state new jump cluster-ips-check
    }}
    chain filter-output {{
        type filter hook output priority 0; policy accept;
        ct state new jump service-endpoints-check
        ct state new jump cluster-ips-check
    }}
    chain nat-prerouting {{
        type nat hook prerouting priority -100; policy accept;
        jump services
    }}
    chain nat-output {{
        type nat hook output priority -100; policy accept;
        jump services
    }}
    chain nat-postrouting {{
        type nat hook postrouting priority 100; policy accept;
        jump masquerading
    }}
}}
"""


def whole_table(services: Iterable[Service], cluster: Iterable[str]) -> str:
    """The frame, and all services. What comes from outside of `cluster` is masqueraded."""
    return _FRAME.replace("CLUSTER", ", ".join(cluster)) + "".join(map(_added, services))


def changed_service(before: Service, after: Service) -> str:
    """What a partial sync writes for a service whose backends changed: its rules anew, and the elements that
    differ. kube-proxy keeps the elements in memory, so it reads nothing for this."""
    hairpins, wanted = _hairpins(before), _hairpins(after)
    lines = [
        *(f"flush chain {TABLE} {_chain(after, port)}\n{_rule(after, port)}" for port in after.ports),
        *(f"add element {TABLE} hairpin-connections {{ {key} }}" for key in sorted(wanted - hairpins)),
        *(f"delete element {TABLE} hairpin-connections {{ {key} }}" for key in sorted(hairpins - wanted)),
    ]
    return "\n".join([*lines, ""])


def _added(service: Service) -> str:
    address = service.addresses[0]
    lines = [f"add element {TABLE} cluster-ips {{ {address} }}"]
    for port in service.ports:
        chain = _chain(service, port)
        key = f"{address} . {port.protocol} . {port.port}"
        lines += [f"add chain {TABLE} {chain}", _rule(service, port)]
        lines.append(f"add element {TABLE} service-ips {{ {key} : goto {chain} }}")
    lines += (f"add element {TABLE} hairpin-connections {{ {key} }}" for key in sorted(_hairpins(service)))
    return "\n".join([*lines, ""])


def _chain(service: Service, port: ServicePort) -> str:
    name = f"{service.name}/{port.protocol}/{port.name or port.port}"
    return f"service-{crc32(name.encode()):08X}-{name}"


def _rule(service: Service, port: ServicePort) -> str:
    target = port.target or port.port
    endpoints = ", ".join(
        f"{number} : {backend.address} . {target}" for number, backend in enumerate(service.backends)
    )
    drawn = f"numgen random mod {len(service.backends)} map {{ {endpoints} }}"
    translated = f"meta l4proto {port.protocol} dnat ip addr . port to {drawn}"
    return f"add rule {TABLE} {_chain(service, port)} {translated}"


def _hairpins(service: Service) -> set[str]:
    """The connections of its endpoints to themselves, as keys of the set."""
    return {
        f"{backend.address} . {backend.address} . {port.protocol} . {port.target or port.port}"
        for backend in service.backends
        for port in service.ports
    }
