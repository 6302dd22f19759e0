"""The nftables dataplane: a table in each address family, each on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping

from vipd.dataplane.dual_stack import DualStackDataplane
from vipd.dataplane.iptables.names import ChainId, Names
from vipd.dataplane.iptables.watch.stream import WatchOptions
from vipd.dataplane.nftables.compile import first_chain, prefill_lookup_tables
from vipd.dataplane.nftables.family import FamilyTable
from vipd.dataplane.nftables.flow_counter import Element, ElementCounter
from vipd.dataplane.nftables.layout import NftSet
from vipd.dataplane.nftables.plan import Plan
from vipd.dataplane.nftables.tools import NFT, find_nft
from vipd.dataplane.nftables.watch import TableWatch
from vipd.dataplane.programs import Programs
from vipd.host.host_changes import HostChanges
from vipd.host.netlink_socket import Sockets
from vipd.host.process import Runner
from vipd.host.settings.settings import Settings
from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.service import Balance, Family, family_of


class NftablesDataplane(DualStackDataplane[FamilyTable, Plan]):
    """Implements `vipd.dataplane.base.Dataplane`. Make it with `start`."""

    name = "nftables"

    def __init__(self, families: Mapping[Family, FamilyTable], names: Names) -> None:
        super().__init__(families)
        self._names = names
        self.counter = ElementCounter(self.counted, self.forwardings, self.refused, self.delete_counts)

    @classmethod
    async def start(
        cls,
        settings: Settings,
        record: HostChanges,
        run: Runner,
        sockets: Sockets = Sockets(),  # noqa: B008 (immutable)
    ) -> NftablesDataplane:
        """Find nft. Writes nothing. Without nft a family fails when it is needed, and looks for it again
        then. `sockets` are of the network namespace in which `run` runs programs."""
        nft = Programs((NFT,), lambda: find_nft(run))
        await nft.refresh()
        families = {f: FamilyTable(f, nft, settings, record, run, sockets) for f in Family}
        return cls(families, Names(settings.chain_prefix))

    async def prepare(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Fill the lookup tables of `source-hash`, then compile what is large."""
        if hashed := [f for f in changes.values() if f is not None and f.balance is Balance.SOURCE_HASH]:
            await asyncio.to_thread(prefill_lookup_tables, hashed)
        await super().prepare(changes)

    def invalidate(self, chains: Collection[tuple[Family, ChainId]]) -> None:
        """Exactly these chains, maps and sets may have changed."""
        for family, table in self._families.items():
            if names := {chain.name for of, chain in chains if of is family}:
                table.invalidate(names)

    def watch(self, options: WatchOptions) -> TableWatch:
        """Watches for changes of the table by other programs."""
        return TableWatch(self._names, options)

    def chains_of(self, forwarding: Forwarding) -> tuple[str, Mapping[Endpoint, str]]:
        """The chain that the service's first frontend leads to, and for each endpoint its map."""
        chain = first_chain(forwarding, self._families[forwarding.key.family].desired.options)
        held = (
            "node_endpoints" if not (forwarding.addresses or forwarding.external_addresses) else "endpoints"
        )
        holder = held if forwarding.affinity_timeout is None else held.replace("endpoints", "numbered")
        return chain, dict.fromkeys(forwarding.reachable(), holder)

    async def counted(self) -> dict[Element, int]:
        """New flows that were translated, in all. The counts last as long as the table: over changes of
        backends and over the daemon's restart. Raises ApplyError."""
        found: dict[Element, int] = {}
        for table in self._families.values():
            found.update(await table.counters())
        return found

    async def refused(self) -> dict[Element, int]:
        """New flows over each limit, in all. These counts last as long. Raises ApplyError."""
        found: dict[Element, int] = {}
        for table in self._families.values():
            found.update(await table.refused())
        return found

    async def delete_counts(self, nft_set: NftSet, keys: Collection[Element]) -> dict[Element, int]:
        """Delete elements that packets have added; returns the last count of each that is deleted. Raises
        ApplyError."""
        found: dict[Element, int] = {}
        for family, table in self._families.items():
            if part := [key for key in keys if family_of(key[0]) is family]:
                found.update(await table.delete_counts(nft_set, part))
        return found

    def forwardings(self) -> Iterator[Forwarding]:
        """All wanted forwardings."""
        for table in self._families.values():
            yield from table.desired.forwardings()
