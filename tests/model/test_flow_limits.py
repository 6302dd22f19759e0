"""Limits on flows: in which order they hold, with which numbers."""

from __future__ import annotations

from vipd.model.flow_limits import AppliedLimit, FlowLimits, Limit


def test_a_client_meets_its_own_limits_first_and_a_rate_before_a_number() -> None:
    limits = FlowLimits(
        new_per_client=3, client_burst=9, connections_per_client=2, new_per_second=7, burst=30, connections=5
    )
    assert [*limits.applied()] == [
        (Limit.NEW_PER_CLIENT, 3, 9),
        (Limit.CONNECTIONS_PER_CLIENT, 2, 0),
        (Limit.NEW_PER_SECOND, 7, 30),
        (Limit.CONNECTIONS, 5, 0),
    ]


def test_without_a_burst_as_many_may_come_at_once_as_in_a_second() -> None:
    assert [*FlowLimits(new_per_client=3, new_per_second=7).applied()] == [
        (Limit.NEW_PER_CLIENT, 3, 3),
        (Limit.NEW_PER_SECOND, 7, 7),
    ]
    assert [*FlowLimits(connections=5).applied()] == [(Limit.CONNECTIONS, 5, 0)]
    assert AppliedLimit(Limit.CONNECTIONS, 5) == (Limit.CONNECTIONS, 5, 0)
    assert not [*FlowLimits().applied()]


def test_which_limits_hold_for_each_client_and_which_are_rates() -> None:
    assert {each for each in Limit if each.per_client} == {Limit.NEW_PER_CLIENT, Limit.CONNECTIONS_PER_CLIENT}
    assert {each for each in Limit if each.is_rate} == {Limit.NEW_PER_CLIENT, Limit.NEW_PER_SECOND}


def test_the_words_for_a_limit() -> None:
    assert str(AppliedLimit(Limit.NEW_PER_CLIENT, 3, 9)) == "new_per_client 3/s, 9 at once"
    assert str(AppliedLimit(Limit.CONNECTIONS, 5)) == "connections 5"


def test_a_rate_is_remembered_until_its_burst_has_come_back() -> None:
    """Twice the time in which it does, rounded up, and 10 s at least."""
    assert AppliedLimit(Limit.NEW_PER_CLIENT, 100, 100).idle_seconds == 10
    assert AppliedLimit(Limit.NEW_PER_CLIENT, 3, 100).idle_seconds == 67
