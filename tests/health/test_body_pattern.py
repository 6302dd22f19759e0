"""What may be asked of a body, what is refused, and that no body takes long."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.health.servers import ask_once, run, target, tcp_server
from vipd.declaration.body_pattern import MAX_PATTERN, BodyPattern, PatternError, body_pattern, literal_text
from vipd.declaration.native import parse_declaration
from vipd.health.probes.http import probe_http
from vipd.model.check import HttpProbe
from vipd.sources.etcd.values import read_registration


@pytest.mark.parametrize(
    ("pattern", "body"),
    [
        ("ok", "it is ok"),
        ('{"status":"UP"}', '{"status":"UP"}'),
        (r"v1\.2 \(stable\)", "v1.2 (stable)"),
        ("^hel+o$", "hello\n"),
        ("(?m)^ready$", "starting\nready\nnow"),
        (r"(?i)STATUS\s*:\s*(up|ok)\b", "status: Up"),
        ("grün|bleu", "es ist grün"),
        (r"^\d{2,}$", "123\n"),
        ("(?P<state>up)", "up"),
        ("a{0,3}b", "aaab"),
        ("x{y}", "x{y}"),
    ],
)
def test_what_python_finds_is_found(pattern: str, body: str) -> None:
    assert re.search(pattern, body)
    assert body_pattern(pattern).matches(body.encode())
    assert not re.search(pattern, "#")
    assert not body_pattern(pattern).matches(b"#")


@given(
    st.text("ab\n", max_size=8),
    st.text("ab.^$*+?|()[]{}\\n1,2", max_size=6),
)
def test_it_agrees_with_python_on_all_that_both_know(body: str, pattern: str) -> None:
    try:
        wanted = re.search(pattern, body) is not None
        found = body_pattern(pattern).matches(body.encode())
    except (re.error, PatternError, RecursionError, FutureWarning):
        return
    # In RE2 `$` is also the end of a body that lost its last newline: then more of it may follow.
    assert found == wanted or ("$" in pattern and body.endswith("\n"))


@pytest.mark.parametrize("pattern", ["ok", r"a\.b", "{x}", "a]b", "a}b", r"\$5"])
def test_plain_text_is_plain(pattern: str) -> None:
    text = literal_text(pattern)
    assert text is not None
    assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("pattern", ["a.b", "a|b", "a{2}", "a{,2}", "^a", r"\d", "a\\", "(a)", "[a]"])
def test_what_is_more_than_text_is_not(pattern: str) -> None:
    assert literal_text(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("(?=a)", "no look-around"),
        (r"(a)\1", "back-references"),
        ("a++", "possessive"),
        (r"a\Z", r"\z for \Z"),
        ("(", "RE2"),
        ("a{,5}", "{0,N}"),
        ("a" * (MAX_PATTERN + 1), "at most 500"),
        (".{999}", "smaller counts"),
        ("((a{30}){30}){30}", "RE2"),
        ("\ud800", "surrogate"),
        (r"\pL\PN[\pM\pS]\pZ", "at most 4"),
    ],
)
def test_what_cannot_be_asked_is_a_problem_with_a_hint(pattern: str, hint: str) -> None:
    with pytest.raises(PatternError) as caught:
        body_pattern(pattern)
    assert hint in caught.value.hint


def test_a_declaration_says_it_by_line() -> None:
    text = """apiVersion: vipd/v1
services:
  - name: shop
    address: 10.96.0.1
    ports: 80
    backends: [10.0.0.1]
    check: {type: http, body: '(?=x)'}
"""
    (problem,) = parse_declaration(text, "x.yaml", "file").problems
    assert (problem.line, problem.path) == (7, "services[0].check.body")
    assert "is not a regular expression" in str(problem)


def test_a_registration_may_ask_for_text_alone() -> None:
    """Whoever registers a backend may not give every host work to do."""
    key, rest = "/vipd/v1/backends/shop/10.0.0.1:80", "shop/10.0.0.1:80"
    plain = read_registration(key, rest, "check: {type: http, body: it is ok}")
    assert isinstance(plain, tuple)
    refused = read_registration(key, rest, "check: {type: http, body: 'a+b'}")
    assert not isinstance(refused, tuple)
    (problem,) = refused.problems
    assert "a registered backend" in problem.what
    assert problem.hint


def test_no_pattern_takes_long_to_read() -> None:
    """Python waits for RE2 to read a pattern. Ratio, not time: to one of plain text of the same length."""

    def took(pattern: str) -> float:
        found = []
        for number in range(5):
            began = time.thread_time()
            with contextlib.suppress(PatternError):
                BodyPattern(f"{pattern}{number}")
            found.append(time.thread_time() - began)
        return min(found)

    plain = took(f"(?i){'(k|s)' * 90}")
    for unit in (r"\pL", r"\PL", r"[^\pL]", r"[\pL\pN\pM\pS]", r"\W", "[^a]", r"\p{Han}", "(.{1,30}){1,30}"):
        pattern = f"(?i){unit * (480 // len(unit))}"
        assert took(pattern) < 20 * plain, (pattern[:20], plain)


def test_a_body_that_is_no_text_grows_no_longer() -> None:
    async def ask(pattern: str) -> bool | None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 65536\r\n\r\n" + b"\xff" * 65536)
            await asyncio.sleep(300)

        async with tcp_server(handler) as port:
            return (await ask_once(probe_http, target(port, HttpProbe(body=pattern)))).good

    seen = []
    original = BodyPattern.matches

    def found_in(self: BodyPattern, body: bytes) -> bool:
        seen.append(len(body))
        return original(self, body)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BodyPattern, "matches", found_in)
        assert run(ask("\ufffd.\ufffd")) is True
    assert seen == [65536]


SLOW = [
    "(a+)+$",
    "(a|aa)+$",
    "(a|a?)+$",
    ".{0,100}c",
    "(a{1,30}){1,30}$b",
    "(.*)(.*)(.*)(.*)(.*)x",
    "a{900}b",
]


@pytest.mark.parametrize("pattern", SLOW)
@pytest.mark.parametrize("body", [b"a" * 65535 + b"!", b"ab" * 32768])
def test_no_answer_holds_up_the_loop(pattern: str, body: bytes) -> None:
    """Ratio, not time: what the loop misses is little beside a whole second, which the slowest would take."""

    async def ask() -> float:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            await asyncio.sleep(300)

        async with tcp_server(handler) as port:
            asked = asyncio.ensure_future(ask_once(probe_http, target(port, HttpProbe(body=pattern))))
            longest, last = 0.0, time.thread_time()
            while not asked.done():
                await asyncio.sleep(0)
                now = time.thread_time()
                longest, last = max(longest, now - last), now
            assert asked.result().good is not None
            return longest

    try:
        body_pattern(pattern)
    except PatternError:
        return
    assert run(ask()) < 0.05


def test_matching_that_takes_too_long_blames_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vipd.health.probes.http._WORK_AT_ONCE", -1)
    monkeypatch.setattr("vipd.declaration.body_pattern.BodyPattern.matches", lambda *_: time.sleep(1.0))

    async def ask() -> object:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n")
            await asyncio.sleep(300)

        async with tcp_server(handler) as port:
            return (await ask_once(probe_http, target(port, HttpProbe(body="k."), timeout=0.2))).good

    assert run(ask()) is None
