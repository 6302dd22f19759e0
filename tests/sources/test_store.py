from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.declaration.strategies import PATIENT, services
from tests.lab.examples import examples
from tests.model.samples import HEAD, block, service
from vipd.declaration.native import format_service, parse_declaration
from vipd.model.service import Affinity, Backend, Masquerade, Origin, Protocol, Service, ServicePort
from vipd.sources import store as store_module
from vipd.sources.store import STORE_UNIT, StoreError, StoreSource

RICH = Service(
    "kube-system/kube-dns",
    ("10.96.0.10", "fd00::10"),
    (
        ServicePort(53, Protocol.UDP, "dns"),
        ServicePort(53, Protocol.TCP),
        ServicePort(80, Protocol.TCP, "w", 81),
    ),
    (Backend("10.244.0.5", 5353, 3), Backend("fd01::5", weight=0), Backend("10.244.0.6")),
    Affinity(90),
    Masquerade.ALWAYS,
    fallback=(Backend("10.244.9.9", 99, 7),),
)


def loaded(path: Path) -> StoreSource:
    """A store that has read its file."""
    store = StoreSource(path)
    store.load()
    return store


def test_what_is_saved_is_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state" / "services.yaml"
    saved = {s.name: s for s in (RICH, service("10.96.0.20:53/udp", "10.96.0.20"))}
    loaded(path).save(saved)
    assert dict(loaded(path).services) == saved
    assert {s.origin.owner for s in loaded(path).services.values()} == {"cli"}


def test_a_change_after_a_restart_formats_only_what_changed_whatever_characters_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "services.yaml"
    paths = {"s1": "/health?a=1&b=*&c=R&D", "s2": "/health", "s3": "/a,&b"}
    lines = [
        f"  - {{name: {name}, address: 10.96.0.{name[1]}, ports: 80, backends: [10.244.0.5],"
        f" check: {{type: http, path: '{probed}'}}}}\n"
        for name, probed in paths.items()
    ]
    found = parse_declaration(f"{HEAD}{''.join(lines)}", "x", source="cli")
    assert found.ok
    saved = {each.name: replace(each, origin=Origin("cli")) for each in found.services}
    loaded(path).save(saved)
    store, formatted = loaded(path), list[str]()

    def counting(each: Service) -> str:
        formatted.append(each.name)
        return format_service(each)

    monkeypatch.setattr(store_module, "format_service", counting)
    store.save({**store.services, "new": service("new", "10.96.0.9")})
    assert set(formatted) == {"new", "s3"}, "only that of s3 might be an anchor of YAML"
    assert dict(loaded(path).services) == {**saved, "new": service("new", "10.96.0.9")}


def test_services_of_an_edited_file_that_refer_to_each_other_are_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "services.yaml"
    loaded(path).save({name: service(name, f"10.96.0.{n}") for n, name in enumerate("abc", 1)})
    first, second, third = path.read_text().split("    backends:\n      - 10.244.0.5\n")[:3]
    values = ("&shared [10.244.0.5]", "*shared", "[10.244.0.5]")
    path.write_text(
        "".join(f"{text}    backends: {v}\n" for text, v in zip((first, second, third), values, strict=False))
    )
    store = loaded(path)
    assert store.faults() == ()
    kept = {name: each for name, each in store.services.items() if name != "a"}
    assert len(kept) == 2
    store.save(kept)
    assert "shared" not in path.read_text()
    assert dict(loaded(path).services) == kept


@settings(PATIENT, max_examples=examples(40))  # each example syncs the disk
@given(services())
def test_every_service_of_the_language_survives_the_file(
    tmp_path_factory: pytest.TempPathFactory, declared: Service
) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    path.unlink(missing_ok=True)
    loaded(path).save({declared.name: declared})
    again = loaded(path)
    assert again.faults() == ()
    assert dict(again.services) == {declared.name: declared}
    ((change, before, after),) = again.changes_in(again.history.entries[-1])
    assert (change.name, before, after) == (declared.name, None, declared)


def test_an_emptied_store_is_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "services.yaml"
    store = loaded(path)
    store.save({"a": service("a", "10.96.0.10")})
    store.save({})
    assert parse_declaration(path.read_text(), str(path)).ok
    assert dict(loaded(path).services) == {}


def test_services_that_did_not_change_keep_their_identity(tmp_path: Path) -> None:
    store = loaded(tmp_path / "services.yaml")
    kept = service("a", "10.96.0.10")
    store.save({"a": kept})
    store.save({**store.services, "b": service("b", "10.96.0.11")})
    assert store.services["a"] is kept


@pytest.mark.parametrize(
    "content", [b"\xff", b"apiVersion: vipd/v2\n", b"nonsense", (HEAD + "  - {address: x}\n").encode()]
)
def test_a_broken_file_is_never_written_over(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "services.yaml"
    path.write_bytes(content)
    store = loaded(path)
    assert any(str(path) in fault for fault in store.faults())
    with pytest.raises(StoreError, match="vipctl reload"):
        store.save({"a": service("a", "10.96.0.10")})
    assert path.read_bytes() == content
    assert dict(store.services) == {}


@pytest.mark.parametrize("saved", [True, False])
def test_a_broken_file_is_one_problem_that_says_what_serves(tmp_path: Path, saved: bool) -> None:
    path = tmp_path / "services.yaml"
    if saved:
        loaded(path).save({"a": service("a", "10.96.0.10")})
    path.write_text("nonsense")
    store = loaded(path)
    (fault,) = store.faults()
    assert fault.endswith("its last good copy goes on serving" if saved else "no good copy of it can be read")
    assert store.has_good_copy is saved
    assert set(store.services) == ({"a"} if saved else set())


def test_of_a_store_of_a_later_version_serves_what_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "services.yaml"
    loaded(path).save({name: service(name, f"10.96.0.{n}") for n, name in enumerate("ab", 1)})
    later = path.read_text() + "    later_key: 1\n"
    for file in (path, path.with_name("services.yaml.last-good")):
        file.write_text(later)
    store = loaded(path)
    (fault,) = store.faults()
    assert "later_key" in fault
    assert fault.endswith("the services without problems go on serving")
    assert not store.has_good_copy, "to put it in place would help nothing"
    assert set(store.services) == {"a"}
    with pytest.raises(StoreError, match="vipctl reload"):
        store.save({})
    assert path.read_text() == later


def test_a_mended_file_is_read_at_the_next_reload(tmp_path: Path) -> None:
    path = tmp_path / "services.yaml"
    path.write_text("nonsense")
    store = loaded(path)
    store.reload()
    assert store.faults()
    path.write_text(HEAD + block("10.96.0.10", "dns", "10.244.0.5"))
    store.reload()
    assert store.faults() == ()
    assert set(store.services) == {"dns"}
    store.save({})


def test_a_broken_file_moved_aside_leaves_an_empty_store(tmp_path: Path) -> None:
    path = tmp_path / "services.yaml"
    path.write_text("nonsense")
    store = loaded(path)
    path.rename(tmp_path / "aside")
    store.reload()
    store.save({"a": service("a", "10.96.0.10")})
    assert set(loaded(path).services) == {"a"}


def test_a_save_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "services.yaml"
    store = loaded(path)
    store.save({"a": service("a", "10.96.0.10")})
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        store.save({})
    assert path.read_bytes() == before
    assert set(store.services) == {"a"}


def test_the_store_is_one_unit_that_was_accepted_when_it_was_stored(tmp_path: Path) -> None:
    store = loaded(tmp_path / "services.yaml")
    store.save({"a": service("a", "10.96.0.10")})
    assert set(store.units()) == {STORE_UNIT}
    unit = store.units()[STORE_UNIT]
    assert unit.accepted is unit.candidate


def test_what_an_older_version_accepted_is_not_lost_to_a_later_rule(tmp_path: Path) -> None:
    text = (
        f"{HEAD}{block('10.96.0.1', 'a', '10.96.0.2')}{block('10.96.0.2', 'b', '10.244.0.5')}"
        "  - {name: c, address: 10.96.0.3, ports: [53/udp], backends: ['10.96.0.3:54']}\n"
    )
    assert not parse_declaration(text, "x").ok
    path = tmp_path / "services.yaml"
    path.write_text(text)
    store = StoreSource(path)
    store.load()
    assert store.faults() == ()
    assert set(store.services) == {"a", "b", "c"}


def test_what_a_check_can_no_longer_do_takes_no_service_away(tmp_path: Path) -> None:
    text = (
        f"{HEAD}  - {{name: a, address: 10.96.0.1, ports: [80], backends: [10.244.0.5],"
        " check: {type: http, body: '(?=ok)ok'}}\n"
        "  - {name: b, address: 10.96.0.2, ports: [{name: x, port: 53, protocol: udp}, {name: y, port: 80}],"
        " backends: [{address: 10.244.0.5, ports: {x: 53}}], check: tcp}\n"
    )
    assert not parse_declaration(text, "x").ok
    path = tmp_path / "services.yaml"
    path.write_text(text)
    store = StoreSource(path)
    store.load()
    assert store.faults() == ()
    assert set(store.services) == {"a", "b"}
