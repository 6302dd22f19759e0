"""The nftables dataplane: a table in each address family, each on its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from vipd.dataplane.base import ApplyError, DataplanePlan
from vipd.dataplane.iptables.names import ChainId
from vipd.dataplane.nftables.compile import compile_forwarding
from vipd.dataplane.nftables.family import FamilyTable
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.plan import Plan
from vipd.dataplane.nftables.reading import OpenSocket, open_netlink
from vipd.dataplane.nftables.tools import Nft, find_nft
from vipd.host_record import HostRecord
from vipd.model import Endpoint, Family, Forwarding, ForwardingKey
from vipd.process import Runner
from vipd.settings import Settings


@dataclass(frozen=True, slots=True)
class NftablesPlan:
    """One plan for each family, and why a family could not be planned."""

    plans: Mapping[Family, Plan]
    errors: tuple[ApplyError, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.errors) or any(self.plans.values())

    def __str__(self) -> str:
        parts = [f"# {family}\n{plan}" for family, plan in self.plans.items() if plan]
        return "".join([*parts, *(f"# {error}\n" for error in self.errors)])


class NftablesDataplane:
    """Implements `vipd.dataplane.base.Dataplane`. Make it with `start`."""

    name = "nftables"

    def __init__(self, families: Mapping[Family, FamilyTable]) -> None:
        self._families = families
        self._host_addresses: frozenset[str] = frozenset()

    @classmethod
    async def start(
        cls, settings: Settings, record: HostRecord, run: Runner, open_socket: OpenSocket = open_netlink
    ) -> NftablesDataplane:
        """Find nft. Writes nothing. Without nft a family fails when it is needed. `open_socket` makes netlink
        sockets in the network namespace in which `run` runs programs."""
        nft: Nft | ApplyError
        try:
            nft = await find_nft(run)
        except ApplyError as error:
            nft = error
        return cls({f: FamilyTable(f, nft, settings, record, run, open_socket) for f in Family})

    def update(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Take new forwardings, and None for those that are gone."""
        for key, forwarding in changes.items():
            self._families[key.family].update(key, forwarding)

    def host_changed(self, addresses: frozenset[str]) -> None:
        """Node ports may be limited to some of this host's addresses."""
        self._host_addresses = addresses
        for table in self._families.values():
            table.host_changed(addresses)

    def forget(self) -> None:
        """Trust nothing about the kernel: the next plan reads it."""
        for table in self._families.values():
            table.forget()

    def doubt(self, chains: Collection[tuple[Family, ChainId]]) -> None:
        """Somebody may have changed these chains, maps and sets, and nothing else."""
        for family, table in self._families.items():
            if names := {chain.name for of, chain in chains if of is family}:
                table.doubt(names)

    async def plan(self) -> NftablesPlan:
        """What has to be written now; a family that cannot be read does not hold back the other."""
        plans, errors = {}, []
        for family, table in self._families.items():
            try:
                plans[family] = await table.plan()
            except ApplyError as error:
                errors.append(error)
        return NftablesPlan(plans, tuple(errors))

    async def apply(self, plan: DataplanePlan) -> None:
        """Write a plan, every family of it; raises the first ApplyError after all were tried."""
        assert isinstance(plan, NftablesPlan)  # noqa: S101 (each dataplane takes its own plans only)
        errors = list(plan.errors)
        for family, part in plan.plans.items():
            try:
                await self._families[family].apply(part)
            except ApplyError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    async def sweep(self) -> None:
        """Delete chains and maps that nothing needs any more. Raises ApplyError."""
        for table in self._families.values():
            await table.sweep()

    def quarantined(self) -> Mapping[ForwardingKey, str]:
        """The forwardings that the kernel does not take, and what it said."""
        return {k: reason for table in self._families.values() for k, reason in table.quarantined().items()}

    def warnings(self) -> tuple[str, ...]:
        """What this host lacks and what that means for services."""
        return tuple(warning for table in self._families.values() for warning in table.warnings())

    def chains_of(self, forwarding: Forwarding) -> tuple[str, Mapping[Endpoint, str]]:
        """The chain that the service's first frontend leads to, and for each endpoint its map."""
        options = self.options_of(forwarding.key.family)
        fragment = compile_forwarding(forwarding, options)
        first = next(iter(fragment.elements.values()), "")
        held = (
            "node_endpoints" if not (forwarding.addresses or forwarding.external_addresses) else "endpoints"
        )
        holder = held if forwarding.affinity_timeout is None else held.replace("endpoints", "numbered")
        return first.rpartition(" ")[2], dict.fromkeys(forwarding.reachable(), holder)

    async def counters(self) -> dict[ForwardingKey, dict[Endpoint, int]]:
        """New flows that were translated, by forwarding and endpoint; endpoints that are gone are left out.

        They last as long as the table: over changes of backends and over the daemon's restart.
        """
        found: dict[ForwardingKey, dict[Endpoint, int]] = {}
        for table in self._families.values():
            counted = await table.counters()
            forwardings = list(table.table.forwardings())
            by_frontend = dict(_frontends(forwardings))
            by_node_port = {(str(f.key.protocol), str(f.node_port)): f for f in forwardings if f.node_port}
            for (address, protocol, port, *endpoint), flows in counted.items():
                forwarding = by_frontend.get((address, protocol, port)) or by_node_port.get((protocol, port))
                if forwarding is not None:
                    _add(found.setdefault(forwarding.key, {}), forwarding, tuple(endpoint), flows)
        return found

    def options_of(self, family: Family) -> TableOptions:
        """Everything besides the forwardings that shapes a family's table."""
        return self._families[family].table.options

    def host_addresses(self) -> frozenset[str]:
        """This host's own addresses, as `host_changed` told them last."""
        return self._host_addresses

    def versions(self) -> dict[str, str]:
        """nft as it names itself, for each family."""
        return {str(family): table.version() for family, table in self._families.items()}


def _frontends(forwardings: Iterable[Forwarding]) -> Iterable[tuple[tuple[str, str, str], Forwarding]]:
    for forwarding in forwardings:
        external = (each.address for each in forwarding.external_addresses)
        for address in (*forwarding.addresses, *external):
            yield (address, str(forwarding.key.protocol), str(forwarding.port)), forwarding


def _add(counts: dict[Endpoint, int], forwarding: Forwarding, place: tuple[str, ...], flows: int) -> None:
    for endpoint in (*forwarding.reachable(), *forwarding.resting):
        if (endpoint.address, str(endpoint.port)) == place:
            counts[endpoint] = counts.get(endpoint, 0) + flows
            return
