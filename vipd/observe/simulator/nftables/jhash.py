"""The kernel's `jhash` over bytes, which nft's hash expression uses (include/linux/jhash.h)."""

from __future__ import annotations

from sys import byteorder

_BITS = 0xFFFFFFFF
_GOLDEN = 0xDEADBEEF
_BLOCK = 12


def jhash(data: bytes, seed: int) -> int:
    """The 32-bit hash of some bytes (at least one) as this machine's kernel computes it.

    The kernel reads blocks of twelve bytes in the machine's byte order, and the last one to twelve bytes as
    little-endian on every machine. So up to twelve bytes, such as an IPv4 address, have the same hash on
    all machines.
    """
    a = b = c = (_GOLDEN + len(data) + seed) & _BITS
    while len(data) > _BLOCK:
        a, b, c = (
            (word + int.from_bytes(data[at : at + 4], byteorder)) & _BITS
            for word, at in ((a, 0), (b, 4), (c, 8))
        )
        a, b, c = _mix(a, b, c)
        data = data[_BLOCK:]
    rest = data.ljust(_BLOCK, b"\0")
    a, b, c = (
        (w + int.from_bytes(rest[at : at + 4], "little")) & _BITS for w, at in ((a, 0), (b, 4), (c, 8))
    )
    return _final(a, b, c)


def reciprocal_scale(number: int, modulus: int) -> int:
    """Maps a 32-bit number to 0..modulus - 1, as the kernel's reciprocal_scale does."""
    return number * modulus >> 32


def _rotate_left(word: int, bits: int) -> int:
    return (word << bits | word >> (32 - bits)) & _BITS


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    for bits in (4, 6, 8, 16, 19, 4):
        a = (a - c) & _BITS ^ _rotate_left(c, bits)
        c = (c + b) & _BITS
        a, b, c = b, c, a
    return a, b, c


def _final(a: int, b: int, c: int) -> int:
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - _rotate_left(b, bits)) & _BITS
        a, b, c = b, c, a
    # The result is the word that the last of the seven rounds changed; it is now in `b`.
    return b
