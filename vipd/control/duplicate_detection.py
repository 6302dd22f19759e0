"""Finds addresses that something else on the LAN answers for, before this host answers for them and after.

The kernel asks the LAN; an answer from a hardware address of no host of the fleet is a duplicate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

ANSWER_SECONDS = 1.2
"""From a question to the look at its answers: the kernel has asked twice by then."""
ASK_SECONDS = 60.0
"""Between two questions about an address. For one that this host holds each is an announcement, too, which
repairs what a client missed."""
DUPLICATE_SECONDS = 5.0
"""The same, of an address that something else answers for: nobody serves it meanwhile."""


class Lans(Protocol):
    """Asks the LANs of this host. Both raise OSError."""

    async def ask(self, addresses: Collection[str]) -> None:
        """Ask who has these addresses."""

    async def answers(self, addresses: Collection[str]) -> Mapping[str, str]:
        """The hardware address that answered for each of these that one answered for."""


class DuplicateDetection:
    """The state of every address that this host could hold. Times are those of a monotonic clock."""

    def __init__(self, lans: Lans) -> None:
        self._lans = lans
        self._asked: dict[str, float] = {}
        self._unread: set[str] = set()
        self._clear: set[str] = set()
        self._fleet: dict[str, float] = {}
        """When each hardware address of a host of the fleet was last known as one."""
        self.duplicates: dict[str, str] = {}
        """Addresses that something else answers for, with its hardware address."""

    def is_clear(self, address: str) -> bool:
        """Whether nothing else answers: the LAN was asked, or a host of the fleet held it."""
        return address in self._clear

    async def step(
        self, addresses: Collection[str], held: Collection[str], fleet: Collection[str], now: float
    ) -> None:
        """Ask, and look at answers, where it is time for that. `held`: those of the addresses that another
        host of the fleet holds, which nobody is asked about; `fleet`: the hardware addresses of its hosts.
        Raises OSError."""
        self._forget_all_but(addresses)
        # A host that leaves between a question and the look at its answers is no stranger.
        self._fleet.update(dict.fromkeys(fleet, now))
        self._fleet = {hardware: at for hardware, at in self._fleet.items() if now < at + ASK_SECONDS}
        due = {address for address in self._unread if now >= self._asked[address] + ANSWER_SECONDS}
        if due:
            found = await self._lans.answers(due)
            others = {a: hardware for a, hardware in found.items() if hardware not in self._fleet}
            self._unread -= due
            self._clear = (self._clear | due) - others.keys()
            self.duplicates = {a: h for a, h in self.duplicates.items() if a not in due} | others
        # A host that takes over for a lost one has no time to ask.
        self._clear |= set(held) & set(addresses)
        pauses = {a: DUPLICATE_SECONDS if a in self.duplicates else ASK_SECONDS for a in addresses}
        last = {a: self._asked.get(a, -ASK_SECONDS) for a in addresses if a not in held}
        if ask := {a for a, at in last.items() if now >= at + pauses[a]}:
            await self._lans.ask(ask)
            self._asked.update(dict.fromkeys(ask, now))
            self._unread |= ask

    def _forget_all_but(self, addresses: Collection[str]) -> None:
        self._asked = {a: at for a, at in self._asked.items() if a in addresses}
        self._unread &= self._asked.keys()
        self._clear &= set(addresses)
        self.duplicates = {a: h for a, h in self.duplicates.items() if a in self._asked}
