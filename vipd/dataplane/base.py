"""What the reconciler asks of a dataplane."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from vipd.dataplane.iptables.names import ChainId
from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.service import Family

if TYPE_CHECKING:
    from vipd.dataplane.counting import FlowCounter
    from vipd.dataplane.iptables.options import RuleOptions
    from vipd.dataplane.iptables.watch.stream import Disturbances, WatchOptions
    from vipd.dataplane.nftables.options import TableOptions

DataplaneName = Literal["iptables", "nftables"]
DATAPLANES: tuple[DataplaneName, ...] = get_args(DataplaneName)


class ApplyError(RuntimeError):
    """The kernel's rules could not be read or written: what was tried and what the tool said."""

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

    Level-triggered: whatever was there before, `apply(plan())` makes the kernel equal to the forwardings
    given so far. After a failed apply the next plan is made from what the kernel really holds.
    """

    async def prepare(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Work out beside the event loop what `update` would take long for. Changes nothing."""

    def update(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Take new forwardings, and None for those that are deleted. Touches nothing outside the process."""

    async def plan(self) -> DataplanePlan:
        """What has to be written now. Reads the kernel when its state is not known; raises ApplyError."""

    async def survey(self) -> object:
        """The rules that the kernel holds now, for `difference`. Changes nothing of what is known of them;
        may go on beside all else. Raises ApplyError."""

    async def difference(self, surveyed: object) -> DataplanePlan:
        """What would have to be written if the kernel were as it was surveyed. Changes nothing."""

    async def apply(self, plan: DataplanePlan) -> None:
        """Write a plan to the kernel. Raises ApplyError; then some of its steps may have been done."""

    def host_changed(self, addresses: frozenset[str]) -> None:
        """This host's own addresses are these from now on."""

    def invalidate(self, chains: Collection[tuple[Family, ChainId]]) -> None:
        """Trust nothing that is known about these chains, maps and sets, and no others, which somebody else
        may have changed."""

    def invalidate_all(self) -> None:
        """Trust nothing that is known about the kernel: the next plan reads it. May come at any time, also
        while a plan is being applied."""

    async def collect_garbage(self) -> None:
        """Delete what changes left behind for later. Raises ApplyError."""

    def quarantined(self) -> Mapping[ForwardingKey, str]:
        """The forwardings that the kernel does not take, and what it said. All others are programmed."""

    def warnings(self) -> tuple[str, ...]:
        """What this host lacks and what that means for services."""

    def chains_of(self, forwarding: Forwarding) -> tuple[str, Mapping[Endpoint, str]]:
        """The kernel names by which a forwarding and its endpoints are found."""

    @property
    def name(self) -> DataplaneName:
        """`iptables` or `nftables`."""

    @property
    def counter(self) -> FlowCounter:
        """Counts new flows."""

    def watch(self, options: WatchOptions) -> Disturbances:
        """Sees that somebody else changes the rules. To be entered before the first write."""

    def options_of(self, family: Family) -> RuleOptions | TableOptions:
        """What shapes a family's rules besides the forwardings."""

    def versions(self) -> dict[str, str]:
        """The tools in use, by family, as they name themselves."""
