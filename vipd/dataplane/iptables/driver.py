"""The iptables dataplane at work: reads by iptables-save, writes by iptables-restore, each family alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from vipd.dataplane.base import ApplyError, DataplanePlan
from vipd.dataplane.iptables.names import TABLES, Names
from vipd.dataplane.iptables.options import KUBE_PREFIX, RuleOptions
from vipd.dataplane.iptables.plan import Installed, Plan, make_plan
from vipd.dataplane.iptables.ruleset import Ruleset
from vipd.dataplane.iptables.saved import read_saved, recognise
from vipd.dataplane.iptables.tools import Tools, find_tools, restore, save
from vipd.host_record import HostRecord
from vipd.model import Endpoint, Family, Forwarding, ForwardingKey
from vipd.process import Runner
from vipd.settings import Settings

KUBE_PROXY_CANARY = "KUBE-PROXY-CANARY"


@dataclass(frozen=True, slots=True)
class IptablesPlan:
    """One plan for each family, and why a family could not be planned."""

    plans: Mapping[Family, Plan]
    errors: tuple[ApplyError, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.errors) or any(self.plans.values())

    def __str__(self) -> str:
        parts = [f"# {family}\n{plan}" for family, plan in self.plans.items() if plan]
        return "".join([*parts, *(f"# {error}\n" for error in self.errors)])


@dataclass(slots=True)
class _FamilyState:
    """One family's rules as wanted and as last seen."""

    ruleset: Ruleset
    tools: Tools | ApplyError
    installed: Installed | None = None
    """None: not known, so the next plan reads the kernel."""
    recorded: bool = False
    """The record on disk says that our chains are about to be there."""

    def idle(self) -> bool:
        """Nothing is wanted and the tools are missing, so nothing can be there either."""
        return isinstance(self.tools, ApplyError) and not self.ruleset.shared()


class IptablesDataplane:
    """Implements `vipd.dataplane.base.Dataplane`. Make it with `start`."""

    def __init__(
        self,
        states: Mapping[Family, _FamilyState],
        settings: Settings,
        record: HostRecord,
        run: Runner,
    ) -> None:
        self._states = states
        self._settings = settings
        self._record = record
        self._run = run
        self._names = Names(settings.chain_prefix)
        self._host_addresses: frozenset[str] = frozenset()

    @classmethod
    async def start(cls, settings: Settings, record: HostRecord, run: Runner) -> IptablesDataplane:
        """Find the tools of both families. Writes nothing. A family without tools fails when it is needed."""
        states = {}
        for family in Family:
            tools: Tools | ApplyError
            try:
                tools = await find_tools(family, settings.iptables_variant, run)
            except ApplyError as error:
                tools = error
            random_fully = isinstance(tools, Tools) and tools.random_fully
            states[family] = _FamilyState(Ruleset(RuleOptions.of(settings, family, random_fully)), tools)
        return cls(states, settings, record, run)

    def update(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Take new forwardings, and None for those that are gone."""
        for key, forwarding in changes.items():
            self._states[key.family].ruleset.update(key, forwarding)

    def host_changed(self, addresses: frozenset[str]) -> None:
        """Node ports may be limited to some of this host's addresses."""
        self._host_addresses = addresses
        for family, state in self._states.items():
            options = state.ruleset.options
            state.ruleset.reconfigure(
                replace(options, node_port_addresses=self._settings.node_addresses(family, addresses))
            )

    def forget(self) -> None:
        """Trust nothing about the kernel: the next plan reads it."""
        for state in self._states.values():
            state.installed = None

    async def plan(self) -> IptablesPlan:
        """What has to be written now; a family that cannot be read does not hold back the other."""
        plans, errors = {}, []
        for family, state in self._states.items():
            try:
                plans[family] = await self._plan_family(family, state)
            except ApplyError as error:
                errors.append(error)
        return IptablesPlan(plans, tuple(errors))

    async def apply(self, plan: DataplanePlan) -> None:
        """Write a plan, every family of it; raises the first ApplyError after all were tried."""
        assert isinstance(plan, IptablesPlan)  # noqa: S101 (each dataplane takes its own plans only)
        errors = list(plan.errors)
        for family, part in plan.plans.items():
            try:
                await self._apply_family(self._states[family], part)
            except ApplyError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def chains_of(self, forwarding: Forwarding) -> tuple[str, Mapping[Endpoint, str]]:
        """The SVC chain and each endpoint's SEP chain."""
        key = forwarding.key
        return self._names.service(key), {e: self._names.endpoint(key, e) for e in forwarding.endpoints}

    def options_of(self, family: Family) -> RuleOptions:
        """Everything besides the forwardings that shapes a family's rules."""
        return self._states[family].ruleset.options

    def host_addresses(self) -> frozenset[str]:
        """This host's own addresses, as `host_changed` told them last."""
        return self._host_addresses

    def versions(self) -> dict[str, str]:
        """Each family's iptables, as it names itself."""
        return {
            str(family): state.tools.version_text if isinstance(state.tools, Tools) else str(state.tools)
            for family, state in self._states.items()
        }

    async def _plan_family(self, family: Family, state: _FamilyState) -> Plan:
        if state.idle():
            return Plan()
        if isinstance(state.tools, ApplyError):
            raise state.tools
        if state.installed is None:
            installed = await self._observe(family, state.tools)
            wanted = state.ruleset.whole(installed.chains)
            for group in (*wanted.leaves, wanted.shared):
                recognise(installed, group)
            state.installed = installed
        else:
            wanted = state.ruleset.touched()
        plan = make_plan(wanted, state.installed, self._names)
        if not plan:
            state.ruleset.written()
        return plan

    async def _observe(self, family: Family, tools: Tools) -> Installed:
        text = await save(tools, self._run)
        if self._settings.chain_prefix == KUBE_PREFIX and not self._settings.force_chain_prefix:
            _refuse_beside_kube_proxy(text, family)
        installed = read_saved(text, self._names)
        installed.missing_tables = tuple(f"{family} {table}" for table in TABLES if f"*{table}\n" not in text)
        return installed

    async def _apply_family(self, state: _FamilyState, plan: Plan) -> None:
        if not plan:
            return
        assert isinstance(state.tools, Tools)  # noqa: S101 (a plan exists only where tools do)
        assert state.installed is not None  # noqa: S101
        if state.installed.missing_tables or not state.recorded:
            self._record.rules(self._settings.chain_prefix, list(state.installed.missing_tables))
            state.installed.missing_tables, state.recorded = (), True
        try:
            for text in plan.restores:
                await restore(state.tools, text, self._run)
        except BaseException:
            # Some restores may have been done, also when this task was cancelled: look again first.
            state.installed = None
            raise
        plan.settle(state.installed)
        state.ruleset.written()


def _refuse_beside_kube_proxy(saved: str, family: Family) -> None:
    if f":{KUBE_PROXY_CANARY} " in saved:
        raise ApplyError(
            f"chain_prefix KUBE is refused for {family}",
            f"a kube-proxy is at work on this host (chain {KUBE_PROXY_CANARY})",
            "use another chain_prefix, or force_chain_prefix: true",
        )
