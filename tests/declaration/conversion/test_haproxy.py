"""Proxies of HAProxy in tcp mode as services, and what of them has no counterpart."""

from __future__ import annotations

import pytest

from tests.declaration.conversion.reading import convert, lost, noted, only
from tests.lab.inside import Declared
from vipd.model.check import UNCHECKED, Check, HttpProbe, Probe, TcpProbe, Timing
from vipd.model.service import (
    Affinity,
    Backend,
    BackendState,
    Balance,
    Masquerade,
    NamedBackend,
    NameKind,
    Protocol,
    Service,
    ServicePort,
)

VIP = "10.96.0.10"

WEB = """
global
    log /dev/log local0
    maxconn 4096

defaults
    mode    tcp
    log     global
    option  tcplog
    timeout connect 5000
    timeout client  50s

frontend web            # the shop
    bind :80
    default_backend web

backend web
    balance source
    default-server inter 4s fall 2 slowstart 30s
    server b1 10.244.0.11:8080 weight 2 check
    server b2 10.244.0.12:8080 check rise 3
    server b3 10.244.0.13:8080 check backup
"""

SENT = """option httpchk
    http-check send meth GET uri /ready ver HTTP/1.1 hdr Host www.example.com
    http-check expect status 200,204-206
"""


def listen(inside: str = "", server: str = "") -> str:
    """A listen section, whose third line is `inside`, and whose last one is a server."""
    return f"listen web\n    bind 10.96.0.10:80\n    {inside}\n    server b1 10.244.0.11:8080 {server}\n"


def check_of(inside: str = "", server: str = "check") -> Check:
    return only(convert(listen(inside, server))).check


def test_a_frontend_with_its_backend_is_a_service() -> None:
    found = convert(WEB, VIP, form="haproxy")
    check = Check(TcpProbe(), Timing(4, 4, rise=2, fall=2))
    assert only(found) == Service(
        name="web",
        addresses=(VIP,),
        ports=(ServicePort(80, Protocol.TCP, target=8080, node_port=80),),
        backends=(
            Backend("10.244.0.11", weight=2, check=check),
            Backend("10.244.0.12", check=Check(TcpProbe(), Timing(4, 4, rise=3, fall=2))),
            Backend("10.244.0.13", check=check, backup=True),
        ),
        balance=Balance.SOURCE_HASH,
        slow_start=30,
    )
    assert [line for line, _ in noted(found)] == [7, 8, 9, 10, 12]


def test_what_listens_on_every_address_needs_a_virtual_ip() -> None:
    found = convert(WEB)
    assert (found.services, lost(found)) == ((), [(12, "frontend web"), (13, "bind :80")])
    assert "--address 10.96.0.10" in found.problems[1].hint


def test_the_same_check_of_all_servers_is_that_of_the_service() -> None:
    check = Check(TcpProbe(), Timing(2, 2, 2, 3))
    assert check_of() == check


@pytest.mark.parametrize(
    ("inside", "server", "probe", "timing"),
    [
        ("", "check port 9000 inter 500 fall 5", TcpProbe(9000), Timing(0.5, 0.5, 2, 5)),
        ("timeout check 1s", "check inter 10s", TcpProbe(), Timing(10, 10, 2, 3)),
        ("option tcp-check", "check", TcpProbe(), Timing(2, 2, 2, 3)),
        ("option httpchk", "check", HttpProbe(method="OPTIONS"), Timing(2, 2, 2, 3)),
        ("option httpchk /a", "check", HttpProbe(method="OPTIONS", path="/a"), Timing(2, 2, 2, 3)),
        (
            r"option httpchk HEAD /a HTTP/1.1\r\nHost:\ www.example.com",
            "check",
            HttpProbe(method="HEAD", path="/a", host="www.example.com"),
            Timing(2, 2, 2, 3),
        ),
        (
            SENT,
            "check check-ssl verify none check-sni shop",
            HttpProbe(
                tls=True,
                verify=False,
                path="/ready",
                host="www.example.com",
                status=((200, 200), (204, 206)),
                server_name="shop",
            ),
            Timing(2, 2, 2, 3),
        ),
        (
            "option httpchk GET /\n    http-check expect string a.b(c){2}\\\\d",
            "check",
            HttpProbe(body=r"a\.b\(c\)\{2}\\d"),
            Timing(2, 2, 2, 3),
        ),
    ],
)
def test_a_check(inside: str, server: str, probe: Probe, timing: Timing) -> None:
    assert check_of(inside, server) == Check(probe, timing)


def test_the_times_of_a_check_that_has_its_own() -> None:
    times = "timeout connect 1s\n    timeout check 3s"
    assert check_of(times, "check inter 10s").timing.timeout == 1
    assert check_of(f"{times}\n    option httpchk GET /", "check inter 10s").timing.timeout == 4


def test_states_and_the_address_of_clients() -> None:
    service = only(convert(listen("source 0.0.0.0 usesrc clientip", "disabled backup")))
    assert service.masquerade is Masquerade.HAIRPIN
    assert service.backends == (Backend("10.244.0.11", state=BackendState.DOWN, backup=True),)


def test_a_later_word_undoes_one_of_default_server() -> None:
    service = only(convert(listen("default-server check backup disabled", "no-check no-backup enabled")))
    assert (service.backends, service.check) == ((Backend("10.244.0.11"),), UNCHECKED)


@pytest.mark.parametrize(
    ("line", "balance"),
    [
        ("", Balance.ROUND_ROBIN),
        ("balance static-rr", Balance.ROUND_ROBIN),
        ("balance random(3)", Balance.RANDOM),
        ("balance source\n    hash-type consistent", Balance.SOURCE_HASH),
        ("balance hash src", Balance.SOURCE_HASH),
    ],
)
def test_balance(line: str, balance: Balance) -> None:
    assert only(convert(listen(line))).balance is balance


def test_stickiness_is_affinity() -> None:
    lines = "stick-table type ip size 200k expire 30m\n    stick on src"
    assert only(convert(listen(lines))).affinity == Affinity(1800)
    found = convert(
        listen("stick on src table sticky") + "backend sticky\n    stick-table type ip expire 1h\n"
    )
    assert only(found).affinity == Affinity(3600)
    found = convert(listen("stick-table type ip size 1m peers mine\n    stick on src"))
    assert (found.services[0].affinity, [line for line, _ in lost(found)]) == (Affinity(86400), [3, 3])


def test_several_binds_are_services_by_their_ports() -> None:
    found = convert(
        """
        frontend web
            bind 10.96.0.10:80,10.96.0.11:80 name plain
            bind 10.96.0.12:8000-8002
            bind [fd00:96::1]:80
            bind ipv4@10.96.0.13:80
            default_backend b
        backend b
            server b1 10.244.0.11
            server b2 fd00:244::5:80
        """,
        form="haproxy",
    )
    assert [(each.name, each.addresses, [port.port for port in each.ports]) for each in found.services] == [
        ("web", ("10.96.0.10", "10.96.0.11", "fd00:96::1", "10.96.0.13"), [80]),
        ("web-2", ("10.96.0.12",), [8000, 8001, 8002]),
    ]
    assert [len(each.backends) for each in found.services] == [2, 1]
    assert lost(found) == [(9, "server b2 fd00:244::5:80")]
    assert "address family" in " ".join(each.text for each in found.notes)


def test_binds_of_both_families_get_both_virtual_ips() -> None:
    text = listen(server="\n    server b2 [fd00:244::5]:8080").replace("10.96.0.10:80", ":::80 v4v6")
    service = only(convert(text, VIP, "fd00:96::10"))
    assert service.addresses == (VIP, "fd00:96::10")
    found = convert(text, VIP)
    assert lost(found) == [(2, "bind :::80"), (5, "server b2 [fd00:244::5]:8080")]


def test_named_defaults() -> None:
    found = convert(
        """
        defaults a
            balance random
        defaults b from a
            mode tcp
        defaults
            mode http
        listen x from b
            bind 10.96.0.10:80
            server b1 10.244.0.11:80
        listen y
            bind 10.96.0.11:80
            server b1 10.244.0.11:80
        """
    )
    assert only(found).balance is Balance.RANDOM
    assert noted(found)[-1] == (10, "listen y")


def test_each_line_without_a_counterpart_is_named() -> None:
    for line in (
        "balance first",
        "balance url_param id",
        "maxconn 100",
        "tcp-request connection reject if { src 10.0.0.1 }",
        "acl local src 10.0.0.0/8",
        "use-server b1 if { src 10.0.0.1 }",
        "rate-limit sessions 10",
        "option mysql-check",
        "tcp-check send PING",
        "stick-table type ip size 1m store conn_cur",
        "source 10.0.0.9",
        "server-template w 3 10.244.0.12:80",
        "bind 10.96.0.11:443 ssl crt /etc/ssl/a.pem",
        "bind 10.96.0.11:80 accept-proxy",
        "bind /run/web.sock",
        "bind 10.96.0.11",
        "bind 10.96.0.11:90-80",
        'server b2 "$WEB":80',
        "server b2 web:80",
        "server b2 web_.example.com-:80",
        "server b2 127.0.0.1:80",
        "server b2 10.244.0.12:+1",
        "server b2 10.244.0.12:80 ssl verify none",
        "server b2 10.244.0.12:80 send-proxy-v2",
        "server b2 10.244.0.12:80 track web/b1",
        "server b2 10.244.0.12:80 check addr 10.0.0.9",
        "server b2 10.244.0.12:80 minconn 10",
        "server b2 10.244.0.12:80 maxconn ten",
        "server b2 10.244.0.12:80 weight 70000",
        "server b2 10.244.0.12:80 unheard-of",
        "new-keyword x",
    ):
        found = convert(listen(line))
        assert {number for number, _ in lost(found)} == {3}, line
        assert [each.name for each in found.services] == ["web"], line


def test_a_line_without_effect_on_services_is_a_note() -> None:
    for line in (
        "timeout client 50s",
        "log global",
        "option tcplog",
        "no option dontlognull",
        "retries 3",
        "errorfile 400 x",
    ):
        found = convert(listen(line))
        assert lost(found) == [], line
        assert 3 in [number for number, _ in noted(found)], line


def test_a_frontend_that_chooses_by_content_goes_to_its_default() -> None:
    found = convert(
        """
        backend web
            server b1 10.244.0.11:80
        frontend f
            bind 10.96.0.10:80
            use_backend other if { src 10.0.0.1 }
            default_backend web
        """
    )
    assert [what for _, what in lost(found)] == ["use_backend other if { src 10.0.0.1 }"]
    assert found.services[0].backends == (Backend("10.244.0.11"),)


def test_a_frontend_without_its_backend_is_left_out() -> None:
    found = convert("frontend f\n    bind 10.96.0.10:80\n    default_backend other\n")
    assert (found.services, lost(found)) == ((), [(1, "frontend f"), (3, "default_backend other")])


@pytest.mark.parametrize(
    ("line", "problems"),
    [
        ('balance "${ALGORITHM}"', [(3, True)]),
        ("acl a path '$HOST'", [(3, False)]),
        (r'acl a path "\$HOST"', [(3, False)]),
        ("# balance $ALGORITHM", []),
        (r"""log a\ b 'c # $d' "" # $e""", []),
    ],
)
def test_a_line_with_a_variable_is_not_read(line: str, problems: list[tuple[int, bool]]) -> None:
    found = convert(listen(line))
    assert [(each.line, "variable" in each.what) for each in found.problems] == problems
    assert found.services[0].balance is Balance.ROUND_ROBIN


def test_quotes_and_backslashes_make_one_word() -> None:
    found = convert(listen(r"""ser"ver" b\2 '10.244.0.12':"8080" # weight 3"""))
    assert only(found).backends == (Backend("10.244.0.12"), Backend("10.244.0.11"))


def test_the_limit_of_a_server_is_its_max_connections() -> None:
    found = convert(listen("server b2 10.244.0.12:8080 maxconn 0", "maxconn 10"))
    assert lost(found) == []
    assert [b.max_connections for b in found.services[0].backends] == [None, 10]


def test_conditional_lines_are_not_read() -> None:
    found = convert(listen(".if feature(OPENSSL)\n    maxconn 5\n.if true\n.endif\n    maxconn 6\n.endif"))
    assert [line for line, _ in lost(found)] == [3, 5]


def test_http_alone_is_no_service() -> None:
    found = convert("defaults\n    mode http\nfrontend f\n    bind :80\n    default_backend b\nbackend b\n")
    assert (found.services, lost(found)) == ((), [(0, "")])
    assert noted(found) == [(3, "frontend f")]


def test_more_than_one_backup_is_named_without_allbackups() -> None:
    lines = "server b2 10.244.0.12:8080 backup\n    server b3 10.244.0.13:8080 backup"
    assert lost(convert(listen(lines))) == [(4, "server b3 10.244.0.13:8080")]
    assert lost(convert(listen(f"option allbackups\n    {lines}"))) == []
    assert len(lost(convert(listen(f"option allbackups\n    no option allbackups\n    {lines}")))) == 1


def test_a_name_that_no_service_may_have_is_changed() -> None:
    found = convert(listen().replace("listen web", "listen web:80_"))
    assert only(found).name == "web-80"


def named(line: str, more: str = "") -> tuple[Declared, tuple[NamedBackend, ...]]:
    """A service of one server by name, and what stands for it."""
    found = convert(f"listen web\n    bind 10.96.0.10:80\n    {line}\n    {more}\n")
    return found, only(found).named_backends


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("server w web.example.com:8080 resolvers dns weight 3", "HAProxy takes one at most"),
        ("server-template w 5 web.example.com:8080 resolvers dns weight 3", "HAProxy takes 5 at most"),
        ("server-template w 1-5 Web.Example.com.:8080 weight 3", "HAProxy takes one, when it starts"),
    ],
)
def test_a_server_by_name_is_one_backend_for_all_its_addresses(line: str, told: str) -> None:
    found, names = named(line)
    assert names == (NamedBackend(NameKind.DNS, "web.example.com", Backend("", weight=3)),)
    assert only(found).ports == (ServicePort(80, Protocol.TCP, target=8080),)
    assert any(told in each.text for each in found.notes)


def test_a_name_has_its_check_state_and_limit() -> None:
    line = "server w web.example.com:8080 resolvers dns check port 9000 backup maxconn 50"
    found, (name,) = named(line, "server b1 10.244.0.11:8080 check port 9000")
    assert name.template == Backend("", backup=True, max_connections=50)
    assert only(found).check.probe == TcpProbe(9000)
    assert only(found).backends == (Backend("10.244.0.11"),)


def test_srv_records_say_port_and_weight() -> None:
    line = "server-template w 5 _http._tcp.example.com resolvers dns check"
    found, names = named(line)
    assert names == (NamedBackend(NameKind.SRV, "_http._tcp.example.com"),)
    assert (only(found).ports, only(found).check.probe) == ((ServicePort(80, Protocol.TCP),), TcpProbe())
    assert any("ignores the priority of records" in each.text for each in found.notes)
    for lossy in ("weight 3", "resolve-opts ignore-weight"):
        (problem,) = convert(listen(line + " " + lossy)).problems
        assert problem.what == "the records say the weights"


def test_names_without_a_domain_are_the_hosts_own_unless_resolvers_ask_dns() -> None:
    (problem,) = convert(listen("server w web:80")).problems
    assert problem.hint == "write its address, or dns:web.DOMAIN"
    _, names = named("server w web:80 resolvers dns")
    assert names == (NamedBackend(NameKind.DNS, "web"),)
    assert not convert("listen web\n bind 10.96.0.10:80\n server w web:80\n").services


def test_several_servers_of_one_name_are_one() -> None:
    line = "server w{} web.example.com:80 resolvers dns {}"
    found, names = named(line.format(1, ""), line.format(2, ""))
    assert (list(map(str, names)), noted(found)[-1][0]) == (["dns:web.example.com"], 4)
    found = convert(
        f"listen web\n bind 10.96.0.10:80\n {line.format(1, '')}\n {line.format(2, 'weight 2')}\n"
    )
    assert lost(found) == [(4, "server w2 web.example.com:80")]


def test_a_name_serves_listeners_of_both_families() -> None:
    found = convert(
        "listen web\n bind 10.96.0.10:80\n bind [fd00:96::1]:80\n"
        " server a 10.244.0.11:80\n server w web.example.com:80 resolvers dns\n"
    )
    assert only(found).addresses == ("10.96.0.10", "fd00:96::1")
