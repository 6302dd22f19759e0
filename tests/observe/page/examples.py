"""Services that show everything the page can show."""

from __future__ import annotations

from vipd.model.backend_status import AdminState, BackendStatus
from vipd.model.service import Backend, BackendState, Origin, Protocol, Service, ServicePort

TCP, UDP = Protocol.TCP, Protocol.UDP
DRAINED = BackendStatus(
    admin=AdminState.DRAINING, reason="draining by root (pid 4711): kernel update", health="healthy"
)
UNHEALTHY = BackendStatus(
    healthy=False,
    reason="unhealthy: connection refused, 3 of 3",
    health="unhealthy",
    probe_result="connection refused, 3 of 3",
)
HEALTHY = BackendStatus(health="healthy", probe_result="answered in 1 ms")


def web(number: int, backends: int = 3) -> Service:
    """One of many services that are alike."""
    address = f"10.96.{number // 250}.{number % 250 + 1}"
    behind = tuple(Backend(f"10.{244 + n}.{number // 250}.{number % 250 + 1}", 8080) for n in range(backends))
    origin = Origin("file", f"/etc/vipd/services.d/team-{number % 7}.yaml", number)
    return Service(
        f"team-{number % 7}/web-{number:04}", (address,), (ServicePort(80, TCP),), behind, origin=origin
    )


def mixed() -> list[Service]:
    """A dozen of each kind."""
    file = Origin("file", "/etc/vipd/services.d/shop.yaml", 3)
    dns = Service(
        "kube-system/kube-dns",
        ("10.96.0.53", "fd00:96::53"),
        (ServicePort(53, UDP, "dns"), ServicePort(53, TCP, "dns-tcp"), ServicePort(9153, TCP, "metrics")),
        (Backend("10.244.0.5"), Backend("10.244.2.21", weight=2), Backend("fd00:244::5")),
        origin=Origin("etcd", "/vipd/v1/services/dns"),
    )
    shop = Service(
        "shop/checkout",
        ("10.96.7.10",),
        (ServicePort(443, TCP, node_port=30443),),
        tuple(Backend(f"10.244.{n}.17", 8443, weight=1 + (n == 3)) for n in range(1, 6)),
        origin=file,
    )
    search = Service(
        "shop/search",
        ("10.96.7.11",),
        (ServicePort(80, TCP),),
        tuple(Backend(f"10.244.{n}.18", 9200) for n in range(1, 5)),
        origin=file,
    )
    mail = Service("mail/smtp", ("10.96.9.25",), (ServicePort(25, TCP),), origin=Origin("cli"))
    down = Backend("10.244.9.9", state=BackendState.DOWN)
    cache = Service(
        "shop/cache", ("10.96.7.12",), (ServicePort(6379, TCP),), (Backend("10.244.4.40"), down), origin=file
    )
    return [dns, shop, search, mail, cache, *(web(n) for n in range(8))]
