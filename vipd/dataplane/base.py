"""The interface of a dataplane (iptables or nftables), as the reconciler uses it."""

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
    """vipd could not read or write the kernel's rules. Contains the operation and the tool's message."""

    def __init__(self, what: str, why: str, hint: str = "", *, rules_at_fault: bool = False) -> None:
        super().__init__(f"{what}: {why}" + (f"; hint: {hint}" if hint else ""))
        self.what, self.why, self.hint = what, why, hint
        self.rules_at_fault = rules_at_fault
        """Whether the kernel or the tool rejected a rule: a retry helps only without that rule."""
        self.families: frozenset[Family] = frozenset(Family)
        """The address families whose rules may not be as wanted; those of all others are."""


class MissingProgramError(ApplyError):
    """A program is missing, or has a version that vipd never writes with. Nothing was written."""


class DataplanePlan(Protocol):
    """What must be written to the kernel. False if that is nothing; `str` returns it as a diff of rules."""

    def __bool__(self) -> bool: ...

    def __str__(self) -> str: ...


class Dataplane(Protocol):
    """Programs forwardings into the kernel.

    It is level-triggered: whatever state the kernel is in, `apply(plan())` makes it equal to the forwardings
    that `update` has passed so far. After a failed `apply`, the next `plan` reads the kernel again.
    """

    async def prepare(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Compute, outside the event loop, whatever would make `update` take long. Changes nothing."""

    def update(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Record new or changed forwardings, and None for deleted ones. Writes nothing to the kernel."""

    async def plan(self) -> DataplanePlan:
        """The plan of what must be written now. Reads the kernel if its state is unknown. Raises
        ApplyError."""

    async def survey(self) -> object:
        """Read the kernel's current rules, for `difference`. Does not change the cached state, and may run
        concurrently with every other method. Raises ApplyError."""

    async def difference(self, surveyed: object) -> DataplanePlan:
        """The plan for a kernel whose rules are those that `survey` returned. Changes nothing."""

    async def apply(self, plan: DataplanePlan) -> None:
        """Write a plan to the kernel. Raises ApplyError; then some of its steps may have been applied."""

    async def host_changed(self, addresses: frozenset[str]) -> None:
        """Record this host's own addresses, which have changed."""

    def invalidate(self, chains: Collection[tuple[Family, ChainId]]) -> None:
        """Drop the cached state of exactly these chains, maps and sets, which another program may have
        changed."""

    def invalidate_all(self) -> None:
        """Drop the cached state of the kernel, so that the next plan reads it. May be called at any time,
        even while `apply` runs."""

    def retry_quarantined(self, services: Collection[str]) -> None:
        """Try what the kernel rejects of these services once more, with the next plan."""

    async def collect_garbage(self) -> None:
        """Delete rules, chains and elements that earlier changes left unused. Raises ApplyError."""

    def quarantined(self) -> Mapping[ForwardingKey, str]:
        """The forwardings that the kernel rejects, with its message. All others are programmed."""

    def warnings(self) -> tuple[str, ...]:
        """What this host lacks and the effects on services."""

    def chains_of(self, forwarding: Forwarding) -> tuple[str, Mapping[Endpoint, str]]:
        """The names in the kernel of a forwarding, and of each of its endpoints."""

    @property
    def name(self) -> DataplaneName:
        """`iptables` or `nftables`."""

    @property
    def counter(self) -> FlowCounter:
        """Counts new flows."""

    def watch(self, options: WatchOptions) -> ExternalChangeStream:
        """A stream of other programs' changes to vipd's rules. Enter it before the first write."""

    def options_of(self, family: Family) -> RuleOptions | TableOptions:
        """Everything besides the forwardings that affects the rules of an address family."""

    def versions(self) -> dict[str, str]:
        """The versions of the tools in use, by family, as the tools print them."""
