"""What may be asked of a body, what is refused, and that no body takes long."""

from __future__ import annotations

import re
import time

from hypothesis import given
from hypothesis import strategies as st

from tests.health.servers import Case, answers, beside, checked, differing, seen, tcp_server, verdict
from tests.lab.inside import declare, probed

MISMATCH = "bad: status 200, but the body does not match"


def with_body(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def matches(pattern: str, body: str | bytes) -> bool:
    """Whether a check with this pattern of a backend that answers with this body is good."""
    raw = body.encode() if isinstance(body, str) else body
    with beside(tcp_server(answers(with_body(raw)))) as port:
        text = seen(verdict("http", port, body=pattern))
    assert text in ("good", MISMATCH)
    return text == "good"


def refusal(pattern: str) -> str:
    """Why a check with this pattern cannot be declared, as vipctl prints it; empty: it can."""
    quoted = pattern.replace("'", "''")
    text = f"""apiVersion: vipd/v1
services:
  - name: shop
    address: 10.96.0.1
    ports: 80
    backends: [10.0.0.1]
    check: {{type: http, body: '{quoted}'}}
"""
    return " ".join(problem.printed for problem in declare(text).problems)


FOUND = {
    "ok": "it is ok",
    '{"status":"UP"}': '{"status":"UP"}',
    r"v1\.2 \(stable\)": "v1.2 (stable)",
    "^hel+o$": "hello\n",
    "(?m)^ready$": "starting\nready\nnow",
    r"(?i)STATUS\s*:\s*(up|ok)\b": "status: Up",
    "grün|bleu": "es ist grün",
    r"^\d{2,}$": "123\n",
    "(?P<state>up)": "up",
    "a{0,3}b": "aaab",
    "x{y}": "x{y}",
    "a]b": "a]b",
    "a}b": "a}b",
    r"\$5": "$5",
}
MORE_THAN_TEXT = ("a.b", "a|b", "a{2}", "^a", r"\d", "(a)", "[a]", "a?", "a+")


def test_what_python_finds_is_found_and_nothing_else() -> None:
    asked = [
        *FOUND.items(),
        *((pattern, "#") for pattern in FOUND),
        *((pattern, pattern) for pattern in MORE_THAN_TEXT),
    ]
    assert all(re.search(pattern, body) for pattern, body in FOUND.items())
    cases = {
        f"{pattern} in {body}": Case(
            answers(with_body(body.encode())),
            "good" if re.search(pattern, body) else MISMATCH,
            {"body": pattern},
        )
        for pattern, body in asked
    }
    assert differing(cases) == {}


@given(st.text("ab\n", max_size=8), st.text("ab.^$*+?|()[]{}\\n1,2", min_size=1, max_size=6))
def test_it_agrees_with_python_on_all_that_both_know(body: str, pattern: str) -> None:
    try:
        wanted = re.search(pattern, body) is not None
    except (re.error, RecursionError, FutureWarning):
        return
    if not refusal(pattern):
        # In RE2 `$` is also the end of a body that lost its last newline: then more of it may follow.
        assert matches(pattern, body) == wanted or ("$" in pattern and body.endswith("\n"))


def test_what_cannot_be_asked_is_a_problem_with_a_hint() -> None:
    hints = {
        "(?=a)": "no look-around",
        r"(a)\1": "back-references",
        "a++": "possessive",
        r"a\Z": r"\z for \Z",
        "(": "RE2",
        "a{,5}": "{0,N}",
        "a\\": "RE2",
        "a" * 501: "at most 500",
        ".{999}": "smaller counts",
        "((a{30}){30}){30}": "RE2",
        r"\pL\PN[\pM\pS]\pZ": "at most 4",
    }
    assert {pattern: hint in refusal(pattern) for pattern, hint in hints.items()} == dict.fromkeys(
        hints, True
    )
    printed = refusal("(?=x)")
    assert printed.startswith("a.yaml:7: services[0].check.body: ")
    assert "is not a regular expression" in printed


def test_no_pattern_takes_long_to_read() -> None:
    """Python waits for RE2 to read a pattern. Ratio, not time: to one of plain text of the same length."""

    def took(pattern: str) -> float:
        times = []
        for number in range(5):
            began = time.thread_time()
            refusal(f"{pattern}{number}")
            times.append(time.thread_time() - began)
        return min(times)

    plain = took(f"(?i){'(k|s)' * 90}")
    for unit in (r"\pL", r"\PL", r"[^\pL]", r"[\pL\pN\pM\pS]", r"\W", "[^a]", r"\p{Han}", "(.{1,30}){1,30}"):
        pattern = f"(?i){unit * (480 // len(unit))}"
        assert took(pattern) < 10 * plain, (pattern[:20], plain)


def test_a_body_that_is_no_text_grows_no_longer() -> None:
    """What stands for a byte that is no text takes three; 64 KiB of them count."""
    assert matches("\ufffd.\ufffd", b"\xff" * 65536)
    assert matches("e.d", b"\xff" * 20_000 + b"end")
    assert not matches("e.d", b"\xff" * 30_000 + b"end")


SLOW = [
    "(a+)+$",
    "(a|aa)+$",
    "(a|a?)+$",
    ".{0,100}c",
    "(a{1,30}){1,30}$b",
    "(.*)(.*)(.*)(.*)(.*)x",
    "a{900}b",
]


def test_no_answer_holds_up_the_loop() -> None:
    """Ratio, not time: what the loop misses is little beside a whole second, which the slowest would take."""
    longest = {}
    for body in (b"a" * 65535 + b"!", b"ab" * 32768):
        with beside(tcp_server(answers(with_body(body)))) as port:
            for pattern in (pattern for pattern in SLOW if not refusal(pattern)):
                (found,) = probed(checked("http", port, body=pattern), watched=True)
                assert found.healthy is not None
                longest[pattern, body[:2]] = found.longest_turn
    assert len(longest) > 8
    assert {case: seconds for case, seconds in longest.items() if seconds >= 0.05} == {}


def test_matching_that_takes_too_long_blames_no_backend() -> None:
    """Matches that take long wait for each other."""
    with beside(tcp_server(answers(with_body(b"a" * 65536)))) as port:
        slow = [checked("http", port, body=f"a{{900}}b{n}", timeout="100ms") for n in range(12)]
        shown = {seen(found).partition(";")[0] for found in probed(*slow)}
    late = "not asked: cannot be asked: its body takes too long to match"
    assert late in shown
    assert shown <= {late, MISMATCH}
