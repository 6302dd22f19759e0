"""Orders of operators: what they come to, how they end, and that none is lost."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.recording_observer import RecordingObserver
from tests.lab.simulated_time import simulate
from tests.model.samples import service
from vipd.control.background_tasks import MAX_PAUSE_SECONDS, expire_overrides
from vipd.control.override_requests import overrides_to_clear, parse_override
from vipd.control.reconciler import Reconciler
from vipd.declaration.operations import RefusedError
from vipd.model.backend_status import AdminState
from vipd.model.override import (
    MAX_TEXT,
    MalformedOverrideError,
    Override,
    OverrideKey,
    OverridePart,
    OverrideTarget,
    by_part,
    effective_override,
    expired,
    from_json,
    merge_parts,
    to_document,
    to_json,
)
from vipd.model.service import Backend
from vipd.model.text import is_encodable
from vipd.sources.override_store import OverrideStore
from vipd.sources.store import StoreError

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
DNS = service("dns", "10.96.0.10", "", 1, "10.244.0.5", "10.244.0.6")
WEB = service("web", "10.96.0.11", "", 1, "10.244.0.5")
SERVICES = {"dns": DNS, "web": WEB}
DRAIN = Override(OverrideTarget("dns", "10.244.0.5"), "uid 0", NOW, AdminState.DRAINING)
FIRST = Backend("10.244.0.5")
STATE, WEIGHT = (OverrideKey(DRAIN.target, part) for part in OverridePart)
EVERYWHERE = OverrideTarget("", "10.244.0.5")

LINES = st.text(st.characters(exclude_categories=["Cs"]), max_size=5).filter(str.isprintable)

ENDS = st.none() | st.integers(1, 3).map(lambda hours: NOW + hours * HOUR)
WEIGHTS = st.none() | st.integers(0, 65535)
OVERRIDES = st.builds(
    Override,
    st.sampled_from([OverrideTarget("dns", "10.244.0.5"), OverrideTarget("", "fd00::5")]),
    LINES,
    st.just(NOW),
    st.sampled_from(AdminState),
    st.none() | st.integers(0, 65535),
    LINES,
    st.none() | st.just(NOW + timedelta(hours=1)),
    st.none() | st.just(NOW + timedelta(minutes=1)),
)


@given(OVERRIDES)
def test_what_is_stored_is_read_back(override: Override) -> None:
    assert from_json(json.loads(json.dumps(to_json(override)))) == override


@given(OVERRIDES, st.text(st.characters(), max_size=2000), st.text(st.characters(), max_size=5))
def test_what_somebody_else_has_stored_is_one_line_and_then_stays_so(
    override: Override, reason: str, by: str
) -> None:
    stored = {**to_json(override), "reason": reason, "by": by}
    if not all(map(is_encodable, (reason, by))):
        with pytest.raises(MalformedOverrideError, match="must be text"):
            from_json(stored)
        return
    found = from_json(stored)
    assert all(text.isprintable() and len(text) <= MAX_TEXT for text in (found.reason, found.by))
    assert from_json(json.loads(json.dumps(to_json(found)))) == found


def test_orders_that_would_read_back_as_others_are_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "overrides.json"
    store = OverrideStore(path, lambda: NOW)
    store.put(DRAIN)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="read back as others"):
        store.put(replace(DRAIN, reason="\x1b[2J"))
    assert path.read_bytes() == before
    assert store.overrides == DRAIN.parts()


def test_the_severest_order_and_the_nearest_weight_win() -> None:
    everywhere = Override(OverrideTarget("", "10.244.0.5"), "uid 0", NOW, AdminState.DISABLED, 7)
    found = effective_override(DNS, FIRST, [DRAIN, everywhere])
    assert (found.admin, found.weight) == (AdminState.DISABLED, 7)
    weighted = replace(DRAIN, weight=2)
    assert effective_override(DNS, FIRST, [weighted, everywhere]).weight == 2
    assert effective_override(WEB, FIRST, [weighted]).admin is AdminState.ACTIVE
    assert effective_override(DNS, Backend("10.244.0.6"), [weighted, everywhere]).sources == ()


def test_pins_last_as_long_as_every_drain_lets_them() -> None:
    pins = replace(DRAIN, pins_until=NOW + timedelta(minutes=1))
    assert effective_override(DNS, FIRST, [pins]).keeps_affinity
    assert not effective_override(
        DNS, FIRST, [pins, replace(DRAIN, target=OverrideTarget("", "10.244.0.5"))]
    ).keeps_affinity


def test_time_ends_orders_and_pins() -> None:
    brief = replace(DRAIN, until=NOW + timedelta(hours=1), pins_until=NOW + timedelta(minutes=1))
    known = brief.parts()
    assert expired(known, NOW) == {}
    assert expired(known, NOW + timedelta(minutes=1)) == {STATE: replace(brief, pins_until=None)}
    assert expired(known, NOW + timedelta(hours=1)) == {STATE: None}


@pytest.mark.parametrize("first", ["state", "weight"])
def test_a_permanent_part_outlives_a_timed_one_in_either_order(tmp_path: Path, first: str) -> None:
    now, path = [NOW], tmp_path / "overrides.json"
    for state_until, weight_until in ((NOW + HOUR, None), (None, NOW + HOUR)):
        state = replace(DRAIN, until=state_until)
        weight = Override(DRAIN.target, "uid 1", NOW, weight=5, reason="small", until=weight_until)
        now[0], store = NOW, OverrideStore(path, lambda: now[0])
        for each in (state, weight) if first == "state" else (weight, state):
            store.put(each)
        store.load()
        assert store.overrides == {STATE: state, WEIGHT: weight}
        now[0] += HOUR
        store.expire_due()
        assert list(store.overrides.values()) == [weight if state_until else state]
        store.clear(DRAIN.target)
        assert not store.overrides


PARTS = st.builds(
    lambda state, weight: {**state.parts(), **weight.parts()},
    st.builds(replace, st.just(DRAIN), reason=LINES, until=ENDS, pins_until=ENDS),
    st.builds(
        replace, st.just(DRAIN), reason=LINES, until=ENDS, admin=st.just(AdminState.ACTIVE), weight=WEIGHTS
    ),
)


@given(PARTS)
def test_an_older_version_reads_what_is_stored_and_no_order_lasts_longer_there(
    parts: dict[OverrideKey, Override],
) -> None:
    document = json.loads(json.dumps(to_document(parts)))
    (old,) = [from_json(item) for item in document["overrides"]]
    state, weight = parts.get(STATE), parts.get(WEIGHT)
    if state:
        assert (old.admin, old.until, old.reason) == (state.admin, state.until, state.reason)
    if weight and old.weight is not None:
        assert old.weight == weight.weight
        assert weight.until is None or (old.until is not None and old.until <= weight.until)
    assert by_part(map(from_json, (*document["overrides"], *document.get("weights", ())))) == parts


def test_parts_that_were_given_at_once_are_one_order(tmp_path: Path) -> None:
    both = replace(DRAIN, weight=3, until=NOW + HOUR, pins_until=NOW + timedelta(minutes=1))
    assert merge_parts(both.parts()) == [both]
    assert to_document(both.parts()) == {"overrides": [to_json(both)]}
    other = replace(both, weight=4, at=NOW + HOUR)
    assert merge_parts({**both.parts(), WEIGHT: other.parts()[WEIGHT]}) == [
        both.parts()[STATE],
        other.parts()[WEIGHT],
    ]


@pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EROFS])
def test_an_end_in_time_needs_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: int
) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(kind, os.strerror(kind))

    now, observer = [NOW], RecordingObserver()
    store = OverrideStore(tmp_path / "overrides.json", lambda: now[0], observer)
    store.put(replace(DRAIN, until=NOW + HOUR), Override(DRAIN.target, "uid 0", NOW, weight=5))
    observer.overrides.clear()
    now[0] += HOUR
    with monkeypatch.context() as patch:
        patch.setattr("vipd.sources.override_store.write_durably", refuse)
        with caplog.at_level("INFO"):
            store.expire_due()
            store.expire_due()
        assert list(store.overrides) == [WEIGHT]
        assert observer.overrides == [{DRAIN.target}]
        assert len(caplog.records) == 1
        assert store.unsaved
        assert store.next_expiry() is None
        with pytest.raises(StoreError, match="cannot be written"):
            store.save_expired()
        with pytest.raises(StoreError):
            store.clear(DRAIN.target)
        assert list(store.overrides) == [WEIGHT], "what has no end is taken back on disk first"
        again = OverrideStore(tmp_path / "overrides.json", lambda: now[0])
        again.load()
        assert list(again.overrides) == [WEIGHT], "it has ended, whatever the file says"
    store.save_expired()
    assert "draining" not in (tmp_path / "overrides.json").read_text()


def test_an_order_of_a_faulty_file_ends_in_time_and_the_file_stays(tmp_path: Path) -> None:
    now, path = [NOW], tmp_path / "overrides.json"
    items = [to_json(replace(DRAIN, until=NOW + HOUR)), {"admin": "perhaps"}]
    path.write_text(text := json.dumps({"overrides": items}))
    store = OverrideStore(path, lambda: now[0])
    store.load()
    assert list(store.overrides) == [STATE]
    now[0] += HOUR
    store.expire_due()
    assert store.overrides == {}
    assert not store.unsaved, "else it would be tried for ever"
    store.save_expired()
    assert path.read_text() == text
    path.write_text(json.dumps({"overrides": [items[0], to_json(replace(DRAIN, target=EVERYWHERE))]}))
    store.reload()
    assert list(store.overrides) == [OverrideKey(EVERYWHERE, OverridePart.STATE)]


def test_an_order_is_about_what_there_is() -> None:
    found = parse_override(SERVICES, {"address": "10.244.0.5", "admin": "draining", "for": 60}, "uid 0", NOW)
    assert [s.name for s, _ in found.backends] == ["dns", "web"]
    assert found.override.until == NOW + timedelta(minutes=1)
    by_frontend = parse_override(
        SERVICES, {"service": "10.96.0.10:53/udp", "backend": "10.244.0.6", "weight": 0}, "x", NOW
    )
    assert by_frontend.override.target == OverrideTarget("dns", "10.244.0.6")


def test_a_backend_is_found_by_the_port_that_describe_shows() -> None:
    """It has no port of its own: describe shows it with that of the service, or its target."""
    request = {"service": "dns", "backend": "10.244.0.6:53", "admin": "draining"}
    assert parse_override(SERVICES, request, "x", NOW).override.target == OverrideTarget("dns", "10.244.0.6")
    with pytest.raises(RefusedError) as refused:
        parse_override(SERVICES, {**request, "backend": "10.244.0.6:54"}, "x", NOW)
    assert refused.value.hint == "did you mean 10.244.0.6?"


def test_a_backend_of_the_fallback_takes_no_orders() -> None:
    services = {"dns": replace(DNS, fallback=(Backend("10.244.9.9", 53),))}
    with pytest.raises(RefusedError, match="is of the fallback, whose backends take no orders"):
        parse_override(
            services, {"service": "dns", "backend": "10.244.9.9:53", "admin": "draining"}, "x", NOW
        )


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        ({"service": "dns", "backend": "10.244.9.9", "admin": "draining"}, "not-found"),
        ({"service": "nope", "backend": "10.244.0.5", "admin": "draining"}, "not-found"),
        ({"address": "10.244.9.9", "admin": "draining"}, "not-found"),
        ({"address": "nonsense", "admin": "draining"}, "invalid"),
        ({"service": "dns", "backend": "10.244.0.5"}, "malformed"),
        ({"service": "dns", "admin": "draining"}, "malformed"),
        ({"service": "dns", "backend": "10.244.0.5", "admin": "active"}, "invalid"),
        ({"service": "dns", "backend": "10.244.0.5", "weight": 65536}, "invalid"),
        ({"service": "dns", "backend": "10.244.0.5", "admin": "draining", "for": 0}, "invalid"),
        ({"service": "dns", "backend": "10.244.0.5", "admin": "draining", "reason": "a\nb"}, "invalid"),
        ({"service": "dns", "backend": "10.244.0.5", "admin": "disabled", "pins": 5}, "malformed"),
    ],
)
def test_wrong_orders_are_refused(request_: dict[str, object], kind: str) -> None:
    with pytest.raises(RefusedError) as refused:
        parse_override(SERVICES, request_, "uid 0", NOW)
    assert refused.value.kind == kind


def test_an_order_can_be_taken_back_when_its_backend_is_gone() -> None:
    gone = OverrideTarget("old", "10.244.0.5")
    assert overrides_to_clear(SERVICES, {"service": "old", "backend": "10.244.0.5"}, {gone}) == (
        frozenset({gone}),
        (),
    )
    assert overrides_to_clear({}, {"address": "10.244.0.5"}, {EVERYWHERE}) == (frozenset({EVERYWHERE}), ())


@pytest.mark.parametrize(
    ("known", "word"),
    [
        (OverrideTarget("dns", "10.244.0.5:53"), "10.244.0.5:53"),
        (OverrideTarget("dns", "10.244.0.9:53"), "10.244.0.9:53"),
        (OverrideTarget("api", "10.244.0.2"), "10.244.0.2"),
        (OverrideTarget("api", "10.244.0.3"), "10.244.0.3"),
        (OverrideTarget("10.96.0.10:53/udp", "10.244.0.5"), "10.244.0.5"),
        (OverrideTarget("10.96.0.10:53/udp", "10.244.0.9"), "10.244.0.9"),
        (OverrideTarget("dns", "fd00::5"), "FD00:0::5"),
        (OverrideTarget("dns", "web-1"), "web-1"),
        (OverrideTarget("", "fd00::5"), "FD00:0::5"),
    ],
)
def test_an_order_is_taken_back_by_the_words_that_list_it(known: OverrideTarget, word: str) -> None:
    """Its backend has a port now, has lost it, has become several, or its service has got a name."""
    api = replace(
        service("api", "10.96.0.12", "", 1),
        backends=(Backend("10.244.0.2", 8080), Backend("10.244.0.3", 1), Backend("10.244.0.3", 2)),
    )
    request = {"service": known.service, "backend": word} if known.service else {"address": word}
    others = {OverrideTarget("dns", "10.244.0.6"), EVERYWHERE}
    assert overrides_to_clear({**SERVICES, "api": api}, request, {known, *others})[0] == {known}


def test_words_that_name_neither_order_nor_backend_are_refused() -> None:
    request = {"service": "dns", "backend": "10.244.0.9"}
    for asked in (request, {"address": "10.244.0.9"}, {"service": "x", "backend": "y"}):
        with pytest.raises(RefusedError) as refused:
            overrides_to_clear(SERVICES, asked, {DRAIN.target})
        assert refused.value.kind == "not-found"
    assert (
        overrides_to_clear(SERVICES, {"service": "dns", "backend": "10.244.0.6"}, {DRAIN.target})[0]
        == frozenset()
    )


def test_orders_survive_a_restart_and_end_on_time(tmp_path: Path) -> None:
    now, path = [NOW], tmp_path / "state" / "overrides.json"
    observer = RecordingObserver()
    store = OverrideStore(path, lambda: now[0], observer)
    store.load()
    store.put(
        replace(DRAIN, until=NOW + timedelta(hours=1)), replace(DRAIN, target=OverrideTarget("", "10.0.0.9"))
    )
    again = OverrideStore(path, lambda: now[0])
    again.load()
    assert again.overrides == store.overrides
    assert again.faults() == ()
    assert again.next_expiry() == NOW + timedelta(hours=1)
    now[0] += timedelta(hours=1)
    again.expire_due()
    assert {key.target for key in again.overrides} == {OverrideTarget("", "10.0.0.9")}
    store.clear(OverrideTarget("", "10.0.0.9"))
    assert observer.overrides == [
        {DRAIN.target, OverrideTarget("", "10.0.0.9")},
        {OverrideTarget("", "10.0.0.9")},
    ]
    again.load()
    assert again.overrides == {}, "what was taken back does not return"


@pytest.mark.parametrize("step", [2 * HOUR, -2 * HOUR])
def test_an_override_ends_by_the_wall_clock_which_may_be_set(tmp_path: Path, step: timedelta) -> None:
    """Set forward: it ends as soon as that is noticed. Set back: it lasts longer, and once over stays so."""
    path, synced = tmp_path / "overrides.json", list[datetime]()

    async def story() -> None:
        loop, offset = asyncio.get_running_loop(), [timedelta()]

        def now() -> datetime:
            return NOW + timedelta(seconds=loop.time()) + offset[0]

        store, changed = OverrideStore(path, now), asyncio.Event()
        store.put(replace(DRAIN, until=now() + HOUR))
        reconciler = cast(Reconciler, SimpleNamespace(clock=now, request_sync=lambda: synced.append(now())))

        async def loops() -> None:
            while True:
                await expire_overrides(store, reconciler, changed)

        expiring = asyncio.create_task(loops())
        await asyncio.sleep(600)
        offset[0] = step
        await asyncio.sleep(2 * MAX_PAUSE_SECONDS)
        assert bool(store.overrides) is (step < timedelta())
        await asyncio.sleep(3 * 3600)
        assert not store.overrides
        assert len(synced) == 1
        store.save_expired()
        offset[0] -= 10 * HOUR
        again = OverrideStore(path, now)
        again.load()
        await asyncio.sleep(2 * MAX_PAUSE_SECONDS)
        assert not store.overrides
        assert not again.overrides, "nor does it return with a restart"
        expiring.cancel()

    simulate(story())


def test_a_file_that_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "overrides.json"
    good, bad = to_json(DRAIN), to_json(DRAIN) | {"admin": "perhaps"}
    path.write_text(text := json.dumps({"overrides": [good, bad]}))
    store = OverrideStore(path, lambda: NOW)
    store.load()
    assert set(store.overrides) == {STATE}
    assert "override 1" in store.faults()[0]
    with pytest.raises(StoreError, match="override 1"):
        store.put(DRAIN)
    assert path.read_text() == text
    path.write_text("{")
    store.load()
    assert store.overrides == {}
    assert "cannot be read" in store.faults()[0]
