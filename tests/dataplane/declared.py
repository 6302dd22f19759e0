"""Services and machines to run them on: a dataplane over some kernel, driven as the reconciler drives it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from vipd.control.selection import SelectionPolicy, select_backends
from vipd.dataplane.dual_stack import FamilyPlans
from vipd.dataplane.iptables.driver import IptablesDataplane
from vipd.dataplane.iptables.plan import Plan
from vipd.host.host_changes import HostChanges
from vipd.host.process import Runner
from vipd.host.settings.settings import Settings
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Affinity, Backend, Family, Protocol, Service, ServicePort

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


class Machine:
    """A daemon's dataplane over a kernel, with the forwardings it was last told."""

    def __init__(self, run: Runner, state_dir: Path, **settings: object) -> None:
        self.settings = Settings(state_dir=state_dir, **settings)  # type: ignore[arg-type]
        self.policy = SelectionPolicy({family: self.settings.masquerade_for(family) for family in Family})
        self._run, self._record = run, HostChanges(state_dir)
        self._forwardings: dict[ForwardingKey, Forwarding] = {}
        self.restart()

    def restart(self) -> None:
        """A new process: it remembers nothing of the kernel, but is told the same forwardings."""
        self.dataplane = asyncio.run(IptablesDataplane.start(self.settings, self._record, self._run))
        self.dataplane.update(dict(self._forwardings))

    def declare(self, services: Iterable[Service]) -> None:
        """Tell the dataplane what differs from before."""
        new = {f.key: f for service in services for f in select_backends(service, self.policy)}
        changes: dict[ForwardingKey, Forwarding | None] = dict.fromkeys(self._forwardings.keys() - new.keys())
        changes.update({key: f for key, f in new.items() if self._forwardings.get(key) != f})
        self.dataplane.update(changes)
        self._forwardings = new

    def plan(self) -> FamilyPlans[Plan]:
        """What has to be written now."""
        return asyncio.run(self.dataplane.plan())

    def apply(self, plan: FamilyPlans[Plan]) -> None:
        """Write it. Raises ApplyError."""
        asyncio.run(self.dataplane.apply(plan))

    def become(self, services: Iterable[Service]) -> FamilyPlans[Plan]:
        """One step of the reconciler; returns what was written."""
        self.declare(services)
        return self.step()

    def step(self) -> FamilyPlans[Plan]:
        """Plan and, when there is something to do, apply."""
        plan = self.plan()
        if plan:
            self.apply(plan)
        return plan
