"""What overrides come to together, and as text."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tests.model.samples import service
from vipd.model.backend_status import AdminState, BackendStatus
from vipd.model.override import (
    MalformedOverrideError,
    Override,
    OverrideTarget,
    describe,
    effective_override,
    from_json,
    to_json,
)
from vipd.model.service import MAX_WEIGHT

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
DNS = service("dns", "10.96.0.1", "", 1, "10.0.0.1")
EVERYWHERE, HERE = OverrideTarget("", "10.0.0.1"), OverrideTarget("dns", "10.0.0.1")
DRAINED = Override(HERE, "anna", NOON, AdminState.DRAINING, pins_until=NOON)


def test_the_severest_state_and_the_nearest_weight_win() -> None:
    (backend,) = DNS.backends
    disabled = Override(EVERYWHERE, "anna", NOON, AdminState.DISABLED)
    heavy, light = (Override(s, "anna", NOON, weight=w) for s, w in ((EVERYWHERE, 9), (HERE, 1)))
    assert effective_override(DNS, backend, [DRAINED, disabled]).admin is AdminState.DISABLED
    assert effective_override(DNS, backend, [light, heavy]).weight == 1
    assert effective_override(DNS, backend, [DRAINED, heavy]).keeps_affinity, (
        "a weight says nothing of clients with affinity"
    )
    unpinned = Override(EVERYWHERE, "anna", NOON, AdminState.DRAINING)
    assert not effective_override(DNS, backend, [DRAINED, unpinned]).keeps_affinity
    assert not effective_override(DNS, backend, [heavy]).keeps_affinity


def test_an_override_in_words() -> None:
    order = Override(HERE, "anna", NOON, AdminState.DRAINING, 3, "update", NOON)
    assert describe(order) == "draining, weight 3 until 2026-01-31T12:00:00+00:00 (update)"
    assert describe(Override(HERE, "anna", NOON, weight=0, reason="old")) == "weight 0 (old)"


def test_json_leaves_out_what_is_not_said_and_reads_no_more_than_it_knows() -> None:
    written = to_json(DRAINED)
    assert written.keys() == {"service", "backend", "by", "at", "admin", "pins_until"}
    assert from_json(written) == DRAINED
    with pytest.raises(MalformedOverrideError, match="unknown key 'pin'"):
        from_json({**written, "pin": 1})
    times = ("2026-01-31T12:00:00", "2026-01-31T14:00:00+02:00")
    assert {from_json({**written, "at": time}).at for time in times} == {NOON}


def test_words_for_people_make_no_other_status() -> None:
    assert BackendStatus(reason="a", health="b", probe_result="c", shown_weight=1) == BackendStatus()
    assert BackendStatus(weight=1) != BackendStatus()


@pytest.mark.parametrize("weight", [-1, MAX_WEIGHT + 1, 1.0, True, "1"])
def test_a_weight_is_a_whole_number_within_limits(weight: object) -> None:
    written = to_json(Override(HERE, "anna", NOON, weight=MAX_WEIGHT))
    assert from_json(written).weight == MAX_WEIGHT
    with pytest.raises(MalformedOverrideError, match="is not a whole number from 0 to"):
        from_json({**written, "weight": weight})


def test_a_backend_of_which_nothing_is_known_gets_new_flows() -> None:
    status = BackendStatus()
    assert (status.admin, status.healthy, status.weight, status.full) == (
        AdminState.ACTIVE,
        True,
        None,
        False,
    )
