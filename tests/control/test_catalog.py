from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.examples import examples
from tests.model.samples import broken, declared, service, unit
from vipd.control.catalog import Catalog, MergeResult, merge
from vipd.declaration.conflicts import find_conflicts
from vipd.declaration.problems import Declaration
from vipd.declaration.unit import EMPTY_DECLARATION, Unit
from vipd.model.service import Backend, ExternalAddress, Frontend, Protocol, Service, ServicePort

UDP = Protocol.UDP

A, B = "file:/d/a.yaml", "file:/d/b.yaml"
PATHS = {A: "/d/a.yaml", B: "/d/b.yaml"}
DNS = "10.96.0.10"


def adopt(units: Mapping[str, Unit], merged: MergeResult) -> dict[str, Unit]:
    """The units after a merge, each chosen version accepted, as the sources do it."""
    return {name: Unit(u.candidate, merged.chosen[name]) for name, u in units.items()}


def test_units_without_conflict_all_serve() -> None:
    units = {A: unit(declared(service("a", DNS))), B: unit(declared(service("b", "10.96.0.11")))}
    merged = merge(units)
    assert set(merged.services) == {"a", "b"}
    assert merged.problems == {}


@pytest.mark.parametrize(("incumbent", "newcomer"), [(A, B), (B, A)])
def test_an_incumbent_keeps_its_frontend_whichever_file_sorts_first(incumbent: str, newcomer: str) -> None:
    held = declared(service("old", DNS, PATHS[incumbent], 7))
    units = {
        incumbent: unit(held, held),
        newcomer: unit(declared(service("new", DNS, PATHS[newcomer], 4), service("more", "10.96.0.99"))),
    }
    merged = merge(units)
    assert set(merged.services) == {"old"}, "the newcomer is refused as a whole unit"
    assert set(merged.problems) == {newcomer}
    (problem,) = merged.problems[newcomer]
    assert (problem.file, problem.line) == (PATHS[newcomer], 4)
    assert f"{PATHS[incumbent]}:7" in problem.what
    assert f"{DNS}:53/udp" in problem.what


def test_a_taken_name_is_refused_too() -> None:
    held = declared(service("dns", DNS, PATHS[A], 2))
    merged = merge({A: unit(held, held), B: unit(declared(service("dns", "10.96.0.11", PATHS[B], 9)))})
    assert merged.services["dns"].addresses == (DNS,)
    (problem,) = merged.problems[B]
    assert "dns" in problem.what
    assert f"{PATHS[A]}:2" in problem.what


def test_a_conflict_is_told_in_the_words_of_a_check_of_the_files_and_once() -> None:
    name = f"{DNS}:53/udp"
    held, grabbed = service(name, DNS, PATHS[A], 7), service(name, DNS, PATHS[B], 4)
    merged = merge({A: unit(declared(held), declared(held)), B: unit(declared(grabbed))})
    assert merged.problems[B] == find_conflicts([held, grabbed])
    assert str(merged.problems[B][0]) == (
        f"{PATHS[B]}:4: {name} already belongs to the service at {PATHS[A]}:7; "
        "one address, port and protocol can serve once"
    )
    other = service("other", DNS, PATHS[B], 4)
    merged = merge({A: unit(declared(held), declared(held)), B: unit(declared(other))})
    assert merged.problems[B] == find_conflicts([held, other])


def test_a_refused_unit_goes_on_with_its_last_accepted_version() -> None:
    held = declared(service("old", DNS))
    before = declared(service("b", "10.96.0.11"))
    after = declared(service("b", "10.96.0.11", "", 1, "10.244.9.9"), service("grab", DNS))
    merged = merge({A: unit(held, held), B: unit(after, before)})
    assert merged.chosen[B] is before
    assert merged.services["b"].backends == before.services[0].backends


def test_a_broken_candidate_keeps_the_accepted_version_and_tells_its_problems() -> None:
    held = declared(service("old", DNS))
    merged = merge({A: unit(broken(PATHS[A]), held)})
    assert set(merged.services) == {"old"}
    assert merged.problems == {A: broken(PATHS[A]).problems}


def test_two_newcomers_are_decided_by_unit_name_and_not_by_the_order_given() -> None:
    first, second = unit(declared(service("a", DNS))), unit(declared(service("b", DNS)))
    for units in ({A: first, B: second}, {B: second, A: first}):
        assert set(merge(units).services) == {"a"}


@pytest.mark.parametrize("source_first", [True, False], ids=["source saved first", "target saved first"])
@pytest.mark.parametrize(("source", "target"), [(A, B), (B, A)])
def test_moving_a_service_between_files_ends_right_in_either_order(
    source: str, target: str, source_first: bool
) -> None:
    full, empty = declared(service("dns", DNS)), declared()
    units = {source: unit(full, full), target: unit(empty, empty)}
    saves = [(source, declared()), (target, declared(service("dns", DNS, PATHS[target])))]
    for name, candidate in saves if source_first else reversed(saves):
        units[name] = Unit(candidate, units[name].accepted)
        units = adopt(units, merge(units))
    merged = merge(units)
    assert merged.problems == {}
    assert merged.services["dns"].origin.path == PATHS[target]


def test_two_files_may_swap_their_services_in_one_step() -> None:
    x, y = declared(service("x", DNS)), declared(service("y", "10.96.0.11"))
    merged = merge({A: unit(y, x), B: unit(x, y)})
    assert merged.problems == {}
    assert merged.chosen[A] is y


def test_a_unit_sent_back_takes_its_claims_back_from_a_newcomer() -> None:
    # a gave up DNS but asks for what c has; so a goes back, and b cannot have DNS.
    c = declared(service("c", "10.96.0.50"))
    a_before, a_now = declared(service("a", DNS)), declared(service("a", "10.96.0.50"))
    merged = merge({A: unit(a_now, a_before), B: unit(declared(service("b", DNS))), "file:/d/c": unit(c, c)})
    assert {s.name for s in merged.services.values()} == {"a", "c"}
    assert set(merged.problems) == {A, B}


@pytest.mark.timeout(10, method="signal")
def test_accepted_versions_that_conflict_do_not_hang_the_merge() -> None:
    # The store was broken, a file took over its frontend, then the store was mended: both are accepted.
    file, store = declared(service("web", DNS, PATHS[A])), declared(service("dns", DNS))
    merged = merge({"cli": unit(store, store), A: unit(file, file)})
    assert len(merged.services) == 1
    assert merged.problems


@pytest.mark.slow
def test_an_edited_file_beside_its_copy_is_merged_in_reasonable_time() -> None:
    def many(path: str, number: int) -> Declaration:
        return declared(*(service(f"s{n}", f"10.97.{n // 250}.{n % 250}", path, n) for n in range(number)))

    def seconds(number: int) -> float:
        """CPU time, without a search for garbage: that would cost what all other tests have left."""
        held, other = many(PATHS[B], number), many(PATHS[A], number)
        gc.disable()
        began = time.thread_time()
        merged = merge({B: unit(held, held), A: unit(other)})
        took = time.thread_time() - began
        gc.enable()
        assert merged.chosen[A] is EMPTY_DECLARATION
        return took

    few, lot = (min(seconds(number) for _ in range(3)) for number in (250, 4000))
    # 16 times as many cost 25 times as much; if each conflict looked through every service, 256 times.
    assert lot < 80 * few


NAMES = st.sampled_from(["file:/d/a", "file:/d/b", "file:/d/c", "cli"])
ADDRESSES = st.sampled_from([f"10.96.0.{n}" for n in range(1, 6)])
BACKENDS = st.one_of(st.just("10.244.0.5"), ADDRESSES)
"""One may be a service's address: then it cannot be a backend's."""
SERVICES = st.builds(service, st.sampled_from("abcde"), ADDRESSES, NAMES, st.just(1), BACKENDS).filter(
    lambda made: made.backends[0].address not in made.addresses
)


def coherent(services: list[Service], *, roles: bool = False) -> bool:
    """No name and no frontend twice; with `roles` no address in two roles, as the parser sees to it within
    one unit."""
    vips = {address for s in services for address in s.addresses}
    if roles and any(backend.address in vips for s in services for backend in s.backends):
        return False
    names = [s.name for s in services]
    frontends = [f for s in services for f in s.frontends()]
    return len(set(names)) == len(names) and len(set(frontends)) == len(frontends)


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Declaration]]:
    """Some saves of some units, one set of candidates after the other."""
    one = (
        st.lists(SERVICES, max_size=3)
        .filter(lambda services: coherent(services, roles=True))
        .map(lambda s: declared(*s))
    )
    candidate = st.one_of(one, st.just(broken("/d/x")))
    return draw(st.lists(st.dictionaries(NAMES, candidate, max_size=4), min_size=1, max_size=5))


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(histories())
def test_whatever_is_saved_nothing_is_claimed_twice_and_incumbents_stay(
    history: list[dict[str, Declaration]],
) -> None:
    units: dict[str, Unit] = {}
    for saves in history:
        accepted = {name: u.accepted for name, u in units.items()}
        for name, candidate in saves.items():
            units[name] = Unit(candidate, accepted.get(name, EMPTY_DECLARATION))
        merged = merge(units)
        reordered = merge(dict(reversed(units.items())))
        assert merged.services == reordered.services
        assert {n: set(p) for n, p in merged.problems.items()} == {
            n: set(p) for n, p in reordered.problems.items()
        }
        everything = [s for part in merged.chosen.values() for s in part.services]
        assert coherent(everything)
        frontends: set[Frontend] = {f for s in merged.services.values() for f in s.frontends()}
        assert len(frontends) == sum(len(s.frontends()) for s in everything)
        for name, u in units.items():
            assert merged.chosen[name] is (u.accepted if name in merged.problems else u.candidate)
        units = adopt(units, merged)


@settings(max_examples=examples(100), deadline=None)
@given(histories())
def test_a_catalog_that_is_told_what_changes_comes_to_the_same(
    history: list[dict[str, Declaration]],
) -> None:
    catalog, units, served = Catalog(), dict[str, Unit](), dict[str, Service]()
    for saves in history:
        before = dict(units)
        gone = [name for name in units if name not in saves and len(saves) % 2]
        for name in gone:  # a file that was deleted, now and then
            del units[name]
        for name, candidate in saves.items():
            units[name] = Unit(candidate, units[name].accepted if name in units else EMPTY_DECLARATION)
        changed = {n for n in before.keys() | units.keys() if before.get(n) is not units.get(n)}
        merged, expected = catalog.merge(units, changed), merge(units)
        assert dict(merged.services) == dict(expected.services)
        assert {n: id(d) for n, d in merged.chosen.items() if d.services} == {
            n: id(d) for n, d in expected.chosen.items() if d.services
        } or expected.losers
        assert merged.problems == expected.problems
        names = served.keys() | merged.services.keys()
        assert {n for n in names if served.get(n) is not merged.services.get(n)} <= set(merged.dirty)
        served = dict(merged.services)
        vips = {address for s in served.values() for address in s.addresses}
        assert {s.name for s in served.values() if catalog.backends_at_vips(s)} == {
            s.name for s in served.values() if not vips.isdisjoint(b.address for b in s.backends)
        }
        units = adopt(units, merged)
        catalog.merge(units, set(units))


@pytest.mark.parametrize("names", [(A, B), (B, A)])
def test_who_names_a_virtual_ip_as_a_backend_is_refused(names: tuple[str, str]) -> None:
    vip = declared(service("dns", DNS, PATHS[names[0]], 7, "10.244.0.5", "10.244.0.6"))
    user = declared(service("web", "10.96.0.99", PATHS[names[1]], 4, "10.244.0.7", DNS))
    units = {names[0]: unit(vip, vip), names[1]: unit(user)}
    merged = merge(units)
    assert list(merged.services) == ["dns"]
    (problem,) = merged.problems[names[1]]
    assert merged.problems == {names[1]: find_conflicts([*vip.services, *user.services])}
    assert str(problem) == (
        f"{PATHS[names[1]]}:4: web: the backend {DNS} is a virtual IP, that of dns at {PATHS[names[0]]}:7: "
        "a packet is translated only once; name the backends of dns instead: 10.244.0.5, 10.244.0.6"
    )
    units[names[0]] = unit(declared(), declared())
    assert merge(units).problems == {}


@pytest.mark.parametrize("first", ["user", "neither"])
@pytest.mark.parametrize("names", [(A, B), (B, A)])
def test_a_backend_keeps_nobody_from_its_address(names: tuple[str, str], first: str) -> None:
    vip = declared(service("dns", DNS, PATHS[names[0]], 7, "10.244.0.5"))
    user = declared(service("web", "10.96.0.99", PATHS[names[1]], 4, "10.244.0.7", DNS))
    catalog = Catalog()
    if first == "user":
        catalog.merge({names[1]: unit(user)}, {names[1]})
        units = {names[0]: unit(vip), names[1]: unit(user, user)}
        merged = catalog.merge(units, {names[0]})
        assert merged.dirty == ("dns",)
    else:
        units = {names[0]: unit(vip), names[1]: unit(user)}
        merged = catalog.merge(units, set(units))
    assert set(merged.services) == {"dns", "web"}
    assert merged.problems == {}
    assert list(merged.taken) == ["web"]
    assert catalog.backends_at_vips(user.services[0]) == [DNS]
    (warning,) = catalog.warnings()
    assert warning.startswith(f"{DNS}: both a virtual IP and the address of a backend of another service")
    gone = catalog.merge({names[1]: units[names[1]]}, {names[0]})
    assert list(gone.taken) == ["web"]
    assert not list(catalog.warnings())


def test_named_future_addresses_cost_a_virtual_ip_nothing() -> None:
    """Thousands of addresses that others name as backends are in nobody's way."""
    named = declared(*(service(f"s{n}", f"10.97.0.{n}", "", 1, f"10.99.0.{n}") for n in range(1, 200)))
    units, catalog = {A: unit(named, named)}, Catalog()
    catalog.merge(units, set(units))
    for n in range(1, 4):
        units[f"file:/d/{n}"] = unit(declared(service(f"v{n}", f"10.99.0.{n}")))
        merged = catalog.merge(units, {f"file:/d/{n}"})
        assert merged.problems == {}
        assert (merged.dirty, list(merged.taken)) == ((f"v{n}",), [f"s{n}"])


def test_fallbacks_count_and_external_addresses_do_not() -> None:
    vip, user = service("dns", DNS, PATHS[A]), service("web", "10.96.0.99", PATHS[B])
    spare = replace(user, fallback=(Backend(DNS),))
    outside = replace(vip, addresses=(), external_addresses=(ExternalAddress(DNS),))
    for one, other, refused in ((vip, spare, True), (outside, spare, False), (vip, user, False)):
        units = {A: unit(declared(one), declared(one)), B: unit(declared(other))}
        assert bool(merge(units).problems) is refused
        assert bool(find_conflicts([one, other])) is refused


def test_many_users_of_an_address_are_decided_in_one_round() -> None:
    vips = {f"file:/d/v{n}": declared(service(f"v{n}", DNS)) for n in range(2)}
    vips["file:/d/v1"] = declared(replace(vips["file:/d/v1"].services[0], ports=(ServicePort(54, UDP),)))
    users = {f"file:/d/x{n}": declared(service(f"x{n}", f"10.97.0.{n}", "", 1, DNS)) for n in range(250)}
    units = {name: unit(each, each) for name, each in vips.items()}
    merged = merge({**units, **{name: unit(each) for name, each in users.items()}})
    assert set(merged.services) == {"v0", "v1"}
    assert all(len(found) == 1 for found in merged.problems.values())
    assert set(merged.problems) == set(users)


@pytest.mark.parametrize("contested", [False, True])
def test_a_change_looks_at_nothing_else(monkeypatch: pytest.MonkeyPatch, contested: bool) -> None:
    """Not even while a unit is refused for a conflict with others."""
    asked: list[str] = []
    frontends = Service.frontends

    def noted(of: Service) -> tuple[Frontend, ...]:
        asked.append(of.name)
        return frontends(of)

    many = [service(f"s{n}", f"10.97.0.{n}") for n in range(1, 200)]
    held = declared(*many)
    units = {A: unit(held, held), B: unit(declared(service("dns", DNS)))}
    if contested:
        units["etcd:late"] = unit(declared(service("late", "10.97.0.9", "", 1, "10.244.9.8")))
    catalog = Catalog()
    first = catalog.merge(units, set(units))
    assert (set(first.problems), "late" in first.services) == ({"etcd:late"} if contested else set(), False)
    new = service("s7", "10.97.0.7", "", 1, "10.244.9.9")
    units[A] = unit(declared(*[new if s.name == "s7" else s for s in many]))
    monkeypatch.setattr(Service, "frontends", noted)
    merged = catalog.merge(units, {A})
    assert merged.dirty == ("s7",)
    assert merged.services["s7"] is new
    assert set(asked) == {"s7"}
    assert merged.problems == first.problems
    units[A] = unit(declared(*[s for s in many if s.name != "s9"]))
    assert ("late" in catalog.merge(units, {A}).services) is contested, "what it lost to is gone"


def calls(units: Mapping[str, Unit]) -> int:
    """How many calls of Python a merge of these units makes."""
    counted = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        merge(units)
    finally:
        sys.setprofile(None)
    return counted


def one_by_one(number: int) -> dict[str, Unit]:
    """Each newcomer in a unit of its own wants what an incumbent has."""
    held = {f"file:/a/{n}": declared(service(f"a{n}", f"10.97.{n >> 8}.{n & 255}")) for n in range(number)}
    new = {f"file:/b/{n}": declared(service(f"b{n}", f"10.97.{n >> 8}.{n & 255}")) for n in range(number)}
    return {**{n: unit(d, d) for n, d in held.items()}, **{n: unit(d) for n, d in new.items()}}


def one_after_the_other(number: int) -> dict[str, Unit]:
    """Each unit wants what the next one has, and the last one what it cannot have."""
    versions = [declared(service(f"s{n}", f"10.97.{n >> 8}.{n & 255}")) for n in range(number + 1)]
    found = {f"file:/{n:06}": unit(versions[n + 1], versions[n]) for n in range(number)}
    return {**found, "file:/last": unit(versions[number], versions[number])}


def roles(number: int) -> dict[str, Unit]:
    """Many services at one address, which many others have as a backend."""
    vips = {
        f"file:/b/{n}": declared(replace(service(f"v{n}", DNS), ports=(ServicePort(n + 1, UDP),)))
        for n in range(number)
    }
    users = {
        f"file:/a/{n}": declared(service(f"u{n}", f"10.97.{n >> 8}.{n & 255}", "", 1, DNS))
        for n in range(number)
    }
    return {name: unit(each, each) for name, each in (vips | users).items()}


def one_unit_loses_piece_by_piece(number: int) -> dict[str, Unit]:
    """As `one_after_the_other`, but each that falls back takes a service from the same unit."""
    chain = one_after_the_other(number)
    own = [
        service(f"x{n}", f"10.98.{n >> 8}.{n & 255}", "", 1, f"10.97.{n >> 8}.{n & 255}")
        for n in range(number)
    ]
    return {**chain, "file:/x": unit(declared(*own), declared(*own))}


@pytest.mark.parametrize(
    "shape", [one_by_one, one_after_the_other, roles, one_unit_loses_piece_by_piece], ids=lambda s: s.__name__
)
def test_a_merge_costs_what_is_claimed_however_much_of_it_is_contested(
    shape: Callable[[int], dict[str, Unit]],
) -> None:
    few, lot = (calls(shape(number)) for number in (50, 400))
    assert lot < 10 * few, "eight times as many cost eight times as much, not 64 times"
