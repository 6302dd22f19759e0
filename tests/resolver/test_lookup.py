"""One lookup against a real name server, and against one that sends what no server should."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from vipd.model.service import Family, NameKind
from vipd.resolver.answers import LookupResult, NameState, Part, Question, Target
from vipd.resolver.lookup import ServerOptions, look_up

V4, V6 = Family.IPV4, Family.IPV6
LOOPBACK = "127.0.0.1"
LINES = (
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
needs_dnsmasq = pytest.mark.skipif(not shutil.which("dnsmasq"), reason="dnsmasq-base is not installed")


def free_port() -> int:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerOptions]:
    """dnsmasq on loopback, without any server above it."""
    port, config = free_port(), tmp_path_factory.mktemp("dnsmasq") / "dnsmasq.conf"
    own: tuple[str, ...] = ("no-resolv", "no-hosts", "bind-interfaces", "pid-file", "local-ttl=77")
    own += (f"listen-address={LOOPBACK}", f"port={port}", "edns-packet-max=512", "local=/internal/")
    config.write_text("\n".join((*own, *LINES)) + "\n")
    command = ["dnsmasq", "--no-daemon", f"--conf-file={config}"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        options, end = ServerOptions(((LOOPBACK, port),), 2.0), time.monotonic() + 10
        while ask("web.internal", options, V4).fault and time.monotonic() < end:
            time.sleep(0.02)
        yield options
    finally:
        process.kill()
        process.wait()


def ask(name: str, options: ServerOptions, *families: Family, most: int = 100) -> LookupResult:
    return look_up(Question(NameKind.DNS, name), families, options, NameState(), most)


def addresses(result: LookupResult) -> list[str]:
    return sorted(target.address for target in result.targets)


@needs_dnsmasq
def test_the_addresses_of_the_wanted_families_with_their_ttl(server: ServerOptions) -> None:
    assert ask("web.internal", server, V4).ttl == 77
    assert addresses(ask("web.internal", server, V4)) == ["10.0.0.1", "10.0.0.2"]
    assert addresses(ask("web.internal", server, V4, V6)) == ["10.0.0.1", "10.0.0.2", "fd00::1"]


@needs_dnsmasq
def test_aliases_are_followed(server: ServerOptions) -> None:
    assert addresses(ask("www.internal", server, V4)) == ["10.0.0.1", "10.0.0.2"]


@needs_dnsmasq
def test_a_truncated_answer_comes_over_tcp_and_no_more_than_wanted_is_used(server: ServerOptions) -> None:
    whole = ask("many.internal", server, V4)
    assert (len(whole.targets), whole.left_out) == (100, 0)
    part = ask("many.internal", server, V4, most=30)
    assert (len(part.targets), part.left_out) == (30, 70)


@needs_dnsmasq
def test_a_name_that_is_unknown_or_has_no_address_is_a_fault(server: ServerOptions) -> None:
    assert ask("unknown.internal", server, V4, V6).fault == "the name does not exist (NXDOMAIN)"
    assert ask("empty.internal", server, V4).fault == "the name has no A records"


@needs_dnsmasq
def test_a_family_without_records_is_no_fault_beside_another(server: ServerOptions) -> None:
    result = ask("b.internal", server, V4, V6)
    assert (addresses(result), result.fault, dict(result.failed)) == (["10.0.0.12"], "", {})


@needs_dnsmasq
def test_srv_records_with_the_addresses_of_their_targets(server: ServerOptions) -> None:
    result = look_up(Question(NameKind.SRV, "_http._tcp.internal"), (V4, V6), server, NameState())
    assert set(result.targets) == {
        Target("10.0.0.11", 8081, 10, 5, "a.internal"),
        Target("fd00::11", 8081, 10, 5, "a.internal"),
        Target("10.0.0.12", 8082, 20, 0, "b.internal"),
    }
    assert set(result.failed) == {Part("gone.internal", V4), Part("gone.internal", V6)}
    few = look_up(Question(NameKind.SRV, "_http._tcp.internal"), (V4,), server, NameState(), most=1)
    assert ([target.host for target in few.targets], few.left_out) == (["a.internal"], 2)


Reply = Callable[[dns.message.Message], bytes | None]


@contextmanager
def hostile(reply: Reply, timeout: float = 0.4) -> Iterator[ServerOptions]:
    """A UDP server that answers as told."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
        sock.bind((LOOPBACK, 0))
        sock.settimeout(0.05)
        done = threading.Event()

        def serve() -> None:
            while not done.is_set():
                try:
                    data, client = sock.recvfrom(4096)
                except TimeoutError:
                    continue
                if (answer := reply(dns.message.from_wire(data))) is not None:
                    sock.sendto(answer, client)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield ServerOptions(((LOOPBACK, sock.getsockname()[1]),), timeout)
        finally:
            done.set()
            thread.join()


def rcode(code: dns.rcode.Rcode) -> Reply:
    def reply(query: dns.message.Message) -> bytes:
        answer = dns.message.make_response(query)
        answer.set_rcode(code)
        return answer.to_wire()

    return reply


def answering(name: str, kind: str, *values: str) -> Reply:
    def reply(query: dns.message.Message) -> bytes:
        answer = dns.message.make_response(query)
        answer.answer.append(dns.rrset.from_text(name, 60, "IN", kind, *values))
        return answer.to_wire(max_size=65535)

    return reply


def to_other_question(query: dns.message.Message) -> bytes:
    other = dns.message.make_query("other.internal.", "A", id=query.id)
    return answering("other.internal.", "A", "10.66.66.66")(other) or b""


def with_other_id(query: dns.message.Message) -> bytes:
    forged = dns.message.make_query(query.question[0].name, "A", id=query.id ^ 1)
    return answering(str(query.question[0].name), "A", "10.66.66.66")(forged) or b""


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (lambda query: None, "no answer within 0.4 s from 127.0.0.1:"),
        (rcode(dns.rcode.SERVFAIL), "SERVFAIL"),
        (rcode(dns.rcode.REFUSED), "REFUSED"),
        (rcode(dns.rcode.NXDOMAIN), "NXDOMAIN"),
        (lambda query: b"", ""),
        (lambda query: b"\xff" * 700, ""),
        (lambda query: query.to_wire(), ""),
        (to_other_question, ""),
        (with_other_id, ""),
        (answering("web.internal.", "CNAME", "web.internal."), ""),
        (answering("elsewhere.internal.", "A", "10.66.66.66"), ""),
        (answering("web.internal.", "AAAA", "fd66::66"), ""),
    ],
)
def test_what_is_no_answer_to_the_question_is_a_fault_in_time(reply: Reply, told: str) -> None:
    with hostile(reply) as options:
        began = time.monotonic()
        result = ask("web.internal", options, V4)
        assert time.monotonic() - began < 10 * options.timeout
    assert (result.targets, bool(result.fault)) == ((), True)
    assert told in result.fault


@contextmanager
def over_tcp(reply: Reply, part: int = 65535) -> Iterator[ServerOptions]:
    """A server that answers over TCP alone, in parts of so many bytes."""
    with closing(socket.socket()) as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(listener.getsockname())

        def serve() -> None:
            query, client = udp.recvfrom(4096)
            truncated = dns.message.make_response(dns.message.from_wire(query))
            truncated.flags |= dns.flags.TC
            udp.sendto(truncated.to_wire(), client)
            connection, _ = listener.accept()
            with connection:
                question = connection.recv(4096)
                answer = reply(dns.message.from_wire(question[2:])) or b""
                message = len(answer).to_bytes(2, "big") + answer
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with suppress(ConnectionError):
                    for start in range(0, min(len(message), 20 * part), part):
                        connection.sendall(message[start : start + part])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield ServerOptions((listener.getsockname(),), 10.0)
        finally:
            thread.join()
            udp.close()


def addresses_in(count: int) -> Reply:
    return answering("web.internal.", "A", *(f"10.1.{n // 250}.{n % 250 + 1}" for n in range(count)))


def declaring_records(query: dns.message.Message) -> bytes:
    """A short answer that declares 2,000 records."""
    wire = bytearray(addresses_in(300)(query) or b"")
    wire[6:8] = (2000).to_bytes(2, "big")
    return bytes(wire)


@pytest.mark.parametrize(("reply", "part"), [(addresses_in(1000), 65535), (declaring_records, 7)])
def test_an_answer_of_thousands_of_records_is_not_read(reply: Reply, part: int) -> None:
    with over_tcp(reply, part) as options:
        result = ask("web.internal", options, V4)
    assert "sent an answer that is too large to be read; hint: dns_max_addresses" in result.fault, result


def test_an_answer_of_some_more_records_than_may_serve_is_read() -> None:
    with over_tcp(addresses_in(250)) as options:
        result = ask("web.internal", options, V4)
    assert (len(result.targets), result.left_out, result.fault) == (100, 150, "")


def test_a_datagram_larger_than_was_asked_for_counts_as_truncated() -> None:
    with hostile(addresses_in(1000)) as options:
        assert ask("web.internal", options, V4).targets == ()


def test_a_srv_record_that_says_there_is_no_service_has_no_target() -> None:
    with hostile(answering("_x._tcp.internal.", "SRV", "0 0 0 .")) as options:
        result = look_up(Question(NameKind.SRV, "_x._tcp.internal"), (V4,), options, NameState())
    assert (result.targets, result.fault) == ((), "")


def test_many_targets_that_stall_take_a_bounded_time() -> None:
    records = [f"1 1 80 h{n}.internal." for n in range(30)]
    answer = answering("_x._tcp.internal.", "SRV", *records)

    def only_the_first(query: dns.message.Message) -> bytes | None:
        return answer(query) if "_x" in str(query.question[0].name) else None

    with hostile(only_the_first, timeout=0.5) as options:
        began = time.monotonic()
        result = look_up(Question(NameKind.SRV, "_x._tcp.internal"), (V4,), options, NameState())
        took = time.monotonic() - began
    assert took < len(records) * options.timeout / 2, "one after the other would take twice as long, and more"
    assert (result.targets, len(result.failed)) == ((), 30)


@pytest.mark.parametrize("content", [None, "", "# nothing\n", "nameserver none\n"])
def test_a_host_without_name_servers_is_a_fault_with_a_hint(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    if content is not None:
        path.write_text(content)
    result = ask("web.internal", ServerOptions(resolv_conf=path, timeout=0.2), V4)
    assert str(path) in result.fault
    assert result.fault.endswith("hint: dns_servers in vipd's settings")


def test_the_host_s_own_name_servers_are_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    path.write_text("nameserver 127.0.0.99\nsearch example.com\noptions timeout:30 attempts:9 rotate\n")
    began = time.monotonic()
    result = ask("web.internal", ServerOptions(resolv_conf=path, timeout=0.2), V4)
    assert "127.0.0.99" in result.fault
    assert time.monotonic() - began < 9 * 30 / 2, "what resolv.conf says of attempts and time is not followed"
