"""What of a lookup's result serves, and when the next one is due."""

from dataclasses import replace

import pytest

from vipd.model.service import Backend, Family, NamedBackend, NameKind
from vipd.resolver.answers import (
    AnswerLimits,
    LookupResult,
    NameState,
    Part,
    Target,
    apply_result,
    limited,
    without_useless,
)
from vipd.resolver.backends import backends_of

LIMITS = AnswerLimits(min_ttl=5, max_ttl=300, hold=30, max_targets=10)
BOTH = (Family.IPV4, Family.IPV6)


def targets(*addresses: str) -> tuple[Target, ...]:
    return tuple(map(Target, addresses))


def answer(*addresses: str, ttl: float = 60, **more: object) -> LookupResult:
    return LookupResult(targets(*addresses), ttl, **more)  # type: ignore[arg-type]


def after(state: NameState, result: LookupResult, now: float, part: float = 0.0) -> NameState:
    return apply_result(state, result, LIMITS, now, 1e9 + now, part)


def serving(state: NameState) -> list[str]:
    return [target.address for target in state.serving]


def test_the_first_answer_serves_at_once_and_is_asked_again_at_its_ttl() -> None:
    state = after(NameState(), answer("10.0.0.2", "10.0.0.1"), 100)
    assert serving(state) == ["10.0.0.1", "10.0.0.2"]
    assert (state.next_at, state.answered_at, state.fault) == (160, 1e9 + 100, "")


@pytest.mark.parametrize(("ttl", "pause"), [(0, 5), (4.9, 5), (60, 60), (2**31, 300)])
def test_the_ttl_is_bounded(ttl: float, pause: float) -> None:
    assert after(NameState(), answer("10.0.0.1", ttl=ttl), 0).next_at == pause


def test_lookups_are_spread_and_never_before_the_ttl() -> None:
    assert after(NameState(), answer("10.0.0.1"), 0, part=0.99).next_at == pytest.approx(65.94)


@pytest.mark.parametrize("bad", [LookupResult(fault="NXDOMAIN"), LookupResult((), 60)])
def test_an_answer_that_fails_or_is_empty_changes_nothing(bad: LookupResult) -> None:
    good = after(NameState(), answer("10.0.0.1", "10.0.0.2"), 0)
    state, pauses = good, []
    for _ in range(12):
        now = state.next_at
        state = after(state, bad, now)
        pauses.append(state.next_at - now)
        assert serving(state) == serving(good)
    assert state.fault
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300, 300, 300, 300]
    assert after(state, answer("10.0.0.1", "10.0.0.2"), 1e4).fault == ""


def test_what_a_part_of_the_lookup_could_not_find_out_stays() -> None:
    state = after(NameState(), answer("10.0.0.1", "10.0.0.2", "fd00::1"), 0)
    partly = answer("10.0.0.1", failed={Part("", Family.IPV6): "no answer within 5 s"}, ttl=60)
    state = after(state, partly, 60)
    assert serving(state) == ["10.0.0.1", "fd00::1"]
    assert (state.fault, state.next_at) == ("no answer within 5 s", 65)


def test_srv_targets_whose_addresses_fail_stay() -> None:
    known = (
        Target("10.0.0.1", 80, host="a"),
        Target("10.0.0.2", 80, host="b"),
        Target("10.0.0.3", 80, host="c"),
    )
    state = after(NameState(), LookupResult(known, 60), 0)
    result = LookupResult((known[0],), 60, failed={Part("b", Family.IPV4): "no answer"})
    assert after(state, result, 60).serving == known[:2]


def test_a_small_removal_happens_at_once() -> None:
    state = after(NameState(), answer("10.0.0.1", "10.0.0.2"), 0)
    assert serving(after(state, answer("10.0.0.1"), 60)) == ["10.0.0.1"]


@pytest.mark.parametrize("new", [("10.0.0.1",), ("10.9.9.9",), ("10.0.0.1", "10.9.9.8", "10.9.9.9")])
def test_a_removal_of_more_than_half_waits_until_it_lasts(new: tuple[str, ...]) -> None:
    old = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    state = after(after(NameState(), answer(*old), 0), answer(*new), 60)
    assert serving(state) == sorted({*old, *new})
    assert {address for address, _ in state.held} == {*old} - {*new}
    assert state.next_at == 90
    early = after(state, answer(*new), 89.9)
    assert serving(early) == serving(state)
    late = after(early, answer(*new), 90)
    assert (serving(late), late.held, late.trial) == (sorted(new), {}, {})


@pytest.mark.parametrize("wrong", [("10.66.66.66",), tuple(f"10.66.66.{n}" for n in range(9))])
def test_one_wrong_answer_removes_nothing_and_is_forgotten(wrong: tuple[str, ...]) -> None:
    old = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    state = after(after(NameState(), answer(*old), 0), answer(*wrong), 60)
    state = after(state, answer(*old), 65)
    assert (serving(state), state.held, state.trial) == (list(old), {}, {})


def test_each_address_is_held_from_when_answers_lack_it_themselves() -> None:
    state = after(NameState(), answer("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"), 0)
    state = after(state, answer("10.0.0.4", "10.9.9.9"), 60)
    state = after(state, answer("10.9.9.9"), 86)  # lacks 10.0.0.4, too, 4 s before the others' hold ends
    state = after(state, answer("10.9.9.9"), 90)
    assert serving(state) == ["10.0.0.4", "10.9.9.9"]
    assert state.next_at == 116
    state = after(state, answer("10.9.9.9"), 115.9)
    assert serving(state) == ["10.0.0.4", "10.9.9.9"]
    assert serving(after(state, answer("10.9.9.9"), 116)) == ["10.9.9.9"]


def test_an_address_that_returns_and_goes_again_is_held_anew() -> None:
    old, new = ("10.0.0.1", "10.0.0.2"), ("10.9.9.9",)
    state = after(after(NameState(), answer(*old), 0), answer(*new), 60)
    state = after(after(state, answer("10.0.0.1", *new), 80), answer(*new), 85)
    state = after(state, answer(*new), 90)
    assert serving(state) == ["10.0.0.1", "10.9.9.9"]
    assert serving(after(state, answer(*new), 115)) == ["10.9.9.9"]


def test_what_served_through_a_whole_hold_is_held_itself() -> None:
    state = after(after(NameState(), answer("10.0.0.1"), 0), answer("10.0.0.2"), 60)
    state = after(after(state, answer("10.0.0.2"), 89), answer("10.0.0.2"), 90)
    assert serving(state) == ["10.0.0.2"]
    assert serving(after(state, answer("10.0.0.3"), 91)) == ["10.0.0.2", "10.0.0.3"]


GOOD = ("10.200.0.1", "10.200.0.2", "10.200.0.3")
UNKNOWN = tuple(f"10.6.0.{n}" for n in range(25))


@pytest.mark.parametrize(
    "wrong",
    [
        [UNKNOWN[:10], UNKNOWN[10:20], UNKNOWN[5:15]],  # those that serve on are more than an answer may have
        [UNKNOWN[:10], (*UNKNOWN[:10], *GOOD)],  # the answer that has them again is beyond the limit
        [UNKNOWN[:10], (*UNKNOWN[:10], GOOD[0]), UNKNOWN[:10]],
    ],
)
def test_unknown_addresses_displace_none_that_served(wrong: list[tuple[str, ...]]) -> None:
    state = after(NameState(), answer(*GOOD), 0)
    for now, addresses in enumerate(wrong, 60):
        listed, beyond = limited(targets(*addresses), state, LIMITS.max_targets)
        state = after(state, LookupResult(tuple(listed), 60, left_out=beyond), now)
        assert {*serving(state)} >= {*GOOD}
        assert len(state.serving) <= 2 * LIMITS.max_targets
    assert {*serving(after(state, answer(*GOOD), 70))} >= {*GOOD}


def test_a_part_that_failed_neither_ends_nor_begins_a_hold() -> None:
    state = after(NameState(), answer("fd00::1", "fd00::2"), 0)
    state = after(state, answer("10.0.0.1"), 60)
    failed = answer("10.0.0.1", failed={Part("", Family.IPV6): "no answer"})
    state = after(state, failed, 85)
    assert serving(after(state, failed, 95)) == ["10.0.0.1", "fd00::1", "fd00::2"]
    assert serving(after(state, answer("10.0.0.1"), 90)) == ["10.0.0.1"]


def test_a_failure_meanwhile_neither_ends_nor_confirms_a_removal() -> None:
    state = after(after(NameState(), answer("10.0.0.1"), 0), answer("10.0.0.2"), 60)
    state = after(state, LookupResult(fault="SERVFAIL"), 100)
    assert serving(state) == ["10.0.0.1", "10.0.0.2"]
    assert serving(after(state, answer("10.0.0.2"), 105)) == ["10.0.0.2"]


def test_answers_that_differ_each_time_do_not_pile_up() -> None:
    state = after(NameState(), answer("10.0.0.1"), 0)
    for n in range(25):
        state = after(state, answer(*(f"10.{n}.0.{i}" for i in range(8))), 1 + n)
        assert len(state.serving) <= 2 * LIMITS.max_targets


def test_without_a_hold_every_answer_counts_at_once() -> None:
    limits = replace(LIMITS, hold=0)
    state = apply_result(NameState(), answer("10.0.0.1"), limits, 0, 0, 0)
    assert serving(apply_result(state, answer("10.0.0.2"), limits, 60, 60, 0)) == ["10.0.0.2"]


def test_an_answer_of_which_nothing_may_serve_is_a_failure() -> None:
    def usable(address: str) -> bool:
        return address != "0.0.0.0"

    blocked = without_useless(answer("0.0.0.0"), usable)
    assert (blocked.targets, blocked.fault) == ((), "it resolves to 0.0.0.0, which no backend may have")
    several = without_useless(answer("0.0.0.0", "0.0.0.0", "0.0.0.0"), usable)
    assert several.fault == "it resolves to 0.0.0.0 and 2 more, which no backend may have"
    partly, failed = answer("0.0.0.0", "10.0.0.1"), LookupResult(fault="SERVFAIL")
    assert without_useless(partly, usable) is partly
    assert without_useless(failed, usable) is failed
    good = after(NameState(), answer("10.0.0.1"), 0)
    assert serving(after(good, blocked, 60)) == ["10.0.0.1"]


def test_another_weight_is_no_removal() -> None:
    state = after(NameState(), LookupResult((Target("10.0.0.1", 80, 0, 1),), 60), 0)
    state = after(state, LookupResult((Target("10.0.0.1", 80, 5, 9),), 60), 60)
    assert state.serving == (Target("10.0.0.1", 80, 5, 9),)


def test_of_too_many_targets_those_that_serve_stay() -> None:
    found, left_out = limited(
        targets("10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.3"), NameState(targets("10.0.0.3")), 2
    )
    assert ([target.address for target in found], left_out) == (["10.0.0.3", "10.0.0.1"], 1)


def srv(*records: tuple[str, int, int, int]) -> list[tuple[str, int, bool]]:
    named = NamedBackend(NameKind.SRV, "_http._tcp.web.internal")
    found = backends_of(named, [Target(*record) for record in records], BOTH)
    return [(str(backend), backend.weight, backend.backup) for backend in found]


def test_srv_records_say_port_weight_and_priority() -> None:
    assert srv(("10.0.0.1", 80, 10, 3), ("10.0.0.2", 81, 10, 1), ("10.0.0.3", 82, 20, 5)) == [
        ("10.0.0.1:80", 3, False),
        ("10.0.0.2:81", 1, False),
        ("10.0.0.3:82", 5, True),
    ]


def test_weight_zero_is_a_small_share_as_rfc_2782_says_and_equal_shares_if_all_have_it() -> None:
    assert [weight for _, weight, _ in srv(("10.0.0.1", 80, 0, 0), ("10.0.0.2", 80, 0, 0))] == [1, 1]
    assert [weight for _, weight, _ in srv(("10.0.0.1", 80, 0, 0), ("10.0.0.2", 80, 0, 3))] == [1, 300]
    assert [weight for _, weight, _ in srv(("10.0.0.1", 80, 0, 0), ("10.0.0.2", 80, 0, 65535))] == [1, 65535]


def test_addresses_of_families_that_a_service_lacks_are_none_of_its_backends() -> None:
    named = NamedBackend(NameKind.DNS, "web.internal", Backend("", 8080, 2))
    (backend,) = backends_of(named, targets("10.0.0.1", "fd00::1"), [Family.IPV6])
    assert backend == Backend("fd00::1", 8080, 2, resolved_from="dns:web.internal:8080")
