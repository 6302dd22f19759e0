"""What is known of the keys, after any walk: equal to what disk gives back, and to a start from there."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from random import Random

import pytest

from tests.sources.etcd.following import PREFIX, key, value
from vipd.control.catalog import merge
from vipd.declaration.problems import Declaration
from vipd.declaration.unit import EMPTY_DECLARATION
from vipd.model.service import Backend, RegisteredBackend
from vipd.sources.etcd import values
from vipd.sources.etcd.keys import EtcdKeys, KeyWrite, StoreChange
from vipd.sources.etcd.snapshot_file import Record, SnapshotState, StoredKey, _replay
from vipd.sources.etcd.values import Layout, read_value
from vipd.sources.removal_guard import RemovalGuard

LAYOUT = Layout(PREFIX)
SERVICES = [key(f"s{n}") for n in range(8)]
REGISTRATIONS = [f"{PREFIX}backends/s1/10.0.0.{n}:80" for n in range(3)]
OTHERS = [f"{PREFIX}overrides/s1"]


class Walk:
    """Keys whose records are replayed as the disk would."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.disk = SnapshotState()
        self.keys = EtcdKeys(LAYOUT, RemovalGuard(50), self._note)
        self.now = 0.0
        self.revision = 0

    def _note(self, record: Record) -> None:
        _replay(self.disk, json.loads(json.dumps(record)))

    def step(self) -> None:
        choice = self.random.random()
        if choice < 0.25:
            self.accept()
        elif choice < 0.30:
            self.keys.accept_removal()
        else:
            self.change()

    def accept(self) -> None:
        self.keys.accept(merge(self.keys.units).chosen)

    def change(self) -> None:
        random = self.random
        self.revision += 1
        self.now += random.choice([0.5, 20.0])
        everything = [*SERVICES, *REGISTRATIONS, *OTHERS]
        touched = random.sample(everything, random.choice([1, 2, 9]))
        removed = {k for k in touched if random.random() < 0.5 and k in self.keys.kept}
        removed -= self.keys.held
        written = tuple(self.written(k) for k in touched if k not in removed)
        foreign = random.random() < 0.1
        self.keys.apply(StoreChange("c", self.revision, written, frozenset(removed), foreign), self.now)

    def written(self, name: str) -> KeyWrite:
        good = value(int(name[-1])) if name in SERVICES else self.random.choice(["", "{weight: 2}"])
        text = self.random.choice([good, good.replace("10.244.0.5", "10.244.0.9"), "no: [such"])
        return KeyWrite(name, text, self.revision, read_value(LAYOUT, name, text))


@pytest.mark.parametrize("seed", range(40))
def test_any_walk_ends_as_disk_and_restart_say(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(60):
        walk.step()
        state = walk.keys.state()
        assert walk.disk.keys == state.keys
        for start in (LAYOUT.services, LAYOUT.backends, LAYOUT.overrides):
            below = {k.removeprefix(start): kept for k, kept in state.keys.items() if k.startswith(start)}
            assert walk.keys.count(start) == sum(not kept.held for kept in below.values())
        assert walk.keys.overrides() == {name: kept.value for name, kept in below.items()}
        assert walk.keys.held == {k for k, kept in state.keys.items() if kept.held}
        assert all(state.keys[k].accepted is not None for k in walk.keys.held if k in SERVICES)
    restarted = EtcdKeys(LAYOUT, RemovalGuard(50), lambda _: None)
    restarted.restore(walk.disk)
    assert restarted.held == walk.keys.held
    assert restarted.registrations == walk.keys.registrations
    assert serving(restarted) == serving(walk.keys)
    walk.accept()
    restarted.accept(merge(restarted.units).chosen)
    assert serving(restarted) == serving(walk.keys)
    assert restarted.rejected == walk.keys.rejected


def test_an_event_costs_what_it_changes_however_many_keys_there_are() -> None:
    costs = []
    for number in (20, 2000):
        keys = EtcdKeys(LAYOUT, RemovalGuard(50), lambda _: None)
        names = [key(f"s{n}") for n in range(number)]
        parsed = read_value(LAYOUT, names[1], value(1))
        keys.apply(StoreChange("c", 1, tuple(KeyWrite(name, value(1), 1, parsed) for name in names)), 0.0)
        assert len(keys.take_changed()) == 1, "all of these values declare one service"
        counted = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            changed = (KeyWrite(names[2], value(2), 2, read_value(LAYOUT, names[2], value(2))),)
            keys.apply(StoreChange("c", 2, changed, frozenset(names[3:4])), 0.0)
            keys.overrides()
            keys.take_changed()
        finally:
            sys.setprofile(None)
        costs.append(counted)
    assert costs[1] < costs[0] + 20


def serving(keys: EtcdKeys) -> dict[str, object]:
    return {name: (unit.candidate, unit.accepted) for name, unit in keys.units.items()}


def test_what_has_not_changed_is_the_same_object() -> None:
    keys = EtcdKeys(LAYOUT, RemovalGuard(50), lambda _: None)
    names = [SERVICES[1], SERVICES[2], REGISTRATIONS[0]]
    written = [
        KeyWrite(n, t, 1, read_value(LAYOUT, n, t))
        for n, t in zip(names, [value(1), value(2), ""], strict=True)
    ]
    assert keys.apply(StoreChange("c", 1, tuple(written)), 0.0)
    keys.accept(merge(keys.units).chosen)
    before, registered = dict(keys.units), keys.registrations["s1"]
    text = value(2, "10.244.0.9")
    assert keys.apply(
        StoreChange("c", 2, (KeyWrite(names[1], text, 2, read_value(LAYOUT, names[1], text)),)), 0.0
    )
    place = f"etcd:{names[0]}"
    assert keys.units[place] is before[place]
    assert keys.registrations["s1"] is registered
    again = KeyWrite(names[0], value(1), 3, read_value(LAYOUT, names[0], value(1)))
    assert not keys.apply(StoreChange("c", 3, (again,)), 0.0), "the same value once more is no difference"
    assert keys.units[place] is before[place]
    assert keys.kept[names[0]].mod_revision == 3


def test_a_service_that_never_served_is_not_held() -> None:
    keys = EtcdKeys(LAYOUT, RemovalGuard(0), lambda _: None)
    names = SERVICES[:6]
    keys.apply(StoreChange("c", 1, tuple(KeyWrite(n, "", 1, read_value(LAYOUT, n, "")) for n in names)), 0.0)
    keys.accept(merge(keys.units).chosen)
    assert keys.rejected == set(names)
    keys.apply(StoreChange("c", 2, (), frozenset(names)), 0.0)
    assert (keys.held, dict(keys.units)) == (frozenset(), {})


def test_a_service_that_is_held_serves_its_accepted_value() -> None:
    keys = EtcdKeys(LAYOUT, RemovalGuard(50), lambda _: None)
    name, place = SERVICES[1], f"etcd:{SERVICES[1]}"
    keys.apply(StoreChange("c", 1, (KeyWrite(name, value(1), 1, read_value(LAYOUT, name, value(1))),)), 0.0)
    good = keys.units[place].candidate
    keys.accept({place: good})
    keys.apply(StoreChange("c", 2, (KeyWrite(name, "bad", 2, read_value(LAYOUT, name, "bad")),)), 0.0)
    keys.apply(StoreChange("d", 1, (), frozenset({name}), store_replaced=True), 0.0)
    assert keys.units[place].candidate is keys.units[place].accepted is good
    assert keys.units[place].accepted is not EMPTY_DECLARATION
    assert keys.store_replaced


def test_a_value_that_is_put_back_is_the_accepted_one_again() -> None:
    keys = EtcdKeys(LAYOUT, RemovalGuard(50), lambda _: None)
    name, place = SERVICES[1], f"etcd:{SERVICES[1]}"
    for revision, text in enumerate((value(1), "bad", value(1)), start=1):
        keys.apply(
            StoreChange("c", revision, (KeyWrite(name, text, revision, read_value(LAYOUT, name, text)),)), 0.0
        )
        if revision == 1:
            keys.accept(merge(keys.units).chosen)
    assert keys.units[place].candidate is keys.units[place].accepted
    keys.accept({})
    assert keys.rejected == frozenset()


def test_a_bad_registration_keeps_the_good_one() -> None:
    keys = EtcdKeys(LAYOUT, RemovalGuard(50), lambda _: None)
    name = REGISTRATIONS[1]
    for revision, text in ((1, "{weight: 2}"), (2, "{weight: many}")):
        keys.apply(
            StoreChange("c", revision, (KeyWrite(name, text, revision, read_value(LAYOUT, name, text)),)), 0.0
        )
    assert keys.registrations == {
        "s1": (RegisteredBackend("etcd:/vipd/v1/backends/s1/10.0.0.1:80", Backend("10.0.0.1", 80, 2)),)
    }
    assert not keys.units[f"etcd:{name}"].candidate.ok


@pytest.mark.parametrize("name", [SERVICES[1], REGISTRATIONS[0]])
def test_what_ended_in_an_internal_error_is_read_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = EtcdKeys(LAYOUT, RemovalGuard(50), lambda _: None)
    text = value(1) if name in SERVICES else ""
    with monkeypatch.context() as broken:
        for reading in ("read_service_value", "read_registration"):
            broken.setattr(values, reading, lambda *_: [][1])
        keys.apply(StoreChange("c", 1, (KeyWrite(name, text, 1, read_value(LAYOUT, name, text)),)), 0.0)
        assert not keys.retry_failed_reads(), "it is broken still"
    assert not keys.units[f"etcd:{name}"].candidate.ok
    assert keys.retry_failed_reads()
    assert bool(keys.registrations) == (name in REGISTRATIONS)
    assert all(unit.candidate.ok for unit in keys.units.values())
    assert not keys.retry_failed_reads(), "once is enough"


def claiming(name: str, address: str, mod_revision: int, create_revision: int) -> KeyWrite:
    """A service of one address."""
    text = f"address: {address}\nports: [80]\nbackends: [10.244.0.5]\n"
    return KeyWrite(key(name), text, mod_revision, read_value(LAYOUT, key(name), text), create_revision)


OLDER = claiming("b", "10.96.0.9", 3, 3)
EDITED = claiming("b", "10.96.0.9", 7, 3)
NEWER = claiming("a", "10.96.0.9", 5, 5)
ELSEWHERE = claiming("b", "10.96.0.1", 3, 3)
"""The older one while it claims something else."""
ALIKE: dict[str, list[tuple[KeyWrite, ...]]] = {
    "saw one after the other": [(OLDER,), (NEWER,), (EDITED,)],
    "started after both": [(NEWER, EDITED)],
    "was away when the newer one came": [(OLDER,), (NEWER, EDITED)],
}


def seen_in(history: list[tuple[KeyWrite, ...]], restarts: bool) -> Walk:
    """A host that saw these changes, each at once, and took up what serves after each."""
    walk = Walk(0)
    for revision, written in enumerate(history, 1):
        walk.keys.apply(StoreChange("c", revision, written), 0.0)
        walk.accept()
        if restarts:
            state = SnapshotState("c", revision, dict(walk.disk.keys))
            walk.keys = EtcdKeys(LAYOUT, RemovalGuard(50), walk._note)
            walk.keys.restore(state)
    return walk


def served(walk: Walk) -> dict[str, str]:
    """Each service's address."""
    return {name: service.addresses[0] for name, service in merge(walk.keys.units).services.items()}


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("history", ALIKE.values(), ids=ALIKE.keys())
def test_of_two_keys_with_one_claim_the_older_one_serves_on_every_host(
    history: list[tuple[KeyWrite, ...]], restarts: bool
) -> None:
    walk = seen_in(history, restarts)
    assert served(walk) == {"b": "10.96.0.9"}
    assert list(merge(walk.keys.units).problems) == [f"etcd:{key('a')}"]


@pytest.mark.parametrize("restarts", [False, True])
def test_an_older_key_takes_nothing_that_a_newer_one_has(restarts: bool) -> None:
    walk = seen_in([(ELSEWHERE,), (NEWER,), (EDITED,)], restarts)
    assert served(walk) == {"a": "10.96.0.9", "b": "10.96.0.1"}
    assert list(merge(walk.keys.units).problems) == [f"etcd:{key('b')}"]


def test_keys_kept_by_an_older_version_are_ranked_once_etcd_lists_them() -> None:
    unranked = (replace(NEWER, create_revision=0), replace(OLDER, create_revision=0))
    walk = Walk(0)
    walk.keys.apply(StoreChange("c", 1, unranked), 0.0)
    assert served(walk) == {"a": "10.96.0.9"}, "the one that sorts first"
    walk.keys.apply(StoreChange("c", 2, (NEWER, OLDER)), 0.0)
    assert served(walk) == {"b": "10.96.0.9"}


@pytest.mark.parametrize("earlier", [True, False])
def test_what_a_later_version_accepted_and_this_one_does_not_understand_is_not_served(
    *, earlier: bool
) -> None:
    """A key that is passed over might be one that lets fewer in."""
    later = f"later_key: 1\n{value(1)}"
    accepted = value(1) if earlier else later
    keys = EtcdKeys(LAYOUT, RemovalGuard(50), lambda _: None)
    keys.restore(SnapshotState("c", 1, {SERVICES[1]: StoredKey(later, 1, accepted)}))
    unit = keys.units[f"etcd:{SERVICES[1]}"]
    assert "later_key" in str(unit.candidate.problems[0])
    assert [service.name for service in unit.accepted.services] == (["s1"] if earlier else [])
    assert unit.accepted.ok


def test_what_an_earlier_version_accepted_stays_in_use_although_a_later_rule_forbids_it() -> None:
    text = "address: 10.96.0.1\nports: 80\nbackends: [10.96.0.1:8080]\n"
    refused = read_value(LAYOUT, SERVICES[1], text)
    assert isinstance(refused, Declaration)
    assert not refused.ok
    keys = EtcdKeys(LAYOUT, RemovalGuard(50), lambda _: None)
    keys.restore(SnapshotState("c", 1, {SERVICES[1]: StoredKey(text, 1, text)}))
    unit = keys.units[f"etcd:{SERVICES[1]}"]
    assert unit.candidate is unit.accepted
    assert unit.accepted.services
