"""Keys and values by which hosts agree on who answers for addresses of a LAN. Pure.

`PREFIXannounce/addresses/ADDRESS` names the holder, `PREFIXannounce/hosts/NAME` what a host could hold. Both
have the lease of the host that they name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import ip_address

from vipd.declaration.bounded_json import read_json
from vipd.declaration.problems import printable
from vipd.sources.etcd.election import Candidate, Holding
from vipd.sources.etcd.errors import MalformedAnswerError
from vipd.sources.etcd.fields import Message, message_of, text
from vipd.sources.etcd.messages import KeyRange, KeyValue

MAX_HOLDER_BYTES = 2048
MAX_CANDIDATE_BYTES = 2**18
MAX_ADDRESSES = 5_000
"""Of one host: some 100 kB."""
_MAX_NAME = 253
_HARDWARE = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")


@dataclass(frozen=True, slots=True)
class AnnouncementKeys:
    """The keys of one prefix."""

    prefix: str

    @property
    def all(self) -> KeyRange:
        """Both kinds."""
        return KeyRange.prefix(f"{self.prefix}announce/".encode())

    @property
    def addresses(self) -> str:
        """How the keys of addresses begin."""
        return f"{self.prefix}announce/addresses/"

    @property
    def hosts(self) -> str:
        """How the keys of hosts begin."""
        return f"{self.prefix}announce/hosts/"

    def address(self, address: str) -> bytes:
        """The key of an address."""
        return f"{self.addresses}{address}".encode()

    def host(self, name: str) -> bytes:
        """The key of a host."""
        return f"{self.hosts}{name}".encode()


def holder_value(host: str, instance: str, since: str, previous: str = "") -> bytes:
    """The value of an address's key."""
    found = {"host": host, "since": since, "instance": instance}
    return json.dumps({**found, **({"previous": previous} if previous else {})}).encode()


def candidate_value(
    addresses: Collection[str], hardware: Collection[str], own: Collection[str], instance: str
) -> bytes:
    """The value of a host's key."""
    listed = sorted(addresses)[:MAX_ADDRESSES]
    return json.dumps(
        {"addresses": listed, "hardware": sorted(hardware), "own": list(own), "instance": instance}
    ).encode()


def read_holder(keys: AnnouncementKeys, kv: KeyValue) -> tuple[str, Holding] | None:
    """An address and its holder; None if the key names no address.

    A value that cannot be read is a holder without a name: the key exists, so nobody may take the address.
    """
    try:
        address = str(ip_address(kv.key.decode().removeprefix(keys.addresses)))
        if keys.address(address) != kv.key:
            return None
    except ValueError:
        return None
    try:
        found = message_of(read_json(kv.value, MAX_HOLDER_BYTES), "the holder")
        host, since, previous, instance = (
            _short(text(found, name)) for name in ("host", "since", "previous", "instance")
        )
    except (ValueError, MalformedAnswerError):
        host = since = previous = instance = ""
    return address, Holding(host, kv.lease, kv.mod_revision, since, previous, instance)


def read_candidate(keys: AnnouncementKeys, kv: KeyValue) -> Candidate:
    """What a host published; one that cannot be read is a candidate for nothing."""
    name = printable(kv.key.decode(errors="backslashreplace").removeprefix(keys.hosts))
    try:
        found = message_of(read_json(kv.value, MAX_CANDIDATE_BYTES), "the candidate")
        addresses = frozenset(str(ip_address(each)) for each in _texts(found, "addresses", MAX_ADDRESSES))
        hardware = frozenset(each for each in _texts(found, "hardware", 100) if _HARDWARE.fullmatch(each))
        own = tuple(str(ip_address(each)) for each in _texts(found, "own", 100))
        instance = _short(text(found, "instance"))
    except (ValueError, MalformedAnswerError) as error:
        return Candidate(name, kv.lease, kv.mod_revision, frozenset(), fault=printable(str(error)))
    return Candidate(name, kv.lease, kv.mod_revision, addresses, hardware, own, instance)


def _texts(found: Message, name: str, most: int) -> list[str]:
    values = found.get(name, [])
    if not isinstance(values, list) or len(values) > most or not all(isinstance(v, str) for v in values):
        raise ValueError(f"{name} is no list of at most {most} texts")
    return [str(value) for value in values]


def _short(value: str) -> str:
    if len(value) > _MAX_NAME or not value.isprintable():
        raise ValueError("a name is too long, or no text")
    return value
