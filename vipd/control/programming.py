"""Hands forwardings to the dataplane and has it write them. An exception that nobody expected is the fault
of one service, found in halves: its rules stay as they were, and all others are written."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from vipd.dataplane.base import ApplyError, Dataplane
from vipd.model.forwarding import Forwarding, ForwardingKey

log = logging.getLogger(__name__)

Changes = Mapping[ForwardingKey, Forwarding | None]
Hold = Callable[[str, str, Exception], None]
"""Told of a service that cannot be programmed: its name, what was being done, the exception."""


@dataclass(frozen=True, slots=True)
class _Withheld:
    wanted: Forwarding | None
    before: Forwarding | None
    """What the dataplane has in its place."""


class Programming:
    """Writes through a dataplane. `beat` is called between its long parts."""

    def __init__(self, dataplane: Dataplane, hold: Hold, beat: Callable[[], None]) -> None:
        self._dataplane, self._hold, self._beat = dataplane, hold, beat
        self._wanted: dict[ForwardingKey, Forwarding | None] = {}
        """What was handed over since the last good write."""
        self._before: dict[ForwardingKey, Forwarding | None] = {}
        """What the dataplane had in place of that."""
        self._withheld: dict[ForwardingKey, _Withheld] = {}
        """What the dataplane could not do, though it is wanted."""

        self._told = ""
        """The last exception of which the log tells that a service is looked for."""

    def withheld(self, service: str) -> Changes:
        """What is wanted of a service and was not programmed: it is to be handed over again."""
        return {key: each.wanted for key, each in self._withheld.items() if key.service == service}

    def update(self, changes: Changes, before: Callable[[ForwardingKey], Forwarding | None]) -> None:
        """Hand over changes; `before` tells what the dataplane has in their place."""
        for key, wanted in changes.items():
            withheld = self._withheld.pop(key, None)
            self._before.setdefault(key, withheld.before if withheld else before(key))
            self._wanted[key] = wanted
        if changes:
            self._update(changes, "compiling its rules")

    async def write(self) -> bool:
        """Make the kernel equal to what was handed over; whether anything was written. Raises ApplyError, and
        any other exception that no service is to blame for."""
        wrote, error = await self._write()
        if error is not None:
            await self._bisect(error)
        self._wanted.clear()
        self._before.clear()
        return wrote

    async def _write(self) -> tuple[bool, Exception | None]:
        """Whether anything was written, and the exception if one came that nobody expected. Raises
        ApplyError."""
        wrote = False
        try:
            plan = await self._dataplane.plan()
            self._beat()
            if plan:
                wrote = True
                await self._dataplane.apply(plan)
        except ApplyError:
            raise
        except Exception as error:
            return True, error
        return wrote, None

    async def _bisect(self, error: Exception) -> None:
        """Find the services that an exception comes from, and write all others."""
        if not self._wanted:
            raise error
        names = list(dict.fromkeys(key.service for key in self._wanted))
        if str(error) != self._told:
            self._told = str(error)
            log.error("rules cannot be written; looking for the service at fault among %d", len(names))
        try:
            await self._revert(names, error)
            await self._reapply(names, error)
        except BaseException:
            # No service was found, or the search was ended: what is wanted is wanted as before.
            self._update(self._wanted, "compiling its rules")
            raise

    async def _revert(self, names: Iterable[str], error: Exception) -> None:
        """Write the rules as they were before these services changed. Raises the error when that fails too:
        then no service is to blame."""
        self._dataplane.forget()
        self._update(self._of(self._before, names), "taking back its rules")
        if (await self._write())[1] is not None:
            raise error

    async def _reapply(self, names: Sequence[str], error: Exception) -> None:
        """Write the changes of these services; hold those with which that fails."""
        self._update(self._of(self._wanted, names), "compiling its rules")
        _, again = await self._write()
        if again is None:
            return
        await self._revert(names, error)
        if len(names) == 1:
            self._withhold(self._of(self._wanted, names))
            self._hold(names[0], "programming its rules", again)
            return
        middle = len(names) // 2
        await self._reapply(names[:middle], error)
        await self._reapply(names[middle:], error)

    def _update(self, changes: Changes, doing: str) -> None:
        """Hand over changes; those of which one raises an exception are withheld."""
        with contextlib.suppress(Exception):
            self._dataplane.update(changes)
            return
        for key, wanted in changes.items():
            self._update_one(key, wanted, doing)

    def _update_one(self, key: ForwardingKey, wanted: Forwarding | None, doing: str) -> None:
        try:
            self._dataplane.update({key: wanted})
        except Exception as error:
            self._withhold((key,))
            self._hold(key.service, doing, error)

    def _withhold(self, keys: Iterable[ForwardingKey]) -> None:
        for key in keys:
            self._withheld[key] = _Withheld(self._wanted[key], self._before[key])

    @staticmethod
    def _of(changes: Changes, names: Iterable[str]) -> Changes:
        wanted = frozenset(names)
        return {key: forwarding for key, forwarding in changes.items() if key.service in wanted}
