"""Hypothesis strategies for what may be declared at one time."""

from __future__ import annotations

from hypothesis import strategies as st

from vipd.model.flow_limits import FlowLimits
from vipd.model.service import (
    Affinity,
    Backend,
    BackendState,
    Masquerade,
    Protocol,
    RejectAction,
    Service,
    ServicePort,
)

VIPS = (
    *(f"10.96.0.{i}" for i in range(1, 7)),
    *(f"fd00:96::{i}" for i in range(1, 4)),
)
"""Few, so that a VIP often moves from one service to another."""
BACKENDS = (
    *(f"10.244.0.{i}" for i in range(1, 5)),
    *(f"fd00:244::{i}" for i in range(1, 4)),
)
PORTS = (
    ServicePort(80, Protocol.TCP, "http", 8080),
    ServicePort(80, Protocol.TCP),
    ServicePort(53, Protocol.UDP, "dns"),
    ServicePort(53, Protocol.TCP, "dns-tcp"),
    ServicePort(9, Protocol.SCTP),
)
LIMITS = (
    FlowLimits(new_per_client=3, connections_per_client=2, new_per_second=7, burst=30, connections=9),
    FlowLimits(connections=9),
    FlowLimits(new_per_client=3000, client_ipv6_prefix=56),
)
NAMES = tuple(f"test/s{i}" for i in range(5))

_backend = st.builds(
    Backend,
    address=st.sampled_from(BACKENDS),
    port=st.sampled_from([None, None, 8081]),
    weight=st.sampled_from([0, 1, 1, 1, 2, 7, 65535]),
    state=st.sampled_from([BackendState.UP, BackendState.UP, BackendState.DRAIN, BackendState.DOWN]),
)


def some_backends(most: int) -> st.SearchStrategy[tuple[Backend, ...]]:
    """At most so many, each at another place."""
    return st.lists(_backend, max_size=most, unique_by=lambda b: (b.address, b.port)).map(tuple)


_ports = st.lists(
    st.sampled_from(PORTS), min_size=1, max_size=3, unique_by=lambda p: (p.port, p.protocol)
).map(tuple)


@st.composite
def _service(draw: st.DrawFn, name: str, addresses: tuple[str, ...]) -> Service:
    return Service(
        name,
        addresses,
        draw(_ports),
        draw(some_backends(4)),
        affinity=draw(st.sampled_from([None, None, Affinity(), Affinity(60)])),
        masquerade=draw(st.sampled_from([None, *Masquerade])),
        refusal=draw(st.sampled_from(list(RejectAction))),
        fallback=draw(some_backends(2)),
        limits=draw(st.sampled_from([None, None, None, *LIMITS])),
    )


@st.composite
def state(draw: st.DrawFn) -> tuple[Service, ...]:
    """Up to five services that share no VIP."""
    vips = draw(st.permutations(VIPS))
    found, used = [], 0
    for name in NAMES:
        count = draw(st.integers(0, 3))
        addresses, used = tuple(vips[used : used + count]), used + count
        if addresses:
            found.append(draw(_service(name, addresses)))
    return tuple(found)


walks = st.lists(state() | st.just(()), min_size=2, max_size=6)
"""States one after the other."""

cluster_cidrs = st.sampled_from(
    [(), ("10.20.0.0/16",), ("10.20.0.0/16", "10.244.0.0/16"), ("10.20.0.0/16", "fd00:20::/64")]
)
