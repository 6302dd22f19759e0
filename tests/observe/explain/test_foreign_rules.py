"""What rules of other programs do to a packet, as `explain --on-host` reads them."""

from __future__ import annotations

from dataclasses import replace

from vipd.model.service import Family
from vipd.observe.simulator import Arrival, Host, Packet, UnknownRule, parse_ruleset, parse_tables, trace
from vipd.observe.simulator.errors import RulesetError

HOST = Host(("192.0.2.1", "fd00::1"))
TCP = Packet("198.51.100.7", "203.0.113.9", "tcp", 80, in_interface="eth0", out_interface="br-lan")
UDP = replace(TCP, protocol="udp")
PING = replace(TCP, protocol="icmp", port=None)
FROM_HOST = replace(TCP, source="192.0.2.1", arriving=Arrival.LOCAL)
TCP6 = Packet("fd00:1::7", "fd00:2::9", "tcp", 80)
PING6 = replace(TCP6, protocol="icmpv6", port=None)


def fate(rules: str, packet: Packet = TCP, *, strict: bool = False) -> str:
    """The verdict on a packet, and where it is sent; or that a rule in its way is not known."""
    try:
        ruleset = parse_ruleset(rules, packet.family, strict=strict, prefix="VIPD")
        (outcome,) = trace(ruleset, packet, HOST).outcomes
    except UnknownRule:
        return "unknown"
    return f"{outcome.verdict} {outcome.backend}" if outcome.backend else str(outcome.verdict)


def takes(rule: str, packet: Packet = TCP, before: str = "") -> bool:
    """A DROP rule of this form in FORWARD and OUTPUT drops the packet."""
    lines = ["*filter", before, f"-A FORWARD {rule} -j DROP", f"-A OUTPUT {rule} -j DROP", "COMMIT"]
    return fate("\n".join(lines), packet) == "dropped"


CONDITIONS = [
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
    ("-i eth0", TCP, True),
    ("-i eth1", TCP, False),
    ("! -i eth0", TCP, False),
    ("! -i docker0", TCP, True),
    ("-i eth+", TCP, True),
    ("! -i cali+", TCP, True),
    ("-o br-lan", TCP, True),
    ("! -o br+", TCP, False),
    ("-i eth0", replace(TCP, in_interface=None), False),
    ("! -i eth0", replace(TCP, in_interface=None), True),
]  # fmt: skip


def test_conditions() -> None:
    # What others remember of clients is not known.
    wrong = [
        (rule, packet)
        for rule, packet, expected in CONDITIONS
        if takes(rule, packet) is not (expected and "--rcheck" not in rule)
    ]
    assert wrong == []


MARKS = [
    ("--set-xmark 0x4000/0x4000", 0x1, 0x4001),
    ("--set-xmark 0x4000/0x0", 0x4001, 0x1),
    ("--set-xmark 0x5", 0xF0, 0x5),
    ("--set-mark 0x6/0x2", 0xF, 0xF),
    ("--set-mark 0x6/0x0", 0x6, 0x6),
    ("--or-mark 0x4000", 0x4001, 0x4001),
    ("--xor-mark 0x4000", 0x4001, 0x1),
    ("--xor-mark 0x00004000", 0x1, 0x4001),
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
]  # fmt: skip
UNKNOWN_IN_NAT = [
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


QUOTA = "-m quota --quota 5"
FORWARD = "*filter\n:FORWARD {0} [0:0]\n:A - [0:0]\n:B - [0:0]\n{1}COMMIT\n"
DNAT = "*nat\n-A PREROUTING -j DNAT --to-destination {0}\nCOMMIT\n"
RECENT = "*filter\n:{0} - [0:0]\n-A FORWARD -j {0}\n-A {0} -m recent --rcheck --name A -j DROP\nCOMMIT\n"
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
    "a refusal": (FORWARD.format("ACCEPT", "-A FORWARD -j REJECT\n"), "rejected"),
    "counters, comments and blank lines": (
        FORWARD.format("ACCEPT", "# note\n\n[1:60] -A FORWARD -j DROP\n"),
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
    "the first translation ends its chain": (
        DNAT.format("10.0.0.5:1\n-A PREROUTING -j DNAT --to-destination 10.0.0.6:2"),
        "delivered 10.0.0.5:1",
    ),
    "a redirection stays here": (
        "*nat\n-A PREROUTING -p tcp -j REDIRECT --to-ports 8080\nCOMMIT\n",
        "delivered 192.0.2.1:8080",
    ),
    "an unknown rule in another chain": (f"*filter\n-A INPUT {QUOTA} -j DROP\nCOMMIT\n", "unchanged"),
    "an unknown rule in the packet's way": (f"*filter\n-A FORWARD {QUOTA} -j DROP\nCOMMIT\n", "unknown"),
    "a drop before tracking": ("*raw\n-A PREROUTING -j DROP\nCOMMIT\n", "dropped"),
    "no tracking": ("*raw\n-A PREROUTING -j CT --notrack\nCOMMIT\n", "unknown"),
    **{
        f"an unknown rule that cannot concern it: {rule}": (
            f"*filter\n-A FORWARD {rule}\nCOMMIT\n",
            "unchanged",
        )
        for rule in (
            f"-p udp {QUOTA} -j DROP",
            f"{QUOTA} -s 10.99.0.0/16 -j DROP",
            f"{QUOTA} -m conntrack --ctstate RELATED,ESTABLISHED -j DROP",
            f"{QUOTA} -m conntrack ! --ctstate NEW -j DROP",
            f"-p tcp -m tcp --dport 22 {QUOTA} -j DROP",
            f"{QUOTA} ! -p tcp -j DROP",
            QUOTA,
            f"{QUOTA} -j LOG --log-prefix in:",
            "-j NFLOG",
        )
    },
    "what others remember of clients": (
        RECENT.format("blocked"),
        "unknown",
    ),
    "what vipd remembers": (
        RECENT.format("VIPD-A"),
        "unchanged",
    ),
}


def test_the_way_through_chains() -> None:
    wrong = {name: seen for name, (rules, expected) in WALKS.items() if (seen := fate(rules)) != expected}
    assert wrong == {}


OTHERS = """
table inet fw {{
	set blocked {{
		type ipv4_addr
		flags interval
		elements = {{ 198.51.100.0/24, 10.2.0.5 }}
	}}
	set odd {{
		type ether_addr
	}}
	chain c {{
		type filter hook forward priority 10; policy accept;
		{}
	}}
	chain in {{
		type filter hook ingress device "eth0" priority 0; policy accept;
	}}
}}
"""


NFT = [
    ("ip saddr @blocked drop", "dropped"),
    ("ip saddr != @blocked drop", "unchanged"),
    ('iifname "eth0" drop', "dropped"),
    ('iifname "eth*" oif "br-1" drop', "dropped"),
    ('iifname { "lo", "br-*" } drop', "unchanged"),
    ('iifname != "eth0" drop', "unchanged"),
    ("ct state 0x8,0x40 drop", "dropped"),
    ("ct state 0x2,0x4 drop", "unchanged"),
    ("ct state vmap { 0x1 : accept, 0x8 : drop }", "dropped"),
    ("ct status 0x20 drop", "unchanged"),
    ("meta nfproto 10 drop", "unchanged"),
    ("ip protocol 6 drop", "dropped"),
    ("ip6 nexthdr 6 drop", "unchanged"),
    ("icmp type { 3, 8 } drop", "unchanged"),
    ("meta pkttype { 1, 2 } drop", "unchanged"),
    ("fib daddr type { 2, 3 } drop", "unchanged"),
    ('log prefix "in: " level info flags all counter packets 0 bytes 0 drop', "dropped"),
    ("reject with icmpx 3", "rejected"),
    ("limit rate 5/second accept", "unknown"),
    ("limit rate 5/second log", "unchanged"),
    ("ip saddr 10.0.0.0/8 limit rate 5/second drop", "unchanged"),
    ("ether saddr @odd drop", "unknown"),
    ("queue num 3", "unknown"),
    ("tcp flags 0x2 tcp option maxseg size set rt mtu", "unchanged"),
    ("tcp option maxseg size set 1400 accept", "unknown"),
    ("meta mark set 0x1", "unchanged"),
    ("tcp flags 0x0 / 0x3 drop", "unknown"),
    ("tcp flags 0x12 / 0x10 drop", "unknown"),
    ("ct status != 0x20 drop", "unknown"),
    ("ct status { 0x20 } drop", "unknown"),
    ("add @blocked { ip saddr limit rate over 5/second burst 5 packets } drop", "unknown"),
    (
        'iif "x" add @blocked { ip saddr limit rate over 5/second burst 5 packets } drop',
        "unchanged",
    ),
]


def test_rules_of_nft() -> None:
    wrong = []
    for rule, verdict in NFT:
        packet = replace(TCP, out_interface="br-1")
        tables = parse_tables(OTHERS.format(rule), Family.IPV4, strict=False)
        assert tables.left_out == ("inet fw in",)
        try:
            seen = str(trace(tables, packet, Host()).outcomes[0].verdict)
        except UnknownRule as error:
            seen = "unknown" if error.text == f"inet fw c: {rule}" else error.text
        if seen != verdict:
            wrong.append((rule, seen))
    assert wrong == []
    dormant = OTHERS.format("drop").replace("table inet fw {\n", "table inet fw {\n\tflags dormant\n")
    (outcome,) = trace(parse_tables(dormant, Family.IPV4, strict=False), TCP, Host()).outcomes
    assert outcome.verdict == "unchanged"


LINES = (
    "garbage",
    "-A",
    "*nat",
    "COMMIT",
    ":X",
    "[x:y] -A A -j B",
    "chain {",
    "}",
    "\x00\x01",
    "\N{SNOWMAN}",
)


def test_what_programs_print_otherwise_is_an_error_of_its_own() -> None:
    for parse, text in (
        (parse_ruleset, WALKS["a return comes back behind the jump"][0]),
        (parse_tables, OTHERS.format("drop")),
    ):
        lines = text.splitlines()
        for at in range(len(lines)):
            for line in (*LINES, lines[at][: len(lines[at]) // 2]):
                try:
                    parse("\n".join([*lines[:at], line, *lines[at + 1 :]]) + "\n", Family.IPV4, strict=False)
                except RulesetError:
                    continue
