"""Hypothesis strategies for services that vipd/v1 can declare."""

from ipaddress import IPv4Address, IPv6Address

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from vipd.model import Affinity, Backend, Masquerade, Protocol, Refusal, Service, ServicePort

# The machine that runs the tests may be busy: how long an example takes says nothing.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

VIPS = st.integers(0x0A60_0000, 0x0A60_00FF).map(lambda number: str(IPv4Address(number))) | st.integers(
    0xFD00 << 112, (0xFD00 << 112) + 0xFFFF
).map(lambda number: str(IPv6Address(number)))
PORTS = st.integers(1, 65535)
PORT_NAMES = st.tuples(st.text("az09-", max_size=5), st.sampled_from("bm"), st.text("az09-", max_size=5)).map(
    "".join
)
ENDS = st.sampled_from("aZ09")
ODD_NAMES = ("no", "null", "1.5", "1e3", "010", "2026-01-01", "0x10", "true", "53", "1_000", "y")
SERVICE_NAMES = (
    st.tuples(ENDS, st.text("aZ09._/-", max_size=12), ENDS).map("".join) | ENDS | st.sampled_from(ODD_NAMES)
)


@st.composite
def backends(draw: st.DrawFn, like: tuple[str, ...], base: int) -> tuple[Backend, ...]:
    """Backends of the families of `like`, each address once, apart from any VIP."""
    v6 = any(":" in address for address in like)
    v4 = any(":" not in address for address in like)
    hosts = draw(st.lists(st.integers(1, 250), unique=True, max_size=5))
    found = []
    for host in hosts:
        use_v6 = v6 and (not v4 or draw(st.booleans()))
        address = f"fd01::{host:x}" if use_v6 else f"10.{base}.0.{host}"
        weight = draw(st.just(1) | st.integers(0, 65535))
        found.append(Backend(address, draw(st.none() | PORTS), weight))
    return tuple(found)


@st.composite
def service_ports(draw: st.DrawFn) -> tuple[ServicePort, ...]:
    """Ports that repeat neither number and protocol nor name, with a target only where it differs."""
    keys = draw(
        st.lists(st.tuples(PORTS, st.sampled_from(list(Protocol))), min_size=1, max_size=4, unique=True)
    )
    names = draw(st.lists(PORT_NAMES, min_size=len(keys), max_size=len(keys), unique=True))
    found = []
    for (port, protocol), name in zip(keys, names, strict=True):
        target = draw(st.none() | PORTS)
        found.append(
            ServicePort(port, protocol, draw(st.sampled_from(["", name])), None if target == port else target)
        )
    return tuple(found)


@st.composite
def services(draw: st.DrawFn) -> Service:
    """A service that no rule of the language refuses."""
    addresses = tuple(draw(st.lists(VIPS, min_size=1, max_size=3, unique=True)))
    ports = draw(service_ports())
    refusal = draw(st.sampled_from(list(Refusal)))
    fallback = draw(backends(addresses, 245)) if refusal is Refusal.REJECT else ()
    unnamed = Service("", addresses, ports)
    return Service(
        name=draw(st.just(str(unnamed.frontends()[0])) | SERVICE_NAMES),
        addresses=addresses,
        ports=ports,
        backends=draw(backends(addresses, 244)),
        affinity=draw(st.none() | st.integers(1, 86400).map(Affinity)),
        masquerade=draw(st.none() | st.sampled_from(list(Masquerade))),
        refusal=refusal,
        fallback=fallback,
    )
