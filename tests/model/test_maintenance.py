"""Maintenance of a host: as text, and as the JSON of its file."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from vipd.model.maintenance import Maintenance, from_json, to_json
from vipd.model.override import MAX_TEXT, MalformedOverrideError

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATER = AT + timedelta(hours=2)


@pytest.mark.parametrize(
    ("maintenance", "text", "json"),
    [
        (Maintenance("root", AT), "in maintenance", {"by": "root", "at": "2026-01-31T12:00:00+00:00"}),
        (
            Maintenance("root", AT, "new disks", LATER),
            "in maintenance until 2026-01-31T14:00:00+00:00 (new disks)",
            {
                "by": "root",
                "at": "2026-01-31T12:00:00+00:00",
                "reason": "new disks",
                "until": "2026-01-31T14:00:00+00:00",
            },
        ),
    ],
)
def test_its_forms(maintenance: Maintenance, text: str, json: dict[str, object]) -> None:
    assert str(maintenance) == text
    assert to_json(maintenance) == json
    assert from_json(json) == maintenance


def test_times_of_other_zones_are_in_utc_and_those_without_a_zone_are_utc(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(time.tzset)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    assert from_json({"at": "2026-01-31T13:00:00+01:00"}).at == AT
    found = from_json({"at": "2026-01-31T12:00:00", "until": "2026-01-31T14:00:00"})
    assert (found.at, found.until, found.by, found.reason) == (AT, LATER, "", "")


def test_it_is_over_at_its_end() -> None:
    assert not Maintenance("root", AT, until=LATER).over(LATER - timedelta(seconds=1))
    assert Maintenance("root", AT, until=LATER).over(LATER)
    assert not Maintenance("root", AT).over(datetime.max.replace(tzinfo=UTC))


def test_texts_are_short_and_of_one_line() -> None:
    found = from_json({"at": AT.isoformat(), "by": "a\nb", "reason": "x" * 9999})
    assert "\n" not in found.by
    assert len(found.reason) == MAX_TEXT


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([], "it must be a mapping, not list"),
        ({"at": AT.isoformat(), "who": "root"}, "unknown key 'who'"),
        ({"by": "root"}, "at is missing"),
        ({"at": AT.isoformat(), "by": 5}, "by and reason must be text"),
        ({"at": AT.isoformat(), "reason": "\ud800"}, "by and reason must be text"),
        ({"at": 5}, "5 is not a time"),
        ({"at": "soon"}, "'soon' is not a time"),
        ({"at": AT.isoformat(), "until": "9999-12-31T23:59:59-23:00"}, "is not a time"),
    ],
)
def test_what_is_wrong_with_anything_else(value: object, why: str) -> None:
    with pytest.raises(MalformedOverrideError, match=why):
        from_json(value)
