"""Virtual servers of keepalived as services, and what of them has no counterpart."""

from __future__ import annotations

import pytest

from tests.declaration.conversion.reading import convert, lost, noted, only
from vipd.model.check import (
    UNCHECKED,
    Check,
    DnsProbe,
    ExecProbe,
    HttpProbe,
    InitialHealth,
    Probe,
    TcpProbe,
    Timing,
    UdpProbe,
)
from vipd.model.service import (
    Affinity,
    Backend,
    Balance,
    Masquerade,
    Protocol,
    Service,
    ServicePort,
)

WEB = """
! Configuration File for keepalived

global_defs {
   router_id LVS_1
}

vrrp_instance VI_1 {
    interface eth0
    virtual_ipaddress {
        10.96.0.10
    }
}

virtual_server 10.96.0.10 80 {
    delay_loop 6
    lb_algo wrr           # by weight
    lb_kind NAT
    persistence_timeout 50
    protocol TCP
    sorry_server 10.244.0.13 8080

    real_server 10.244.0.11 8080 {
        weight 2
        HTTP_GET {
            url {
              path /healthz
              status_code 200 204-206
            }
            connect_timeout 3
            retry 2
        }
    }
    real_server 10.244.0.12 8080
    {
        HTTP_GET { url { path /healthz
            status_code 200 204-206 }
            connect_timeout 3
            retry 2 }
    }
}
"""


def virtual(inside: str = "", server: str = "", protocol: str = "TCP") -> str:
    """A virtual server of two lines, in whose middle stand others; the first of them is line 2."""
    return (
        f"virtual_server 10.96.0.10 80 {{\n{inside}\nlb_algo wrr\nprotocol {protocol}\n"
        f"real_server 10.244.0.11 80 {{\n{server}\n}}\n}}\n"
    )


def check_of(checker: str, inside: str = "", protocol: str = "TCP") -> Check:
    return only(convert(virtual(inside, checker, protocol))).check


def test_a_virtual_server_is_a_service() -> None:
    found = convert(WEB, form="keepalived")
    assert only(found) == Service(
        name="10.96.0.10:80/tcp",
        addresses=("10.96.0.10",),
        ports=(ServicePort(80, Protocol.TCP, target=8080),),
        backends=(Backend("10.244.0.11", weight=2), Backend("10.244.0.12")),
        fallback=(Backend("10.244.0.13", check=UNCHECKED),),
        affinity=Affinity(50),
        balance=Balance.ROUND_ROBIN,
        masquerade=Masquerade.HAIRPIN,
        check=Check(
            HttpProbe(path="/healthz", status=((200, 200), (204, 206))), Timing(6, 3, rise=1, fall=3)
        ),
    )
    assert noted(found) == [(3, "global_defs"), (7, "vrrp_instance VI_1"), (14, "address 10.96.0.10")]


@pytest.mark.parametrize(
    ("checker", "probe", "timing"),
    [
        ("TCP_CHECK { connect_timeout 2 }", TcpProbe(), Timing(60, 2, 1, 2)),
        ("TCP_CHECK {\nconnect_port 8080\ndelay_loop 10\nretry 0\n}", TcpProbe(8080), Timing(10, 5, 1, 1)),
        (
            "SSL_GET {\nurl {\npath /\nvirtualhost www.example.com\n}\n}",
            HttpProbe(tls=True, verify=False, host="www.example.com", status=((200, 299),)),
            Timing(60, 5, 1, 2),
        ),
        (
            "MISC_CHECK {\nmisc_path \"/usr/local/bin/check --quick 'a b'\"\nmisc_timeout 7\nuser checks\n}",
            ExecProbe(command=("/usr/local/bin/check", "--quick", "a b"), user="checks"),
            Timing(60, 7, 1, 1),
        ),
    ],
)
def test_a_checker_is_a_check(checker: str, probe: Probe, timing: Timing) -> None:
    assert check_of(checker) == Check(probe, timing)


@pytest.mark.parametrize(
    ("checker", "probe", "timing"),
    [
        ("DNS_CHECK {\ntype A\nname example.com\n}", DnsProbe(query="example.com"), Timing(60, 5, 1, 4)),
        ("DNS_CHECK { }", DnsProbe(type="SOA"), Timing(60, 5, 1, 4)),
        ("UDP_CHECK {\npayload 0a1b 2 c\n}", UdpProbe(send=b"\x0a\x1b\x02\x0c"), Timing(60, 5, 1, 2)),
        ("UDP_CHECK { require_reply }", UdpProbe(send=b"\0", expect=b""), Timing(60, 5, 1, 2)),
    ],
)
def test_a_checker_by_udp_is_a_check(checker: str, probe: Probe, timing: Timing) -> None:
    assert check_of(checker, protocol="UDP") == Check(probe, timing)


def test_a_check_by_udp_of_a_tcp_service_has_its_port() -> None:
    assert check_of("DNS_CHECK { }").probe == DnsProbe(port=80, type="SOA")


def test_the_innermost_setting_of_checks_counts() -> None:
    inside = "delay_loop 10\nconnect_timeout 4\nalpha\nvirtualhost outer.example"
    check = check_of("retry 5\nHTTP_GET {\nurl { path / }\nconnect_timeout 3\n}", inside)
    assert check.timing == Timing(10, 3, 1, 6, InitialHealth.UNHEALTHY)
    assert isinstance(check.probe, HttpProbe)
    assert check.probe.host == "outer.example"


def test_a_timeout_beyond_the_interval_is_shortened_with_a_note() -> None:
    found = convert(virtual("delay_loop 3", "TCP_CHECK { }"))
    assert only(found).check.timing == Timing(3, 3, 1, 2)
    assert (6, "TCP_CHECK") in noted(found)


def test_different_checks_are_those_of_their_backends() -> None:
    text = virtual(server="TCP_CHECK { }").replace(
        "lb_algo wrr", "lb_algo wrr\nreal_server 10.244.0.12 80 {\n}"
    )
    service = only(convert(text))
    assert service.check == UNCHECKED
    assert [backend.check for backend in service.backends] == [None, Check(TcpProbe(), Timing(60, 5, 1, 2))]


def test_a_group_is_one_service_for_all_addresses_with_the_same_port() -> None:
    found = convert(
        """
        virtual_server_group WEB {
            10.96.0.10 80
            10.96.0.12-14 80
            10.96.0.32/31 443
            fwmark 7
        }
        virtual_server group WEB {
            lb_algo rr
            real_server 10.244.0.11 8080 { }
        }
        """,
        form="keepalived",
    )
    assert [(each.name, each.addresses, each.ports) for each in found.services] == [
        (
            "WEB",
            ("10.96.0.10", "10.96.0.12", "10.96.0.13", "10.96.0.14"),
            (ServicePort(80, Protocol.TCP, target=8080),),
        ),
        ("WEB-2", ("10.96.0.32", "10.96.0.33"), (ServicePort(443, Protocol.TCP, target=8080),)),
    ]
    assert lost(found) == [(5, "fwmark 7")]


def test_ipv6_and_the_port_of_the_virtual_server() -> None:
    service = only(
        convert("virtual_server fd00:96::1 53 {\nprotocol UDP\nlb_algo sh\nreal_server fd00::5\n}\n")
    )
    assert (service.addresses, service.backends) == (("fd00:96::1",), (Backend("fd00::5"),))
    assert (service.balance, service.ports) == (Balance.SOURCE_HASH, (ServicePort(53, Protocol.UDP),))


def test_each_setting_without_a_counterpart_is_named() -> None:
    for line in (
        "lvs_sched sed",
        "sh-port",
        "lb_kind DR",
        "persistence_granularity 255.255.255.0",
        "persistence_timeout 100000",
        "ops",
        "quorum 2",
        "quorum_up /usr/local/bin/up",
        "include other.conf",
        "@main protocol UDP",
        "$PORT=80",
        "new_setting 1",
    ):
        text = virtual(line).replace("lb_algo wrr\n", "" if "sched" in line else "lb_algo wrr\n")
        found = convert(text)
        assert [number for number, _ in lost(found)] in ([2], [3]), line
        assert len(found.services) == 1, line


def test_the_upper_threshold_is_max_connections() -> None:
    found = convert(virtual(server="uthreshold 100\nlthreshold 80"))
    assert lost(found) == []
    assert [b.max_connections for b in found.services[0].backends][-1] == 100


def test_each_setting_of_a_server_without_a_counterpart_is_named() -> None:
    for line in (
        "notify_down /usr/local/bin/down",
        "uthreshold many",
        "lvs_method TUN",
        "weight many",
        "SMTP_CHECK { }",
        "PING_CHECK { }",
        "TCP_CHECK { bindto 10.0.0.9 }",
        "TCP_CHECK { connect_ip 10.0.0.9 }",
        "HTTP_GET { url { digest 640205b7b0fc66c1ea91c463fac6334d } }",
        'MISC_CHECK { misc_path "check | grep ok" }',
        "MISC_CHECK { misc_path /bin/check\nmisc_dynamic }",
    ):
        found = convert(virtual(server=line))
        assert [number for number, _ in lost(found)] in ([6], [7]), line
        assert len(found.services) == 1, line


def test_further_checks_of_a_server_are_named() -> None:
    found = convert(virtual(server="TCP_CHECK { }\nHTTP_GET {\nurl { path /a }\n}"))
    assert lost(found) == [(7, "HTTP_GET")]
    found = convert(virtual(server="HTTP_GET {\nurl { path /a }\nurl { path /b }\n}"))
    assert lost(found) == [(8, "url path /b")]


@pytest.mark.parametrize(
    "heading", ["virtual_server fwmark 1 {", "virtual_server 10.0.0.1 {", "virtual_server group NONE {"]
)
def test_a_virtual_server_without_address_and_port_is_left_out(heading: str) -> None:
    found = convert(f"{heading}\nreal_server 10.1.0.1 80 {{ }}\n}}\n")
    assert found.services == ()
    assert {number for number, _ in lost(found)} == {1}


def test_a_file_that_ends_within_a_block_says_so() -> None:
    found = convert(WEB[: WEB.rindex("}")])
    assert any("ends within" in each.what for each in found.problems)
    found = convert(WEB + "}\n")
    assert any("closing brace" in each.what for each in found.problems)


def test_an_include_outside_of_blocks_is_named() -> None:
    found = convert(WEB + "include /etc/keepalived/conf.d/*.conf\n")
    assert [what for _, what in lost(found)] == ["include /etc/keepalived/conf.d/*.conf"]
