"""Orders of operators: what they come to, how they end, and that none is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.samples import service
from vipd.model import Backend
from vipd.operations import RefusedError
from vipd.orders import order, subject_of
from vipd.overrides import (
    MOST_TEXT,
    MalformedError,
    Override,
    Subject,
    from_json,
    lapsed,
    merged,
    orders_about,
    to_json,
)
from vipd.sources.override_store import OverrideStore
from vipd.sources.store import StoreError
from vipd.standing import Admin
from vipd.text import is_text

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
DNS = service("dns", "10.96.0.10", "", 1, "10.244.0.5", "10.244.0.6")
WEB = service("web", "10.96.0.11", "", 1, "10.244.0.5")
SERVICES = {"dns": DNS, "web": WEB}
DRAIN = Override(Subject("dns", "10.244.0.5"), "uid 0", NOW, Admin.DRAINING)
FIRST = Backend("10.244.0.5")

LINES = st.text(st.characters(exclude_categories=["Cs"]), max_size=5).filter(str.isprintable)

OVERRIDES = st.builds(
    Override,
    st.sampled_from([Subject("dns", "10.244.0.5"), Subject("", "fd00::5")]),
    LINES,
    st.just(NOW),
    st.sampled_from(Admin),
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
    if not all(map(is_text, (reason, by))):
        with pytest.raises(MalformedError, match="must be text"):
            from_json(stored)
        return
    found = from_json(stored)
    assert all(text.isprintable() and len(text) <= MOST_TEXT for text in (found.reason, found.by))
    assert from_json(json.loads(json.dumps(to_json(found)))) == found


def test_orders_that_would_read_back_as_others_are_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "overrides.json"
    store = OverrideStore(path, lambda: NOW)
    store.put(DRAIN)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="read back as others"):
        store.put(replace(DRAIN, reason="\x1b[2J"))
    assert path.read_bytes() == before
    assert store.overrides == {DRAIN.subject: DRAIN}


def test_the_severest_order_and_the_nearest_weight_win() -> None:
    everywhere = Override(Subject("", "10.244.0.5"), "uid 0", NOW, Admin.DISABLED, 7)
    found = orders_about(DNS, FIRST, [DRAIN, everywhere])
    assert (found.admin, found.weight) == (Admin.DISABLED, 7)
    weighted = replace(DRAIN, weight=2)
    assert orders_about(DNS, FIRST, [weighted, everywhere]).weight == 2
    assert orders_about(WEB, FIRST, [weighted]).admin is Admin.ACTIVE
    assert orders_about(DNS, Backend("10.244.0.6"), [weighted, everywhere]).sources == ()


def test_pins_last_as_long_as_every_drain_lets_them() -> None:
    pins = replace(DRAIN, pins_until=NOW + timedelta(minutes=1))
    assert orders_about(DNS, FIRST, [pins]).pinned
    assert not orders_about(DNS, FIRST, [pins, replace(DRAIN, subject=Subject("", "10.244.0.5"))]).pinned


def test_time_ends_orders_and_pins() -> None:
    brief = replace(DRAIN, until=NOW + timedelta(hours=1), pins_until=NOW + timedelta(minutes=1))
    known = {brief.subject: brief}
    assert lapsed(known, NOW) == {}
    assert lapsed(known, NOW + timedelta(minutes=1)) == {brief.subject: replace(brief, pins_until=None)}
    assert lapsed(known, NOW + timedelta(hours=1)) == {brief.subject: None}


def test_a_weight_and_a_state_stand_side_by_side() -> None:
    weight = Override(DRAIN.subject, "uid 0", NOW, weight=5)
    assert merged(DRAIN, weight).admin is Admin.DRAINING
    assert merged(weight, DRAIN).weight == 5


def test_an_order_is_about_what_there_is() -> None:
    found = order(SERVICES, {}, {"address": "10.244.0.5", "admin": "draining", "for": 60}, "uid 0", NOW)
    assert [s.name for s, _ in found.backends] == ["dns", "web"]
    assert found.override.until == NOW + timedelta(minutes=1)
    by_frontend = order(
        SERVICES, {}, {"service": "10.96.0.10:53/udp", "backend": "10.244.0.6", "weight": 0}, "x", NOW
    )
    assert by_frontend.override.subject == Subject("dns", "10.244.0.6")


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
        ({"service": "dns", "backend": "10.244.0.5", "admin": "draining", "until": 5}, "malformed"),
    ],
)
def test_wrong_orders_are_refused(request_: dict[str, object], kind: str) -> None:
    with pytest.raises(RefusedError) as refused:
        order(SERVICES, {}, request_, "uid 0", NOW)
    assert refused.value.kind == kind


def test_an_order_can_be_taken_back_when_its_backend_is_gone() -> None:
    gone = Subject("old", "10.244.0.5")
    assert subject_of(SERVICES, {"service": "old", "backend": "10.244.0.5"}, {gone}) == (gone, ())
    assert subject_of({}, {"address": "10.244.0.5"}, {Subject("", "10.244.0.5")})[1] == ()


def test_orders_survive_a_restart_and_end_on_time(tmp_path: Path) -> None:
    now, path = [NOW], tmp_path / "state" / "overrides.json"
    changed: list[frozenset[Subject]] = []
    store = OverrideStore(path, lambda: now[0])
    store.load()
    store.changed = changed.append
    store.put(replace(DRAIN, until=NOW + timedelta(hours=1)), replace(DRAIN, subject=Subject("", "10.0.0.9")))
    again = OverrideStore(path, lambda: now[0])
    again.load()
    assert again.overrides == store.overrides
    assert again.faults() == ()
    assert again.due() == NOW + timedelta(hours=1)
    now[0] += timedelta(hours=1)
    again.tick()
    assert set(again.overrides) == {Subject("", "10.0.0.9")}
    store.take_back(Subject("", "10.0.0.9"))
    assert changed == [{DRAIN.subject, Subject("", "10.0.0.9")}, {Subject("", "10.0.0.9")}]


def test_a_file_that_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "overrides.json"
    good, bad = to_json(DRAIN), to_json(DRAIN) | {"admin": "perhaps"}
    path.write_text(text := json.dumps({"overrides": [good, bad]}))
    store = OverrideStore(path, lambda: NOW)
    store.load()
    assert set(store.overrides) == {DRAIN.subject}
    assert "override 1" in store.faults()[0]
    with pytest.raises(StoreError, match="override 1"):
        store.put(DRAIN)
    assert path.read_text() == text
    path.write_text("{")
    store.load()
    assert store.overrides == {}
    assert "cannot be read" in store.faults()[0]
