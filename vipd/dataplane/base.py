"""The interface of a dataplane for the reconciler."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from vipd.dataplane.iptables.names import ChainId
from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.service import Family

if TYPE_CHECKING:
    from vipd.dataplane.counting import FlowCounter
    from vipd.dataplane.iptables.options import RuleOptions
    from vipd.dataplane.iptables.watch.stream import ExternalChangeStream, WatchOptions
    from vipd.dataplane.nftables.options import TableOptions

DataplaneName = Literal["iptables", "nftables"]
DATAPLANES: tuple[DataplaneName, ...] = get_args(DataplaneName)


class ApplyError(RuntimeError):
    """The kernel's rules could not be read or written: the operation, and the tool's message."""

    def __init__(self, what: str, why: str, hint: str = "", *, rules_at_fault: bool = False) -> None:
        super().__init__(f"{what}: {why}" + (f"; hint: {hint}" if hint else ""))
        self.what, self.why, self.hint = what, why, hint
        self.rules_at_fault = rules_at_fault
        """Some rule was not taken: trying again will not help, trying without it will."""


class MissingProgramError(ApplyError):
    """There is no such program, or one of a version that vipd never writes with: it has written nothing."""


class DataplanePlan(Protocol):
    """Work as a value: false when there is none, and printable as a difference of rules."""

    def __bool__(self) -> bool: ...

    def __str__(self) -> str: ...


class Dataplane(Protocol):
    """Programs forwardings into the kernel.

    Level-triggered: whatever the state before, `apply(plan())` makes the kernel equal to the forwardings
    given so far. After a failed apply the next plan is based on a reading of the kernel.
    """

    async def prepare(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Compute, off the event loop, what would take `update` long. Changes nothing."""

    def update(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Take new forwardings, and None for those that are deleted. Touches nothing outside the process."""

    async def plan(self) -> DataplanePlan:
        """The plan of what must be written now. Reads the kernel if its state is unknown; raises
        ApplyError."""

    async def survey(self) -> object:
        """The kernel's current rules, for `difference`. Does not change the cached state;
        may run concurrently with everything else. Raises ApplyError."""

    async def difference(self, surveyed: object) -> DataplanePlan:
        """The plan for a kernel in the surveyed state. Changes nothing."""

    async def apply(self, plan: DataplanePlan) -> None:
        """Write a plan to the kernel. Raises ApplyError; then some of its steps may have been applied."""

    def host_changed(self, addresses: frozenset[str]) -> None:
        """This host's own addresses are these from now on."""

    def invalidate(self, chains: Collection[tuple[Family, ChainId]]) -> None:
        """Drop the cached state of exactly these chains, maps and sets, which another program may have
        changed."""

    def invalidate_all(self) -> None:
        """Drop the cached state of the kernel: the next plan reads it. May be called at any time, also
        while a plan is being applied."""

    async def collect_garbage(self) -> None:
        """Delete leftovers of changes. Raises ApplyError."""

    def quarantined(self) -> Mapping[ForwardingKey, str]:
        """The forwardings that the kernel rejects, with its message. All others are programmed."""

    def warnings(self) -> tuple[str, ...]:
        """What this host lacks and the effects on services."""

    def chains_of(self, forwarding: Forwarding) -> tuple[str, Mapping[Endpoint, str]]:
        """The names of a forwarding and its endpoints in the kernel."""

    @property
    def name(self) -> DataplaneName:
        """`iptables` or `nftables`."""

    @property
    def counter(self) -> FlowCounter:
        """Counts new flows."""

    def watch(self, options: WatchOptions) -> ExternalChangeStream:
        """Sees that somebody else changes the rules. To be entered before the first write."""

    def options_of(self, family: Family) -> RuleOptions | TableOptions:
        """Everything besides the forwardings that shapes a family's rules."""

    def versions(self) -> dict[str, str]:
        """The tools in use, by family, as they name themselves."""
