"""What vipd makes of the answers of a real name server, and of one that sends what no server should."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import dns.exception
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest

from tests.faults.equipment import MountingNode
from tests.lab.name_server import NEEDED, NameServer
from tests.lab.node import Node
from tests.sources.host import Host, namespace

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

    def reply(query: Message) -> bytes:
        answer = dns.message.make_response(query)
        answer.set_rcode(code)
        return answer.to_wire()

    return reply


def to_another_question(query: Message) -> bytes | None:
    other = dns.message.make_query("other.internal.", "A", id=query.id)
    return answering("A", "10.66.66.66")(other)


def behind_aliases(query: Message) -> bytes:
    """An address behind two aliases, the last record first, each with a TTL of its own."""
    answer, name = dns.message.make_response(query), str(query.question[0].name)
    aliases = ((name, 30, "CNAME", "One.internal."), ("one.internal.", 20, "CNAME", "two.internal."))
    for owner, ttl, kind, value in (("TWO.internal.", 40, "A", "10.0.0.9"), *aliases):
        answer.answer.append(dns.rrset.from_text(owner, ttl, "IN", kind, value))
    return answer.to_wire()


def with_another_id(query: Message) -> bytes | None:
    forged = dns.message.make_query(query.question[0].name, "A", id=query.id ^ 1)
    return answering("A", "10.66.66.66")(forged)


def addresses(count: int) -> Reply:
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


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


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


pytestmark = pytest.mark.root

RECORDS = (
    "host-record=web.internal,10.0.0.1,fd00::1",
    "host-record=web.internal,10.0.0.2",
    "cname=www.internal,alias.internal",
    "cname=alias.internal,web.internal",
    "txt-record=empty.internal,nothing",
    "host-record=a.internal,10.0.0.11,fd00::11",
    "host-record=b.internal,10.0.0.12",
    "srv-host=_http._tcp.internal,a.internal,8081,10,5",
    "srv-host=_http._tcp.internal,b.internal,8082,20,0",
    "srv-host=_http._tcp.internal,gone.internal,8083,20,1",
    *(f"host-record=many.internal,10.1.0.{n}" for n in range(1, 101)),
)
PROMPT = {"dns_min_ttl": "1s", "dns_timeout": "400ms", "dns_hold": "0s"}


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with namespace() as made:
        yield made


def service(number: int, named: str, *, both: bool = False) -> str:
    more = f", 'fd00:96::{number}'" if both else ""
    address = f"address: [10.96.0.{number}{more}], ports: 80"
    return f"  - {{name: s{number}, {address}, backends: ['{named}']}}\n"


def view(host: Host, number: int) -> dict[str, object]:
    """What vipd knows of the name of a service."""
    (found,) = host.service(f"s{number}")["names"]
    return dict(found)


ANSWERS: dict[str, tuple[bool, list[str], str]] = {
    "dns:web.internal": (False, ["10.0.0.1", "10.0.0.2"], ""),
    "dns:a.internal": (True, ["10.0.0.11", "fd00::11"], ""),
    "dns:www.internal": (False, ["10.0.0.1", "10.0.0.2"], ""),
    "dns:many.internal": (False, [f"10.1.0.{n}" for n in range(1, 101)], ""),
    "dns:unknown.internal": (True, [], "the name does not exist (NXDOMAIN)"),
    "dns:empty.internal": (False, [], "the name has no A records"),
    "dns:b.internal": (True, ["10.0.0.12"], ""),
    "srv:_http._tcp.internal": (
        True,
        ["10.0.0.11:8081", "10.0.0.12:8082", "[fd00::11]:8081"],
        "gone.internal",
    ),
}
"""For a name, whether the service has both families: the addresses, and the fault."""


@NEEDED
def test_the_answers_of_a_real_name_server_serve(node: Node, tmp_path: Path) -> None:
    server = NameServer(node, tmp_path, ttl=77)
    server.serve(*RECORDS)
    try:
        declared = "".join(service(n, name, both=ANSWERS[name][0]) for n, name in enumerate(ANSWERS))
        with Host(node, declared, dns_servers=server.place, dns_max_addresses=100) as host:

            def differing() -> dict[str, object]:
                found = {name: view(host, n) for n, name in enumerate(ANSWERS)}
                return {
                    name: seen
                    for name, seen in found.items()
                    if sorted(seen["addresses"]) != sorted(ANSWERS[name][1])  # type: ignore[call-overload]
                    or (
                        ANSWERS[name][2] not in str(seen["fault"])
                        or bool(seen["fault"]) != bool(ANSWERS[name][2])
                    )
                }

            host.wait_until(differing, {}, 30)
            assert view(host, 0)["ttl"] == 77
            host.wait_until(lambda: len(host.endpoints("s7")), 3)
            endpoints = {
                e["endpoint"]: e["reason"] for f in host.service("s7")["forwardings"] for e in f["endpoints"]
            }
            assert endpoints["10.0.0.12:8082"] == "backup, waiting"
    finally:
        server.die()


WRONG: dict[str, tuple[Reply, str]] = {
    "silent": (lambda query: None, "no answer within 0.4 s from 127.0.0.1:"),
    "servfail": (refusing(dns.rcode.SERVFAIL), "SERVFAIL"),
    "refused": (refusing(dns.rcode.REFUSED), "REFUSED"),
    "nothing": (lambda query: b"", ""),
    "garbage": (lambda query: b"\xff" * 700, ""),
    "the question": (lambda query: query.to_wire(), ""),
    "another question": (to_another_question, ""),
    "another id": (with_another_id, ""),
    "itself": (answering("CNAME", "itself.internal."), ""),
    "another name": (answering("A", "10.66.66.66", name="elsewhere.internal."), ""),
    "another type": (answering("AAAA", "fd66::66"), ""),
    "a large datagram": (addresses(1000), ""),
}


def name_of(case: str) -> str:
    return f"{case.replace(' ', '-')}.internal"


@pytest.fixture
def server(node: Node) -> Iterator[DnsServer]:
    with node.entered(), dns_server() as made:
        yield made


def test_what_is_no_answer_to_the_question_is_a_fault_in_time(node: Node, server: DnsServer) -> None:
    server.replies = {name_of(case): reply for case, (reply, _) in WRONG.items()}
    server.replies["good.internal"] = of_type(A=answering("A", "10.0.0.1"))
    names = [*map(name_of, WRONG), "good.internal"]
    declared = "".join(service(n, f"dns:{name}") for n, name in enumerate(names))
    began = time.monotonic()
    with Host(node, declared, dns_servers=server.place, **PROMPT) as host:
        host.wait_until(lambda: view(host, len(WRONG))["addresses"], ["10.0.0.1"])
        found: dict[str, dict[str, object]] = {}

        def differing() -> list[str]:
            found.update({case: view(host, n) for n, case in enumerate(WRONG)})
            faults = {case: str(seen["fault"]) for case, seen in found.items()}
            return [
                case for case, (_, words) in WRONG.items() if not faults[case] or words not in faults[case]
            ]

        host.wait_until(differing, [])
        assert time.monotonic() - began < 60
        assert {case: seen for case, seen in found.items() if seen["addresses"]} == {}
        asked_once = server.asked["silent.internal"]
        host.wait_until(lambda: server.asked["silent.internal"] > asked_once, True)  # it is asked again


def test_an_answer_of_thousands_of_records_is_not_read(node: Node, server: DnsServer) -> None:
    server.by_tcp = {
        "huge.internal": (addresses(1000), 65535),
        "declared.internal": (declaring_records, 7),
        "some-more.internal": (addresses(250), 65535),
    }
    declared = "".join(service(n, f"dns:{name}") for n, name in enumerate(server.by_tcp))
    with Host(node, declared, dns_servers=server.place, **{**PROMPT, "dns_timeout": "10s"}) as host:
        for number in range(2):
            host.wait_until(
                lambda: "too large to be read; hint: dns_max_addresses" in str(view(host, number)["fault"]),  # noqa: B023
                True,
            )
        host.wait_until(lambda: len(view(host, 2)["addresses"]), 100)  # type: ignore[arg-type]
        assert (view(host, 2)["left_out"], view(host, 2)["fault"]) == (150, "")


def test_a_server_that_fails_is_passed_over_and_aliases_are_followed(node: Node, server: DnsServer) -> None:
    with dns_server() as failing:
        failing.replies = {"web.internal": refusing(dns.rcode.SERVFAIL)}
        server.replies = {"web.internal": of_type(A=behind_aliases)}
        places = [f"127.0.0.1:{closed_port()}", failing.place, server.place]
        declared = service(0, "dns:web.internal") + service(1, "dns:broken.internal")
        failing.replies["broken.internal"] = server.replies["broken.internal"] = refusing(dns.rcode.REFUSED)
        with Host(node, declared, **{**PROMPT, "dns_servers": places, "dns_timeout": "5s"}) as host:
            host.wait_until(lambda: view(host, 0)["addresses"], ["10.0.0.9"])
            assert (view(host, 0)["ttl"], view(host, 0)["fault"]) == (20, "")
            refusals = f"; {failing.place} answered REFUSED; {server.place} answered REFUSED"
            faults = f"{places[0]} cannot be reached: Connection refused{refusals}"
            host.wait_until(lambda: view(host, 1)["fault"], faults)


def test_odd_srv_records(node: Node, server: DnsServer) -> None:
    """One that says there is no service has no target; thirty targets that stall take a bounded time."""
    server.replies["_none._tcp.internal"] = answering("SRV", "0 0 0 .")
    server.replies["_many._tcp.internal"] = answering("SRV", *(f"1 1 80 h{n}.internal." for n in range(30)))
    server.replies |= {f"h{n}.internal": lambda query: None for n in range(30)}
    declared = service(0, "srv:_none._tcp.internal") + service(1, "srv:_many._tcp.internal")
    with Host(node, declared, dns_servers=server.place, **{**PROMPT, "dns_timeout": "1s"}) as host:
        host.wait_until(lambda: bool(server.asked["_many._tcp.internal"]), True)
        began = time.monotonic()
        host.wait_until(lambda: "no answer" in str(view(host, 1)["fault"]), True)
        assert time.monotonic() - began < 15, "one after the other would take 30 s"
        host.wait_until(lambda: view(host, 0)["ttl"] is not None, True)
        assert view(host, 0)["addresses"] == view(host, 1)["addresses"] == []


def test_names_without_an_answer_delay_none_that_have_one_of_their_author_or_another(
    node: Node, server: DnsServer
) -> None:
    hanging = [f"hang{n}.internal" for n in range(200)]
    server.replies = {
        **{name: (lambda query: None) for name in hanging},
        "a.internal": of_type(A=answering("A", "10.0.0.1")),
        "b.internal": of_type(A=answering("A", "10.0.0.3")),
    }
    settings = {**PROMPT, "dns_servers": server.place, "dns_timeout": "30s", "dns_max_ttl": "1s"}
    with Host(node, service(1, "dns:a.internal"), **settings) as host:
        host.wait_until(lambda: host.endpoints("s1"), ["10.0.0.1:80"])
        names = ", ".join(f"dns:{name}" for name in hanging)
        host.write(
            service(1, "dns:a.internal")
            + f"  - {{name: hangs, address: 10.96.0.2, ports: 80, backends: [{names}]}}\n"
        )
        host.wait_until(lambda: sum(bool(server.asked[name]) for name in hanging) >= 20, True)
        server.replies["a.internal"] = of_type(A=answering("A", "10.0.0.2"))
        host.write(service(3, "dns:b.internal"), "other.yaml")
        host.wait_until(lambda: host.endpoints("s1"), ["10.0.0.2:80"], 10)
        host.wait_until(lambda: host.endpoints("s3"), ["10.0.0.3:80"], 30)
        assert sum(bool(server.asked[name]) for name in hanging) < 100, "few are asked for at once"


def test_the_hosts_own_name_servers_are_asked(node: Node, tmp_path: Path) -> None:
    """Without any, or with one that is none, there is a hint. What resolv.conf says of attempts and time is
    not followed."""
    hint, path = "hint: dns_servers in vipd's settings", tmp_path / "resolv.conf"
    path.write_text("")
    host = Host(node, service(1, "dns:a.internal"), **PROMPT)
    mount = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
    host.host = MountingNode(node.namespace, "", "", "", directory=str(path), script=mount)
    with host:
        host.host = node
        for content, words in (
            ("", hint),
            ("nameserver 127.0.0.99\noptions timeout:30 attempts:9 rotate\n", "127.0.0.99"),
            ("nameserver none\n", hint),
        ):
            path.write_text(content)  # it is read each time
            host.wait_until(lambda: words in str(view(host, 1)["fault"]), True)  # noqa: B023
            assert words != hint or "/etc/resolv.conf" in str(view(host, 1)["fault"])
