"""Every rule form: does a rule of that form take this packet?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from vipd.model.service import Family
from vipd.observe.simulator import Arrival, Host, Packet, PacketVerdict, UnknownRule, parse_ruleset, trace

HOST = Host(("192.0.2.1", "fd00::1"))
TCP = Packet("198.51.100.7", "203.0.113.9", "tcp", 80, in_interface="eth0", out_interface="br-lan")
UDP = replace(TCP, protocol="udp")
PING = replace(TCP, protocol="icmp", port=None)
FROM_HOST = replace(TCP, source="192.0.2.1", arriving=Arrival.LOCAL)
TCP6 = Packet("fd00:1::7", "fd00:2::9", "tcp", 80)
PING6 = replace(TCP6, protocol="icmpv6", port=None)


def takes(rule: str, packet: Packet = TCP, host: Host = HOST, before: str = "") -> bool:
    """A DROP rule of this form in FORWARD and OUTPUT drops the packet."""
    lines = [before, f"-A FORWARD {rule} -j DROP", f"-A OUTPUT {rule} -j DROP"]
    text = "\n".join(["*filter", *lines, "COMMIT"])
    outcomes = trace(parse_ruleset(text, packet.family), packet, host).outcomes
    assert len(outcomes) == 1
    return outcomes[0].verdict is PacketVerdict.DROPPED


@pytest.mark.parametrize(
    ("rule", "packet", "expected"),
    [
        ("", TCP, True),
        ("-s 198.51.100.0/24", TCP, True),
        ("-s 198.51.100.99/24", TCP, True),
        ("-s 198.51.100.7/255.255.255.255", TCP, True),
        ("! -s 198.51.100.0/24", TCP, False),
        ("! -s 10.244.0.0/16", TCP, True),
        ("--source 198.51.100.8", TCP, False),
        ("-s 0.0.0.0/0", TCP, True),
        ("-d 203.0.113.9", TCP, True),
        ("-d 203.0.113.8", TCP, False),
        ("! -d 203.0.113.9/32", TCP, False),
        ("! -d 127.0.0.0/8", TCP, True),
        ("-s fd00:1::/32 ! -d ::1/128", TCP6, True),
        ("-s fd00:3::/32", TCP6, False),
        ("-p tcp", TCP, True),
        ("-p 6", TCP, True),
        ("-p udp", TCP, False),
        ("! -p tcp", TCP, False),
        ("! -p udp", TCP, True),
        ("-p all", PING, True),
        ("-p tcp -m tcp --dport 80", TCP, True),
        ("-m tcp -p tcp --dport 80", TCP, True),
        ("-p tcp --dport 80", TCP, True),
        ("-p tcp -m tcp --dport 81", TCP, False),
        ("-p tcp -m tcp ! --dport 80", TCP, False),
        ("-p tcp -m tcp ! --dport 443", TCP, True),
        ("-p tcp -m tcp --dport 79:80", TCP, True),
        ("-p tcp -m tcp --dport 81:", TCP, False),
        ("-p tcp -m tcp --sport 40000", TCP, True),
        ("-p tcp -m tcp --sport 1:39999", TCP, False),
        ("-p tcp -m tcp --sport 40000 ! --dport 80", TCP, False),
        ("-p udp -m udp --dport 80", TCP, False),
        ("-p udp -m udp --dport 80", UDP, True),
        ("-p sctp -m sctp --dport 80", replace(TCP, protocol="sctp"), True),
        ("-p icmp", PING, True),
        ("-p icmp -m icmp --icmp-type 8", PING, True),
        ("-p icmp --icmp-type echo-request", PING, True),
        ("-p icmp -m icmp ! --icmp-type 8", PING, False),
        ("-p icmp -m icmp --icmp-type 0", PING, False),
        ("-p icmp -m icmp --icmp-type 0", replace(PING, icmp_type=0), True),
        ("-p icmp -m icmp --icmp-type any", replace(PING, icmp_type=3), True),
        ("-p ipv6-icmp -m icmp6 --icmpv6-type 128", PING6, True),
        ("-p icmpv6 --icmpv6-type 129", PING6, False),
        ("-m addrtype --src-type LOCAL", TCP, False),
        ("-m addrtype --src-type LOCAL", FROM_HOST, True),
        ("-m addrtype ! --src-type LOCAL", TCP, True),
        ("-m addrtype ! --src-type LOCAL", FROM_HOST, False),
        ("-m addrtype --dst-type LOCAL", TCP, False),
        ("-m addrtype ! --dst-type LOCAL", TCP, True),
        ("-m addrtype ! --src-type LOCAL ! --dst-type LOCAL", TCP, True),
        ("-m addrtype ! --src-type LOCAL --dst-type LOCAL", TCP, False),
        ("-m mark --mark 0", TCP, True),
        ("-m mark --mark 0x4000/0x4000", TCP, False),
        ("-m mark ! --mark 0x4000/0x4000", TCP, True),
        ("-m connmark --mark 0x1/0x1", TCP, False),
        ("-m connmark ! --mark 0x1/0x1", TCP, True),
        ("-m conntrack --ctstate NEW", TCP, True),
        ("-m conntrack --ctstate RELATED,ESTABLISHED", TCP, False),
        ("-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT", TCP, True),
        ("-m conntrack ! --ctstate INVALID,NEW", TCP, False),
        ("-m conntrack --ctstate DNAT", TCP, False),
        ("-m conntrack --ctstate SNAT", TCP, False),
        ("-m state --state NEW", TCP, True),
        ("-p tcp -m multiport --dports 22,80:90", TCP, True),
        ("-p tcp -m multiport ! --dports 22,80:90", TCP, False),
        ("-p tcp -m multiport --sports 22,80", TCP, False),
        ("-p tcp -m multiport --ports 22,80", TCP, True),
        ("-m comment --comment \"any \\\"text\\\" -j ACCEPT\"", TCP, True),
        ("-m nfacct --nfacct-name ct_invalid", TCP, True),
        ("-m statistic --mode random --probability 1.0", TCP, True),
        ("-m statistic --mode random --probability 0.0", TCP, False),
        ("-m statistic --mode random ! --probability 0.0", TCP, True),
        ("-m recent --rcheck --name A", TCP, False),
        ("-m recent ! --rcheck --name A", TCP, True),
        ("-m recent --set --name A --mask 255.255.255.255 --rsource", TCP, True),
    ],
)  # fmt: skip
def test_condition(rule: str, packet: Packet, expected: bool) -> None:
    assert takes(rule, packet) is expected


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("-i eth0", True),
        ("-i eth1", False),
        ("! -i eth0", False),
        ("! -i docker0", True),
        ("-i eth+", True),
        ("! -i cali+", True),
        ("-o br-lan", True),
        ("! -o br+", False),
    ],
)
def test_interfaces(rule: str, expected: bool) -> None:
    ruleset = parse_ruleset(f"*filter\n-A FORWARD {rule} -j DROP\nCOMMIT", Family.IPV4)
    verdict = trace(ruleset, TCP, HOST).outcomes[0].verdict
    assert (verdict is PacketVerdict.DROPPED) is expected


def test_a_packet_without_a_named_interface_is_on_one_that_no_rule_names() -> None:
    unnamed = replace(TCP, in_interface=None)
    assert not takes("-i eth0", unnamed)
    assert takes("! -i eth0", unnamed)


@pytest.mark.parametrize(
    ("target", "start", "expected"),
    [
        ("--set-xmark 0x4000/0x4000", 0x1, 0x4001),
        ("--set-xmark 0x4000/0x0", 0x4001, 0x1),
        ("--set-xmark 0x5", 0xF0, 0x5),
        ("--set-mark 0x6/0x2", 0xF, 0xF),
        ("--set-mark 0x6/0x0", 0x6, 0x6),
        ("--or-mark 0x4000", 0x4001, 0x4001),
        ("--xor-mark 0x4000", 0x4001, 0x1),
        ("--xor-mark 0x00004000", 0x1, 0x4001),
        ("--and-mark 0xf", 0x4001, 0x1),
    ],
)
@pytest.mark.parametrize(("kind", "match"), [("MARK", "mark"), ("CONNMARK", "connmark")])
def test_marks(kind: str, match: str, target: str, start: int, expected: int) -> None:
    before = f"-A FORWARD -j {kind} --set-xmark {start}\n-A FORWARD -j {kind} {target}"
    assert takes(f"-m {match} --mark {expected}", before=before)
    assert not takes(f"-m {match} ! --mark {expected}", before=before)


def test_a_connection_mark_is_not_a_packet_mark() -> None:
    assert not takes("-m mark --mark 0x1/0x1", before="-A FORWARD -j CONNMARK --set-xmark 0x1/0x1")


def test_recent_holds_what_the_caller_pins_and_what_a_rule_sets() -> None:
    assert takes(
        "-m recent --rcheck --seconds 10 --reap --name A", host=replace(HOST, affinity_lists=frozenset({"A"}))
    )
    assert not takes("-m recent --rcheck --name B", host=replace(HOST, affinity_lists=frozenset({"A"})))
    assert takes("-m recent --rcheck --name A", before="-A FORWARD -m recent --set --name A")


@pytest.mark.parametrize(
    ("answer", "packet"),
    [
        ("", TCP),
        (" --reject-with icmp-port-unreachable", TCP),
        (" --reject-with icmp-admin-prohibited", UDP),
        (" --reject-with icmp6-adm-prohibited", TCP6),
    ],
)
def test_reject(answer: str, packet: Packet) -> None:
    ruleset = parse_ruleset(f"*filter\n-A FORWARD -j REJECT{answer}\nCOMMIT", packet.family)
    assert [o.verdict for o in trace(ruleset, packet, HOST).outcomes] == [PacketVerdict.REJECTED]


@pytest.mark.parametrize(
    "rule",
    [
        "-m quota --quota 5 -j ACCEPT",
        "-m multiport --dports 80,443 -j ACCEPT",
        "-m physdev --physdev-in a -j ACCEPT",
        "-j LOG",
        "-j LOG --log-prefix x",
        "-j NO-SUCH-CHAIN",
        "-g ACCEPT",
        "-p tcp -m tcp --syn -j ACCEPT",
        "-p tcp -m tcp --tcp-flags SYN SYN -j ACCEPT",
        "--dport 80 -j ACCEPT",
        "-m tcp --dport 80 -j ACCEPT",
        "-p udp -m tcp --dport 80 -j ACCEPT",
        "! -p tcp -m tcp --dport 80 -j ACCEPT",
        "-p tcp --dport http -j ACCEPT",
        "-p tcp --dport ! 80 -j ACCEPT",
        "-p tcp --dport 80 --dport 81 -j ACCEPT",
        "-p tcp --dport 70000 -j ACCEPT",
        "-p nonsense -j ACCEPT",
        "! -p all -j ACCEPT",
        "-s 10.0.0.1,10.0.0.2 -j ACCEPT",
        "-s example.org -j ACCEPT",
        "-s fd00::1 -j ACCEPT",
        "-s 10.0.0.1 -s 10.0.0.2 -j ACCEPT",
        "-m addrtype --dst-type MULTICAST -j ACCEPT",
        "-m addrtype -j ACCEPT",
        "-m addrtype --dst-type LOCAL --limit-iface-in -j ACCEPT",
        "-m mark -j ACCEPT",
        "-m mark --mark zero -j ACCEPT",
        "-m conntrack --ctstate NEW,ODD -j ACCEPT",
        "-m conntrack --ctdir ORIGINAL -j ACCEPT",
        "-m statistic --mode nth --every 3 --packet 3 -j ACCEPT",
        "-m statistic --mode nth --packet 0 -j ACCEPT",
        "-m statistic --mode random -j ACCEPT",
        "-m statistic --mode random --probability 1.5 -j ACCEPT",
        "-m recent --name A -j ACCEPT",
        "-m recent --update --name A -j ACCEPT",
        "-m recent --rcheck --hitcount 3 --name A -j ACCEPT",
        "-m recent --rcheck --rdest --name A -j ACCEPT",
        "-m recent --rcheck --mask 255.255.255.0 --name A -j ACCEPT",
        "-m recent ! --set --name A -j ACCEPT",
        "-p icmp -m icmp --icmp-type 8/0 -j ACCEPT",
        "-p icmpv6 --icmpv6-type 128 -j ACCEPT",
        "-j MARK",
        "-j MARK --or-mark 1 --and-mark 2",
        "-j CONNMARK --save-mark",
        "-j DNAT --to-destination 10.0.0.1",
        "-j MASQUERADE",
        "-j REJECT --reject-with icmp6-no-route",
        "-j REJECT --reject-with tcp-reset",
        "-j ACCEPT --why",
        "-j ACCEPT -j DROP",
        "! -j ACCEPT",
        "! -m mark --mark 1 -j ACCEPT",
        "-m comment --comment \"open -j ACCEPT",
        "-m comment --comment",
        "-m comment -j ACCEPT",
        "-f -j ACCEPT",
        "-t nat -j ACCEPT",
        "-c 1 2 -j ACCEPT",
        "stray -j ACCEPT",
        "-s 10.0.0.1 !",
    ],
)  # fmt: skip
def test_an_unknown_form_is_an_error_with_the_rule_in_it(rule: str) -> None:
    with pytest.raises(UnknownRule) as caught:
        parse_ruleset(f"*filter\n-A FORWARD {rule}\nCOMMIT", Family.IPV4)
    assert rule in caught.value.text
    assert rule in str(caught.value)


@pytest.mark.parametrize(
    "rule",
    [
        "-j DNAT",
        "-j DNAT --to-destination 10.0.0.1-10.0.0.9",
        "-j DNAT --to-destination 10.0.0.1:80-90",
        "-j DNAT --to-destination :80",
        "-j DNAT --to-destination 10.0.0.1 --random",
        "-j DNAT --to-destination [fd00::1]:80",
        "-j DROP",
        "-j REJECT",
        "-j SNAT --to-source 10.0.0.1-10.0.0.9",
        "-j MASQUERADE --to-ports 1000-2000",
        "-p tcp -j REDIRECT --to-ports 80-90",
    ],
)
def test_an_unknown_form_in_nat_is_an_error(rule: str) -> None:
    with pytest.raises(UnknownRule):
        parse_ruleset(f"*nat\n-A PREROUTING {rule}\nCOMMIT", Family.IPV4)
