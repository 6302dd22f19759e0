"""Those who have to keep the contract: each a dataplane, and a kernel that can be disturbed and broken."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.dataplane.fake_dataplane import FakeDataplane
from tests.dataplane.namespace import Namespace
from tests.dataplane.nftables.programmed import Inside
from tests.faults.dataplanes import IPTABLES, NFTABLES, Equipment
from tests.lab.node import Node
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.dataplane.base import ApplyError, Dataplane
from vipd.dataplane.iptables.driver import IptablesDataplane
from vipd.dataplane.nftables.driver import NftablesDataplane
from vipd.host.host_changes import HostChanges
from vipd.host.netlink_socket import Sockets
from vipd.host.process import ProgramResult
from vipd.host.settings.settings import Settings
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family, Service

REFUSAL = "is refused by the test"
HOLDING = "cannot be written now"

Held = Mapping[str, Sequence[str]]
"""What a kernel holds; empty parts are left out."""


class Contestant(ABC):
    """A dataplane over a kernel of its own, with the forwardings it was last told. A context manager."""

    dataplane: Dataplane

    def __init__(self, directory: Path) -> None:
        self.settings = Settings(state_dir=directory)
        self.policy = SelectionPolicy({family: self.settings.masquerade_for(family) for family in Family})
        self.forwardings: dict[ForwardingKey, Forwarding] = {}

    @abstractmethod
    async def restart(self) -> None:
        """A new process: it remembers nothing, but is told the same forwardings."""

    @abstractmethod
    def held(self) -> Held:
        """What the kernel holds."""

    @abstractmethod
    def disturb(self) -> None:
        """Somebody takes rules away."""

    @abstractmethod
    @contextmanager
    def refusing(self, text: str) -> Iterator[None]:
        """For a while the kernel takes nothing that holds this text; `REFUSAL` is what is said then."""

    @abstractmethod
    @contextmanager
    def failing(self) -> Iterator[None]:
        """For a while nothing can be written, which no forwarding is to blame for; `HOLDING` is said."""

    @abstractmethod
    def hold(self, gate: asyncio.Event) -> asyncio.Event:
        """Let the next writing wait for a gate, partly done; the event tells that it waits."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def declare(self, services: Iterable[Service]) -> None:
        """Tell the dataplane what differs from before."""
        new = {f.key: f for service in services for f in select_backends(service, self.policy)}
        changes: dict[ForwardingKey, Forwarding | None] = dict.fromkeys(self.forwardings.keys() - new.keys())
        changes.update({key: f for key, f in new.items() if self.forwardings.get(key) != f})
        self.dataplane.update(changes)
        self.forwardings = new

    async def step(self) -> None:
        """Plan, write, and clear away what is left over. Raises ApplyError."""
        if plan := await self.dataplane.plan():
            await self.dataplane.apply(plan)
        await self.dataplane.collect_garbage()

    async def become(self, *services: Service) -> None:
        """One step of the reconciler. Raises ApplyError."""
        self.declare(services)
        await self.step()


class Fake(Contestant):
    """The one that keeps its rules in a dictionary."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._fake = FakeDataplane()
        self.dataplane = self._fake

    async def restart(self) -> None:
        self._fake = FakeDataplane(kernel=self._fake.kernel)
        self.dataplane = self._fake
        self.dataplane.update(dict(self.forwardings))

    def held(self) -> Held:
        return {str(key): [str(forwarding)] for key, forwarding in self._fake.kernel.items()}

    def disturb(self) -> None:
        self._fake.kernel.popitem()

    @contextmanager
    def refusing(self, text: str) -> Iterator[None]:
        self._fake.refuses = lambda forwarding: REFUSAL if text in str(forwarding) else ""
        yield
        self._fake.refuses = lambda forwarding: ""

    @contextmanager
    def failing(self) -> Iterator[None]:
        self._fake.failures = [ApplyError("nothing", HOLDING)]
        yield
        self._fake.failures = []

    def hold(self, gate: asyncio.Event) -> asyncio.Event:
        self._fake.gate = gate
        self._fake.entered.clear()
        return self._fake.entered


class Real(Contestant):
    """One over the real kernel, in a namespace of its own."""

    equipment: Equipment

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.record = HostChanges(directory)
        self._namespace = Namespace()
        self._refused = self._broken = ""
        self.started: list[Sequence[str]] = []
        """The command line of each program."""
        self._gate: asyncio.Event | None = None
        self._entered = asyncio.Event()

    @abstractmethod
    async def start(self) -> Dataplane:
        """The dataplane of a new process."""

    async def restart(self) -> None:
        self.dataplane = await self.start()
        self.dataplane.update(dict(self.forwardings))

    def held(self) -> Held:
        return {name: rules for name, rules in self.equipment.rules_of(self.node).items() if rules}

    def disturb(self) -> None:
        self.node.run("bash", "-c", self.equipment.foreign_changes["dispatch emptied"])

    @contextmanager
    def refusing(self, text: str) -> Iterator[None]:
        self._refused = text
        yield
        self._refused = ""

    @contextmanager
    def failing(self) -> Iterator[None]:
        self._broken = HOLDING
        yield
        self._broken = ""

    @property
    def writes_fail(self) -> bool:
        """Whether some rules are refused, or nothing can be written, or a write is waited for."""
        return bool(self._refused or self._broken or self._gate)

    def hold(self, gate: asyncio.Event) -> asyncio.Event:
        self._gate, self._entered = gate, asyncio.Event()
        return self._entered

    async def run(self, argv: Sequence[str], stdin: str) -> ProgramResult:
        """The seam by which vipd runs programs, with the faults that were asked for."""
        self.started.append(argv)
        if argv[0] not in self.equipment.programs or "--version" in argv or not stdin:
            return await self._namespace.run(argv, stdin)
        said = f"{argv[0]}: {self._broken}" if self._broken else ""
        if self._refused and self._refused in stdin:
            line = next(n for n, line in enumerate(stdin.splitlines(), 1) if self._refused in line)
            said = self.equipment.complaint.format(name=argv[0], line=line, refusal=REFUSAL)
        if said:
            return ProgramResult(1, "", f"{said}\n")
        finished = await self._namespace.run(argv, stdin)
        if gate := self._gate:
            self._gate = None
            self._entered.set()
            await gate.wait()
        return finished

    @property
    def node(self) -> Node:
        """Its namespace."""
        return Node(self._namespace.name, "kernel", "", "")

    def __enter__(self) -> Self:
        self._namespace.__enter__()
        self.inside = Inside(self._namespace.name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._namespace.__exit__(kind, error, trace)


class Iptables(Real):
    """iptables-nft."""

    equipment = IPTABLES

    async def start(self) -> Dataplane:
        return await IptablesDataplane.start(self.settings, self.record, self.run)


class Writing(socket.socket):
    """A socket by which nothing is written while a real dataplane refuses or fails: nft then says why."""

    def __init__(self, descriptor: int, real: Real) -> None:
        super().__init__(fileno=descriptor)
        self._real = real

    def sendto(self, *arguments: Any) -> int:
        """Send, or fail."""
        if self._real.writes_fail:
            raise OSError
        return super().sendto(*arguments)


class Nftables(Real):
    """nftables."""

    equipment = NFTABLES

    async def start(self) -> Dataplane:
        return await NftablesDataplane.start(
            self.settings, self.record, self.run, Sockets(self.inside.open_socket, self._open_writing)
        )

    def _open_writing(self) -> socket.socket:
        return Writing(self.inside.open_socket().detach(), self)


CONTESTANTS: tuple[type[Contestant], ...] = (Fake, Iptables, Nftables)
