"""Reading the counters of one family's rules: from the kernel directly, or as iptables-save prints them.

The kernel is asked over netlink, which takes a hundredth of what iptables-nft-save takes.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from vipd.dataplane.iptables.counters.messages import (
    FAMILY_NUMBERS,
    HEAD,
    RULE_LISTED,
    Counted,
    RuleMessages,
    attribute,
)
from vipd.dataplane.iptables.names import Names
from vipd.model import Family

NETLINK_NETFILTER = 12
SILENCE_SECONDS = 10.0
_RECEIVE_BYTES = 1 << 17
_REQUEST_DUMP = 0x301
_ERROR, _DONE = 2, 3
_INTERRUPTED = 0x10
_SAVED = re.compile(r"^\[(\d+):\d+\] -A (\S+) .*-j DNAT ")


class Reading(NamedTuple):
    """The counts of a family's translating rules."""

    counts: list[Counted]
    complete: bool
    """No change of the rules disturbed it."""


def read_kernel(family: Family, messages: RuleMessages) -> Reading:
    """The counts of the nf_tables rules of iptables' nat table, in the thread's network namespace.

    Blocks. Raises OSError.
    """
    table = attribute(1, b"nat\0")
    head = HEAD.pack(HEAD.size + 4 + len(table), RULE_LISTED, _REQUEST_DUMP, 1, 0)
    counts, complete, done = list[Counted](), True, False
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
    with opened:
        opened.settimeout(SILENCE_SECONDS)
        opened.bind((0, 0))
        opened.sendto(head + bytes([FAMILY_NUMBERS[family], 0, 0, 0]) + table, (0, 0))
        while not done:
            datagram = opened.recv(_RECEIVE_BYTES)
            try:
                counts.extend(messages.listed(datagram))
            except (ValueError, struct.error) as error:
                raise OSError(errno.EBADMSG, f"the kernel's rules: {error}") from error
            done, disturbed = _ends(datagram)
            complete = complete and not disturbed
    return Reading(counts, complete)


def _ends(datagram: bytes) -> tuple[bool, bool]:
    """Whether a part of a dump is the last one, and whether it was disturbed. Raises OSError.

    The end comes alone or as the last message, and it and the first message of each part carry the flag.
    """
    place, done, disturbed = 0, False, False
    while place + HEAD.size <= len(datagram):
        length, kind, flags, _, _ = HEAD.unpack_from(datagram, place)
        disturbed = disturbed or bool(flags & _INTERRUPTED)
        if kind in (_ERROR, _DONE):
            done = True
            number = -struct.unpack_from("=i", datagram, place + HEAD.size)[0]
            if number:
                raise OSError(number, f"the kernel's rules cannot be read: {os.strerror(number)}")
        place += (length + 3) & ~3
    return done, disturbed


def read_saved_counts(text: str, family: Family, names: Names) -> Reading:
    """The counts in what iptables-save prints with `-c`."""
    return Reading(list(_saved(text, family, f"{names.prefix}-SEP-")), complete=True)


def _saved(text: str, family: Family, prefix: str) -> Iterator[Counted]:
    nat = text.partition("*nat\n")[2].partition("\nCOMMIT")[0]
    for line in nat.splitlines():
        match = _SAVED.match(line) if prefix in line else None
        if match and match[2].startswith(prefix):
            yield Counted(family, match[2], 0, int(match[1]))
