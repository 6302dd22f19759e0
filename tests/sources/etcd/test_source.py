"""The source against a real etcd: what is written serves, what is bad does not, no accident removes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.sources.etcd.following import PREFIX, following, key, value, values
from tests.sources.etcd.members import Cluster, cluster
from tests.sources.etcd.relay import relay
from vipd.host.settings.etcd import EtcdSettings
from vipd.model import limits
from vipd.model.service import Backend
from vipd.sources import removal_guard
from vipd.sources.etcd.fleet_overrides import FleetOverrides
from vipd.sources.etcd.keys import KeyWrite, StoreChange
from vipd.sources.etcd.list_watcher import WatchIntervals
from vipd.sources.etcd.messages import Header, KeyRange, KeyValue, WatchEvent
from vipd.sources.etcd.values import read_service_value
from vipd.sources.etcd.watch import WatchBatch


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("one")) as made:
        yield made


@pytest.fixture
def etcd(one: Cluster) -> Cluster:
    one.clear()
    return one


def test_what_is_written_serves_and_what_is_deleted_does_not(etcd: Cluster, tmp_path: Path) -> None:
    etcd.put(key("dns"), value(1))

    async def scene() -> None:
        async with following(etcd.urls, tmp_path) as there:
            await there.until(lambda: there.names() == {"dns"}, "the first list")
            revision = etcd.put(key("shop/web"), value(2))
            await there.until(lambda: there.names() == {"dns", "shop/web"}, "a new key")
            assert there.services["shop/web"].origin.path == key("shop/web")
            assert there.services["shop/web"].origin.source == "etcd"
            assert there.source.applied_revision >= revision == there.source.last_change
            etcd.put(key("dns"), value(1, "10.244.0.9"))
            await there.until(lambda: there.backend("dns") == "10.244.0.9", "a new value")
            etcd.delete(key("dns"))
            await there.until(lambda: there.names() == {"shop/web"}, "a deleted key")
            await there.until(lambda: there.source.connected, "followed")
            state = there.source.state()
            assert (state.endpoint, state.keys, state.rejected, state.held) == (etcd.urls[0], 1, (), ())
            assert state.connected
            assert state.lag is not None
            assert there.source.faults() == ()

    asyncio.run(scene())


FORMS = {
    "yaml": "name: yaml\naddress: 10.96.0.1\nports: 53/udp\nbackends: [10.244.0.5]",
    "json": '{"address": "10.96.0.2", "ports": [80], "backends": ["10.244.0.5"]}',
    "document": "apiVersion: vipd/v1\nservices:\n- {address: 10.96.0.3, ports: 80, backends: [10.244.0.5]}",
}
BAD = {
    "bad/value": ("address: 10.96.0.4\nports: 80\nbackend: 10.244.0.5", ":3: unknown key"),
    "bad/yaml": ("address: [10.96.0.5", ":2: YAML syntax"),
    "bad/name": (value(6) + "name: other", "the name other is not the key's, bad/name"),
    "bad/two": ("apiVersion: vipd/v1\nservices: []", "declares 0 services, and not one"),
    "bad/empty": ("", "declares 0 services, and not one"),
    "bad/a/b": (value(7), "the key names no service"),
    "bad name": (value(8), "the key names no service"),
}


def test_every_form_of_a_value_and_every_fault_alone(etcd: Cluster, tmp_path: Path) -> None:
    etcd.put_all({key(name): text for name, text in FORMS.items()})
    etcd.put_all({key(name): text for name, (text, _) in BAD.items()})

    async def scene() -> None:
        async with following(etcd.urls, tmp_path) as there:
            await there.until(lambda: there.names() == set(FORMS), "the good ones")
            for name, (_, words) in BAD.items():
                assert any(p.startswith(f"etcd:{key(name)}:") and words in p for p in there.problems), name
            assert set(there.source.state().rejected) == {key(name) for name in BAD}

    asyncio.run(scene())


def test_a_bad_value_keeps_the_last_good_one_also_over_a_restart(etcd: Cluster, tmp_path: Path) -> None:
    etcd.put_all({key("dns"): value(1), key("web"): value(2)})

    async def scene() -> None:
        async with following(etcd.urls, tmp_path) as there:
            await there.until(lambda: len(there.names()) == 2, "both")
            etcd.put(key("dns"), "address: nonsense")
            etcd.put(key("web"), value(2, "10.244.0.9"))
            await there.until(lambda: there.problems and there.backend("web") == "10.244.0.9", "a fault")
            assert there.backend("dns") == "10.244.0.5"
        etcd.member(etcd.urls[0]).stop()
        try:
            async with following(etcd.urls, tmp_path) as there:
                assert there.backend("dns") == "10.244.0.5"
                assert there.backend("web") == "10.244.0.9"
                assert any("etcd:/vipd/v1/services/dns:1: address" in p for p in there.problems)
                assert there.source.state().rejected == (key("dns"),)
                await there.until(there.source.faults, "a fault")
                assert "Connection refused; the last known services" in there.source.faults()[0]
                etcd.start_again(*etcd.urls)
                etcd.put(key("dns"), value(1, "10.244.0.7"))
                await there.until(lambda: there.backend("dns") == "10.244.0.7", "etcd is back")
                await there.until(lambda: not there.source.faults(), "no fault any more")
                assert there.problems == []
        finally:
            etcd.ensure()

    asyncio.run(scene())


def test_an_etcd_that_was_never_reached_leaves_nothing_to_serve(tmp_path: Path) -> None:
    async def scene() -> None:
        async with following(("http://127.0.0.1:9",), tmp_path) as there:
            await there.until(there.source.faults, "a fault")
            assert there.source.faults()[0].endswith("; no service of it is known")

    asyncio.run(scene())


def test_what_was_compacted_while_away_is_listed(etcd: Cluster, tmp_path: Path) -> None:
    etcd.put_all(values(3))

    async def scene() -> None:
        async with relay(etcd.urls[0]) as cable, following((cable.url,), tmp_path) as there:
            await there.until(lambda: len(there.names()) == 3, "all")
            await cable.cut()
            await there.until(there.source.faults, "away")
            etcd.delete(key("s001"))
            etcd.compact(etcd.put(key("s009"), value(9)))
            await cable.open()
            await there.until(lambda: there.names() == {"s002", "s003", "s009"}, "what is there now")
            await there.until(lambda: not there.source.faults(), "no fault any more")

    asyncio.run(scene())


def test_mass_deletion_is_held_until_it_is_accepted(etcd: Cluster, tmp_path: Path) -> None:
    etcd.put_all(values(10))

    async def scene() -> None:
        async with following(etcd.urls, tmp_path) as there:
            await there.until(lambda: len(there.names()) == 10, "all")
            etcd.delete(f"{PREFIX}services/*")
            await there.until(lambda: len(there.source.state().held) == 10, "held")
            etcd.put(key("s003"), value(3, "10.244.0.9"))
            await there.until(lambda: there.backend("s003") == "10.244.0.9", "one comes back")
            assert len(there.names()) == 10
            await there.until(lambda: len(there.source.faults()) == 1, "one fault")
            (fault,) = there.source.faults()
            assert fault.startswith("9 keys are gone from etcd and go on serving: more than 50%")
            assert "vipctl accept-removal" in fault
        async with following(etcd.urls, tmp_path) as there:
            assert len(there.names()) == 10
            await there.until(lambda: there.source.connected, "after a restart")
            assert len(there.source.state().held) == 9
            assert there.source.accept_removal() == 9
            await there.until(lambda: there.names() == {"s003"}, "accepted")
            assert there.source.faults() == ()
        async with following(etcd.urls, tmp_path) as there:
            assert there.names() == {"s003"}

    asyncio.run(scene())


def test_a_burst_of_single_deletions_comes_back(
    etcd: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal_guard, "WINDOW_SECONDS", 600.0)
    etcd.put_all(values(10))

    async def scene() -> None:
        async with following(etcd.urls, tmp_path) as there:
            await there.until(lambda: len(there.names()) == 10, "all")
            for n in range(1, 6):
                etcd.delete(key(f"s{n:03}"))
            await there.until(lambda: len(there.names()) == 5, "half may go")
            etcd.delete(key("s006"))
            await there.until(lambda: len(there.names()) == 10, "one more is too many")
            assert len(there.source.state().held) == 6

    asyncio.run(scene())


def test_a_folder_that_is_emptied_holds_up_no_other(etcd: Cluster, tmp_path: Path) -> None:
    etcd.put_all({key(f"a/s{n}"): value(n) for n in range(1, 10)})
    etcd.put_all({key(f"b/s{n}"): value(10 + n) for n in range(1, 4)})

    async def scene() -> None:
        async with following(etcd.urls, tmp_path) as there:
            await there.until(lambda: len(there.names()) == 12, "all")
            for n in range(1, 10):
                etcd.delete(key(f"a/s{n}"))
            await there.until(lambda: len(there.source.state().held) == 9, "the folder is held")
            etcd.delete(key("b/s1"))
            await there.until(lambda: "b/s1" not in there.names(), "another's removal")
            assert len(there.names()) == 11
            assert "more than 50% of the services of their folder at once" in there.source.faults()[0]
            assert there.source.accept_removal() == 9
            await there.until(lambda: there.names() == {"b/s2", "b/s3"}, "accepted")

    asyncio.run(scene())


def test_one_registrars_excess_stops_nobody_elses_services(
    etcd: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ETCD_BYTES", 8 * limits.MIB)
    monkeypatch.setattr(limits, "ETCD_FOLDER_BYTES", limits.MIB)
    start = f"{PREFIX}backends/bad/"
    etcd.put_all(values(2))
    for n in range(9):
        etcd.put(f"{start}10.244.0.{n}:80", "x" * 1_400_000)
    etcd.put(f"{start}{'k' * 1_200_000}", "")

    async def scene() -> None:
        async with following(etcd.urls, tmp_path) as there:
            for word in ("listed", "watched"):
                etcd.put(key(f"{word}"), value(len(word)))
                await there.until(lambda: word in there.names(), word)  # noqa: B023
                for n in range(100, 180):  # each small enough, together beyond the budget
                    etcd.put(f"{start}10.244.1.{n}:80", "y" * 16_000)
                etcd.put(f"{start}10.244.2.1:80", "z" * 1_400_000)
            etcd.put(f"{PREFIX}backends/s001/10.244.0.8:80", "")
            await there.until(lambda: "s001" in there.source.registrations, "another's registration")
            problems = {p.what for u in there.source.units().values() for p in u.candidate.problems}
            assert "it has 1400000 bytes, of which 16384 are the most" in problems
            assert any("the keys of its folder have more than" in each for each in problems)
            assert there.source.faults() == ()
            kept = sum(len(k) + len(v.value) for k, v in there.source._keys.kept.items())
            assert kept < 2 * limits.MIB

    asyncio.run(scene())


def test_one_registrars_many_keys_keep_nobody_elses_from_being_followed(
    etcd: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beyond all that is followed, with long names, and while the watch is asked whether it lags."""
    monkeypatch.setattr(limits, "ETCD_KEYS", 400)
    monkeypatch.setattr(limits, "ETCD_FOLDER_KEYS", 100)
    start = f"{PREFIX}backends/bad/"
    etcd.put_all({f"{start}10.244.0.{n}:80": "" for n in range(250)})
    etcd.put_all(values(2))

    async def scene() -> None:
        async with following(etcd.urls, tmp_path) as there:
            await there.until(lambda: len(there.names()) == 2, "listed")
            for n in range(1, 4):
                etcd.put_all({f"{start}10.244.{n}.{m}:80": "" for m in range(250)})
                for m in range(3):
                    etcd.put(f"{start}{n}{m}{'k' * 1_000_000}", "")
                etcd.put(f"{PREFIX}backends/s001/10.244.9.{n}:80", "")
                await there.until(lambda: len(there.source.registrations.get("s001", ())) == n, "registered")  # noqa: B023
                await there.source._follower._probe([])
            problems = {p.what for u in there.source.units().values() for p in u.candidate.problems}
            assert "its folder has more than 100 keys" in problems
            for _ in range(3):  # a later list adds none, and reports none as missed
                await there.source._follower._list()
                assert len(there.source._keys.kept) < 150
            for n in range(1, 4):
                etcd.delete(f"{start}10.244.{n}.*")
            etcd.delete(f"{start}10.244.0.*")
            etcd.put(f"{start}10.244.0.7:80", "")
            await there.until(lambda: len(there.source.registrations.get("bad", ())) == 1, "room again")
            assert there.source.faults() == ()

    asyncio.run(scene())


def test_overrides_beyond_their_budget_stop_nobodys_services(
    etcd: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ETCD_BYTES", 2 * limits.MIB)
    monkeypatch.setattr(limits, "ETCD_OVERRIDES_BYTES", limits.MIB)

    def order(number: int) -> str:
        told = {"backend": f"10.244.{number}.1", "weight": 1, "by": "x", "at": "2026-01-01T00:00:00+00:00"}
        return json.dumps({**told, "reason": "r" * 15_000})

    etcd.put_all({f"{PREFIX}overrides/addresses/10.244.{n}.1": order(n) for n in range(120)})

    async def scene() -> None:
        async with following(etcd.urls, tmp_path) as there:
            overrides = FleetOverrides(lambda: there.source.overrides, lambda: datetime.now(UTC))
            for word in ("listed", "watched"):
                etcd.put(key(word), value(len(word)))
                await there.until(lambda: word in there.names(), word)  # noqa: B023
                etcd.put_all({f"{PREFIX}overrides/addresses/10.244.{n}.2": order(n) for n in range(120)})
            await there.until(lambda: len(there.source.overrides) == 240, "all orders")
            overrides.refresh()
            assert any("the keys of its folder have more than 1 MiB" in each for each in overrides.faults())
            assert there.source.faults() == ()

    asyncio.run(scene())


def test_a_wiped_store_takes_nothing_away(etcd: Cluster, tmp_path: Path) -> None:
    """As many keys as before, too few for the share: only the store's revision gives it away."""
    registered = f"{PREFIX}backends/s001/10.244.0.8:80"
    etcd.put_all(values(2))
    etcd.put(registered, "")
    member = etcd.members[0]

    async def scene() -> None:
        async with relay(member.url) as cable, following((cable.url,), tmp_path) as there:
            await there.until(lambda: len(there.names()) == 2, "both")
            await cable.cut()
            member.stop()
            member.wipe()
            etcd.start_again(member.url)
            etcd.put_all({key("s001"): value(1, "10.244.0.9"), key("s003"): value(3)})
            etcd.put(f"{PREFIX}backends/s003/10.244.0.8:80", "")
            await cable.open()
            await there.until(lambda: there.backend("s001") == "10.244.0.9", "what is there serves")
            await there.until(lambda: there.source.connected, "followed again")
            assert set(there.source.state().held) == {key("s002"), registered}
            assert there.names() == {"s001", "s002", "s003"}
            assert list(there.source.registrations) == ["s001", "s003"]
            assert "the store is another one than before" in there.source.faults()[0]
            etcd.put(key("s002"), value(2))
            etcd.put(registered, "")
            await there.until(lambda: not there.source.faults(), "everything came back")

    asyncio.run(scene())


def test_another_cluster_takes_nothing_away(etcd: Cluster, tmp_path: Path) -> None:
    """As many keys, none newer, and a higher revision: only its identity gives it away."""

    async def scene(other: Cluster) -> None:
        other.put_all({key("s001"): value(1), key("s003"): value(3)})
        for _ in range(10):
            etcd.put(f"{PREFIX}hosts/n1", "")
        revision = etcd.put_all(values(2))
        while other.put(f"{PREFIX}hosts/n1", "") <= revision:
            pass
        async with relay(etcd.urls[0]) as cable, following((cable.url,), tmp_path / "state") as there:
            await there.until(lambda: there.names() == {"s001", "s002"}, "both")
            await cable.cut()
            cable.to = int(other.urls[0].rpartition(":")[2])
            await cable.open()
            await there.until(lambda: there.source.state().held == (key("s002"),), "held")
            await there.until(lambda: there.names() == {"s001", "s002", "s003"}, "what is there serves")
            await there.until(lambda: there.source.connected, "followed again")
            other.put(key("s004"), value(4))
            await there.until(lambda: len(there.names()) == 4, "followed")

    with cluster(tmp_path / "other") as other:
        asyncio.run(scene(other))


def test_what_is_known_already_is_passed_over(etcd: Cluster, tmp_path: Path) -> None:
    """A probe or a list may run ahead of the watch."""
    etcd.put_all(values(1))

    async def scene() -> None:
        async with following(etcd.urls, tmp_path) as there:
            await there.until(lambda: there.source.connected, "the first list")
            at, keys = there.source.applied_revision, KeyRange.prefix(f"{PREFIX}services/".encode())
            late = KeyValue(key("s001").encode(), b"", at)
            await there.source._follower._on_events(
                WatchBatch(keys, Header("", "", at), (WatchEvent(True, late),))
            )
            there.step()
            assert there.names() == {"s001"}
            news = late._replace(mod_revision=at + 1)
            await there.source._follower._on_events(
                WatchBatch(keys, Header("", "", at), (WatchEvent(True, news),))
            )
            there.step()
            assert there.names() == set()

    asyncio.run(scene())


def test_registered_backends_and_overrides(etcd: Cluster, tmp_path: Path) -> None:
    start = f"{PREFIX}backends/"
    etcd.put_all(
        {
            f"{start}dns/10.244.0.5:53": "",
            f"{start}dns/[fd00::5]:53": "{weight: 3}",
            f"{start}shop/web/10.244.0.6": '{"weight": 0, "node": "n1"}',
            f"{start}shop/web/nonsense": "",
            f"{PREFIX}overrides/dns": "raw",
            f"{PREFIX}hosts/other": "{}",
        }
    )

    async def scene() -> None:
        async with following(etcd.urls, tmp_path) as there:
            await there.until(lambda: there.source.connected, "the first list")
            assert {
                name: tuple(each.backend for each in known)
                for name, known in there.source.registrations.items()
            } == {
                "dns": (Backend("10.244.0.5", 53), Backend("fd00::5", 53, 3)),
                "shop/web": (Backend("10.244.0.6", None, 0, node="n1"),),
            }
            assert there.source.overrides == {"dns": "raw"}
            there.step()
            assert any(p.startswith(f"etcd:{start}shop/web/nonsense: ") for p in there.problems)
            etcd.put(f"{start}dns/10.244.0.5:53", "{weight: many}")
            await there.until(lambda: any("weight" in p for p in there.problems), "a bad one")
            assert len(there.source.registrations["dns"]) == 2
            etcd.delete(f"{start}dns/*")
            await there.until(lambda: "dns" not in there.source.registrations, "gone with their leases")

    asyncio.run(scene())


@pytest.mark.parametrize("what", ["write", "removal"])
def test_a_watch_that_has_fallen_silent_is_found_out(what: str, etcd: Cluster, tmp_path: Path) -> None:
    """Its connection stays open and every probe is answered, so that only what it lacks gives it away."""
    etcd.put_all(values(2))

    async def scene() -> None:
        async with relay(etcd.urls[0]) as cable, following((cable.url,), tmp_path) as there:
            await there.until(lambda: there.source.connected, "the first list")
            await there.until(lambda: (there.source.lag or 1) < 0.1, "a probe")
            cable.silence()
            if what == "write":
                etcd.put(key("s002"), value(2, "10.244.0.9"))
                await there.until(lambda: there.backend("s002") == "10.244.0.9", "found out")
            else:
                etcd.delete(key("s001"))
                await there.until(lambda: there.names() == {"s002"}, "found out")

    asyncio.run(scene())


def test_others_keys_move_the_revision_and_nothing_else(etcd: Cluster, tmp_path: Path) -> None:
    """What hosts report below the prefix must not look like a change: each report would cause more."""
    last = etcd.put_all(values(1))

    async def scene() -> None:
        async with following(etcd.urls, tmp_path) as there:
            await there.until(lambda: there.source.connected, "the first list")
            steps = len(there.seen)
            revision = etcd.put(f"{PREFIX}hosts/n1", "{}")
            await there.until(lambda: there.source.applied_revision >= revision, "a probe")
            assert there.source.last_change == last
            assert len(there.seen) == steps

    asyncio.run(scene())


def test_a_list_now_and_then_finds_what_nothing_else_did(etcd: Cluster, tmp_path: Path) -> None:
    """As many keys, nothing newer: a wrong value that no probe can see."""
    etcd.put_all(values(2))
    times = WatchIntervals(probe=0.1, grace=0.1, relist=0.3, initial_backoff=0.05, max_backoff=0.3)

    async def scene() -> None:
        async with following(etcd.urls, tmp_path, times) as there:
            await there.until(lambda: there.source.connected, "the first list")
            keys, wrong = there.source._keys, value(1, "10.244.0.66")
            meaning = read_service_value(key("s001"), "s001", wrong)
            keys.apply(
                StoreChange(keys.cluster, keys.revision, (KeyWrite(key("s001"), wrong, 1, meaning),)), 0.0
            )
            there.step()
            assert there.backend("s001") == "10.244.0.66"
            await there.until(lambda: there.backend("s001") == "10.244.0.5", "listed anew")

    asyncio.run(scene())


def test_nothing_known_and_nothing_reachable(tmp_path: Path) -> None:
    async def scene() -> None:
        settings = EtcdSettings(("http://127.0.0.1:1",), timeout=30.0)
        async with following((), tmp_path, settings=settings) as there:
            assert not await there.source.wait_ready(0.5)
            assert there.names() == set()
            await there.until(there.source.faults, "a fault")
            assert there.source.faults()[0].startswith("etcd cannot be reached: http://127.0.0.1:1: cannot")

    asyncio.run(scene())
