"""Listings over netlink: where they end, what disturbs them, and messages that are built and read again."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import cast

import pytest

from vipd.host.netlink import (
    DONE,
    ERROR,
    HEADER,
    INTERRUPTED,
    MalformedMessageError,
    message,
)
from vipd.host.netlink_socket import ATTEMPTS, RECEIVE_BYTES, acknowledge, dump, read_whole

RULE = message(0x0A06, 0, 1, b"12345678")
END = message(DONE, 0, 1, bytes(4))
REFUSED = message(ERROR, 0, 1, struct.pack("=i", -errno.ENOENT))

Received = tuple[bytes, list[object], int, tuple[int, int]]


class Answering:
    """A socket with these datagrams and errors to read."""

    def __init__(self, answers: Iterable[bytes | OSError | Received]) -> None:
        self._answers = list(answers)

    def sendto(self, data: bytes, address: tuple[int, int]) -> None:
        """As a socket's."""

    def recvmsg(self, size: int) -> Received:
        answer = self._answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer if isinstance(answer, tuple) else (answer, [], 0, (0, 0))


def answering(*answers: bytes | OSError | Received) -> socket.socket:
    return cast(socket.socket, Answering(answers))


def listed(*answers: bytes | OSError | Received) -> tuple[int, bool]:
    """The number of messages of a listing, and whether it is complete."""
    number, listing = 0, dump(answering(*answers), b"", 1)
    while True:
        try:
            number += len(next(listing)[1])
        except StopIteration as ended:
            return number, ended.value


def test_a_listing_ends_where_the_kernel_says() -> None:
    interrupted = message(0x0A06, INTERRUPTED, 1, bytes(4))
    forged = (RULE, list[object](), 0, (4711, 0))
    listings: list[tuple[tuple[bytes | OSError | Received, ...], tuple[int, bool]]] = [
        ((RULE + RULE, END), (2, True)),
        ((RULE, RULE + END, RULE), (2, True)),
        # A disturbed one is read to its end, and is not complete.
        ((RULE, OSError(errno.ENOBUFS, ""), RULE + END), (2, False)),
        ((RULE, interrupted, RULE + END), (3, False)),
        # Other senders and earlier requests are passed over.
        ((forged, message(DONE, 0, 7, bytes(4)), END), (0, True)),
    ]
    assert [listed(*answers) for answers, _ in listings] == [wanted for _, wanted in listings]


def test_an_error_or_what_is_cut_short_ends_it_wherever_it_stands() -> None:
    for before in (b"", RULE):
        with pytest.raises(OSError, match="No such file") as raised:
            listed(before + REFUSED)
        assert raised.value.errno == errno.ENOENT
    for cut in (message(0, 0, 0, b"")[:-1], struct.pack("=IHHII", 0, 20, 0, 1, 0), b"1234"):
        with pytest.raises(MalformedMessageError):
            listed(RULE + cut)
    with pytest.raises(OSError, match=f"more than {RECEIVE_BYTES} bytes"):
        listed((RULE, [], socket.MSG_TRUNC, (0, 0)))


class Changing(Answering):
    """A socket that answers each request with the next of some readings: how many items, and whether the
    kernel marks it as interrupted."""

    def __init__(self, *readings: tuple[int, bool]) -> None:
        super().__init__(())
        self._readings = list(readings)

    def sendto(self, data: bytes, address: tuple[int, int]) -> None:
        """As a socket's."""
        sequence = HEADER.unpack_from(data)[3]
        number, interrupted = self._readings.pop(0)
        flags = INTERRUPTED if interrupted else 0
        items = [message(0x0A06, flags, sequence, bytes([n])) for n in range(number)]
        self._answers = [*items, message(DONE, flags, sequence, bytes(4))]


def whole(*readings: tuple[int, bool], most: int | None = None) -> list[int]:
    def read(datagram: bytes, answers: Sequence[tuple[int, int, int]]) -> list[int]:
        return [datagram[start + HEADER.size] for _, start, _ in answers]

    changing = cast(socket.socket, Changing(*readings))
    return read_whole(changing, lambda sequence: message(0x0A06, 0, sequence, b""), read, most)


def test_a_listing_that_changed_meanwhile_is_read_again() -> None:
    assert whole((3, False)) == [0, 1, 2]
    assert whole((2, True), (1, True), (4, False)) == [0, 1, 2, 3], "nothing is left of what was interrupted"
    assert whole((9, True), most=4) == [0, 1, 2, 3], "of a long one only so many items are read"
    with pytest.raises(OSError, match="changed during each of") as raised:
        whole(*([(3, True)] * ATTEMPTS))
    assert raised.value.errno == errno.EBUSY


def test_a_request_is_acknowledged_or_refused() -> None:
    acknowledge(answering(RULE, message(ERROR, 0, 1, bytes(20))))
    with pytest.raises(OSError, match="No such file"):
        acknowledge(answering(REFUSED))
