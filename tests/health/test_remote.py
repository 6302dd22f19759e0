"""What is no answer of the process that reads answers: whatever a stranger makes of it, it harms nothing."""

from __future__ import annotations

import pytest

from vipd.health.probes.remote import read_result


def test_what_is_no_result_is_refused() -> None:
    nan = float("nan")
    rows: list[object] = [None, 7, "fine", {}, [], [True, "fine", 0.1], [1, "fine", 0.1, None]]
    rows += [[True, None, 0.1, None], [True, "fine", "0.1", None], [True, "fine", 0.1, 7]]
    rows += [[True, "fine", seconds, None] for seconds in (nan, -1.0, 1e9)]
    for row in rows:
        with pytest.raises(ValueError, match="no result of a check"):
            read_result(row)


def test_text_is_made_harmless() -> None:
    read = read_result([False, "\x1b[31m" + "x" * 1000, 0.1, "999999"])
    assert (read.reason.isprintable(), len(read.reason) <= 120, read.weight) == (True, True, None)
