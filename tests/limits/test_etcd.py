"""What etcd may hold all together: registered backends, keys, their problems and their sizes."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.samples import service
from vipd.control.address_policy import AddressPolicy
from vipd.control.registrations import Registrar
from vipd.declaration.bounded_json import read_json
from vipd.model import limits
from vipd.model.service import Backend, Protocol, RegisteredBackend, Service, ServicePort
from vipd.sources.etcd.client import KeyValue
from vipd.sources.etcd.fleet import read_override
from vipd.sources.etcd.keys import EtcdKeys, StoreChange
from vipd.sources.etcd.leases import read_report
from vipd.sources.etcd.values import Layout, read_registration, read_service_value, read_value
from vipd.sources.removal_guard import RemovalGuard

LAYOUT = Layout("/vipd/v1/")


def sized(number: int, backends: int, ports: int = 1) -> Service:
    """With one address, so that its size is its ports times one more than its backends."""
    return replace(
        service(f"s{number}", f"10.96.0.{number}"),
        registrations=True,
        ports=tuple(ServicePort(80 + port, Protocol.TCP) for port in range(ports)),
        backends=tuple(Backend(f"172.16.{i >> 8}.{i & 255}") for i in range(backends)),
    )


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
    written = {
        KeyValue(key, value, revision + at): read_value(LAYOUT, key, value)
        for at, (key, value) in enumerate(values.items())
    }
    return StoreChange("c", revision + len(values), written)


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


HOSTILE = ["[" * 100_000, '{"revision": ' + "[" * 500 + "]" * 500 + "}", '{"revision": ' + "1" * 4000 + "}"]


@pytest.mark.parametrize("text", [*HOSTILE, " " * limits.ETCD_SMALL_VALUE_BYTES + "{}"])
def test_what_others_write_to_etcd_breaks_nobody(text: str) -> None:
    report, fault = read_report(text)
    assert fault.startswith("its report cannot be read: ")
    assert report["revision"] == 0
    assert isinstance(read_override(text), str)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.slow
@given(values, st.booleans())
def test_whatever_is_within_the_limits_is_read_as_it_is(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert read_json(text, 10**6) == json.loads(text)
    assert read_json(text.encode(errors="surrogatepass"), 10**6) == json.loads(text)
