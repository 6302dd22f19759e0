"""The comparison of what pages show with what is printed can fail."""

from __future__ import annotations

from tests.docs.transcript import mismatch

AGREE = [
    ("one\ntwo", "one\ntwo\n"),
    ("one\n...", "one\ntwo\nthree\n"),
    ("...\nthree\n...", "one\ntwo\nthree\n"),
    ("a ... c", "a b c\n"),
    ("vipd  pid 12, 2026-01-01T00:00:00Z (5s ago)", "vipd    pid 4711, 2027-02-03T04:05:06Z (1m10s ago)\n"),
    ("b1 answers", "b2 answers\n"),
    ("", "\n"),
]
DISAGREE = [
    ("one", "two\n"),
    ("one", "one\ntwo\n"),
    ("one\ntwo", "one\n"),
    ("one\n...\nfour", "one\ntwo\nthree\n"),
    ("a ... c", "a b d\n"),
    ("a.c", "abc\n"),
    ("pid 12", "pid\n"),
    ("c1 answers", "c2 answers\n"),
    ("a b", "ab\n"),
]


def test_what_is_shown_agrees_with_what_is_printed_or_not() -> None:
    for pairs, agree in ((AGREE, True), (DISAGREE, False)):
        for shown, printed in pairs:
            assert (mismatch(shown.split("\n"), printed, [r"b\d"]) == "") is agree, shown
    assert mismatch((), "") == ""
    assert mismatch((), "surprise\n") == "+ surprise"
