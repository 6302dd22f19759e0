"""Numbers, times and texts as people read them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone

import pytest

from vipd.model.formatting import counted, duration, per_second, size, thousands, time_text
from vipd.model.text import (
    display_width,
    join_surrogate_pairs,
    json_text,
    lines,
    one_line,
    sanitized,
    shortened,
    yaml_quoted,
)


@pytest.mark.parametrize(
    ("form", "number", "text"),
    [
        (duration, 0, "0s"),
        (duration, 0.9, "0s"),
        (duration, 45, "45s"),
        (duration, 600, "10m"),
        (duration, 5400, "1h30m"),
        (duration, 3601, "1h"),
        (duration, 3 * 86400 + 59, "3d"),
        (duration, 90000, "1d1h"),
        (per_second, 0, "0"),
        (per_second, 0.5, "0.5"),
        (per_second, 9.94, "9.9"),
        (per_second, 9.95, "10"),
        (per_second, 1520.4, "1520"),
        (size, 812, "812"),
        (size, 999.4, "999"),
        (size, 999.5, "1.0K"),
        (size, 1229, "1.2K"),
        (size, 37 * 1024**2, "37M"),
        (size, 2000 * 1024**5, "2000P"),
        (thousands, 1200, "1.2K"),
        (thousands, 9949, "9.9K"),
        (thousands, 9950, "10K"),
        (thousands, 999_499, "999K"),
        (thousands, 999_500, "1.0M"),
    ],
)
def test_numbers(form: Callable[[float], str], number: float, text: str) -> None:
    assert form(number) == text


def test_counts_and_times() -> None:
    assert [counted(n, "backend") for n in (0, 1, 2)] == ["0 backends", "1 backend", "2 backends"]
    moment = datetime(2026, 1, 31, 14, 0, 5, 123_999, timezone(timedelta(hours=2)))
    assert time_text(moment) == "2026-01-31T12:00:05Z"
    assert time_text(moment, milliseconds=True) == "2026-01-31T12:00:05.123Z"
    assert time_text(moment.astimezone(UTC)) == "2026-01-31T12:00:05Z"
    assert time_text(None) is None


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (one_line, "a\nb\x1b[1m", "a\\nb\\x1b[1m"),
        (lines, "a\nb\x1b", "a\nb\\x1b"),
        (json_text, {"é": "\x7f\n"}, '{"é": "\\u007f\\n"}'),
        (yaml_quoted, 'a"b\\c\n', '"a\\"b\\\\c\\n"'),
        (join_surrogate_pairs, '"\\ud83d\\ude00"', '"\\U0001f600"'),
        (join_surrogate_pairs, '"\\\\ud83d\\\\ude00 \\ud83d"', '"\\\\ud83d\\\\ude00 \\ud83d"'),
        (display_width, "abc", 3),
        (display_width, "世e\u0301", 3),
    ],
)
def test_texts(form: Callable[[object], object], value: object, text: object) -> None:
    assert form(value) == text


def test_a_value_of_json_has_its_texts_on_one_line_but_for_a_diff() -> None:
    value = {"a\n": ["b\n", {"diff": "-x\n+y\x1b"}, 1], "diff": {"c": "d\n"}, "e": "f\n"}
    assert sanitized(value) == {
        "a\\n": ["b\\n", {"diff": "-x\n+y\\x1b"}, 1],
        "diff": {"c": "d\\n"},
        "e": "f\\n",
    }


def test_words_are_cut_to_their_length() -> None:
    assert shortened(" a \n b ", 3) == "a b"
    assert shortened("a b c", 4) == "a b…"
