"""What of a lookup's result serves, and when the next one is due."""

from dataclasses import replace

from vipd.model.service import Backend, Family, NamedBackend, NameKind
from vipd.resolver.answers import (
    AnswerLimits,
    LookupResult,
    NameState,
    Part,
    Target,
    apply_result,
    backends_of,
    limited,
    without_useless,
)

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


def listed(numbers: str) -> LookupResult:
    """An answer in short: `1` stands for 10.0.0.1, `:1` for fd00::1; `no6` for no answer about IPv6, and
    a word in capitals for no answer at all."""
    if numbers.isupper():
        return LookupResult(fault=numbers)
    words = [word for word in numbers.split() if word != "no6"]
    failed = {Part("", Family.IPV6): "no answer within 5 s"} if "no6" in numbers else {}
    return answer(*(f"fd00:{word}" if word[0] == ":" else f"10.0.0.{word}" for word in words), failed=failed)


HISTORIES = {
    "the first answer serves at once, and is asked again at its TTL": "100: 2 1 = 1 2, next 160",
    "a small removal happens at once": "0: 1 2 = 1 2; 60: 1 = 1",
    "a removal of more than half waits until it lasts": (
        "0: 1 2 3 = 1 2 3; 60: 1 = 1 2 3, next 90; 89.9: 1 = 1 2 3; 90: 1 = 1"
    ),
    "and one beside which others come": (
        "0: 1 2 3 = 1 2 3; 60: 1 8 9 = 1 2 3 8 9, next 90; 89.9: 1 8 9 = 1 2 3 8 9; 90: 1 8 9 = 1 8 9"
    ),
    "one wrong answer removes nothing, and is forgotten": (
        "0: 1 2 3 = 1 2 3; 60: 66 = 1 2 3 66; 65: 1 2 3 = 1 2 3; 66: 7 8 9 = 1 2 3 7 8 9; 70: 1 2 3 = 1 2 3"
    ),
    "an address is held from when answers lack it themselves": (
        "0: 1 2 3 4 = 1 2 3 4; 60: 4 9 = 1 2 3 4 9; 86: 9 = 1 2 3 4 9; 90: 9 = 4 9, next 116; "
        "115.9: 9 = 4 9; 116: 9 = 9"
    ),
    "an address that returns and goes again is held anew": (
        "0: 1 2 = 1 2; 60: 9 = 1 2 9; 80: 1 9 = 1 2 9; 85: 9 = 1 2 9; 90: 9 = 1 9; 115: 9 = 9"
    ),
    "what served through a whole hold is held": "0: 1 = 1; 60: 2 = 1 2; 89: 2 = 1 2; 90: 2 = 2; 91: 3 = 2 3",
    "what a part of the lookup could not find out stays": "0: 1 2 :1 = 1 2 :1; 60: 1 no6 = 1 :1, next 65",
    "a part that failed ends no hold": (
        "0: :1 :2 = :1 :2; 60: 1 = 1 :1 :2; 85: 1 no6 = 1 :1 :2; 95: 1 no6 = 1 :1 :2"
    ),
    "nor does it begin one": "0: :1 :2 = :1 :2; 60: 1 = 1 :1 :2; 85: 1 no6 = 1 :1 :2; 90: 1 = 1",
    "a failure neither ends nor confirms a removal": "0: 1 = 1; 60: 2 = 1 2; 100: SERVFAIL = 1 2; 105: 2 = 2",
}
"""`SECOND: what is answered = what serves then`, and when it is asked next."""


def test_what_serves_after_a_row_of_answers() -> None:
    wrong = {}
    for name, history in HISTORIES.items():
        state = NameState()
        for step in history.split("; "):
            at, _, rest = step.partition(": ")
            answered, _, wanted = rest.partition(" = ")
            serves, _, next_at = wanted.partition(", next ")
            state = after(state, listed(answered), float(at))
            seen = (set(serving(state)), state.next_at)
            if seen != ({t.address for t in listed(serves).targets}, float(next_at or state.next_at)):
                wrong[name, step] = seen
    assert wrong == {}


def test_the_ttl_is_bounded_and_lookups_are_spread_but_never_before_it() -> None:
    pauses = {0: 5, 4.9: 5, 60: 60, 2**31: 300}
    assert {ttl: after(NameState(), answer("10.0.0.1", ttl=ttl), 0).next_at for ttl in pauses} == pauses
    state = after(NameState(), answer("10.0.0.1"), 0, part=0.99)
    assert round(state.next_at, 2) == 65.94
    assert (state.answered_at, state.fault) == (1e9, "")


def test_an_answer_that_fails_or_is_empty_changes_nothing() -> None:
    for bad in (LookupResult(fault="NXDOMAIN"), LookupResult((), 60)):
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


def test_srv_targets_whose_addresses_fail_stay() -> None:
    known = tuple(Target(f"10.0.0.{n}", 80, host=host) for n, host in enumerate("abc", 1))
    state = after(NameState(), LookupResult(known, 60), 0)
    result = LookupResult((known[0],), 60, failed={Part("b", Family.IPV4): "no answer"})
    after_it = after(state, result, 60)
    assert (after_it.serving, after_it.fault) == (known[:2], "no answer")


GOOD = ("10.200.0.1", "10.200.0.2", "10.200.0.3")
UNKNOWN = tuple(f"10.6.0.{n}" for n in range(25))
FLOODS = [
    [UNKNOWN[:10], UNKNOWN[10:20], UNKNOWN[5:15]],  # those that serve on are more than an answer may have
    [UNKNOWN[:10], (*UNKNOWN[:10], *GOOD)],  # the answer that has them again is beyond the limit
    [UNKNOWN[:10], (*UNKNOWN[:10], GOOD[0]), UNKNOWN[:10]],
]


def test_unknown_addresses_displace_none_that_served() -> None:
    for flood in FLOODS:
        state = after(NameState(), answer(*GOOD), 0)
        for now, addresses in enumerate(flood, 60):
            kept, beyond = limited(targets(*addresses), state, LIMITS.max_targets)
            state = after(state, LookupResult(tuple(kept), 60, left_out=beyond), now)
            assert {*serving(state)} >= {*GOOD}
            assert len(state.serving) <= 2 * LIMITS.max_targets
        assert {*serving(after(state, answer(*GOOD), 70))} >= {*GOOD}


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
    def fault(*addresses: str) -> str:
        return without_useless(answer(*addresses), lambda address: address != "0.0.0.0").fault

    assert fault("0.0.0.0") == "it resolves to 0.0.0.0, which no backend may have"
    several = "it resolves to 0.0.0.0 and 2 more, which no backend may have"
    assert fault("0.0.0.0", "0.0.0.0", "0.0.0.0") == several
    assert fault("0.0.0.0", "10.0.0.1") == fault() == ""


def test_another_weight_is_no_removal() -> None:
    state = after(NameState(), LookupResult((Target("10.0.0.1", 80, 0, 1),), 60), 0)
    state = after(state, LookupResult((Target("10.0.0.1", 80, 5, 9),), 60), 60)
    assert state.serving == (Target("10.0.0.1", 80, 5, 9),)


def test_of_too_many_targets_those_that_serve_stay() -> None:
    found, left_out = limited(
        targets("10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.3"), NameState(targets("10.0.0.3")), 2
    )
    assert ([target.address for target in found], left_out) == (["10.0.0.3", "10.0.0.1"], 1)


def srv(*records: tuple[int, int, int]) -> list[tuple[str, int, bool]]:
    """The backends of SRV records with these ports, priorities and weights."""
    named = NamedBackend(NameKind.SRV, "_http._tcp.web.internal")
    found = backends_of(named, [Target(f"10.0.0.{n}", *each) for n, each in enumerate(records, 1)], BOTH)
    return [(str(backend), backend.weight, backend.backup) for backend in found]


def test_srv_records_say_port_weight_and_priority() -> None:
    """Weight zero is a small share, as RFC 2782 says, and equal shares if all have it."""
    assert srv((80, 10, 3), (81, 10, 1), (82, 20, 5)) == [
        ("10.0.0.1:80", 3, False),
        ("10.0.0.2:81", 1, False),
        ("10.0.0.3:82", 5, True),
    ]
    for other, weights in ((0, [1, 1]), (3, [1, 300]), (65535, [1, 65535])):
        assert [weight for _, weight, _ in srv((80, 0, 0), (80, 0, other))] == weights


def test_addresses_of_families_that_a_service_lacks_are_none_of_its_backends() -> None:
    named = NamedBackend(NameKind.DNS, "web.internal", Backend("", 8080, 2))
    (backend,) = backends_of(named, targets("10.0.0.1", "fd00::1"), [Family.IPV6])
    assert backend == Backend("fd00::1", 8080, 2, resolved_from="dns:web.internal:8080")
