"""A name server that says what no server should, or nothing: each name has an answer of its own."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import dns.exception
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

Message = dns.message.Message
Reply = Callable[[Message], "bytes | None"]
"""What is sent for a question; None: nothing."""


def answering(kind: str, *values: str, name: str = "") -> Reply:
    """Records of the name that was asked for, or of another one."""

    def reply(query: Message) -> bytes:
        answer = dns.message.make_response(query)
        asked = name or str(query.question[0].name)
        answer.answer.append(dns.rrset.from_text(asked, 60, "IN", kind, *values))
        return answer.to_wire(max_size=65535)

    return reply


def of_type(**replies: Reply) -> Reply:
    """An answer for each type of question, such as `A`; empty for others."""

    def reply(query: Message) -> bytes | None:
        kind = dns.rdatatype.to_text(query.question[0].rdtype)
        return replies[kind](query) if kind in replies else dns.message.make_response(query).to_wire()

    return reply


def refusing(code: dns.rcode.Rcode) -> Reply:
    """An error."""

    def reply(query: Message) -> bytes:
        answer = dns.message.make_response(query)
        answer.set_rcode(code)
        return answer.to_wire()

    return reply


def to_another_question(query: Message) -> bytes | None:
    other = dns.message.make_query("other.internal.", "A", id=query.id)
    return answering("A", "10.66.66.66")(other)


def with_another_id(query: Message) -> bytes | None:
    forged = dns.message.make_query(query.question[0].name, "A", id=query.id ^ 1)
    return answering("A", "10.66.66.66")(forged)


def addresses(count: int) -> Reply:
    """So many addresses."""
    return of_type(A=answering("A", *(f"10.1.{n // 250}.{n % 250 + 1}" for n in range(count))))


def declaring_records(query: Message) -> bytes:
    """A short answer that declares 2,000 records."""
    wire = bytearray(addresses(300)(query) or b"")
    wire[6:8] = (2000).to_bytes(2, "big")
    return bytes(wire)


class DnsServer:
    """Answers on a loopback address by UDP and TCP. A name without an answer gets NXDOMAIN."""

    def __init__(self, listening: socket.socket, udp: socket.socket) -> None:
        self.replies: dict[str, Reply] = {}
        """By name, without the final dot."""
        self.by_tcp: dict[str, tuple[Reply, int]] = {}
        """Names whose answer by UDP is truncated: the one by TCP, and in parts of how many bytes it comes."""
        self.asked: Counter[str] = Counter()
        """How often each name was asked for."""
        self._listening, self._udp = listening, udp
        self.place = f"127.0.0.1:{udp.getsockname()[1]}"

    def serve_udp(self) -> None:
        with suppress(OSError):
            while True:
                data, client = self._udp.recvfrom(4096)
                if not data:  # it is shut down
                    return
                if (answer := self._answer(dns.message.from_wire(data))) is not None:
                    self._udp.sendto(answer, client)

    def _answer(self, query: Message) -> bytes | None:
        name = str(query.question[0].name).rstrip(".")
        self.asked[name] += 1
        if name in self.by_tcp:
            truncated = dns.message.make_response(query)
            truncated.flags |= dns.flags.TC
            return truncated.to_wire()
        return self.replies.get(name, refusing(dns.rcode.NXDOMAIN))(query)

    def serve_tcp(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                with connection, suppress(OSError, KeyError, dns.exception.DNSException):
                    query = dns.message.from_wire(connection.recv(4096)[2:])
                    reply, part = self.by_tcp[str(query.question[0].name).rstrip(".")]
                    answer = reply(query) or b""
                    message = len(answer).to_bytes(2, "big") + answer
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    for start in range(0, min(len(message), 20 * part), part):
                        connection.sendall(message[start : start + part])


@contextmanager
def dns_server() -> Iterator[DnsServer]:
    """One on a free port of the namespace of this thread."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        udp.bind(listening.getsockname())
        made = DnsServer(listening, udp)
        threads = [threading.Thread(target=serve) for serve in (made.serve_udp, made.serve_tcp)]
        for thread in threads:
            thread.start()
        try:
            yield made
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            with suppress(OSError):
                udp.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
