"""A step costs what has changed, not what exists: counted in calls of Python functions, for seconds would
measure the machine. So are the parts that a load goes through for each of its services."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from types import FrameType

import pytest

from tests.dataplane.fake_dataplane import FakeDataplane, FakePlan, FakeSurroundings
from tests.model.samples import many_declared
from vipd.control.backend_status_tracker import BackendStatusTracker
from vipd.control.catalog import Catalog
from vipd.control.reconciler import Reconciler, ReconcilerDependencies
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.dataplane.conntrack.scheduler import ConntrackScheduler
from vipd.dataplane.iptables import plan as iptables_plan
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.ruleset import Ruleset
from vipd.dataplane.nftables import plan as nftables_plan
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.table import DesiredTable
from vipd.declaration.incremental import parse_incrementally
from vipd.declaration.native import parse_declaration
from vipd.declaration.problems import Declaration
from vipd.declaration.unit import EMPTY_DECLARATION, Unit
from vipd.health.checker import HealthChecker
from vipd.host.requirements import HostRequirements
from vipd.host.settings.settings import load_settings
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Backend, Family, Service
from vipd.observe.health_ports import HealthPorts

FEW, MANY = 100, 2000
PATH = "/etc/vipd/services.d/many.yaml"
SETTINGS = load_settings(flags={})
POLICY = SelectionPolicy.of(SETTINGS, ["192.0.2.1"])

Changes = Mapping[ForwardingKey, Forwarding | None]


class Counted:
    """How many Python functions were called."""

    calls = 0


@contextmanager
def counting() -> Iterator[Counted]:
    """Count the calls in this thread, without those that a search for garbage makes in the midst of them."""
    counted = Counted()

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        counted.calls += event == "call"

    gc.disable()
    sys.setprofile(note)
    try:
        yield counted
    finally:
        sys.setprofile(None)
        gc.enable()


def calls(work: Callable[[], object]) -> int:
    """How many Python functions some work calls."""
    with counting() as counted:
        work()
    return counted.calls


@cache
def services(count: int) -> tuple[Service, ...]:
    """So many services with five backends each."""
    return parse_declaration(many_declared(count), PATH).services


@cache
def forwardings(count: int) -> dict[ForwardingKey, Forwarding]:
    """Theirs."""
    return {f.key: f for service in services(count) for f in select_backends(service, POLICY)}


def edited(service: Service) -> Service:
    """The same with another backend in place of its first."""
    return replace(service, backends=(Backend("10.250.0.1"), *service.backends[1:]))


class Held:
    """A source whose units a test exchanges."""

    name = location = "held"
    writes = False

    def __init__(self, units: Mapping[str, tuple[Service, ...]]) -> None:
        self._units = {name: Unit(Declaration(found)) for name, found in units.items()}

    def units(self) -> Mapping[str, Unit]:
        """As they are now."""
        return self._units

    def faults(self) -> tuple[str, ...]:
        """Never any."""
        return ()

    def held(self) -> Mapping[str, str]:
        """Nothing."""
        return {}

    def accept_removal(self) -> None:
        """Nothing is held."""

    def save_accepted(self, chosen: Mapping[str, Declaration]) -> None:
        """Whatever serves is what to go back to."""
        for name, unit in self._units.items():
            if chosen[name] is not unit.accepted:
                self._units[name] = Unit(unit.candidate, chosen[name])

    def edit(self, name: str, at: int) -> None:
        """One service of a unit says something else; the others stay the same objects."""
        before = self._units[name].candidate.services
        after = (*before[:at], edited(before[at]), *before[at + 1 :])
        self._units[name] = Unit(Declaration(after), self._units[name].accepted)

    def remove(self, name: str) -> None:
        """A unit goes."""
        self._units.pop(name, EMPTY_DECLARATION)


class CheapDataplane(FakeDataplane):
    """A dataplane that takes everything, at a cost that does not depend on what it has."""

    async def plan(self) -> FakePlan:
        """Nothing is ever left to write."""
        return FakePlan({}, {})


class ActiveOverrides:
    """No orders."""

    overrides: Mapping[object, object] = {}


def one_file(count: int) -> Held:
    """All services in one unit."""
    return Held({"file:/all": services(count)})


def many_files(count: int) -> Held:
    """A unit for each service, as in etcd."""
    return Held({f"etcd:/{number}": (service,) for number, service in enumerate(services(count))})


@dataclass(frozen=True, slots=True)
class Case:
    """What is there, and what happens to it."""

    make: Callable[[int], Held]
    change: Callable[[Held], None]


CASES = {
    "a service in a large file": Case(one_file, lambda held: held.edit("file:/all", 7)),
    "a file among many": Case(many_files, lambda held: held.edit("etcd:/7", 0)),
    "a file that goes": Case(many_files, lambda held: held.remove("etcd:/7")),
    "nothing": Case(many_files, lambda held: None),
}


async def step_calls(case: Case, count: int) -> tuple[int, set[str]]:
    """The calls of a step after one change, and the services that the dataplane was told of."""
    held, plane = case.make(count), CheapDataplane()
    health = HealthChecker()
    fitness = BackendStatusTracker((ActiveOverrides(),), health, health.clock)  # type: ignore[arg-type]  # no orders at all
    dependencies = ReconcilerDependencies(fitness)
    reconciler = Reconciler((held,), plane, FakeSurroundings(), lambda: datetime.now(UTC), dependencies)
    reconciler.observers.add(ConntrackScheduler(time.monotonic))
    reconciler.observers.add(HealthPorts(reconciler, lambda family, addresses: None))
    for _ in range(2):  # what was accepted is known from the second one on
        assert await reconciler.step()
    assert len(reconciler.services) == count
    case.change(held)
    plane.updates.clear()
    with counting() as counted:
        await reconciler.step()
    return counted.calls, set().union(*plane.updates)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_step_after_one_change_costs_the_same_however_many_services_there_are(name: str) -> None:
    few, touched = asyncio.run(step_calls(CASES[name], FEW))
    many, same = asyncio.run(step_calls(CASES[name], MANY))
    assert touched == same
    assert touched == (set() if name == "nothing" else {"bench/web-7"})
    assert many <= 1.1 * few, f"{few} calls with {FEW} services, {many} with {MANY}"


def changes(found: Mapping[ForwardingKey, Forwarding]) -> dict[str, Changes]:
    """One change of each kind."""
    first = next(iter(found.values()))
    key = ForwardingKey("other", "", first.key.protocol, Family.IPV4)
    new = replace(first, key=key, addresses=("10.111.0.1",))
    return {
        "a backend": {first.key: replace(first, endpoints=first.endpoints[1:])},
        "a new service": {key: new},
        "a removed service": {first.key: None},
    }


def update_all(wanted: DesiredTable | Ruleset, changes: Changes) -> None:
    """Say what is different."""
    for key, forwarding in changes.items():
        wanted.update(key, forwarding)


def nftables(found: Mapping[ForwardingKey, Forwarding]) -> Callable[[Changes], object]:
    """The pure part of the nftables dataplane, all forwardings written: takes a change and plans it."""
    table = DesiredTable(TableOptions.of(SETTINGS, Family.IPV4))

    def plan(changes: Changes) -> nftables_plan.Plan:
        update_all(table, changes)
        return nftables_plan.make_plan(table.options, table.structure(), installed, *table.dirty())

    installed = nftables_plan.Installed()
    left = plan(found).installed_after
    assert left is not None
    installed = left
    table.mark_clean()
    return lambda changes: [transaction.text() for transaction in plan(changes).transactions()]


def iptables(found: Mapping[ForwardingKey, Forwarding]) -> Callable[[Changes], object]:
    """The same of the iptables dataplane."""
    ruleset, names = Ruleset(RuleOptions.of(SETTINGS, Family.IPV4, random_fully=True)), Names("VIPD")
    installed = iptables_plan.Installed()

    def plan(changes: Changes) -> iptables_plan.Plan:
        update_all(ruleset, changes)
        return iptables_plan.make_plan(ruleset.dirty(), installed, names)

    plan(found).record_applied(installed)
    ruleset.mark_clean()
    return lambda changes: plan(changes).restores


def host_needs(found: Mapping[ForwardingKey, Forwarding]) -> Callable[[Changes], object]:
    """What the host is asked for."""
    return HostRequirements(found.values()).update


PLANNERS = (nftables, iptables, host_needs)
DEEPER = 2.0
"""A tree over twenty times as many addresses is a level deeper, and the groups on the way are fuller."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a backend", "a new service", "a removed service"])
@pytest.mark.parametrize("planner", PLANNERS)
def test_planning_one_change_costs_the_same_however_many_services_there_are(
    planner: Callable[[Mapping[ForwardingKey, Forwarding]], Callable[[Changes], object]], kind: str
) -> None:
    counts = []
    for found in (forwardings(FEW), forwardings(MANY)):
        tell, change = planner(found), changes(found)[kind]
        counts.append(calls(partial(tell, change)))
    few, many = counts
    most = DEEPER if planner is iptables and kind != "a backend" else 1.1
    assert many <= most * few, f"{few} calls with {FEW} services, {many} with {MANY}"


def test_reading_a_file_in_which_one_service_differs_costs_the_same_however_many_are_in_it() -> None:
    counts = []
    for count in (FEW, MANY):
        text = many_declared(count)
        known = parse_declaration(text, PATH)
        new = text.replace("10.128.0.11,", "10.250.0.1,")
        counts.append(calls(partial(parse_incrementally, new, PATH, text, known)))
    few, many = counts
    assert many <= 1.1 * few, f"{few} calls with {FEW} services, {many} with {MANY}"


LIMITS = {"parse": 340, "choose": 45, "nftables": 144, "iptables": 315, "host needs": 8, "flows": 19}
"""Calls for each service of a load: a quarter above what was counted with Python 3.11. Later ones make fewer,
as comprehensions are no functions there any more."""


def test_a_load_calls_no_more_functions_for_each_service_than_it_did() -> None:
    text, found = many_declared(FEW), forwardings(FEW)
    parsed = services(FEW)
    table = DesiredTable(TableOptions.of(SETTINGS, Family.IPV4))
    ruleset = Ruleset(RuleOptions.of(SETTINGS, Family.IPV4, random_fully=True))
    counted = {
        "parse": calls(lambda: parse_declaration(text, PATH)),
        "choose": calls(lambda: [select_backends(service, POLICY) for service in parsed]),
        "nftables": calls(lambda: update_all(table, found)),
        "iptables": calls(lambda: update_all(ruleset, found)),
        "host needs": calls(lambda: HostRequirements(found.values())),
        "flows": calls(lambda: ConntrackScheduler(time.monotonic).services_changed(found)),
    }
    assert {name: number // FEW for name, number in counted.items() if number // FEW > LIMITS[name]} == {}
    # Far below, the limits would tell nothing any more: lower them.
    assert all(number // FEW > LIMITS[name] // 3 for name, number in counted.items()), counted


BYTES = {"parse": 2170, "merge": 485, "choose": 1090, "nftables": 165, "iptables": 5280, "flows": 870}
"""Bytes that each service of a load keeps, a quarter above what was counted with Python 3.11."""


def kept_bytes(work: Callable[[], object]) -> int:
    """Bytes for each service that are left when some work is over, while its result is kept."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        result = work()
        gc.collect()
        left = tracemalloc.get_traced_memory()[0] - before
        del result
    finally:
        tracemalloc.stop()
    return left // MEASURED


MEASURED = 500
"""Services, so that tables and caches that do not grow with them weigh little."""


def test_a_load_keeps_no_more_memory_for_each_service_than_it_did() -> None:
    text, parsed, found = many_declared(MEASURED), services(MEASURED), forwardings(MEASURED)
    table = DesiredTable(TableOptions.of(SETTINGS, Family.IPV4))
    ruleset = Ruleset(RuleOptions.of(SETTINGS, Family.IPV4, random_fully=True))
    flows = ConntrackScheduler(time.monotonic)

    def written(desired: DesiredTable | Ruleset) -> None:
        update_all(desired, found)
        desired.mark_clean()

    def merged() -> Catalog:
        catalog = Catalog()
        catalog.merge({"file:/all": Unit(Declaration(parsed))}, {"file:/all"})
        return catalog

    counted = {
        "parse": kept_bytes(lambda: parse_declaration(text, PATH)),
        "merge": kept_bytes(merged),
        "choose": kept_bytes(lambda: [select_backends(service, POLICY) for service in parsed]),
        "nftables": kept_bytes(lambda: written(table)),
        "iptables": kept_bytes(lambda: written(ruleset)),
        "flows": kept_bytes(lambda: flows.services_changed(found)),
    }
    assert {name: number for name, number in counted.items() if number > BYTES[name]} == {}
    # Far below, the limits would tell nothing any more: lower them.
    assert all(number > BYTES[name] // 2 for name, number in counted.items()), counted
