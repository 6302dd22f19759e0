"""Searches piece by piece find what a search of the whole finds."""

from __future__ import annotations

import pytest

from vipd.declaration import pieces

TEXT = b"--a--b----c--"


@pytest.mark.parametrize("mark", [b"-", b"--", b"-b-", b"c--", b"x"])
def test_the_last_place_is_found_wherever_the_pieces_end(
    mark: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for piece in range(len(mark), len(TEXT) + 2):
        monkeypatch.setattr(pieces, "CHUNK_BYTES", piece)
        for start in range(len(TEXT)):
            for end in range(start, len(TEXT) + 1):
                assert pieces.find_last(TEXT, mark, start, end) == TEXT.rfind(mark, start, end)
