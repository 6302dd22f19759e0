"""Reads of an entry's message only what counting flows needs, packed as the kernel sent it. Pure.

Entries that have the same attributes have them at the same places. So the first of them is walked through and
becomes a pattern: the headers of its attributes, with a group for each wanted value. An entry that matches it
has the same attributes, and costs a tenth of what `vipd.dataplane.conntrack.entries.parse` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from vipd.dataplane.conntrack import entries
from vipd.dataplane.conntrack.messages import NEW
from vipd.host.netlink import (
    ATTRIBUTES,
    CONTENT,
    MalformedMessageError,
    walk,
)
from vipd.model.service import Protocol

PackedEntry = tuple[bytes, ...]
"""Protocol; source, destination, their ports; the same four of answers; status, id, and TCP state. An id or
state that the kernel does not report is empty."""

_Path = tuple[int, ...]
"""The types of an attribute and those that contain it, the outermost first."""

_ADDRESSES = {1: "source", 3: "source", 2: "destination", 4: "destination"}
_PORTS = {entries.CTA_PROTO_SRC_PORT: "source_port", entries.CTA_PROTO_DST_PORT: "destination_port"}
_WAYS = {entries.CTA_TUPLE_ORIG: "original", entries.CTA_TUPLE_REPLY: "reply"}
_VALUES: Mapping[_Path, str] = MappingProxyType(
    {
        (entries.CTA_TUPLE_ORIG, entries.CTA_TUPLE_PROTO, entries.CTA_PROTO_NUM): "protocol",
        **{
            (way, part, kind): f"{word}_{name}"
            for way, word in _WAYS.items()
            for part, names in ((entries.CTA_TUPLE_IP, _ADDRESSES), (entries.CTA_TUPLE_PROTO, _PORTS))
            for kind, name in names.items()
        },
        (entries.CTA_STATUS,): "status",
        (entries.CTA_ID,): "id",
        (entries.CTA_PROTOINFO, entries.CTA_PROTOINFO_TCP, entries.CTA_PROTOINFO_TCP_STATE): "tcp_state",
    }
)
"""The wanted attributes, each with the name of its group."""
_CONTAINERS = frozenset(path[:depth] for path in _VALUES for depth in range(1, len(path)))
_NEEDED = tuple(name for name in dict.fromkeys(_VALUES.values()) if name not in ("id", "tcp_state"))
_ORDER = (*_NEEDED, "id", "tcp_state")
MAX_PATTERNS = 8
"""For entries of one length. They are few: what the kernel keeps of a flow decides both."""
MAX_LENGTHS = 64


class _Pattern(NamedTuple):
    match: Callable[[bytes, int, int], re.Match[bytes] | None]
    groups: tuple[int, ...]
    """The numbers of its groups, in the order of a `PackedEntry`."""


class PackedReader:
    """Reads the answers to a query for the entries of one protocol."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = bytes([entries.PROTOCOL_NUMBERS[protocol]])
        self._latest: dict[int, _Pattern] = {}
        """The pattern that matched last, by the length of the message."""
        self._patterns: dict[int, list[_Pattern]] = {}

    def read(self, datagram: bytes, answers: Sequence[tuple[int, int, int]]) -> list[PackedEntry]:
        """The entries of the protocol. `answers`: type, start and end of each message. Raises
        MalformedMessageError."""
        found, latest = [], self._latest
        for kind, start, end in answers:
            if kind != NEW:
                continue
            pattern = latest.get(end - start)
            match = pattern.match(datagram, start, end) if pattern else None
            if match is None:
                pattern = self._other(datagram[start:end])
                match = pattern.match(datagram, start, end)
            values = match.group(*pattern.groups)  # type: ignore[union-attr]
            if values[0] == self._protocol:
                found.append(values)
        return found

    def _other(self, message: bytes) -> _Pattern:
        """The pattern that an entry matches, which becomes the latest of its length."""
        length = len(message)
        if length not in self._patterns and len(self._patterns) >= MAX_LENGTHS:
            self._patterns.clear()
        known = self._patterns.setdefault(length, [])
        found = next((each for each in known if each.match(message, 0, length)), None)
        if found is None:
            found = self._learn(message)
            del known[MAX_PATTERNS - 1 :]
            known.insert(0, found)
        self._latest[length] = found
        return found

    def _learn(self, message: bytes) -> _Pattern:
        """The pattern of entries like this one."""
        if len(message) < ATTRIBUTES:
            raise MalformedMessageError(f"an entry of {len(message)} bytes")
        parts = list(_parts(message, ATTRIBUTES, len(message), ()))
        values = {part.name: part.value for part in parts if part.name}
        lacking = [name for name in _NEEDED if name not in values]
        if lacking and values.get("protocol") == self._protocol:
            raise MalformedMessageError(f"an entry without {', '.join(lacking)}")
        if len(values) < sum(bool(part.name) for part in parts):
            raise MalformedMessageError("an entry with an attribute twice")
        if values.keys() == set(_ORDER):
            while not parts[-1].name:
                parts.pop()  # nothing that follows matters
        text = b"".join(part.pattern for part in parts)
        text += b"".join(b"(?P<%b>)" % name.encode() for name in _ORDER if name not in values)
        family = re.escape(message[CONTENT : CONTENT + 1])
        compiled = re.compile(b"(?s).{%d}%b.{3}%b" % (CONTENT, family, text))
        return _Pattern(compiled.match, tuple(compiled.groupindex[name] for name in _ORDER))


class _Part(NamedTuple):
    """An attribute, or the header of one that contains others."""

    pattern: bytes
    value: bytes = b""
    name: str = ""


def _parts(message: bytes, start: int, end: int, outer: _Path) -> Iterator[_Part]:
    """The attributes in this place. Raises MalformedMessageError."""
    for kind, value in walk(message[:end], start):
        path, header = (*outer, kind), re.escape(message[start : start + 4])
        if path in _CONTAINERS:
            yield _Part(header)
            yield from _parts(message, start + 4, start + 4 + len(value), path)
        elif name := _VALUES.get(path, ""):
            yield _Part(header + b"(?P<%b>.{%d})" % (name.encode(), len(value)), value, name)
        else:
            yield _Part(header + b".{%d}" % len(value))
        padding = -len(value) % 4
        start += 4 + len(value) + padding
        if padding:
            yield _Part(b".{%d}" % min(padding, max(0, end - start + padding)))
