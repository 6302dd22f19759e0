"""DNS messages (RFC 1035), as much as checks and lookups need: one question out, one reply in. Pure.

What an answer costs is bounded by its bytes, whatever they are: parts of names are read once, however many
names point at them. A hundred addresses take 0.15 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from struct import Struct, error
from typing import NamedTuple

TYPES = {
    "A": 1,
    "NS": 2,
    "CNAME": 5,
    "SOA": 6,
    "PTR": 12,
    "MX": 15,
    "TXT": 16,
    "AAAA": 28,
    "SRV": 33,
}
"""Numbers of the record types that a query may request."""

RCODES = ("NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED")
"""Names of the response codes, by number."""

HEADER = Struct("!6H")
"""Number, flags, and how many questions and records of three sections follow."""
_NAMES = {number: name for name, number in TYPES.items()}
_QUESTION = Struct("!2H")
_RECORD = Struct("!2HIH")
_SOA = Struct("!5I")
_SRV = Struct("!3H")
_MX = Struct("!H")
_INTERNET, _OPT = 1, 41
_REPLY, _TRUNCATED, _RECURSION_DESIRED = 0x8000, 0x0200, 0x0100
_POINTER = 0xC0
_MOST_LABELS = 128
_MOST_NAME = 253
"""Characters: 255 bytes in a message."""
_MOST_RECORDS = 200
_TTL_SIGN = 1 << 31
"""A TTL with this bit counts as 0 (RFC 2181, 8)."""


class MalformedError(ValueError):
    """The data is no DNS message; the text gives the reason."""


class Record(NamedTuple):
    """A record of an answer."""

    owner: str
    """In lower case."""
    kind: str
    """A name of TYPES."""
    ttl: int
    """Seconds."""
    text: str
    """Its data as in a zone file: `10.0.0.1`, `10 mail.example.com`."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's reply."""

    rcode: str
    """A name from RCODES, or `rcode 9`."""
    truncated: bool
    records: tuple[Record, ...]
    """Answers of the requested type, and CNAMEs."""


def encode_query(number: int, name: str, kind: str, payload: int = 0) -> bytes:
    """A query with recursion desired. `payload`: the largest datagram that is taken (EDNS); 0: 512 bytes.
    Raises ValueError for an invalid name or type."""
    if kind not in TYPES:
        raise ValueError(f"{kind} is no record type that can be asked for")
    labels = [label.encode("ascii", "replace") for label in name.rstrip(".").split(".") if name.strip(".")]
    encoded = b"".join(bytes([len(label)]) + label for label in labels if 0 < len(label) < 64)
    if any(not 0 < len(label) < 64 for label in labels) or len(encoded) > 254:
        raise ValueError(f"{name!r} is no domain name")
    options = b"\0" + _RECORD.pack(_OPT, payload, 0, 0) if payload else b""
    header = HEADER.pack(number, _RECURSION_DESIRED, 1, 0, 0, bool(options))
    return header + encoded + b"\0" + _QUESTION.pack(TYPES[kind], _INTERNET) + options


def read_reply(data: bytes, query: bytes, most: int = _MOST_RECORDS) -> Reply | None:
    """The reply to a query, with the first records of the answer; None if it replies to another. Raises
    MalformedError for an invalid message."""
    try:
        return _read(data, query, most)
    except (error, IndexError) as fault:
        raise MalformedError(f"a message of {len(data)} bytes ends too early") from fault


def same_record(one: str, other: str) -> bool:
    """Whether two texts are the same record: case, and the dot at a name's end, do not matter."""
    return one.rstrip(".").lower() == _canonical(other).rstrip(".").lower()


def _canonical(text: str) -> str:
    try:
        return inet_ntop(AF_INET6, inet_pton(AF_INET6, text))
    except OSError:
        return text


def _read(data: bytes, query: bytes, most: int) -> Reply | None:
    number, flags, questions, answers, _, _ = HEADER.unpack_from(data)
    if number != HEADER.unpack_from(query)[0] or not flags & _REPLY:
        return None
    rcode = flags & 0xF
    name = RCODES[rcode] if rcode < len(RCODES) else f"rcode {rcode}"
    # A server that could not read the query may reply with the header alone.
    if questions == 0 and rcode != 0:
        return Reply(name, False, ())
    end = query.index(0, HEADER.size) + 1 + _QUESTION.size
    if questions != 1 or data[HEADER.size : end].lower() != query[HEADER.size : end].lower():
        return None
    asked = _QUESTION.unpack_from(query, end - _QUESTION.size)[0]
    truncated = bool(flags & _TRUNCATED)
    try:
        records = _records(data, end, min(answers, most), asked)
    except (error, IndexError):
        if not truncated:
            raise
        records = ()
    return Reply(name, truncated, records)


def _records(data: bytes, start: int, count: int, asked: int) -> tuple[Record, ...]:
    records = []
    names: dict[int, str] = {}
    for _ in range(count):
        owner, start = _name(data, start, names)
        kind, group, ttl, length = _RECORD.unpack_from(data, start)
        start += _RECORD.size
        if start + length > len(data):
            raise IndexError
        if group == _INTERNET and kind in (asked, TYPES["CNAME"]):
            text = _text(data, start, length, _NAMES[kind], names)
            records.append(Record(owner.lower(), _NAMES[kind], 0 if ttl & _TTL_SIGN else ttl, text))
        start += length
    return tuple(records)


def _text(data: bytes, start: int, length: int, kind: str, names: dict[int, str]) -> str:
    """A record's data as in a zone file."""
    content = data[start : start + length]
    match kind:
        case "A" | "AAAA":
            if length != (4 if kind == "A" else 16):
                raise MalformedError(f"an {kind} record of {length} bytes")
            return inet_ntop(AF_INET if kind == "A" else AF_INET6, content)
        case "TXT":
            return _strings(content)
        case "MX":
            return f"{_MX.unpack_from(content)[0]} {_name(data, start + _MX.size, names)[0]}"
        case "SRV":
            numbers = " ".join(map(str, _SRV.unpack_from(content)))
            return f"{numbers} {_name(data, start + _SRV.size, names)[0]}"
        case "SOA":
            server, end = _name(data, start, names)
            mailbox, end = _name(data, end, names)
            return " ".join([server, mailbox, *map(str, _SOA.unpack_from(data, end))])
    return _name(data, start, names)[0]


def _strings(content: bytes) -> str:
    joined, start = b"", 0
    while start < len(content):
        end = start + 1 + content[start]
        joined += content[start + 1 : end]
        start = end
    return joined.decode(errors="replace")


def _name(data: bytes, start: int, names: dict[int, str]) -> tuple[str, int]:
    """The name that begins at an offset, and where it ends there; names point at parts of others. `names`:
    those read before, by where they begin, to which its parts are added."""
    parts: list[tuple[int, str]] = []
    offset, end, name = start, 0, ""
    for _ in range(_MOST_LABELS):
        if offset in names and end:
            name = names[offset]
            break
        length = data[offset]
        if length & _POINTER == _POINTER:
            parts.append((offset, ""))
            end = end or offset + 2
            offset = (length & ~_POINTER) << 8 | data[offset + 1]
        elif length:
            parts.append((offset, data[offset + 1 : offset + 1 + length].decode("ascii", "replace")))
            offset += 1 + length
        else:
            end = end or offset + 1
            break
    else:
        raise MalformedError("a name without an end")
    for offset, label in reversed(parts):
        name = f"{label}.{name}" if label and name else label or name
        if len(name) > _MOST_NAME:
            raise MalformedError("a name that is too long")
        names[offset] = name
    return name or ".", end
