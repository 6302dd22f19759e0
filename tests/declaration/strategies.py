"""Hypothesis strategies for services that vipd/v1 can declare."""

from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from vipd.model.check import (
    UNCHECKED,
    Check,
    DnsProbe,
    ExecProbe,
    HttpProbe,
    InitialHealth,
    TcpProbe,
    Timing,
    UdpProbe,
)
from vipd.model.flow_limits import FlowLimits
from vipd.model.service import (
    Affinity,
    Announcement,
    AnnounceMethod,
    Backend,
    BackendState,
    Balance,
    ExternalAddress,
    Masquerade,
    NamedBackend,
    NameKind,
    Protocol,
    RejectAction,
    Service,
    ServicePort,
    TrafficDistribution,
    TrafficPolicy,
    family_of,
)

# The machine that runs the tests may be busy: how long an example takes says nothing.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

VIPS = st.integers(0x0A60_0000, 0x0A60_00FF).map(lambda number: str(IPv4Address(number))) | st.integers(
    0xFD00 << 112, (0xFD00 << 112) + 0xFFFF
).map(lambda number: str(IPv6Address(number)))
PORTS = st.integers(1, 65535)
PORT_NAMES = (
    st.tuples(st.text("az09-", max_size=5), st.sampled_from("bm"), st.text("az09-", max_size=5)).map("".join)
    # As keys these would be something else to YAML, if they stood there without quotes.
    | st.sampled_from(["no", "on", "null", "true", "1e3", "0x10"])
)
ENDS = st.sampled_from("aZ09")
ODD_NAMES = ("no", "null", "1.5", "1e3", "010", "2026-01-01", "0x10", "true", "53", "1_000", "y")
SERVICE_NAMES = (
    st.tuples(ENDS, st.text("aZ09._/-", max_size=12), ENDS).map("".join) | ENDS | st.sampled_from(ODD_NAMES)
)


MILLISECONDS = st.integers(100, 3_600_000).map(lambda number: number / 1000)
TEXTS = st.sampled_from(["ok", "123", "true", "1e3", "no", "a b", "^x{2}\\b", "naïve", "it's: [so]"])
PAYLOADS = TEXTS.map(str.encode) | st.binary(min_size=1, max_size=8)
STATUS = st.tuples(st.integers(100, 599), st.integers(0, 99)).map(lambda s: (s[0], min(s[0] + s[1], 599)))
PROBES = st.one_of(
    st.just(None),
    st.builds(TcpProbe, port=PORTS),
    st.builds(
        HttpProbe,
        port=PORTS,
        method=st.sampled_from(["GET", "HEAD"]),
        path=st.sampled_from(["/", "/ready?deep=1"]),
        status=st.lists(STATUS, min_size=1, max_size=2).map(tuple),
        body=TEXTS,
    ),
    st.builds(
        HttpProbe,
        port=PORTS,
        tls=st.just(True),
        host=st.sampled_from(["", "web.example"]),
        verify=st.booleans(),
        ca=st.sampled_from(["", "/etc/ssl/own.pem"]),
        server_name=st.sampled_from(["", "api.example"]),
    ),
    st.builds(UdpProbe, port=PORTS, send=PAYLOADS, expect=st.none() | PAYLOADS),
    st.builds(
        DnsProbe,
        port=PORTS,
        query=st.sampled_from([".", "example.com"]),
        type=st.sampled_from(["A", "AAAA", "NS", "SOA", "TXT", "MX", "SRV", "CNAME", "PTR"]),
        rcode=st.sampled_from(["NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED"]),
        answer=TEXTS | st.just(""),
    ),
    st.builds(
        ExecProbe,
        command=st.lists(TEXTS, max_size=2).map(lambda words: ("/bin/check", *words)),
        user=st.sampled_from(["nobody", "checks"]),
    ),
)
"""Each with a port of its own, so that it fits any service."""


@st.composite
def checks(draw: st.DrawFn) -> Check:
    """A check that no rule of the language refuses."""
    probe = draw(PROBES)
    if probe is None:
        return UNCHECKED
    interval = draw(MILLISECONDS)
    timeout = draw(st.integers(100, round(interval * 1000)).map(lambda number: number / 1000))
    timing = draw(
        st.builds(
            Timing,
            interval=st.just(interval),
            timeout=st.just(timeout) | st.just(min(2.0, interval)),
            rise=st.integers(1, 100),
            fall=st.integers(1, 100),
            start=st.sampled_from(InitialHealth),
            jitter=st.integers(0, 50).map(lambda percent: percent / 100),
        )
    )
    return Check(probe, timing)


PLACES = st.sampled_from(["node1", "a.b-c_d", "no", "1e3", "Zone-9"])


@st.composite
def backends(
    draw: st.DrawFn, like: tuple[str, ...], base: int, names: tuple[str, ...] = ()
) -> tuple[Backend, ...]:
    """Backends of the families of `like`, each address once, apart from any VIP. `names`: of the ports."""
    v6 = any(":" in address for address in like)
    v4 = any(":" not in address for address in like)
    hosts = draw(st.lists(st.integers(1, 250), unique=True, max_size=5))
    found = []
    for host in hosts:
        use_v6 = v6 and (not v4 or draw(st.booleans()))
        address = f"fd01::{host:x}" if use_v6 else f"10.{base}.0.{host}"
        weight = draw(st.just(1) | st.integers(0, 65535))
        named = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
        found.append(
            Backend(
                address,
                None if named else draw(st.none() | PORTS),
                weight,
                draw(st.sampled_from(list(BackendState))),
                draw(st.just("") | PLACES),
                tuple(draw(st.lists(PLACES, max_size=2, unique=True))),
                tuple((name, draw(PORTS)) for name in named),
                draw(st.booleans()),
                draw(st.none() | checks()),
            )
        )
    return tuple(found)


DNS_NAMES = st.sampled_from(["a", "no", "web.internal", "_http._tcp.web.internal", "xn--bcher-kva.example"])


@st.composite
def named_backends(
    draw: st.DrawFn, like: tuple[str, ...], ports: tuple[ServicePort, ...], names: tuple[str, ...]
) -> tuple[NamedBackend, ...]:
    """Backends by DNS name, each name once."""
    found = []
    for backend, name in zip(draw(backends(like, 244, names)), draw(st.permutations(range(5))), strict=False):
        template = replace(backend, address="")
        kinds = list(NameKind) if len(ports) == 1 and not template.ports else [NameKind.DNS]
        kind = draw(st.sampled_from(kinds))
        if kind is NameKind.SRV:
            template = replace(template, port=None, weight=1)
        found.append(NamedBackend(kind, f"n{name}.{draw(DNS_NAMES)}", template))
    return tuple(found)


@st.composite
def service_ports(draw: st.DrawFn) -> tuple[ServicePort, ...]:
    """Ports that repeat neither number and protocol nor name, with a target only where it differs."""
    keys = draw(
        st.lists(st.tuples(PORTS, st.sampled_from(list(Protocol))), min_size=1, max_size=4, unique=True)
    )
    names = draw(st.lists(PORT_NAMES, min_size=len(keys), max_size=len(keys), unique=True))
    on_host = draw(st.lists(PORTS, min_size=len(keys), max_size=len(keys), unique=True))
    found = []
    for (port, protocol), name, node_port in zip(keys, names, on_host, strict=True):
        target = draw(st.none() | PORTS)
        found.append(
            ServicePort(
                port,
                protocol,
                draw(st.sampled_from(["", name])),
                None if target == port else target,
                draw(st.sampled_from([None, node_port])),
            )
        )
    return tuple(found)


NETWORKS = {
    4: st.sampled_from(["10.0.0.0/8", "192.0.2.0/24", "203.0.113.7/32", "0.0.0.0/0"]),
    6: st.sampled_from(["fd00::/8", "2001:db8::/32", "::/0"]),
}


@st.composite
def networks_like(draw: st.DrawFn, addresses: tuple[str, ...]) -> tuple[str, ...]:
    """At least one network of each family of the addresses; none for no address."""
    families = sorted({family_of(address) for address in addresses})
    found = [draw(st.lists(NETWORKS[family], min_size=1, max_size=2, unique=True)) for family in families]
    return tuple(network for networks in found for network in networks)


@st.composite
def externals(draw: st.DrawFn, taken: tuple[str, ...]) -> tuple[ExternalAddress, ...]:
    """External IPs, then a load balancer's, apart from `taken`."""
    addresses = [a for a in draw(st.lists(VIPS, max_size=3, unique=True)) if a not in taken]
    balancers = draw(st.integers(0, len(addresses)))
    return tuple(
        ExternalAddress(
            address,
            index >= len(addresses) - balancers,
            draw(st.none() | networks_like(()) | networks_like((address,))),
        )
        for index, address in enumerate(addresses)
    )


def announcements(*, external: bool) -> st.SearchStrategy[Announcement | None]:
    """None, or one that announces an address."""
    inside = st.booleans() if external else st.just(value=True)
    return st.none() | st.builds(Announcement, st.sampled_from(AnnounceMethod), inside)


@st.composite
def flow_limits(draw: st.DrawFn) -> FlowLimits:
    """At least one limit, and bursts only beside their rates."""
    some = st.none() | st.integers(1, 100_000)
    rate, per_client, most, own = draw(some), draw(some), draw(some), draw(st.integers(1, 1_000_000))
    return FlowLimits(
        new_per_client=per_client,
        client_burst=draw(some) if per_client else None,
        connections_per_client=most,
        new_per_second=rate,
        burst=draw(some) if rate else None,
        connections=own,
        client_ipv6_prefix=draw(st.integers(32, 128)),
    )


@st.composite
def services(draw: st.DrawFn) -> Service:
    """A service that no rule of the language refuses."""
    addresses = tuple(draw(st.lists(VIPS, max_size=3, unique=True)))
    external = draw(externals(addresses))
    if not addresses and not external:
        addresses = (draw(VIPS),)
    ports = draw(service_ports())
    names = tuple(port.name for port in ports if port.name)
    refusal = draw(st.sampled_from(list(RejectAction)))
    unnamed = Service("", addresses, ports, external_addresses=external)
    everything = unnamed.all_addresses()
    taken = {port.node_port for port in ports}
    keeps = draw(st.booleans()) and refusal is RejectAction.REJECT
    check = draw(checks())
    return Service(
        name=draw(st.just(str(unnamed.frontends()[0])) | SERVICE_NAMES),
        addresses=addresses,
        ports=ports,
        backends=draw(backends(everything, 244, names)),
        named_backends=draw(st.just(()) | named_backends(everything, ports, names)),
        affinity=draw(st.none() | st.integers(1, 86400).map(Affinity)),
        masquerade=draw(st.none() | st.sampled_from(list(Masquerade))),
        refusal=refusal,
        fallback=draw(backends(everything, 245, names))
        if refusal is RejectAction.REJECT and not keeps
        else (),
        external_addresses=external,
        allow_from=draw(networks_like(()) | networks_like(everything)),
        internal_policy=draw(st.sampled_from(list(TrafficPolicy))),
        external_policy=draw(st.sampled_from(list(TrafficPolicy))),
        traffic_distribution=draw(st.sampled_from(TrafficDistribution)),
        announcement=draw(announcements(external=bool(external))),
        balance=draw(st.sampled_from(Balance)),
        check=check,
        keeps_unhealthy=keeps,
        slow_start=draw(st.integers(0, 3600)),
        limits=draw(st.none() | flow_limits()),
        weight_from_check=isinstance(check.probe, HttpProbe) and draw(st.booleans()),
        health_port=draw(st.none() | PORTS.filter(lambda port: port not in taken)),
    )
