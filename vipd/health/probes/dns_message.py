"""DNS messages (RFC 1035), as much as a check needs: one question out, one reply in. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from struct import Struct, error

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

_NAMES = {number: name for name, number in TYPES.items()}
_HEADER = Struct("!6H")
_QUESTION = Struct("!2H")
_RECORD = Struct("!2HIH")
_SOA = Struct("!5I")
_SRV = Struct("!3H")
_MX = Struct("!H")
_INTERNET = 1
_REPLY, _TRUNCATED, _RECURSION_DESIRED = 0x8000, 0x0200, 0x0100
_POINTER = 0xC0
_MOST_LABELS = 128
_MOST_RECORDS = 200


class MalformedError(ValueError):
    """The data is no DNS message; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's reply."""

    rcode: str
    """A name from RCODES, or `rcode 9`."""
    truncated: bool
    records: tuple[str, ...]
    """Answers of the requested type, and the CNAMEs before them, as text: `10.0.0.1`, `10
    mail.example.com`."""


def encode_query(number: int, name: str, kind: str) -> bytes:
    """A query with recursion desired. Raises ValueError for an invalid name or type."""
    if kind not in TYPES:
        raise ValueError(f"{kind} is no record type that can be asked for")
    labels = [label.encode("ascii", "replace") for label in name.rstrip(".").split(".") if name.strip(".")]
    encoded = b"".join(bytes([len(label)]) + label for label in labels if 0 < len(label) < 64)
    if any(not 0 < len(label) < 64 for label in labels) or len(encoded) > 254:
        raise ValueError(f"{name!r} is no domain name")
    header = _HEADER.pack(number, _RECURSION_DESIRED, 1, 0, 0, 0)
    return header + encoded + b"\0" + _QUESTION.pack(TYPES[kind], _INTERNET)


def read_reply(data: bytes, query: bytes) -> Reply | None:
    """The reply to a query; None if it replies to another. Raises MalformedError for an invalid message."""
    try:
        return _read(data, query)
    except (error, IndexError) as fault:
        raise MalformedError(f"a message of {len(data)} bytes ends too early") from fault


def same_record(one: str, other: str) -> bool:
    """Whether two texts are the same record: case, and the dot at a name's end, do not matter."""
    return one.rstrip(".").lower() == _canonical(other).rstrip(".").lower()


def _canonical(text: str) -> str:
    try:
        return str(IPv6Address(text))
    except ValueError:
        return text


def _read(data: bytes, query: bytes) -> Reply | None:
    number, flags, questions, answers, _, _ = _HEADER.unpack_from(data)
    if number != _HEADER.unpack_from(query)[0] or not flags & _REPLY:
        return None
    rcode = flags & 0xF
    name = RCODES[rcode] if rcode < len(RCODES) else f"rcode {rcode}"
    # A server that could not read the query may reply with the header alone.
    if questions == 0 and rcode != 0:
        return Reply(name, False, ())
    place = len(query)
    if questions != 1 or data[_HEADER.size : place].lower() != query[_HEADER.size :].lower():
        return None
    asked = _QUESTION.unpack_from(query, place - _QUESTION.size)[0]
    truncated = bool(flags & _TRUNCATED)
    try:
        records = _records(data, place, min(answers, _MOST_RECORDS), asked)
    except (error, IndexError):
        if not truncated:
            raise
        records = ()
    return Reply(name, truncated, records)


def _records(data: bytes, place: int, count: int, asked: int) -> tuple[str, ...]:
    found = []
    for _ in range(count):
        _, place = _name(data, place)
        kind, group, _, length = _RECORD.unpack_from(data, place)
        place += _RECORD.size
        if place + length > len(data):
            raise IndexError
        if group == _INTERNET and kind in (asked, TYPES["CNAME"]):
            found.append(_text(data, place, length, _NAMES[kind]))
        place += length
    return tuple(found)


def _text(data: bytes, place: int, length: int, kind: str) -> str:
    """A record's data as in a zone file."""
    content = data[place : place + length]
    match kind:
        case "A" | "AAAA":
            if length != (4 if kind == "A" else 16):
                raise MalformedError(f"an {kind} record of {length} bytes")
            return str(IPv4Address(content) if kind == "A" else IPv6Address(content))
        case "TXT":
            return _strings(content)
        case "MX":
            return f"{_MX.unpack_from(content)[0]} {_name(data, place + _MX.size)[0]}"
        case "SRV":
            numbers = " ".join(map(str, _SRV.unpack_from(content)))
            return f"{numbers} {_name(data, place + _SRV.size)[0]}"
        case "SOA":
            server, after = _name(data, place)
            mailbox, after = _name(data, after)
            return " ".join([server, mailbox, *map(str, _SOA.unpack_from(data, after))])
    return _name(data, place)[0]


def _strings(content: bytes) -> str:
    found, place = b"", 0
    while place < len(content):
        end = place + 1 + content[place]
        found += content[place + 1 : end]
        place = end
    return found.decode(errors="replace")


def _name(data: bytes, place: int) -> tuple[str, int]:
    """The name at a place, and where it ends there; names point back at parts of others."""
    labels: list[str] = []
    end = 0
    for _ in range(_MOST_LABELS):
        length = data[place]
        if length & _POINTER == _POINTER:
            end = end or place + 2
            place = (length & ~_POINTER) << 8 | data[place + 1]
        elif length:
            labels.append(data[place + 1 : place + 1 + length].decode("ascii", "replace"))
            place += 1 + length
        else:
            return ".".join(labels) or ".", end or place + 1
    raise MalformedError("a name without an end")
