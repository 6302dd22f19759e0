"""Where a listing of rules ends."""

from __future__ import annotations

import errno
import struct

import pytest

from vipd.dataplane.iptables.counters.messages import HEAD, RULE_LISTED
from vipd.dataplane.iptables.counters.reading import is_end

ERROR, DONE = 2, 3


def message(kind: int, data: bytes = b"") -> bytes:
    return HEAD.pack(HEAD.size + len(data), kind, 0, 1, 0) + data + bytes(-len(data) % 4)


RULE = message(RULE_LISTED, b"12345")


def test_the_end_is_found_behind_the_last_rules() -> None:
    done = message(DONE, struct.pack("=i", 0))
    assert is_end(done)
    assert is_end(RULE + RULE + done)
    assert not is_end(RULE + RULE)


@pytest.mark.parametrize("before", [b"", RULE])
def test_an_error_ends_it_wherever_it_stands(before: bytes) -> None:
    with pytest.raises(OSError, match="cannot be read"):
        is_end(before + message(ERROR, struct.pack("=i", -errno.ENOENT)))


def test_what_is_cut_short_does_not_go_on_for_ever() -> None:
    assert not is_end(HEAD.pack(0, RULE_LISTED, 0, 1, 0))
    assert not is_end(b"1234")
