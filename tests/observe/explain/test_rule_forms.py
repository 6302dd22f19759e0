"""What rules do to a packet, by their form; and forms that are refused."""

from __future__ import annotations

from dataclasses import replace

from vipd.model.service import Family
from vipd.observe.simulator import Arrival, Host, Packet, UnknownRule, parse_ruleset, trace

HOST = Host(("192.0.2.1", "fd00::1"))
TCP = Packet("198.51.100.7", "203.0.113.9", "tcp", 80)
UDP = replace(TCP, protocol="udp")
PING = replace(TCP, protocol="icmp", port=None)
FROM_HOST = replace(TCP, source="192.0.2.1", arriving=Arrival.LOCAL)
TCP6 = Packet("fd00:1::7", "fd00:2::9", "tcp", 80)
PING6 = replace(TCP6, protocol="icmpv6", port=None)


def fate(rules: str, packet: Packet = TCP) -> str:
    """The verdict on a packet, and where it is sent."""
    (outcome,) = trace(parse_ruleset(rules, packet.family), packet, HOST).outcomes
    return f"{outcome.verdict} {outcome.backend}" if outcome.backend else str(outcome.verdict)


def takes(rule: str, packet: Packet = TCP, before: str = "") -> bool:
    """A DROP rule of this form in FORWARD and OUTPUT drops the packet."""
    lines = ["*filter", before, f"-A FORWARD {rule} -j DROP", f"-A OUTPUT {rule} -j DROP", "COMMIT"]
    return fate("\n".join(lines), packet) == "dropped"


CONDITIONS = [
    ("", TCP, True),
    ("-s 198.51.100.0/24", TCP, True),
    ("! -s 198.51.100.0/24", TCP, False),
    ("--source 198.51.100.8", TCP, False),
    ("-d 203.0.113.8", TCP, False),
    ("-s fd00:1::/32 ! -d ::1/128", TCP6, True),
    ("-p tcp", TCP, True),
    ("-p udp", TCP, False),
    ("! -p tcp", TCP, False),
    ("-p all", PING, True),
    ("-p tcp -m tcp --dport 80", TCP, True),
    ("-p tcp -m tcp --dport 81", TCP, False),
    ("-p tcp -m tcp ! --dport 80", TCP, False),
    ("-p tcp -m tcp --dport 79:80", TCP, True),
    ("-p tcp -m tcp --dport 81:", TCP, False),
    ("-p tcp -m tcp --sport 40000", TCP, True),
    ("-p tcp -m tcp --sport 40000 ! --dport 80", TCP, False),
    ("-p udp -m udp --dport 80", TCP, False),
    ("-p udp -m udp --dport 80", UDP, True),
    ("-p icmp -m icmp --icmp-type 8", PING, True),
    ("-p icmp -m icmp ! --icmp-type 8", PING, False),
    ("-p icmp -m icmp --icmp-type 0", PING, False),
    ("-p icmp -m icmp --icmp-type any", PING, True),
    ("-p ipv6-icmp -m icmp6 --icmpv6-type 128", PING6, True),
    ("-m addrtype --src-type LOCAL", TCP, False),
    ("-m addrtype --src-type LOCAL", FROM_HOST, True),
    ("-m addrtype ! --src-type LOCAL", FROM_HOST, False),
    ("-m addrtype --dst-type LOCAL", TCP, False),
    ("-m mark --mark 0", TCP, True),
    ("-m mark --mark 0x4000/0x4000", TCP, False),
    ("-m connmark --mark 0x1/0x1", TCP, False),
    ("-m conntrack --ctstate NEW", TCP, True),
    ("-m conntrack --ctstate RELATED,ESTABLISHED", TCP, False),
    ("-m conntrack ! --ctstate INVALID,NEW", TCP, False),
    ("-m conntrack --ctstate DNAT", TCP, False),
    ("-m comment --comment \"any \\\"text\\\" -j ACCEPT\"", TCP, True),
    ("-m statistic --mode random --probability 0.0", TCP, False),
    ("-m statistic --mode random ! --probability 0.0", TCP, True),
    ("-m recent --rcheck --name A", TCP, False),
    ("-m recent --set --name A --mask 255.255.255.255 --rsource", TCP, True),
]  # fmt: skip


def test_conditions() -> None:
    wrong = [(rule, packet) for rule, packet, expected in CONDITIONS if takes(rule, packet) is not expected]
    assert wrong == []


MARKS = [
    ("--set-xmark 0x4000/0x4000", 0x1, 0x4001),
    ("--set-xmark 0x4000/0x0", 0x4001, 0x1),
    ("--set-mark 0x6/0x2", 0xF, 0xF),
    ("--or-mark 0x4000", 0x4001, 0x4001),
    ("--and-mark 0xf", 0x4001, 0x1),
]


def test_marks() -> None:
    for kind, match in (("MARK", "mark"), ("CONNMARK", "connmark")):
        for target, start, expected in MARKS:
            before = f"-A FORWARD -j {kind} --set-xmark {start}\n-A FORWARD -j {kind} {target}"
            assert takes(f"-m {match} --mark {expected}", before=before), (kind, target)
            assert not takes(f"-m {match} ! --mark {expected}", before=before), (kind, target)
    assert not takes("-m mark --mark 0x1/0x1", before="-A FORWARD -j CONNMARK --set-xmark 0x1/0x1")


UNKNOWN = [
    "-m quota --quota 5 -j ACCEPT",
    "-m multiport --dports 80,443 -j ACCEPT",
    "-j LOG",
    "-j NO-SUCH-CHAIN",
    "-p tcp -m tcp --syn -j ACCEPT",
    "-p tcp --dport http -j ACCEPT",
    "-p tcp --dport ! 80 -j ACCEPT",
    "-p tcp --dport 70000 -j ACCEPT",
    "-s 10.0.0.1,10.0.0.2 -j ACCEPT",
    "-s fd00::1 -j ACCEPT",
    "-m addrtype --dst-type MULTICAST -j ACCEPT",
    "-m conntrack --ctstate NEW,ODD -j ACCEPT",
    "-m statistic --mode nth --every 3 --packet 3 -j ACCEPT",
    "-m recent --update --name A -j ACCEPT",
    "-p icmp -m icmp --icmp-type 8/0 -j ACCEPT",
    "-j MARK --or-mark 1 --and-mark 2",
    "-j CONNMARK --save-mark",
    "-j MASQUERADE",
    "-j REJECT --reject-with tcp-reset",
    "-j ACCEPT --why",
    "-m comment --comment \"open -j ACCEPT",
    "-c 1 2 -j ACCEPT",
    "stray -j ACCEPT",
]  # fmt: skip
UNKNOWN_IN_NAT = [
    "-j DNAT",
    "-j DNAT --to-destination 10.0.0.1-10.0.0.9",
    "-j DNAT --to-destination 10.0.0.1:80-90",
    "-j DROP",
    "-j SNAT --to-source 10.0.0.1",
    "-j MASQUERADE --to-ports 1000-2000",
    "-p tcp -j REDIRECT --to-ports 80-90",
]


def test_a_form_that_is_not_known_is_an_error_with_the_rule_in_it() -> None:
    known = []
    for table, chain, rules in (("filter", "FORWARD", UNKNOWN), ("nat", "PREROUTING", UNKNOWN_IN_NAT)):
        for rule in rules:
            try:
                parse_ruleset(f"*{table}\n-A {chain} {rule}\nCOMMIT", Family.IPV4)
            except UnknownRule as error:
                if rule in error.text and rule in str(error):
                    continue
            known.append(rule)
    assert known == []


FORWARD = "*filter\n:FORWARD {0} [0:0]\n:A - [0:0]\n:B - [0:0]\n{1}COMMIT\n"
DNAT = "*nat\n-A PREROUTING -j DNAT --to-destination {0}\nCOMMIT\n"
WALKS: dict[str, tuple[str, str]] = {
    "no rules": ("", "unchanged"),
    "a policy": (FORWARD.format("DROP", ""), "dropped"),
    "a return in a built-in chain means its policy": (
        FORWARD.format("DROP", "-A FORWARD -j RETURN\n-A FORWARD -j ACCEPT\n"),
        "dropped",
    ),
    "a return comes back behind the jump": (
        FORWARD.format("ACCEPT", "-A FORWARD -j A\n-A FORWARD -j DROP\n-A A -j RETURN\n-A A -j ACCEPT\n"),
        "dropped",
    ),
    "a jump comes back": (FORWARD.format("ACCEPT", "-A FORWARD -j A\n-A FORWARD -j DROP\n"), "dropped"),
    "a goto does not": (FORWARD.format("ACCEPT", "-A FORWARD -g A\n-A FORWARD -j DROP\n"), "unchanged"),
    "a goto returns to the caller of its chain": (
        FORWARD.format("ACCEPT", "-A FORWARD -j A\n-A FORWARD -j DROP\n-A A -g B\n-A A -j ACCEPT\n"),
        "dropped",
    ),
    "translated to this host": (
        DNAT.format("192.0.2.1:8080") + "*filter\n:INPUT DROP [0:0]\nCOMMIT\n",
        "dropped 192.0.2.1:8080",
    ),
    "translated and forwarded": (
        DNAT.format("10.0.0.5:8080") + "*filter\n:INPUT DROP [0:0]\nCOMMIT\n",
        "delivered 10.0.0.5:8080",
    ),
    "a later rule sees the translation": (
        DNAT.format("10.0.0.5:8080")
        + FORWARD.format(
            "DROP", "-A FORWARD -d 10.0.0.5 -p tcp --dport 8080 -m conntrack --ctstate DNAT -j ACCEPT\n"
        ),
        "delivered 10.0.0.5:8080",
    ),
    "a redirection stays here": (
        "*nat\n-A PREROUTING -p tcp -j REDIRECT --to-ports 8080\nCOMMIT\n",
        "delivered 192.0.2.1:8080",
    ),
}


def test_the_way_through_chains() -> None:
    wrong = {name: seen for name, (rules, expected) in WALKS.items() if (seen := fate(rules)) != expected}
    assert wrong == {}
