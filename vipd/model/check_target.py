"""Check targets of a service: one for each backend with a check. Pure.

A backend is probed once for each service, and the result counts for all of the service's ports. The probe
goes to the check's own port, if it has one, else to the backend's port for the service's first port of the
check's protocol (UDP for udp and dns, TCP for tcp and http, any for exec). Equal targets are probed once,
however many services have them; but a program runs for each author of services by itself, as that author's
user. Backends of a `fallback` are probed likewise; a backend without a port for
the service's check is not probed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from vipd.model.check import Check, DnsProbe, ExecProbe, HttpProbe, Probe, TcpProbe, Timing, UdpProbe
from vipd.model.service import Backend, Protocol, Service, socket_text


@dataclass(frozen=True, slots=True)
class CheckTarget:
    """A backend's address and port with its check. The port in the probe is None: `port` holds it."""

    address: str
    port: int
    protocol: Protocol
    probe: Probe
    timing: Timing
    author: str = ""
    """Of a program: the author whose user runs it. Empty for all other probes, which authors share."""
    _hash: int = field(init=False, repr=False, compare=False)
    """Cached: nested values are slow to hash, and each result looks its target up."""

    def __post_init__(self) -> None:
        values = (self.address, self.port, self.protocol, self.probe, self.timing, self.author)
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return f"{self.kind} {socket_text(self.address, self.port)}"

    @property
    def kind(self) -> str:
        """The type of check, as in a declaration."""
        return probe_kind(self.probe)


_KINDS: dict[type[Probe], str] = {
    TcpProbe: "tcp",
    HttpProbe: "http",
    UdpProbe: "udp",
    DnsProbe: "dns",
    ExecProbe: "exec",
}


def probe_kind(probe: Probe) -> str:
    """The type of check, as in a declaration."""
    return "https" if isinstance(probe, HttpProbe) and probe.tls else _KINDS[type(probe)]


def check_targets(service: Service) -> dict[str, CheckTarget]:
    """The target of each backend that is checked, by the backend's text.

    Omits a backend whose check finds no port; `backends_without_check_port` returns those.
    """
    found: dict[str, CheckTarget] = {}
    for backend, check in _checked(service):
        target = _target(service, backend, check)
        if target is not None:
            found.setdefault(str(backend), target)
    return found


def backends_without_check_port(service: Service) -> tuple[Backend, ...]:
    """The backends whose check finds no port to probe; of a fallback, those with a check of their own."""
    asked = [(b, check) for b, check in _checked(service) if _target(service, b, check) is None]
    # A fallback may be an error page: an unchecked one is better than none.
    inherits = {id(b) for b in service.fallback if b.check is None}
    return tuple(b for b, _ in asked if id(b) not in inherits)


def _checked(service: Service) -> list[tuple[Backend, Check]]:
    backends = (*service.backends, *service.fallback)
    pairs = [(b, service.check if b.check is None else b.check) for b in backends]
    return [(backend, check) for backend, check in pairs if check.probe is not None]


def _target(service: Service, backend: Backend, check: Check) -> CheckTarget | None:
    probe = check.probe
    if probe is None:
        return None
    protocol, port = _protocol_and_port(service, backend, probe)
    if protocol is None or port is None:
        return None
    author = service.origin.author if isinstance(probe, ExecProbe) else ""
    return CheckTarget(backend.address, port, protocol, replace(probe, port=None), check.timing, author)


def _protocol_and_port(
    service: Service, backend: Backend, probe: Probe
) -> tuple[Protocol | None, int | None]:
    fixed = _protocol(probe)
    served = [(p.protocol, number) for p in service.ports if (number := backend.port_for(p))]
    protocol, port = next(((p, n) for p, n in served if fixed in (None, p)), (fixed, None))
    return protocol, probe.port or port


def _protocol(probe: Probe) -> Protocol | None:
    """Transport protocol of a probe; None: any protocol of the service."""
    if isinstance(probe, ExecProbe):
        return None
    return Protocol.UDP if isinstance(probe, UdpProbe | DnsProbe) else Protocol.TCP
