"""What single units may have but all together may not: endpoints, registered backends, problems, keys."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.model.samples import service
from vipd.control.address_policy import AddressPolicy
from vipd.control.admission import Admission
from vipd.control.registrations import Registrar
from vipd.declaration.problems import Declaration, Problem, problem_texts
from vipd.declaration.unit import EMPTY_DECLARATION, Unit
from vipd.model import limits
from vipd.model.service import Backend, Protocol, RegisteredBackend, Service, ServicePort
from vipd.sources.etcd.keys import EtcdKeys, KeyWrite, StoreChange
from vipd.sources.etcd.values import Layout, read_registration, read_service_value, read_value
from vipd.sources.removal_guard import RemovalGuard
from vipd.sources.store import StoreError, StoreSource

LAYOUT = Layout("/vipd/v1/")


def sized(number: int, backends: int, ports: int = 1) -> Service:
    """With one address, so that its size is its ports times one more than its backends."""
    return replace(
        service(f"s{number}", f"10.96.0.{number}"),
        addresses=(f"10.96.0.{number}",),
        registrations=True,
        ports=tuple(ServicePort(80 + port, Protocol.TCP) for port in range(ports)),
        backends=tuple(Backend(f"172.16.{i >> 8}.{i & 255}") for i in range(backends)),
    )


def fresh(number: int, backends: int) -> Unit:
    return Unit(Declaration((sized(number, backends),)))


def taken(unit: Unit) -> Unit:
    return Unit(unit.candidate, unit.candidate)


class Admitted:
    def __init__(self) -> None:
        self.admission, self.given = Admission(), dict[str, Unit]()

    def now(self, **units: Unit | None) -> dict[str, str]:
        """The first problem of each unit, or what serves of it."""
        for name, unit in units.items():
            self.given.pop(name, None)
            if unit is not None:
                self.given[name] = unit
        self.admission.admit(self.admission.update_units([dict(self.given)], AddressPolicy()))
        return {
            name: "" if unit.candidate.ok else unit.candidate.problems[0].what
            for name, unit in self.admission.units.items()
        }


def test_endpoints_of_all_units_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_TOTAL_SIZE", 100)
    all_units = Admitted()
    assert all_units.now(b=fresh(1, 49), c=fresh(2, 49)) == {"b": "", "c": ""}
    all_units.now(b=taken(all_units.given["b"]), c=taken(all_units.given["c"]))
    found = all_units.now(a=fresh(3, 0))
    assert found["a"] == "its services have 1 endpoints, and there is room for 0 beside all others"
    assert found["b"] == found["c"] == "", "what serves goes on serving"
    # One that grows keeps what it had, and one that shrinks makes room, without being asked for.
    grown = Unit(Declaration((sized(2, 50),)), all_units.given["c"].accepted)
    assert "room for 50" in all_units.now(c=grown)["c"]
    assert all_units.admission.units["c"].accepted.services
    assert all_units.now(b=None)["a"] == ""


def test_units_of_a_time_without_limits_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_TOTAL_SIZE", 100)
    all_units = Admitted()
    all_units.now(**{f"u{i}": taken(fresh(i, 59)) for i in range(5)})
    serving = [u.accepted for u in all_units.admission.units.values() if u.accepted is not EMPTY_DECLARATION]
    assert len(serving) == 3


def registered(network: str, number: int) -> tuple[RegisteredBackend, ...]:
    return tuple(RegisteredBackend(f"etcd:{i}", Backend(f"{network}.{i}", 80)) for i in range(number))


def test_registered_backends_of_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SERVICE_ENDPOINTS", 20)
    registrar, declared = Registrar(), sized(1, 3, ports=2)
    old = registered("172.17.1", 7)
    registrar.set_registrations({"s1": old}, AddressPolicy())
    assert len(registrar.with_registered(declared).backends) == 10
    assert registrar.warnings() == []
    flood = registered("172.17.0", 200)
    registrar.set_registrations({"s1": (*flood, *old)}, AddressPolicy())
    made = registrar.with_registered(declared)
    assert {b.address for b in made.backends[3:]} == {each.backend.address for each in old}, (
        "what serves stays"
    )
    (warning,) = registrar.warnings()
    assert warning.startswith("200 registered backends of s1 are left out: ")
    registrar.set_registrations({}, AddressPolicy())
    assert registrar.with_registered(declared) is declared
    assert registrar.warnings() == []


def test_registered_backends_of_a_service_with_many_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ADDRESS_ENDPOINTS", 100)
    registrar = Registrar()
    registrar.set_registrations({"s1": registered("172.17.1", 30)}, AddressPolicy())
    many = replace(sized(1, 3), addresses=tuple(f"10.96.1.{n}" for n in range(1, 11)))
    assert len(registrar.with_registered(many).backends) == 10
    assert registrar.warnings()[0].startswith("23 registered backends of s1 are left out: ")


def test_registered_backends_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_TOTAL_SIZE", 50)
    registrar = Registrar()
    found = registered("172.17.0", 30)
    registrar.set_registrations({"s1": found, "s2": found}, AddressPolicy())
    assert len(registrar.with_registered(sized(1, 0)).backends) == 30
    assert len(registrar.with_registered(sized(2, 0)).backends) == 20
    registrar.remove("s1")
    assert len(registrar.with_registered(sized(2, 1)).backends) == 31


def keys() -> EtcdKeys:
    return EtcdKeys(LAYOUT, RemovalGuard(50), lambda _: None)


def change(values: dict[str, str], revision: int = 1) -> StoreChange:
    written = [
        KeyWrite(key, value, revision + at, read_value(LAYOUT, key, value))
        for at, (key, value) in enumerate(values.items())
    ]
    return StoreChange("c", revision + len(values), tuple(written))


def test_of_very_many_registrations_the_oldest_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BACKENDS", 10)
    known = keys()
    known.apply(change({f"{LAYOUT.backends}a/10.9.0.{i}:80": "" for i in range(10)}), 0.0)
    before = known.registrations["a"]
    known.apply(change({f"{LAYOUT.backends}a/10.1.0.{i}:80": "" for i in range(100)}, 50), 0.0)
    assert known.registrations["a"] == before


def test_ten_thousand_registrations_at_once_are_listed_once() -> None:
    values = {f"{LAYOUT.backends}a/10.9.{i >> 8}.{i & 255}:80": "" for i in range(10_000)}
    at_once, known = change(values), keys()
    began = time.thread_time()
    known.apply(at_once, 0.0)
    assert len(known.registrations["a"]) == 10_000
    assert time.thread_time() - began < 5  # a tenth of a second is usual, and it was half a minute


def test_problems_of_very_many_keys_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ALL_PROBLEMS", 50)
    known = keys()
    bad = "\n".join(f"k{i}: 1" for i in range(20))
    known.apply(change({f"{LAYOUT.services}s{i}": bad for i in range(100)}), 0.0)
    numbers = [len(unit.candidate.problems) for unit in known.units.values()]
    assert min(numbers) == 2
    assert sum(numbers) < 300
    known.apply(change({f"{LAYOUT.services}s{i}": "" for i in range(100)}, 500), 0.0)
    known.apply(change({f"{LAYOUT.services}s1": bad}, 900), 0.0)
    assert len(known.units["etcd:/vipd/v1/services/s1"].candidate.problems) == 2


def test_problems_of_all_units_in_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vipd.declaration.problems.ALL_PROBLEMS", 3)
    found = problem_texts(Problem("a", i, "", "x") for i in range(5))
    assert found == ["a: x", "a:1: x", "a:2: x", "and 2 more problems"]


@pytest.mark.parametrize("more", [0, 1])
def test_values_in_etcd(more: int) -> None:
    text = "address: 10.96.0.1\nports: 80\n#"
    text += "\N{SNOWMAN}" * ((limits.ETCD_SERVICE_BYTES - len(text)) // 3)
    text += "x" * (limits.ETCD_SERVICE_BYTES - len(text.encode()) + more)
    found = read_service_value("/vipd/v1/services/a", "a", text)
    assert found.ok is not bool(more)
    registered = "weight: 2\n#" + "x" * (limits.ETCD_SMALL_VALUE_BYTES - 11 + more)
    where = read_registration("k", "a/10.0.0.1:80", registered)
    assert isinstance(where, tuple) is not bool(more)


def test_no_two_keys_are_the_same_to_vipd() -> None:
    """A byte 0xff and the text `\\xff` were one key once, and every host listed etcd anew all the time."""
    raw = [b"\xff", rb"\xff", b"\\udcff", b"\xed\xb3\xbf", "\xff".encode(), b"\\", b"\\\\", b"\xc3"]
    texts = {key.decode(errors="surrogateescape") for key in raw}
    known = keys()
    known.apply(change({f"{LAYOUT.services}{text}": "" for text in texts}), 0.0)
    assert known.count(LAYOUT.services) == len(known.units) == len(raw)


def test_the_store_takes_no_more_than_it_can_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StoreSource(tmp_path / "services.yaml")
    for name, most, kind in (("SERVICES", 1, "services"), ("MAX_UNIT_SIZE", 5, "endpoints")):
        with monkeypatch.context() as patch:
            patch.setattr(limits, name, most)
            store.save({"s1": sized(1, 4)})
            with pytest.raises(StoreError, match=f"the store would have .* {kind}: {most} are the most"):
                store.save({"s1": sized(1, 4), "s2": sized(2, 4)})
            assert list(store.services) == ["s1"]
    monkeypatch.setattr(limits, "FILE_BYTES", 300)
    with pytest.raises(StoreError, match="bytes: 300 are the most"):
        store.save({"s1": sized(1, 40)})
    again = StoreSource(tmp_path / "services.yaml")
    again.load()
    assert again.services == store.services
