"""An exception that nobody expected is the fault of one unit, one service or one part of vipd, and of no
other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import pytest

from tests.control.reconciling import DNS, WEB, IsolatedReconciler, looping, run_story_simulated
from tests.dataplane.fake_dataplane import FakeDataplane
from tests.lab.simulated_time import simulate
from tests.model.samples import declared, service
from vipd.control import address_policy, admission, catalog, changes
from vipd.control import claim_conflicts as contest
from vipd.control.address_policy import AddressPolicy
from vipd.control.backend_status_tracker import BackendStatusTracker
from vipd.control.catalog import Catalog
from vipd.control.claim_conflicts import ConflictResolver
from vipd.dataplane.base import DataplanePlan
from vipd.declaration import native
from vipd.declaration.conflicts import Claim
from vipd.declaration.native import parse_declaration
from vipd.declaration.problems import Declaration
from vipd.declaration.unit import Unit
from vipd.host.observer import Observer
from vipd.model.check_target import CheckTarget
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.override import OverrideTarget
from vipd.model.service import Family, Service
from vipd.sources.etcd.values import Layout, read_value
from vipd.sources.files import FileSource

TWO = """\
apiVersion: vipd/v1
services:
  - {name: a, address: 10.96.0.1, ports: [80/tcp], backends: [10.244.0.1]}
  - {name: bomb, address: 10.96.0.2, ports: [80/tcp], backends: [10.244.0.2]}
"""


class UnexpectedError(Exception):
    """What nobody expects."""


class Bomb:
    """Wraps a function so that it raises for the service `bomb` while it is armed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> None:
        self.armed = True
        self._real = getattr(module, name)
        monkeypatch.setattr(module, name, self)

    def __call__(self, *arguments: object, **named: object) -> object:
        if self.armed and any("bomb" in str(getattr(each, "name", "")) for each in arguments):
            raise UnexpectedError("boom")
        return self._real(*arguments, **named)


BOMB = service("bomb", "10.96.0.66")


def test_reading_one_service_names_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = native.read_service  # type: ignore[attr-defined]  # the name that the module calls

    def breaking(report: object, node: object, path: str, *others: object) -> object:
        if path == "services[1]":
            raise UnexpectedError("boom")
        return real(report, node, path, *others)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(native, "read_service", breaking)
    found = parse_declaration(TWO, "shop.yaml")
    (problem,) = found.problems
    told = "shop.yaml:4: internal error while reading this service: UnexpectedError: boom; please report it"
    assert str(problem) == told
    assert "Traceback" in problem.trace
    assert [each.name for each in found.services] == ["a"]


@pytest.mark.parametrize("part", ["read_tree", "conflicts_of", "is_kubernetes"])
def test_reading_never_raises(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, part, lambda *_: 1 / 0)
    assert "internal error" in str(parse_declaration(TWO, "shop.yaml").problems[0])


def test_a_file_that_cannot_be_read_for_no_known_reason_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bad", "good"):
        (tmp_path / f"{name}.yaml").write_text(TWO)
    files = FileSource(tmp_path, tmp_path / "kept")
    real = parse_declaration

    def breaking(text: str, path: str, written_by: str = "") -> Declaration:
        if "bad" in path:
            raise UnexpectedError("boom")
        return real(text, path, written_by=written_by)

    monkeypatch.setattr("vipd.sources.files.parse_declaration", breaking)
    assert files.scan()
    units = files.units()
    assert units[f"file:{tmp_path}/good.yaml"].candidate.ok
    (problem,) = units[f"file:{tmp_path}/bad.yaml"].candidate.problems
    told = "internal error while reading this file: UnexpectedError: boom; please report it"
    assert str(problem) == f"{tmp_path}/bad.yaml: {told}"
    assert not files.scan(), "the same problem is no change"
    monkeypatch.undo()
    monkeypatch.setattr("vipd.sources.files.RETRY_SECONDS", 0.0)
    assert files.scan(), "it is read again by itself"
    assert files.units()[f"file:{tmp_path}/bad.yaml"].candidate.ok


def test_a_key_of_etcd_that_cannot_be_read_for_no_known_reason_is_its_own_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vipd.sources.etcd.values.read_service_value", lambda *_, **__: 1 / 0)
    found = read_value(Layout("/vipd/"), "/vipd/services/a", "{}")
    assert isinstance(found, Declaration)
    assert "etcd:/vipd/services/a: internal error while reading this key" in str(found.problems[0])


def test_admission_of_one_service_refuses_its_unit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    Bomb(monkeypatch, address_policy, "_check_problems")
    units = {"file:/a": Unit(declared(DNS)), "file:/b": Unit(declared(BOMB, WEB), declared(WEB))}
    admitting = admission.Admission()
    policy = AddressPolicy()
    admitting.admit(admitting.update_units([units], policy))
    assert admitting.units["file:/a"].candidate.ok
    assert "internal error while admitting bomb: UnexpectedError: boom" in str(
        admitting.units["file:/b"].candidate.problems
    )
    assert [each.name for each in admitting.units["file:/b"].accepted.services] == ["web"]


def test_what_is_refused_already_is_asked_nothing_of_the_host() -> None:
    asked: list[object] = []

    def ask(check: object) -> tuple[str, ...]:
        asked.append(check)
        return ()

    text = TWO + "  - {name: c, address: 10.96.0.3, ports: [80/tcp], check: {type: exec}}\n"
    found = parse_declaration(text, "shop.yaml")
    assert not found.ok
    admission.admit_unit(Unit(found), AddressPolicy(check_problems=ask))
    assert asked == []
    admitting = admission.Admission()
    assert (
        admitting.checks_to_query(admitting.update_units([{"file:/a": Unit(found)}], AddressPolicy()))
        == set()
    )


@pytest.mark.parametrize("others", [0, 1, 7])
def test_a_unit_that_cannot_be_merged_keeps_its_accepted_version(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = Bomb(monkeypatch, catalog, "claims_of")
    monkeypatch.setattr(contest, "claims_of", bomb)
    units = {f"file:/{n}": Unit(declared(service(f"s{n}", f"10.97.0.{n}"))) for n in range(others)}
    known = declared(service("old", "10.96.0.66"))
    units["file:/bad"] = Unit(declared(BOMB), known)
    contained = Catalog()
    merged = contained.merge(units, units.keys())
    assert set(merged.services) == {"old", *(f"s{n}" for n in range(others))}
    assert set(merged.problems) == {"file:/bad"}
    assert "internal error while merging it with all others" in str(merged.problems["file:/bad"])
    assert contained.holds
    assert set(contained.merge(units, ()).services) == set(merged.services), "it stays so while that goes on"
    bomb.armed = False
    merged = contained.merge(units, ())
    assert "bomb" in merged.services
    assert "old" not in merged.services
    assert not merged.problems
    assert not contained.holds


def test_units_that_only_fail_together_cost_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    real = contest.conflicts_between

    def breaking(all_units: ConflictResolver, suspects: Iterable[Claim]) -> object:
        names = {each.name for part in all_units.remaining().values() for each in part.services}
        if {"dns", "web"} <= names:
            raise UnexpectedError("boom")
        return real(all_units, suspects)

    monkeypatch.setattr(catalog, "conflicts_between", breaking)
    units = {"file:/a": Unit(declared(DNS)), "file:/b": Unit(declared(WEB))}
    contained = Catalog()
    contained._apply_replacement = lambda *_: 1 / 0  # type: ignore[method-assign, assignment]  # it fails at first
    assert set(contained.merge(units, units.keys()).services) == {"dns"}


def test_a_merge_that_fails_halfway_loses_no_service_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = Bomb(monkeypatch, catalog, "claims_of")
    bomb.armed = False
    units = {"file:/a": Unit(declared(DNS, BOMB))}
    merging = Catalog()
    merging.merge(units, units.keys())
    units["file:/a"] = Unit(declared(WEB))
    bomb.armed = True
    merged = merging.merge(units, units.keys())
    assert set(merged.services) == {"web"}
    assert set(merged.dirty) == {"dns", "bomb", "web"}


def selected(monkeypatch: pytest.MonkeyPatch) -> Bomb:
    return Bomb(monkeypatch, changes, "select_backends")


def followed(monkeypatch: pytest.MonkeyPatch) -> Bomb:
    class Following(Bomb):
        def __call__(self, *arguments: object, **named: object) -> object:
            if self.armed and "bomb" in str(arguments[-1]):
                raise UnexpectedError("boom")
            return None

    return Following(monkeypatch, BackendStatusTracker, "follow")


def compiled(monkeypatch: pytest.MonkeyPatch) -> Bomb:
    class Updating(Bomb):
        def __call__(self, *arguments: object, **named: object) -> object:
            changes = arguments[-1]
            assert isinstance(changes, Mapping)
            if self.armed and any(key.service == "bomb" and f is not None for key, f in changes.items()):
                raise UnexpectedError("boom")
            return self._real(self.dataplane, changes)

        dataplane: FakeDataplane

    return Updating(monkeypatch, FakeDataplane, "update")


def planned(monkeypatch: pytest.MonkeyPatch) -> Bomb:
    class Planning(Bomb):
        dataplane: FakeDataplane

        async def __call__(self, *_: object, **__: object) -> DataplanePlan:
            if self.armed and any(key.service == "bomb" for key in self.dataplane._wanted):
                raise UnexpectedError("boom")
            plan: DataplanePlan = await self._real(self.dataplane)
            return plan

    return Planning(monkeypatch, FakeDataplane, "plan")


@pytest.mark.parametrize("arm", [selected, followed, compiled, planned])
def test_one_service_is_quarantined_and_all_others_go_through(
    arm: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bomb = arm(monkeypatch)  # type: ignore[operator]  # one of the above
    others = [service(f"s{n}", f"10.97.0.{n}") for n in range(1, 8)]

    async def story(isolated: IsolatedReconciler) -> None:
        bomb.dataplane = isolated.dataplane
        assert await isolated.settled(isolated.reconciler.request_sync())
        expected = {each.name for each in others} | ({"bomb"} if arm is followed else set())
        assert isolated.names() == expected
        why = isolated.reconciler.progress.quarantined["bomb"]
        assert "internal error while" in why
        assert "UnexpectedError: boom; please report it" in why
        assert isolated.reconciler.progress.state == "degraded"
        isolated.source.candidate = declared(*others, BOMB, WEB)
        assert await isolated.settled(isolated.reconciler.request_sync())
        assert "web" in isolated.names(), "another service's change goes through"
        await asyncio.sleep(40)
        assert caplog.text.count("Traceback") == caplog.text.count("bomb is quarantined") == 1
        bomb.armed = False
        await asyncio.sleep(70)
        assert isolated.names() == {"bomb", "web", *(each.name for each in others)}, "without help"
        assert isolated.reconciler.progress.state == "in-sync"

    with caplog.at_level(logging.ERROR):
        run_story_simulated(story, *others, BOMB)


@pytest.mark.slow
@pytest.mark.nightly(each_time="planned")
@pytest.mark.parametrize("arm", [selected, followed, compiled, planned])
def test_a_day_of_it_costs_one_line_in_the_log(
    arm: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bomb = arm(monkeypatch)  # type: ignore[operator]  # one of the above

    async def story() -> IsolatedReconciler:
        isolated = IsolatedReconciler(DNS, BOMB)
        bomb.dataplane = isolated.dataplane
        async with looping(isolated):
            for minute in range(24 * 60):
                if minute % 10 == 0:  # others change meanwhile
                    changed = service(
                        "dns", "10.96.0.10", "", 1, f"10.244.{minute // 250}.{minute % 250 + 1}"
                    )
                    isolated.source.candidate = declared(changed, BOMB)
                    isolated.reconciler.request_sync()
                await asyncio.sleep(60)
        return isolated

    with caplog.at_level(logging.WARNING):
        isolated = simulate(story())
    assert set(isolated.reconciler.progress.quarantined) == {"bomb"}
    assert isolated.reconciler.progress.state == "degraded"
    told = [record for record in caplog.records if record.name.startswith("vipd")]
    assert len(told) <= 2, "the service, and once that it is looked for"


def test_a_quarantined_service_keeps_its_last_good_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = planned(monkeypatch)
    bomb.armed = False

    def endpoints(isolated: IsolatedReconciler) -> set[str]:
        return {
            endpoint.address
            for forwarding in isolated.dataplane.kernel.values()
            if forwarding.key.service == "bomb"
            for endpoint in forwarding.endpoints
        }

    async def story(isolated: IsolatedReconciler) -> None:
        bomb.dataplane = isolated.dataplane  # type: ignore[attr-defined]  # of its subclass
        assert await isolated.settled(isolated.reconciler.request_sync())
        before = endpoints(isolated)
        assert before

        def wrong(key: ForwardingKey, forwarding: Forwarding) -> bool:
            return key.service == "bomb" and any(e.address == "10.244.9.9" for e in forwarding.endpoints)

        real = bomb._real

        async def breaking(dataplane: FakeDataplane) -> DataplanePlan:
            if any(wrong(*each) for each in dataplane._wanted.items()):
                raise UnexpectedError("boom")
            plan: DataplanePlan = await real(dataplane)
            return plan

        monkeypatch.setattr(FakeDataplane, "plan", breaking)
        changed: Service = service("bomb", "10.96.0.66", "", 1, "10.244.9.9")
        isolated.source.candidate = declared(changed, DNS)
        assert await isolated.settled(isolated.reconciler.request_sync())
        assert "bomb" in isolated.reconciler.progress.quarantined
        assert endpoints(isolated) == before
        isolated.source.candidate = declared(BOMB, DNS)
        assert await isolated.settled(isolated.reconciler.request_sync())
        assert not isolated.reconciler.progress.quarantined, "another version is tried at once"

    run_story_simulated(story, BOMB)


class Failing(Observer):
    """An observer of which every call raises while it is broken."""

    broken = True

    def host_changed(self, addresses: frozenset[str]) -> None:
        self.look()

    def overrides_changed(self, targets: frozenset[OverrideTarget]) -> None:
        self.look()

    def health_changed(self, targets: frozenset[CheckTarget]) -> None:
        self.look()

    def services_changed(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        self.look()

    def applied(self, wrote: bool, families: Collection[Family] = tuple(Family)) -> None:
        self.look()

    def stepped(self) -> None:
        self.look()

    def look(self) -> None:
        if self.broken:
            raise UnexpectedError("boom")


def test_an_observer_that_fails_is_named_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        observer = Failing()
        isolated.reconciler.observers.add(observer)
        for _ in range(50):
            assert await isolated.settled(isolated.reconciler.request_sync())
        assert isolated.names() == {"dns"}
        assert "Failing" in " ".join(isolated.reconciler.containment.warnings)
        assert caplog.text.count("Traceback") <= 4, "once for each of its calls"
        observer.broken = False
        isolated.source.candidate = declared(WEB)
        assert await isolated.settled(isolated.reconciler.request_sync())
        assert [w for w in isolated.reconciler.containment.warnings if "addresses" not in w] == []

    run_story_simulated(story, DNS)


def test_a_source_that_fails_keeps_its_units_and_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        assert await isolated.settled(isolated.reconciler.request_sync())
        monkeypatch.setattr(isolated.source, "units", lambda: 1 / 0)
        monkeypatch.setattr(isolated.source, "faults", lambda: 1 / 0)
        assert await isolated.settled(isolated.reconciler.request_sync())
        assert isolated.names() == {"dns"}
        assert "nowhere: internal error while reading its units" in " ".join(
            isolated.reconciler.containment.warnings
        )
        monkeypatch.undo()
        isolated.source.candidate = declared(WEB)
        assert await isolated.settled(isolated.reconciler.request_sync())
        assert isolated.names() == {"web"}
        assert isolated.reconciler.containment.warnings == ()

    run_story_simulated(story, DNS)
