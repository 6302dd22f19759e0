"""What this host answers for on its LANs: the gate, the proxy entries and the announcements, as one.

Every change of the kernel runs in one thread, in order: the event loop never waits for a lock of the kernel.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from vipd.host.host_changes import HostChanges
from vipd.host.lan import neighbours
from vipd.host.lan.answer_gate import AnswerGate
from vipd.host.lan.interfaces import Lan, prepare_settings
from vipd.host.lan.neighbours import Place

log = logging.getLogger(__name__)

TABLE = "vipd-l2"
T = TypeVar("T")


class LanAnswers:
    """Answers for addresses. `configure` first: it says which, and on which LANs. All may raise OSError."""

    def __init__(self, record: HostChanges, gate: AnswerGate | None = None) -> None:
        self._record, self._gate = record, gate or AnswerGate(TABLE)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vipd lan")
        self._places: dict[str, Place] = {}
        self._interfaces: frozenset[str] = frozenset()
        self._held: frozenset[str] = frozenset()
        self._made = False

    @property
    def held(self) -> frozenset[str]:
        """The addresses that this host answers for, while the gate is open."""
        return self._held

    async def configure(self, lans: Mapping[str, Lan]) -> list[str]:
        """Guard these addresses, each on its LAN; the gate is closed when the LANs change. Returns a warning
        for each kernel setting that cannot be set."""
        return await self._run(lambda: self._configure(lans))

    async def hold(self, addresses: Collection[str]) -> None:
        """Answer for these, too, and announce them."""
        await self._run(lambda: self._hold(frozenset(addresses)))

    async def release(self, addresses: Collection[str]) -> None:
        """Answer for these no more. Only then it returns."""
        if addresses:
            await self._run(lambda: self._release(frozenset(addresses)))

    async def ask(self, addresses: Collection[str]) -> None:
        """Ask the LAN who has these: `answers` knows it a second later. Announces those that are held."""
        await self._run(lambda: neighbours.ask(self._placed(addresses)))

    async def answers(self, addresses: Collection[str]) -> dict[str, str]:
        """The hardware address that answered for each of these that one answered for."""
        return await self._run(lambda: self._answers(addresses))

    async def repair(self) -> bool:
        """Make the proxy entries right, which a device loses when it goes down; whether any was wrong."""
        return await self._run(self._repair)

    async def prepare(self, seconds: float) -> None:
        """A request for the lease follows: `open` within so many seconds."""
        await self._run(lambda: self._prepare(seconds))

    async def open(self, seconds: float) -> bool:
        """Open the gate for some seconds; False if it was not prepared in time."""
        return await self._run(lambda: self._made and self._gate.open(self._interfaces, seconds))

    async def extend(self, seconds: float) -> bool:
        """Keep the gate open for some seconds from now; False if it has closed."""
        return await self._run(lambda: self._made and self._gate.extend(self._interfaces, seconds))

    async def reset(self) -> None:
        """Close the gate, and hold nothing."""
        await self._run(self._reset)

    async def stop(self) -> None:
        """Answer for nothing, and take everything away but the kernel settings."""
        await self._run(self._stop)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _placed(self, addresses: Collection[str]) -> list[Place]:
        return [self._places[address] for address in sorted(addresses) if address in self._places]

    def _configure(self, lans: Mapping[str, Lan]) -> list[str]:
        places = {address: Place(address, lan.device) for address, lan in lans.items()}
        interfaces = frozenset(lan.interface for lan in lans.values())
        if (places, interfaces) == (self._places, self._interfaces):
            return []
        warnings = prepare_settings(interfaces - self._interfaces, self._record)
        before, self._places = self._places, places
        # What moved to another LAN is held there by the next step.
        self._held = frozenset(address for address in self._held if places.get(address) == before[address])
        self._interfaces = interfaces
        if interfaces or self._made:
            self._make()
        return warnings

    def _make(self) -> None:
        """Make the gate right, closed. It guards the addresses that it lists and no others, so every proxy
        entry of another address goes first: what an earlier process left, and what this one has lost."""
        neighbours.delete_proxies(neighbours.own_proxies() - frozenset(self._placed(self._held)))
        self._gate.make(self._interfaces, self._places, self._held)
        self._made = True

    def _prepare(self, seconds: float) -> None:
        if not self._made or not self._gate.prepare(self._interfaces, seconds):
            self._make()
            self._gate.prepare(self._interfaces, seconds)

    def _hold(self, addresses: frozenset[str]) -> None:
        places = self._placed(addresses)
        self._held |= {place.address for place in places}
        if not self._gate.hold([place.address for place in places]):
            self._make()  # another program has flushed it; closed until the next renewal
        neighbours.add_proxies(places)  # last: no entry without the gate
        neighbours.ask(places)

    def _release(self, addresses: frozenset[str]) -> None:
        let_go = addresses & self._held
        guarded = not let_go or self._gate.release(let_go)
        self._held -= let_go
        neighbours.delete_proxies(self._placed(addresses))
        if not guarded:
            self._make()

    def _answers(self, addresses: Collection[str]) -> dict[str, str]:
        places = self._placed(addresses)
        found = neighbours.answers(places)
        return {place.address: hardware for place, hardware in found.items()}

    def _repair(self) -> bool:
        wanted, found = frozenset(self._placed(self._held)), neighbours.own_proxies()
        neighbours.delete_proxies(found - wanted)
        neighbours.add_proxies(wanted - found)
        return wanted != found

    def _reset(self) -> None:
        self._held = frozenset()
        self._make()

    def _stop(self) -> None:
        self._reset()
        self._gate.remove()
        self._made = False


def remove_answers(*, dry_run: bool = False) -> list[str]:
    """Delete what a daemon left; returns what was deleted, or would be. Raises OSError."""
    proxies, gate = neighbours.own_proxies(), AnswerGate(TABLE)
    number = "1 proxy neighbour" if len(proxies) == 1 else f"{len(proxies)} proxy neighbours"
    found = [number] if proxies else []
    if gate.exists():
        found.append(f"the tables arp {TABLE} and ip6 {TABLE}")
    if not dry_run and found:
        neighbours.delete_proxies(proxies)
        gate.remove()
    return found
