"""The nftables dataplane over a real kernel in a namespace, driven as the reconciler drives it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.dataplane.iptables.watch.inside import inside
from vipd.control.selection import HostIdentity, SelectionPolicy, select_backends
from vipd.dataplane.dual_stack import FamilyPlans
from vipd.dataplane.nftables.driver import NftablesDataplane
from vipd.dataplane.nftables.plan import Plan
from vipd.host.host_changes import HostChanges
from vipd.host.netlink_socket import Sockets, open_netlink
from vipd.host.process import ProgramResult, Runner, run
from vipd.host.settings.settings import Settings
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family, Service


class Inside:
    """Runs programs and opens netlink sockets in a network namespace."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    async def run(self, argv: Sequence[str], stdin: str) -> ProgramResult:
        """A program inside, through the seam that vipd uses."""
        return await run(["ip", "netns", "exec", self.namespace, *argv], stdin)

    def open_socket(self) -> socket.socket:
        """A netlink socket for questions."""
        return self.make(open_netlink)

    @property
    def sockets(self) -> Sockets:
        """Netlink sockets for questions and changes."""
        return Sockets(self.open_socket, self.open_socket)

    def make(self, opened: Callable[[], socket.socket]) -> socket.socket:
        """A socket opened inside: it stays in the namespace where its thread was."""
        return inside(self.namespace, opened)

    def nft(self, *argv: str, text: str | None = None) -> str:
        """What nft says there; CalledProcessError when it fails."""
        command = ["ip", "netns", "exec", self.namespace, "nft", *argv]
        return subprocess.run(command, input=text, text=True, check=True, stdout=subprocess.PIPE).stdout


class Programmed:
    """A dataplane in a namespace, with the forwardings that it was last told."""

    def __init__(
        self,
        inside: Inside,
        state_dir: Path,
        run: Runner | None = None,
        host: HostIdentity | None = None,
        sockets: Sockets | None = None,
        **settings: object,
    ) -> None:
        self.inside = inside
        self.settings = Settings(state_dir=state_dir, **settings)  # type: ignore[arg-type]
        masquerade = {family: self.settings.masquerade_for(family) for family in Family}
        self.policy = SelectionPolicy(masquerade, host or HostIdentity())
        self._run, self._record = run or inside.run, HostChanges(state_dir)
        self._sockets = sockets or inside.sockets
        self.forwardings: dict[ForwardingKey, Forwarding] = {}
        self.restart()

    def restart(self) -> None:
        """A new process: it remembers nothing of the kernel, but is told the same forwardings."""
        self.dataplane = asyncio.run(
            NftablesDataplane.start(self.settings, self._record, self._run, self._sockets)
        )
        asyncio.run(self.dataplane.host_changed(self.policy.host.addresses))
        self.dataplane.update(dict(self.forwardings))

    def declare(self, services: Iterable[Service]) -> None:
        """Tell the dataplane what differs from before."""
        new = {f.key: f for service in services for f in select_backends(service, self.policy)}
        changes: dict[ForwardingKey, Forwarding | None] = dict.fromkeys(self.forwardings.keys() - new.keys())
        changes.update({key: f for key, f in new.items() if self.forwardings.get(key) != f})
        self.dataplane.update(changes)
        self.forwardings = new

    def plan(self) -> FamilyPlans[Plan]:
        """What has to be written now."""
        return asyncio.run(self.dataplane.plan())

    def write(self) -> FamilyPlans[Plan]:
        """Plan and, when there is something to do, apply; what was written."""
        plan = self.plan()
        if plan:
            asyncio.run(self.dataplane.apply(plan))
        return plan

    def step(self) -> FamilyPlans[Plan]:
        """Plan, write, and clear away what is left over; what was written."""
        plan = self.write()
        asyncio.run(self.dataplane.collect_garbage())
        return plan

    def become(self, *services: Service) -> FamilyPlans[Plan]:
        """One step of the reconciler; what was written."""
        self.declare(services)
        return self.step()

    def tables(self) -> str:
        """Everything in the namespace's nftables, as nft lists it, each holder's elements sorted."""
        return canonical(self.inside.nft("list", "ruleset"))


def only_nft(inside: Inside) -> Sockets:
    """Sockets by which all changes are written by nft."""

    def none() -> socket.socket:
        raise OSError

    return Sockets(inside.open_socket, none)


def canonical(listing: str) -> str:
    """A listing in an order that does not depend on history: of objects, and of elements."""
    tables = []
    for table in listing.split("\ntable "):
        whole = table.replace("table ", "", 1).rstrip().removesuffix("}")
        head, *parts = whole.split("\n\n")
        opening, _, first = head.partition("{\n")
        objects = sorted(_sorted_elements(part.strip()) for part in (first, *parts))
        tables.append("\n".join([opening, *objects]))
    return "\n".join(sorted(tables))


def _sorted_elements(part: str) -> str:
    before, marker, rest = part.partition("elements = { ")
    inside, _, after = rest.partition(" }")
    return before + marker + ", ".join(sorted(" ".join(e.split()) for e in inside.split(","))) + after
