"""Tables of nftables: what is refused, how chains call each other, where dice lead."""

from __future__ import annotations

import pytest

from vipd.model.service import Family
from vipd.observe.simulator import (
    Arrival,
    Host,
    Outcome,
    Packet,
    PacketVerdict,
    RulesetError,
    SimulationResult,
    UnknownRule,
    parse_tables,
    trace,
)

HOST = Host(("192.0.2.1", "fd00::1"))
TCP = Packet("198.51.100.7", "203.0.113.9", "tcp", 80)
PING = Packet("198.51.100.7", "203.0.113.9", "icmp")
BASE = "type nat hook {0} priority {1}; policy {2};"


def table(*parts: str, family: str = "ip") -> str:
    return "\n".join([f"table {family} t {{", *parts, "}"])


def chain(name: str, *rules: str) -> str:
    return "\n".join([f"chain {name} {{", *rules, "}"])


def base(*rules: str, hook: str = "prerouting", policy: str = "accept", priority: str = "-100") -> str:
    return chain(f"{hook}{len(rules)}{policy}", BASE.format(hook, priority, policy), *rules)


def nft_set(name: str, type_of: str, *elements: str) -> str:
    kind = "map" if " : " in type_of else "set"
    listed = ["elements = {", *(f"{element}," for element in elements), "}"] if elements else []
    return "\n".join([f"{kind} {name} {{", f"type {type_of}", *listed, "}"])


def traced(text: str, packet: Packet = TCP) -> SimulationResult:
    return trace(parse_tables(text, packet.family), packet, HOST)


def only(text: str, packet: Packet = TCP) -> Outcome:
    (outcome,) = traced(text, packet).outcomes
    return outcome


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("ip saddr 10.0.0.0/33", "10.0.0.0/33"),
        ("ip saddr fd00::1", "fd00::1 is no ipv4_addr"),
        ("ip saddr @nobody", "there is no map or set nobody"),
        ("ip saddr . ip daddr @addresses", "not of @addresses's type"),
        ("ip saddr vmap @addresses", "@addresses has no verdicts"),
        ("meta mark set ip saddr map @addresses", "@addresses has no values"),
        ("meta mark set ip6 saddr", "does not fit"),
        ("ip length 40", "ip length is not known"),
        ("meta iifname eth0", "eth0 is no name of an interface"),
        ("ct expiration 5", "ct expiration is not known"),
        ("fib daddr type unicast", "unicast"),
        ("th dport set 5", "cannot be set"),
        ("limit rate 5/second", "limit is not known"),
        ("notrack", "notrack is not known"),
        ("tcp dport 70000", "above 65535"),
        ("tcp dport 9-2", "ends before it begins"),
        ("meta l4proto gre", "gre"),
        ("numgen random mod 0", "mod 0"),
        ("meta mark set numgen random mod 3 . numgen inc mod 2 map @x", "numgen|no map"),
        ("meta mark set numgen random mod 3 ct mark set numgen inc mod 2", "chance decides twice"),
        ("reject with icmp echo", "echo"),
        ("dnat to ip saddr . ip daddr", "dnat goes to"),
        ("dnat to 10.0.0.1-10.0.0.9", "is a range"),
        ("update @addresses { ip saddr : ip daddr }", "@addresses is a set"),
        ("goto", "more is wanted"),
        ('accept comment "a" drop', "behind the comment"),
        ("ip saddr 10.0.0.1 ! drop", "sign that is not known"),
    ],
)  # fmt: skip
def test_rules_that_are_not_known(rule: str, why: str) -> None:
    with pytest.raises(UnknownRule, match=why):
        parse_tables(table(nft_set("addresses", "ipv4_addr", "10.0.0.1"), base(rule)), Family.IPV4)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("table inet t {\n}", "no table of ip or ip6"),
        ("add rule ip t c drop", "outside a table"),
        ("table ip t {", "no end"),
        (table("flowtable f {", "}"), "flowtable is not known"),
        (table("set s {", "flags interval", "}"), "no type"),
        (table("set s {", "type ipv4_addr : mark", "}"), "not one of its kind"),
        (table("set s {", "type ether_addr", "}"), "ether_addr is not known"),
        (table(nft_set("s", "ipv4_addr", "10.0.0.1", "10.0.0.1")), "two elements"),
        (table(nft_set("s", "ipv4_addr", *(f"10.0.{n % 90}.1" for n in range(100)))), "the same key"),
        (table(base("goto nowhere")), "leads to nowhere"),
        (table(base("jump prerouting1accept")), "no chain that can be"),
        (table(nft_set("m", "inet_proto : verdict", "tcp : goto b"), base("meta l4proto vmap @m")), "to b"),
        (table(chain("a", "jump b"), chain("b", "goto a")), "loop"),
        (table(chain("a", "type bridge hook output priority 0;")), "unknown base chain"),
        (table(chain("a", "type nat hook ingress priority 0;")), "unknown base chain"),
    ],
)
def test_tables_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(RulesetError, match=why):
        parse_tables(text, Family.IPV4)


def test_what_the_kernel_refuses_in_a_hook_is_an_error() -> None:
    for hook, rule in (
        ("postrouting", "dnat to 10.0.0.1"),
        ("prerouting", "masquerade"),
        ("postrouting", "reject"),
    ):
        with pytest.raises(RulesetError, match=f"is reached from {hook}"):
            traced(table(base(rule, hook=hook)))


def test_an_element_that_is_asked_for_is_read_then() -> None:
    many = [f"10.1.0.{n} : 10.2.0.{n}" for n in range(100)]
    rule = "dnat to ip daddr map @m"
    asked = Packet("198.51.100.7", "10.1.0.7", "tcp", 80)
    text = table(nft_set("m", "ipv4_addr : ipv4_addr", *many, "10.9.0.0/16 : 10.3.0.1"), base(rule))
    found = only(text, asked)
    assert (found.backend, found.steps[0].element) == ("10.2.0.7:80", "10.1.0.7 : 10.2.0.7")
    assert only(text, Packet("198.51.100.7", "10.9.3.4", "tcp", 80)).backend == "10.3.0.1:80"
    wrong = text.replace("10.1.0.7 :", "10.1.0.7 : quickly")
    with pytest.raises(UnknownRule, match="quickly"):
        traced(wrong, asked)


def test_verdicts() -> None:
    second = chain("second", "meta l4proto udp drop", "return", "drop")
    jumping = table(second, base("jump second", "dnat to 10.0.0.1:8080", "drop"))
    assert (only(jumping).verdict, only(jumping).backend) == (PacketVerdict.DELIVERED, "10.0.0.1:8080")
    assert only(table(second, base("goto second", "drop"))).verdict is PacketVerdict.UNCHANGED
    assert only(table(second, base("goto second", policy="drop"))).steps[-1].rule == "policy DROP"
    assert only(table(base("accept", "drop"))).verdict is PacketVerdict.UNCHANGED
    assert only(table(base("continue", "reject"))).verdict is PacketVerdict.REJECTED
    refused = table(base("reject with tcp reset", "meta l4proto icmp reject with icmp host-unreachable"))
    assert [only(refused, p).verdict for p in (TCP, PING)] == [PacketVerdict.REJECTED, PacketVerdict.REJECTED]
    assert [len(only(refused, p).steps) for p in (TCP, PING)] == [1, 1]


def test_chains_are_asked_by_priority_and_translations_are_made_once() -> None:
    early, late = base("dnat to 10.0.0.1", priority="-101"), base("counter", "dnat to 10.0.0.2")
    assert only(table(late, early)).backend == "10.0.0.1:80"
    filtering = chain("f", "type filter hook prerouting priority raw + 1;", "ip daddr 203.0.113.9 counter")
    assert [s.chain for s in only(table(late, early, filtering)).steps] == ["f", "prerouting1accept"]


def test_the_ways_of_a_packet() -> None:
    hooks = ("prerouting", "input", "output", "forward", "postrouting")
    kinds = {"forward": "filter"}
    text = table(
        *(
            chain(h, f"type {kinds.get(h, 'nat')} hook {h} priority 0; policy accept;", "counter")
            for h in hooks
        )
    )

    def way(destination: str, arriving: Arrival) -> list[str]:
        packet = Packet("198.51.100.7", destination, "tcp", 80, arriving=arriving)
        return [step.chain for step in only(text, packet).steps]

    assert way("203.0.113.9", Arrival.FORWARDED) == ["prerouting", "forward", "postrouting"]
    assert way("192.0.2.1", Arrival.FORWARDED) == ["prerouting", "input"]
    assert way("203.0.113.9", Arrival.LOCAL) == ["output", "postrouting"]
    assert way("127.0.0.9", Arrival.LOCAL) == ["output", "postrouting"]


SLOTS = table(
    nft_set("picks", "ipv4_addr : ipv4_addr", *(f"0.0.0.{n} : 10.0.0.{1 + (n > 0)}" for n in range(4))),
    base("ip daddr set numgen random mod 4", "dnat to ip daddr map @picks", "drop"),
    base("ip daddr 10.0.0.2 masquerade", hook="postrouting"),
)


def test_dice_fork_and_equal_outcomes_meet_again() -> None:
    found = traced(SLOTS)
    assert found.shares() == {"10.0.0.1:80": 0.25, "10.0.0.2:80": 0.75}
    assert [o.masqueraded for o in found.outcomes] == [False, True]
    slots = [o.steps[0].slots for o in found.outcomes]
    assert [(s.chosen, s.total) for s in slots if s] == [((0,), 4), ((1, 2, 3), 4)]
    assert [s.element for s in found.outcomes[1].steps] == ["", "0.0.0.1 : 10.0.0.2", ""]


def test_a_slot_that_nobody_has_falls_through() -> None:
    found = traced(SLOTS.replace("mod 4", "mod 8"))
    assert found.probability(PacketVerdict.DROPPED) == 0.5
    assert found.shares()["10.0.0.1:80"] == 0.125
    in_turn = traced(SLOTS.replace("numgen random", "numgen inc"))
    assert in_turn.shares() == traced(SLOTS).shares()
    by_packet = traced(SLOTS.replace("numgen random", "symhash"))
    assert by_packet.shares() == traced(SLOTS).shares()
    # Without a seed the kernel takes one of its own.
    assert traced(SLOTS.replace("numgen random", "jhash ip saddr")).shares() == traced(SLOTS).shares()
    assert len(traced(SLOTS.replace("numgen random mod 4", "jhash ip saddr mod 4 seed 0x7")).shares()) == 1


def test_dice_are_not_thrown_where_the_rule_does_not_match() -> None:
    text = table(base("meta l4proto udp ip daddr set numgen random mod 5", "drop"))
    assert [o.probability for o in traced(text).outcomes] == [1.0]


def test_an_address_that_is_written_and_not_translated_is_where_it_goes() -> None:
    assert only(table(base("ip daddr set 10.9.9.9"))).backend == "10.9.9.9:80"
    assert only(table(base("ip saddr set 10.9.9.9"))).masqueraded
    back = only(table(base("ip saddr set 10.9.9.9 ip saddr set ct original ip saddr")))
    assert (back.verdict, back.masqueraded) == (PacketVerdict.UNCHANGED, False)


def test_a_pin_that_the_kernel_holds_counts() -> None:
    pins = nft_set("pins", "ipv4_addr : ipv4_addr", "198.51.100.7 timeout 10m expires 9m59s : 10.0.0.9")
    text = table(pins, base("dnat to ip saddr map @pins", "dnat to 10.0.0.1"))
    assert only(text).backend == "10.0.0.9:80"
    assert only(text, Packet("198.51.100.8", "203.0.113.9", "tcp", 80)).backend == "10.0.0.1:80"


def test_ping_and_redirect() -> None:
    text = table(base("ip daddr 203.0.113.9 icmp type echo-request redirect"))
    assert (only(text, PING).verdict, only(text, PING).backend) == (PacketVerdict.DELIVERED, "192.0.2.1")
    assert only(text).verdict is PacketVerdict.UNCHANGED


def test_tables_of_the_other_family_are_left_out() -> None:
    both = table(base("drop")) + "\n" + table(base("dnat to [fd00::5]:8080"), family="ip6")
    assert only(both).verdict is PacketVerdict.DROPPED
    assert only(both, Packet("fd00:1::7", "fd00:2::9", "tcp", 80)).backend == "[fd00::5]:8080"
    with pytest.raises(ValueError, match="ipv6"):
        trace(parse_tables(both, Family.IPV6), TCP, HOST)


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


def of_others(rule: str) -> str:
    """The verdict on a forwarded packet by one rule of another program, or that it is unknown."""
    packet = Packet("198.51.100.7", "203.0.113.9", "tcp", 80, in_interface="eth0", out_interface="br-1")
    tables = parse_tables(OTHERS.format(rule), Family.IPV4, strict=False)
    assert tables.left_out == ("inet fw in",)
    try:
        return trace(tables, packet, Host()).outcomes[0].verdict
    except UnknownRule as error:
        return "unknown" if error.text == f"inet fw c: {rule}" else error.text


@pytest.mark.parametrize(
    ("rule", "verdict"),
    [
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
    ],
)
def test_rules_of_other_programs(rule: str, verdict: str) -> None:
    assert of_others(rule) == verdict


def test_a_dormant_table_decides_nothing() -> None:
    text = OTHERS.format("drop").replace("table inet fw {\n", "table inet fw {\n\tflags dormant\n")
    packet = Packet("198.51.100.7", "203.0.113.9", "tcp", 80)
    (outcome,) = trace(parse_tables(text, Family.IPV4, strict=False), packet, Host()).outcomes
    assert outcome.verdict == "unchanged"
