"""Notices that another program changes chains of the forward hook."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from vipd.dataplane.forward_accept.accepts import FORWARD
from vipd.dataplane.forward_accept.driver import ForwardAccepts
from vipd.dataplane.iptables.names import ChainId, Names
from vipd.dataplane.iptables.watch.external_change import ChangeKind, ExternalChange, OwnershipFilter
from vipd.dataplane.iptables.watch.messages import Change
from vipd.model.service import Family

POLL_SECONDS = 5.0
"""Pause between two polls of iptables-legacy; if it has no tables, a poll reads one small file."""


@dataclass(frozen=True, slots=True)
class ForwardOwnershipFilter(OwnershipFilter):
    """The scope of a dataplane, extended to changes of chains in which vipd's accept may be needed."""

    own: OwnershipFilter
    accepts: ForwardAccepts

    def classify(self, change: Change) -> ChangeKind | None:
        """The effect of a change on vipd; None if it has none. Raises ValueError (malformed)."""
        if kind_of_change := self.own.classify(change):
            return kind_of_change
        concerns = not change.of_set and self.accepts.concerns(change)
        return ChangeKind[change.kind.name] if concerns else None


class ForwardPoll:
    """Polls everything for which the kernel sends no events, mainly iptables-legacy."""

    def __init__(self, accepts: ForwardAccepts, interval: float = POLL_SECONDS) -> None:
        self._accepts, self._interval = accepts, interval

    def close(self) -> None:
        """Does nothing: it has no resources."""

    async def run(self, report: Callable[[ExternalChange], None]) -> None:
        """Report that something differs, until that fails. Raises ApplyError and OSError."""
        chains = frozenset((family, ChainId("legacy filter", FORWARD)) for family in Family)
        while True:
            await asyncio.sleep(self._interval)
            if await self._accepts.differs():
                report(ExternalChange(frozenset(Family), chains, frozenset({ChangeKind.RULES_DIFFER})))


def concern_forward(
    chains: Collection[tuple[Family, ChainId]], own_tables: Collection[str], names: Names
) -> bool:
    """Whether chains that may have changed are, or may be, such chains, or are called by one."""
    return any(
        c.table not in own_tables or (c.table == "filter" and (c.name.endswith(FORWARD) or not names.owns(c)))
        for _, c in chains
    )
