"""Services of every kind, and hypothesis strategies over them."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.dataplane.declared import HTTP, backends
from tests.dataplane.states import LIMITS, PORTS, VIPS, some_backends
from vipd.model.service import (
    Affinity,
    Balance,
    ExternalAddress,
    Masquerade,
    RejectAction,
    Service,
    ServicePort,
    TrafficPolicy,
)

OWN = ("10.244.0.1", "fd00:244::1")
"""Addresses of the host on which services are chosen, so that some backends are local."""
OUTSIDE = ("203.0.113.1", "203.0.113.2", "2001:db8:9::1")
NETWORKS = (
    "192.0.2.0/24",
    "198.51.100.0/28",
    "198.51.100.7/32",
    "0.0.0.0/0",
    "2001:db8:1::/48",
    "fd00::1/128",
)
NODE_PORTS = (30001, 30002, 30003)


def numbered(number: int, *texts: str, balance: Balance = Balance.RANDOM) -> Service:
    """A service of one TCP port with a VIP made from its number."""
    vip = f"10.{96 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"
    return Service(f"test/s{number}", (vip,), (HTTP,), backends(*texts), balance=balance)


_external = st.builds(
    ExternalAddress,
    st.sampled_from(OUTSIDE),
    st.booleans(),
    st.lists(st.sampled_from(NETWORKS), max_size=3, unique=True).map(tuple),
)


@st.composite
def _service(
    draw: st.DrawFn, name: str, vips: tuple[str, ...], outside: str, node_port: int | None
) -> Service:
    port = draw(st.sampled_from(PORTS))
    external = draw(_external)
    return Service(
        name,
        vips,
        (ServicePort(port.port, port.protocol, port.name, port.target, node_port),),
        draw(some_backends(4)),
        affinity=draw(st.sampled_from([None, None, Affinity(), Affinity(60)])),
        masquerade=draw(st.sampled_from([None, *Masquerade])),
        refusal=draw(st.sampled_from(list(RejectAction))),
        external_addresses=(ExternalAddress(outside, allow_from=external.allow_from),) if outside else (),
        internal_policy=draw(st.sampled_from(list(TrafficPolicy))),
        external_policy=draw(st.sampled_from(list(TrafficPolicy))),
        answers_ping=draw(st.booleans()),
        limits=draw(st.sampled_from([None, None, *LIMITS])),
        balance=draw(st.sampled_from([Balance.RANDOM, Balance.RANDOM, Balance.ROUND_ROBIN])),
    )


@st.composite
def state(draw: st.DrawFn) -> tuple[Service, ...]:
    """Up to four services that share no frontend."""
    vips, outside = draw(st.permutations(VIPS)), draw(st.permutations(OUTSIDE))
    found, used = [], 0
    for number in range(4):
        count = draw(st.integers(0, 2))
        own, used = tuple(vips[used : used + count]), used + count
        external = outside[number] if number < len(outside) and draw(st.booleans()) else ""
        node_port = NODE_PORTS[number] if number < len(NODE_PORTS) and draw(st.booleans()) else None
        if own or external:
            found.append(draw(_service(f"test/s{number}", own, external, node_port)))
    return tuple(found)


walks = st.lists(state() | st.just(()), min_size=2, max_size=5)
