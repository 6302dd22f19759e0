"""A dataplane that keeps its rules in a dictionary, obeys its protocol and can be told to fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from vipd.control.address_policy import AddressPolicy
from vipd.control.selection import SelectionPolicy
from vipd.dataplane.base import ApplyError, DataplaneName, DataplanePlan
from vipd.dataplane.counting import FlowCounter
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.watch.stream import ExternalChangeStream
from vipd.dataplane.nftables.options import TableOptions
from vipd.model.check import Check
from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.service import Family, Masquerade

Rules = dict[ForwardingKey, Forwarding]


@dataclass(slots=True)
class FakePlan:
    """The rules to have, and those that are there."""

    wanted: Rules
    installed: Rules

    def __bool__(self) -> bool:
        return self.wanted != self.installed

    def __str__(self) -> str:
        keys = sorted({*self.wanted, *self.installed}, key=str)
        changed = [key for key in keys if self.wanted.get(key) != self.installed.get(key)]
        return "".join(f"{'-+'[key in self.wanted]} {key.service_port} {key.protocol}\n" for key in changed)


@dataclass(slots=True)
class FakeDataplane:
    """`kernel` is what is installed. `events` tells what was asked, in order."""

    name: DataplaneName = "iptables"

    kernel: Rules = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    updates: list[set[str]] = field(default_factory=list)
    """The services named in each update."""
    failures: list[Exception] = field(default_factory=list)
    """Raised by the next calls of `apply`, one each."""
    plan_failures: list[Exception] = field(default_factory=list)
    gate: asyncio.Event | None = None
    """While given and not set, `apply` waits for it."""
    surveying: asyncio.Event | None = None
    """While given and not set, `survey` waits for it."""
    surveyed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever `survey` is called."""
    applying: bool = False
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever `apply` is called."""
    misuse: list[str] = field(default_factory=list)
    """Calls that came while the kernel was being written."""
    refused: dict[ForwardingKey, str] = field(default_factory=dict)
    refuses: Callable[[Forwarding], str] = lambda forwarding: ""
    """Why this kernel does not take a forwarding; empty if it does."""
    _wanted: Rules = field(default_factory=dict)

    async def prepare(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Nothing takes long here."""

    def update(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Take new forwardings."""
        self._note("update")
        self.updates.append({key.service for key in changes})
        for key, forwarding in changes.items():
            self.refused.pop(key, None)
            if forwarding is None:
                self._wanted.pop(key, None)
            else:
                self._wanted[key] = forwarding

    async def host_changed(self, addresses: Collection[str]) -> None:
        """Nothing here depends on the host's addresses."""

    async def plan(self) -> FakePlan:
        """The difference between what is wanted and what is there."""
        self._note("plan")
        await asyncio.sleep(0)
        if self.plan_failures:
            raise self.plan_failures.pop(0)
        return FakePlan(self._with_what_it_had(dict(self._wanted)), dict(self.kernel))

    async def survey(self) -> Rules:
        """What is there. May come at any time, so never misuse."""
        self.events.append("survey")
        self.surveyed.set()
        await asyncio.sleep(0)
        if self.surveying is not None:
            await self.surveying.wait()
        return dict(self.kernel)

    async def difference(self, surveyed: object) -> FakePlan:
        """The difference to that."""
        assert isinstance(surveyed, dict)
        self._note("difference")
        return FakePlan(self._with_what_it_had(dict(self._wanted)), surveyed)

    async def apply(self, plan: DataplanePlan) -> None:
        """Install a plan, or fail as told."""
        assert isinstance(plan, FakePlan)
        self._note("apply")
        self.applying = True
        self.entered.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0)
            if self.failures:
                raise self.failures.pop(0)
            self.refused |= {key: why for key, f in plan.wanted.items() if (why := self.refuses(f))}
            self.kernel = self._with_what_it_had(plan.wanted)
        finally:
            self.applying = False

    def retry_quarantined(self, services: Collection[str]) -> None:
        """Forget that these were refused."""
        self.refused = {key: why for key, why in self.refused.items() if key.service not in services}

    def invalidate_all(self) -> None:
        """Nothing is remembered here but who was refused. May come at any time, so never misuse."""
        self.events.append("forget")
        self.refused.clear()

    def invalidate(self, chains: object) -> None:
        """As all."""
        self.invalidate_all()

    def watch(self, options: object) -> ExternalChangeStream:
        """Nobody else changes this kernel."""
        raise NotImplementedError

    @property
    def counter(self) -> FlowCounter:
        """Nothing flows here."""
        raise NotImplementedError

    def options_of(self, family: Family) -> RuleOptions | TableOptions:
        """Not asked for."""
        raise NotImplementedError

    async def collect_garbage(self) -> None:
        """Nothing is ever left for later here."""

    def quarantined(self) -> Mapping[ForwardingKey, str]:
        """What this kernel does not take."""
        return self.refused

    def warnings(self) -> tuple[str, ...]:
        """This host lacks nothing."""
        return ()

    def chains_of(self, forwarding: Forwarding) -> tuple[str, Mapping[Endpoint, str]]:
        """Readable names."""
        return f"SVC-{forwarding.key.service_port}", {e: f"SEP-{e}" for e in forwarding.endpoints}

    def versions(self) -> dict[str, str]:
        """No tools."""
        return {"ipv4": "fake v1", "ipv6": "fake v1"}

    def _with_what_it_had(self, wanted: Rules) -> Rules:
        """Rules where those who are refused are as the kernel has them."""
        taken = {key: forwarding for key, forwarding in wanted.items() if key not in self.refused}
        return taken | {key: self.kernel[key] for key in self.refused if key in self.kernel}

    def _note(self, event: str) -> None:
        self.events.append(event)
        if self.applying:
            self.misuse.append(event)


@dataclass(slots=True)
class FakeSurroundings:
    """A host on which all is well."""

    failures: list[OSError] = field(default_factory=list)
    """Raised by the next readings of the policy, one each."""
    warnings: tuple[str, ...] = ()
    prepared: list[set[Family]] = field(default_factory=list)
    """The families that were made fit, call by call."""
    allowed: AddressPolicy = field(default_factory=AddressPolicy)
    """What services may claim."""
    _keys: set[ForwardingKey] = field(default_factory=set)

    async def policy(self) -> SelectionPolicy:
        """Forwarded flows are masqueraded."""
        if self.failures:
            raise self.failures.pop(0)
        return SelectionPolicy(dict.fromkeys(Family, Masquerade.FORWARDED))

    def claims(self) -> AddressPolicy:
        """Any address, unless a test allows others."""
        return self.allowed

    async def check_problems(self, checks: Collection[Check]) -> Mapping[Check, tuple[str, ...]]:
        """Every check can work here."""
        return {}

    def services_changed(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Know what is forwarded."""
        self._keys = {*(self._keys - changes.keys()), *(key for key, f in changes.items() if f is not None)}

    def assigned_vips(self) -> frozenset[str]:
        """None."""
        return frozenset()

    async def prepare(self) -> tuple[str, ...]:
        """Note the families."""
        self.prepared.append({key.family for key in self._keys})
        return self.warnings


def broken_tool() -> ApplyError:
    """What a dataplane raises when its tool fails."""
    return ApplyError("iptables-restore failed", "it said no", "look at its words")
