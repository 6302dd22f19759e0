"""Connects to backends, as a client of theirs would, and reads what the kernel knows of their addresses.

The doctor sends nothing else. Bounded: `MAX_CONTACTS` backends, `AT_ONCE` at a time, `TOTAL_SECONDS` for all.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path

from vipd.host.process import Runner
from vipd.model.service import Protocol, family_of
from vipd.observe.doctor.collect.network import ip_objects
from vipd.observe.doctor.facts import Contacts, Place, Route, ServedPort

MAX_CONTACTS = 256
MAX_CONTACTS_OF_TARGET = 1000
AT_ONCE = 64
ANSWER_SECONDS = 2.0
"""A SYN that is lost is sent again after one second."""
UDP_SECONDS = 1.0
TOTAL_SECONDS = 15.0

_KINDS = {
    Protocol.TCP: (socket.SOCK_STREAM, socket.IPPROTO_TCP),
    Protocol.UDP: (socket.SOCK_DGRAM, socket.IPPROTO_UDP),
    Protocol.SCTP: (socket.SOCK_STREAM, socket.IPPROTO_SCTP),
}
_UNRESOLVED = ("FAILED", "INCOMPLETE")
NO_ANSWER = f"no answer within {ANSWER_SECONDS:g} s"

Connect = Callable[[Place], Awaitable[str]]
"""Connects to a backend; returns why that failed, empty if it did not."""


async def contact(services: Sequence[ServedPort], named: bool, connect: Connect, root: Path) -> Contacts:
    """Connect to backends. `named`: the services were asked for by name, and all of their backends are
    connected to; else those that take new flows unchecked, and none by UDP: it takes a datagram."""
    wanted = list(dict.fromkeys(_alternating([list(_wanted(port, named)) for port in services])))
    # Opening a socket of SCTP would load the kernel's module.
    sctp = (root / "proc/net/sctp").exists()
    possible = [place for place in wanted if place[0] is not Protocol.SCTP or sctp]
    chosen = possible[: MAX_CONTACTS_OF_TARGET if named else MAX_CONTACTS]
    results, slots, end = dict[Place, str](), asyncio.Semaphore(AT_ONCE), time.monotonic() + TOTAL_SECONDS

    async def reach(place: Place) -> None:
        async with slots:
            if time.monotonic() < end:
                results[place] = await connect(place)

    await asyncio.gather(*map(reach, chosen))
    return Contacts(results, len(wanted) - len(results), named)


def _wanted(port: ServedPort, named: bool) -> Iterator[Place]:
    unchecked = port.new_flows - port.checked if port.protocol is not Protocol.UDP else ()
    yield from ((port.protocol, *backend) for backend in port.backends if named or backend in unchecked)


def _alternating(lists: Sequence[Sequence[Place]]) -> Iterator[Place]:
    """The first of each service, then the second of each: a limit leaves no service out before others."""
    return (place for place in chain.from_iterable(zip_longest(*lists)) if place is not None)


async def connect_to(place: Place) -> str:
    """Connect to a backend and close the connection; by UDP send an empty datagram, which an ICMP error may
    answer. Returns the fault, empty if there is none."""
    protocol, address, port = place
    family = socket.AF_INET6 if family_of(address).value == 6 else socket.AF_INET
    loop, udp = asyncio.get_running_loop(), protocol is Protocol.UDP
    try:
        with socket.socket(family, *_KINDS[protocol]) as opened:
            opened.setblocking(False)
            async with asyncio.timeout(UDP_SECONDS if udp else ANSWER_SECONDS):
                await loop.sock_connect(opened, (address, port))
                if udp:
                    opened.send(b"")
                    await loop.sock_recv(opened, 1)
    except TimeoutError:
        # Nothing need answer an empty datagram.
        return "" if udp else NO_ANSWER
    except OSError as error:
        if error.errno == errno.ETIMEDOUT:
            return NO_ANSWER
        return os.strerror(error.errno or 0).lower()
    return ""


async def read_unresolved(
    services: Sequence[ServedPort], results: Mapping[Place, str], routes: Mapping[str, Route], run: Runner
) -> dict[str, str]:
    """Backends' addresses that nobody on their network answers for -> the state of the kernel's entry. One
    that is being asked for counts only if a connection to it has just failed."""
    addresses = {address for port in services for address, _ in port.backends}
    neighbours = await ip_objects(["neighbour", "show"], run) if addresses else []
    answering = {place[1] for place, fault in results.items() if not fault and place[0] is not Protocol.UDP}
    failed = {place[1] for place, fault in results.items() if fault}
    found = dict[str, str]()
    for neighbour in neighbours:
        address, states = str(neighbour.get("dst", "")), neighbour.get("state", ())
        state = next((state for state in _UNRESOLVED if state in states), "")
        # An entry of another device is left over from another route.
        used = address in addresses and neighbour.get("dev") == routes.get(address, Route()).device
        known = used and address not in answering
        if state and known and (state == "FAILED" or address in failed):
            found[address] = f"{state} on {neighbour['dev']}"
    return found
