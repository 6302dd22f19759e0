"""Announces addresses on LANs, one host at a time: the driver of `announce: l2`.

`ensure` says which addresses this host could hold. Hosts agree in etcd on who holds which
(`vipd.sources.etcd.election`), under a lease of each host, and the kernel answers while that lease is valid
(`vipd.host.lan`). A step is level-triggered: from the keys in etcd and the LANs of this host it follows
what this host holds, and the kernel is made equal to that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from random import Random

from vipd.control.announcements import LanAddress
from vipd.control.duplicate_detection import DuplicateDetection
from vipd.host.host_changes import HostChanges
from vipd.host.lan import neighbours
from vipd.host.lan.answers import LanAnswers
from vipd.host.lan.interfaces import Lan, lan_of, read_lans
from vipd.host.settings.etcd import EtcdSettings
from vipd.host.settings.settings import Settings
from vipd.host.supervisor import Backoff, Loop, LoopState, Work
from vipd.host.systemd.fields import Event, fields
from vipd.host.vip_routes import RouteWatcher
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.election import (
    Action,
    AnnouncementKeys,
    Claim,
    Election,
    HandOver,
    HostLease,
    LeaseTimes,
    Position,
    Release,
    candidate_value,
    holder_value,
)
from vipd.sources.etcd.errors import EtcdError, RejectedError

log = logging.getLogger(__name__)

STEP_SECONDS = 0.5
"""Between two steps while nothing happens: the election waits for times to pass."""
REPAIR_SECONDS = 5.0
MAX_REQUESTS = 20
"""Writes to etcd at a time."""
CLOSE_SECONDS = 3.0
"""How long the end of the daemon may take to hand over its addresses."""
LINK_AND_ADDRESS_CHANGES = 0x1 | 0x10 | 0x100
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK_NAMESPACE = Path("/proc/self/ns/net")


class LanAnnouncer:
    """The driver of one host, with its loops. `close` after them."""

    def __init__(
        self,
        settings: Settings,
        etcd: EtcdSettings,
        record: HostChanges,
        asking: Callable[[], Collection[str]],
        now: Callable[[], datetime],
    ) -> None:
        """`asking` returns every address that a service asks to announce so, whether this host serves it or
        not."""
        self._host, self._asking, self._now = settings.node_name, asking, now
        self.times = LeaseTimes.within(settings.announce_takeover)
        random = Random()  # noqa: S311 (spreads a fleet; nothing secret)
        self._client = EtcdClient(etcd, random)
        self._renewals = EtcdClient(replace(etcd, timeout=min(etcd.timeout, self.times.timeout)), random)
        self._changed, self._wanted = asyncio.Event(), asyncio.Event()
        self._answers = LanAnswers(record)
        self._lease = HostLease(self._renewals, self._answers, self.times, self._changed.set)
        self._keys = AnnouncementKeys(self._client, etcd.prefix, self._changed.set)
        self._election = Election(settings.announce_preempt_after)
        self._state = LoopState(Backoff(0.2, 2.0))
        self._candidates: frozenset[str] = frozenset()
        self._lans: tuple[Lan, ...] = ()
        self._lan_changes = RouteWatcher(LINK_AND_ADDRESS_CHANGES)
        self._published: tuple[int, str] = (0, "")
        self._detection = DuplicateDetection(self._answers)
        self._in_doubt: set[str] = set()
        """Addresses of which this host does not know whether it holds them."""
        self._repaired = 0.0
        self._was_open = False
        self._warnings: tuple[str, ...] = ()

    async def read(self) -> frozenset[str]:
        """The addresses that an earlier process answered for. Raises OSError."""
        return frozenset(place.address for place in await asyncio.to_thread(neighbours.own_proxies))

    async def ensure(self, addresses: frozenset[str]) -> None:
        """This host can hold these addresses and no others."""
        if addresses != self._candidates:
            self._candidates = addresses
            self._changed.set()
        if addresses or self._asking():
            self._wanted.set()

    def loops(self) -> dict[str, Work]:
        """What runs beside the daemon. It does nothing while no service asks for it."""
        return {
            "holding the lease of addresses": Loop(
                self._when_wanted(self._lease.run), self._lease.loop_state
            ),
            "following who announces": Loop(self._when_wanted(self._keys.run), self._keys.loop_state),
            "announcing on LANs": Loop(self._when_wanted(self._run), self._state),
        }

    def addresses(self) -> dict[str, LanAddress]:
        """Every address that a service asks to announce."""
        view, found = self._keys.view, {}
        for address in sorted(self._asking()):
            holding, lan = view.holders.get(address), lan_of(address, self._lans)
            # While renewals fail the gate closes by itself.
            here = self._lease.is_open and not self._lease.loop_state.fault and address in self._answers.held
            name, since = (holding.host or "an unknown host", holding.since) if holding else ("", "")
            interface = lan.interface if lan else ""
            fault = self._fault(address, lan)
            found[address] = LanAddress(address, name, since, here, interface, fault)
        return found

    def warnings(self) -> list[str]:
        """Problems of the LANs and of etcd."""
        faults = [f"{each.address}: {each.fault}" for each in self.addresses().values() if each.fault]
        lease = self._lease.loop_state.fault if self._wanted.is_set() else ""
        held = f"this host holds no address of a LAN: {lease}" if lease else ""
        return [*filter(None, (held,)), *faults, *self._warnings]

    async def close(self) -> None:
        """Hand over every address, then let go of the rest. Waits a few seconds at most."""
        with contextlib.suppress(TimeoutError, EtcdError, OSError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._answers.release(self._answers.held)  # first: etcd may not answer
                if self._lease.id:
                    await self._act(
                        self._election.decide(self._keys.view, self._position(leaving=True), _time())
                    )
        with contextlib.suppress(OSError):
            if self._wanted.is_set():
                await self._answers.stop()
        await self._lease.close()
        await self._client.close()
        await self._renewals.close()

    def _when_wanted(self, work: Work) -> Work:
        async def run() -> None:
            await self._wanted.wait()
            await work()

        return run

    async def _run(self) -> None:
        """Step, for ever. Raises EtcdError, OSError."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STEP_SECONDS):
                    await self._changed.wait()
            self._changed.clear()
            await self.step()
            self._state.clear_fault()

    async def step(self) -> None:
        """One step. Raises EtcdError, OSError."""
        await self._configure()
        await self._answers.release(self._answers.held - self._mine())  # before etcd is asked anything
        await self._find_duplicates()
        if self._keys.listed and self._lease.id:
            await self._act(self._election.decide(self._keys.view, self._position(), _time()))
            await self._publish()
        await self._follow()

    async def _configure(self) -> None:
        if self._lan_changes.changed():
            self._lans = await asyncio.to_thread(read_lans)
        places = {a: lan for a in self._asking() if (lan := lan_of(a, self._lans))}
        if found := await self._answers.configure(places):
            self._warnings = tuple(found)

    async def _find_duplicates(self) -> None:
        view = self._keys.view
        elsewhere = {a for a, holding in view.holders.items() if holding.host != self._host}
        fleet = {lan.hardware for lan in self._lans}
        fleet.update(*(candidate.hardware for candidate in view.candidates.values()))
        before = self._detection.duplicates
        await self._detection.step(self._candidates, elsewhere, fleet, _time())
        for address, hardware in self._detection.duplicates.items():
            if before.get(address) != hardware:
                text = "%s: %s answers for it, which is no host of this fleet"
                extra = fields(Event.ADDRESS_DUPLICATE, reason=f"{hardware} answers for {address}")
                log.warning(text, address, hardware, extra=extra)

    def _position(self, leaving: bool = False) -> Position:
        """This host in the election."""
        ready = frozenset[str]() if leaving else self._ready()
        return Position(self._host, self._lease.id, _instance(), ready)

    def _ready(self) -> frozenset[str]:
        """Those that this host can hold now."""
        clear = filter(self._detection.is_clear, self._candidates)
        return frozenset(address for address in clear if lan_of(address, self._lans))

    async def _publish(self) -> None:
        """Tell the other hosts what this one could hold. Raises EtcdError."""
        value = candidate_value(self._ready(), {lan.hardware for lan in self._lans}, _instance())
        published = self._lease.id, value
        if published != self._published:
            with contextlib.suppress(RejectedError):  # the lease is no more: the next renewal says so
                await self._keys.publish(self._host, value, self._lease.id)
                self._published = published

    async def _act(self, actions: Sequence[Action]) -> None:
        """Do what the election decided. Raises EtcdError, OSError."""
        leaving = [action.address for action in actions if not isinstance(action, Claim)]
        # In doubt until etcd has confirmed who holds them: this host does not answer meanwhile.
        self._in_doubt.update(leaving)
        await self._answers.release(leaving)
        limit = asyncio.Semaphore(MAX_REQUESTS)
        await asyncio.gather(*(self._do(action, limit) for action in actions))
        if self._in_doubt:
            await self._keys.refresh(self._in_doubt)
            self._in_doubt.clear()

    async def _do(self, action: Action, limit: asyncio.Semaphore) -> None:
        address, since = action.address, self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        async with limit:
            match action:
                case Claim():
                    value = holder_value(self._host, _instance(), since)
                    await self._keys.claim(address, value, self._lease.id, action.mod_revision)
                case HandOver():
                    value = holder_value(action.to.host, action.to.instance, since, self._host)
                    if await self._keys.hand_over(address, action.held, action.to, value):
                        self._log(Event.ADDRESS_HANDED_OVER, address, f"to {action.to.host}: {action.why}")
                case Release():
                    if await self._keys.release(address, action.held):
                        self._log(Event.ADDRESS_RELEASED, address, action.why)

    def _mine(self) -> set[str]:
        """What this host holds as far as it knows."""
        mine = {
            address
            for address, holding in self._keys.view.holders.items()
            if (holding.host, holding.lease) == (self._host, self._lease.id) and self._lease.id
        }
        return {address for address in mine - self._in_doubt if lan_of(address, self._lans)}

    async def _follow(self) -> None:
        """Make the kernel equal to what this host holds. Raises OSError."""
        mine, held = self._mine(), self._answers.held
        await self._answers.release(held - mine)
        if new := mine - held:
            await self._answers.hold(new)
            for address in sorted(new):
                holding = self._keys.view.holders[address]
                before = f" from {holding.previous}" if holding.previous else ""
                self._log(Event.ADDRESS_TAKEN, address, f"this host answers for it{before}")
        if self._lease.is_open and not self._was_open and held:
            await self._answers.ask(held)  # while the gate was closed nothing could be announced
        self._was_open = self._lease.is_open
        if _time() - self._repaired >= REPAIR_SECONDS:
            self._repaired = _time()
            if await self._answers.repair():
                log.warning("proxy neighbour entries were missing or too many; they are right again")

    def _fault(self, address: str, lan: Lan | None) -> str:
        """Why this host cannot hold an address, or who else answers for it."""
        if lan is None:
            return "this host has no interface in its subnet"
        if hardware := self._detection.duplicates.get(address):
            return (
                f"{hardware} on {lan.interface} answers for it, which is no host of this fleet; hint: take "
                "the address away there, or choose another one"
            )
        return ""

    def _log(self, event: Event, address: str, reason: str) -> None:
        extra = fields(event, reason=f"{address}: {reason}")
        log.info("%s: %s: %s", address, event.value.removeprefix("address-"), reason, extra=extra)


def _time() -> float:
    return asyncio.get_running_loop().time()


def _instance() -> str:
    """This machine and network namespace: two processes of one name there are the same host."""
    try:
        boot = BOOT_ID.read_text().strip()
        return f"{boot}/{NETWORK_NAMESPACE.stat().st_ino}"
    except OSError:
        return ""
