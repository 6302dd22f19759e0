"""Servers of nginx's stream block as services, and what of them has no counterpart."""

from __future__ import annotations

import pytest

from tests.declaration.conversion.reading import convert, lost, noted, only
from vipd.model.check import Check, TcpProbe, Timing
from vipd.model.service import (
    Backend,
    BackendState,
    Balance,
    Masquerade,
    Protocol,
    Service,
    ServicePort,
)

DNS = """
user www-data;
events { worker_connections 768; }
http {
    server { listen 80; location / { proxy_pass http://127.0.0.1:8080; } }
}
stream {
    log_format basic '$remote_addr [$time_local] '
                     '$protocol';   # of two lines
    upstream dns {
        zone dns 64k;
        server 10.244.0.11:53 weight=3 max_fails=0 max_conns=90;
        server 10.244.0.12:53 backup;
        server 10.244.0.13:53 down;
    }
    server {
        listen 53 udp reuseport;
        listen 53;
        proxy_pass dns;
        proxy_responses 1;
    }
}
"""


def server(inside: str = "", upstream: str = "", servers: str = "") -> str:
    """A server of a stream block. `inside` is on its second line, `upstream` on its fourth."""
    return (
        f"stream {{ server {{ listen 10.96.0.10:80; proxy_pass web;\n{inside}\n}} upstream web {{\n"
        f"{upstream}\nserver 10.244.0.11:8080 {servers}; }} }}\n"
    )


def test_a_server_with_its_upstream_is_a_service() -> None:
    found = convert(DNS, "10.96.0.53", form="nginx")
    assert only(found) == Service(
        name="dns",
        addresses=("10.96.0.53",),
        ports=(
            ServicePort(53, Protocol.UDP, node_port=53),
            ServicePort(53, Protocol.TCP, node_port=53),
        ),
        backends=(
            Backend("10.244.0.11", weight=3, max_connections=90),
            Backend("10.244.0.12", backup=True),
            Backend("10.244.0.13", state=BackendState.DOWN),
        ),
        balance=Balance.ROUND_ROBIN,
    )
    assert [line for line, _ in noted(found)] == [2, 3, 7, 10, 19]


def test_what_listens_on_every_address_needs_a_virtual_ip() -> None:
    found = convert(DNS)
    assert [line for line, _ in lost(found)] == [15, 16, 17]


def test_a_file_that_is_included_in_the_stream_block() -> None:
    found = convert("server { listen 10.96.0.10:80; proxy_pass 10.244.0.11:8080; }\n", form="nginx")
    assert only(found).ports == (ServicePort(80, Protocol.TCP, target=8080),)


@pytest.mark.parametrize(
    ("line", "balance"),
    [
        ("", Balance.ROUND_ROBIN),
        ("random;", Balance.RANDOM),
        ("hash $remote_addr consistent;", Balance.SOURCE_HASH),
        ("hash $binary_remote_addr;", Balance.SOURCE_HASH),
    ],
)
def test_balance(line: str, balance: Balance) -> None:
    assert only(convert(server(upstream=line))).balance is balance


def test_checks_slow_start_and_the_address_of_clients() -> None:
    inside = (
        "health_check interval=10 passes=2 fails=3 port=9000; health_check_timeout 1500ms; "
        "proxy_bind $remote_addr transparent;"
    )
    service = only(convert(server(inside, servers="slow_start=1m30s")))
    assert service.check == Check(TcpProbe(9000), Timing(10, 1.5, rise=2, fall=3))
    assert (service.slow_start, service.masquerade) == (90, Masquerade.HAIRPIN)


def test_a_setting_of_the_stream_block_holds_for_its_servers() -> None:
    text = server().replace("stream {", "stream { proxy_bind $remote_addr transparent; health_check;")
    service = only(convert(text))
    assert (service.masquerade, service.check.probe) == (Masquerade.HAIRPIN, TcpProbe())


def test_ranges_and_families() -> None:
    found = convert(
        "stream { server { listen 10.96.0.10:6000-6002; listen [fd00:96::1]:6000-6002; "
        "proxy_pass [fd00::5]:7000; } }"
    )
    assert [(each.addresses, len(each.ports)) for each in found.services] == [(("fd00:96::1",), 3)]
    assert {what for _, what in lost(found)} == {"listen 10.96.0.10:6000-6002"}


def test_passive_checks_by_default_are_a_note() -> None:
    two = "server 10.244.0.12:8080;"
    assert "upstream web" in [what for _, what in noted(convert(server(upstream=two)))]
    assert lost(convert(server(upstream=two))) == []
    assert "upstream web" not in [what for _, what in noted(convert(server("health_check;", two)))]


def test_each_directive_without_a_counterpart_is_named() -> None:
    for line in (
        "allow 10.0.0.0/8;",
        "proxy_download_rate 1m;",
        "ssl_preread on;",
        "limit_conn a 1;",
        "proxy_bind 10.0.0.9;",
        "include servers.conf;",
        "return 1;",
        "new_directive 1;",
        "health_check match=ok;",
        "health_check udp;",
        "listen 10.96.0.11:443 ssl;",
        "listen 10.96.0.11:443 proxy_protocol;",
        "listen unix:/run/a;",
        "listen 10.96.0.11:99999;",
    ):
        found = convert(server(line))
        assert {number for number, _ in lost(found)} == {2}, line
        assert [each.name for each in found.services] == ["web"], line


def test_each_part_of_an_upstream_without_a_counterpart_is_named() -> None:
    for line in (
        "random two least_conn;",
        "hash $remote_addr$remote_port;",
        "hash $ssl_preread_server_name;",
        "server unix:/run/a;",
        "server web:80;",
        "server web.example.com;",
        "server web.example.com:80 service=http resolve;",
        "server web.example.com service=http resolve backup;",
        "server web.example.com service=http resolve weight=2;",
        "server 10.244.0.12;",
        "server 127.0.0.1:80;",
        "server 10.244.0.12:80 max_conns=five;",
        "server 10.244.0.12:80 max_fails=3 fail_timeout=10s;",
        "server 10.244.0.12:80 unheard_of=1;",
        "include servers.conf;",
    ):
        found = convert(server(upstream=line))
        assert {number for number, _ in lost(found)} == {4}, line
        assert (
            Backend("10.244.0.11") in found.services[0].backends
            or found.services[0].backends[-1].port == 8080
        ), line


@pytest.mark.parametrize("line", ["proxy_ssl on;", "proxy_protocol on;"])
def test_servers_that_need_more_than_the_data_are_left_out(line: str) -> None:
    found = convert(server(line))
    assert (found.services, lost(found)[0][0]) == ((), 1)
    assert (2, line.rstrip(";")) in lost(found)
    assert only(convert(server(line.replace(" on", " off"))))


def test_a_target_that_depends_on_the_flow_is_left_out() -> None:
    found = convert(
        "stream { map $x $name { default a; }\nserver { listen 10.0.0.1:80; proxy_pass $name; } }"
    )
    assert (found.services, lost(found)) == ((), [(1, "map $x $name"), (2, "server 10.0.0.1:80")])


def test_http_alone_is_no_service() -> None:
    found = convert("http { server { listen 80; location / { proxy_pass http://x; } } }", form="nginx")
    assert (found.services, lost(found)) == ((), [(0, "")])


def test_an_unfinished_file_says_so() -> None:
    found = convert(server()[:-3])
    assert any("ends within" in each.what for each in found.problems)


@pytest.mark.parametrize(
    ("line", "name", "told"),
    [
        ("web.example.com:8080 resolve", "dns:web.example.com", False),
        ("web.example.com:8080", "dns:web.example.com", True),
        ("web:8080 resolve", "dns:web", False),
        ("example.com service=http resolve", "srv:_http._tcp.example.com", False),
        ("example.com service=_http._tcp resolve", "srv:_http._tcp.example.com", False),
        ("example.com service=server1.backend resolve", "srv:server1.backend.example.com", False),
    ],
)
def test_servers_by_name(line: str, name: str, told: bool) -> None:
    found = convert(server(upstream=f"server {line} max_conns=9;"))
    (named,) = only(found).named_backends
    assert (str(named), named.template.max_connections) == (name, 9)
    assert any("nginx looks the name up when it starts" in each.text for each in found.notes) is told


def test_proxy_pass_to_a_name() -> None:
    found = convert("stream { server { listen 10.96.0.10:80; proxy_pass web.example.com:8080; } }")
    assert list(map(str, only(found).named_backends)) == ["dns:web.example.com"]
    assert only(found).ports[0].target == 8080
