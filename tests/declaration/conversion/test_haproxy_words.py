"""How HAProxy divides a line into words."""

from __future__ import annotations

import pytest

from vipd.declaration.conversion.haproxy_syntax import split_line


@pytest.mark.parametrize(
    ("line", "words", "variable"),
    [
        ("  server a\\ b 'c # d' # e", ["server", "a b", "c # d"], False),
        ('log "$HOST" x', ["log", "$HOST", "x"], True),
        (r'log "\$HOST"', ["log", "$HOST"], False),
        ("log '$HOST' $HOST", ["log", "$HOST", "$HOST"], False),
        ('a"b"c ""', ["abc", ""], False),
        ("# nothing", [], False),
    ],
)
def test_words_of_a_line(line: str, words: list[str], variable: bool) -> None:
    assert split_line(line) == (words, variable)
