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
        self.duplicates: dict[str, str] = {}
        """Addresses that something else answers for, with its hardware address."""

    def is_clear(self, address: str) -> bool:
        """Whether the LAN was asked, and nothing else answers."""
        return address in self._clear

    async def step(self, addresses: Collection[str], fleet: Collection[str], now: float) -> None:
        """Ask, and look at answers, where it is time for that. `addresses`: all that no other host of the
        fleet holds; `fleet`: the hardware addresses of its hosts. Raises OSError."""
        self._forget_all_but(addresses)
        due = {address for address in self._unread if now >= self._asked[address] + ANSWER_SECONDS}
        if due:
            found = await self._lans.answers(due)
            others = {a: hardware for a, hardware in found.items() if hardware not in fleet}
            self._unread -= due
            self._clear = (self._clear | due) - others.keys()
            self.duplicates = {a: h for a, h in self.duplicates.items() if a not in due} | others
        ask = {a for a in addresses if now >= self._asked.get(a, -ASK_SECONDS) + ASK_SECONDS}
        if ask:
            await self._lans.ask(ask)
            self._asked.update(dict.fromkeys(ask, now))
            self._unread |= ask

    def _forget_all_but(self, addresses: Collection[str]) -> None:
        if self._asked.keys() <= set(addresses):
            return
        self._asked = {a: at for a, at in self._asked.items() if a in addresses}
        self._unread &= self._asked.keys()
        self._clear &= self._asked.keys()
        self.duplicates = {a: h for a, h in self.duplicates.items() if a in self._asked}
