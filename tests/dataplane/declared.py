"""Services that tests of the dataplanes declare."""

from __future__ import annotations

from vipd.model.service import Affinity, Backend, Protocol, Service, ServicePort

HTTP = ServicePort(80, Protocol.TCP, "http", 8080)
DNS = ServicePort(53, Protocol.UDP, "dns")


def backends(*addresses: str) -> tuple[Backend, ...]:
    """Backends, each `address` or `address@weight`."""
    split = (address.partition("@") for address in addresses)
    return tuple(Backend(address, None, int(weight or 1)) for address, _, weight in split)


def numbered(number: int, *addresses: str) -> Service:
    """A service of one TCP port with a VIP made from its number."""
    vip = f"10.96.{number // 250}.{number % 250 + 1}"
    return Service(f"test/s{number}", (vip,), (HTTP,), backends(*addresses))


def kube_like_services() -> list[Service]:
    """One of each kind of rule, in both families."""
    return [
        Service(
            "kube-system/kube-dns",
            ("10.96.0.10", "10.96.1.10", "fd00:96::10"),
            (DNS, ServicePort(53, Protocol.TCP, "dns-tcp"), ServicePort(7, Protocol.SCTP)),
            backends("10.244.0.5", "10.244.2.21@2", "fd00:244::5", "10.244.9.9@0"),
            affinity=Affinity(600),
        ),
        Service("web", ("10.96.0.20", "fd00:96::20"), (HTTP,)),
    ]
