"""Small forwardings for tests of what is stale."""

from __future__ import annotations

from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.service import ExternalAddress, Masquerade, Protocol, family_of


def forwarding(
    address: str,
    port: int,
    *endpoints: tuple[str, int],
    protocol: Protocol = Protocol.UDP,
    resting: tuple[tuple[str, int], ...] = (),
    local: tuple[tuple[str, int], ...] = (),
    external: tuple[str, ...] = (),
    node_port: int | None = None,
    name: str = "",
) -> Forwarding:
    """A forwarding of one address, known by that and the port unless it has a name."""
    return Forwarding(
        key=ForwardingKey(name or f"{address}-{port}", "", protocol, family_of(address)),
        addresses=(address,),
        port=port,
        endpoints=tuple(Endpoint(*each) for each in endpoints),
        masquerade=Masquerade.HAIRPIN,
        without_new_flows=tuple(Endpoint(*each) for each in resting),
        local_endpoints=tuple(Endpoint(*each) for each in local),
        external_addresses=tuple(ExternalAddress(each, allow_from=()) for each in external),
        node_port=node_port,
    )
