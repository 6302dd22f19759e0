"""Building tables from text, and the paths that chains give."""

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
    UnknownRule,
    parse_ruleset,
    trace,
)

CLIENT = Packet("198.51.100.7", "203.0.113.9", "tcp", 80)
HOST = Host(("192.0.2.1",))


def outcomes(text: str, packet: Packet = CLIENT) -> tuple[Outcome, ...]:
    return trace(parse_ruleset(text, packet.family), packet, HOST).outcomes


def only(text: str, packet: Packet = CLIENT) -> Outcome:
    found = outcomes(text, packet)
    assert len(found) == 1
    return found[0]


def filter_verdict(*lines: str) -> PacketVerdict:
    return only("\n".join(["*filter", *lines, "COMMIT"])).verdict


def nat(*lines: str) -> str:
    return "\n".join(["*nat", *lines, "COMMIT", ""])


def test_no_rules_change_nothing() -> None:
    found = only("")
    assert (found.verdict, found.backend, found.probability, found.steps) == (
        PacketVerdict.UNCHANGED,
        None,
        1.0,
        (),
    )


def test_policy_is_honoured_and_named_as_a_step() -> None:
    found = only("*filter\n:FORWARD DROP [0:0]\nCOMMIT")
    assert found.verdict is PacketVerdict.DROPPED
    assert [str(s) for s in found.steps] == ["filter FORWARD: policy DROP"]


def test_return_in_a_built_in_chain_means_its_policy() -> None:
    assert (
        filter_verdict(":FORWARD DROP [0:0]", "-A FORWARD -j RETURN", "-A FORWARD -j ACCEPT")
        is PacketVerdict.DROPPED
    )


def test_return_comes_back_behind_the_jump() -> None:
    lines = [":A - [0:0]", "-A FORWARD -j A", "-A FORWARD -j DROP", "-A A -j RETURN", "-A A -j ACCEPT"]
    assert filter_verdict(*lines) is PacketVerdict.DROPPED


def test_goto_does_not_come_back() -> None:
    lines = [":A - [0:0]", "-A FORWARD {} A", "-A FORWARD -j DROP", "-A A -m comment --comment x"]
    assert filter_verdict(*(line.format("-j") for line in lines)) is PacketVerdict.DROPPED
    assert filter_verdict(*(line.format("-g") for line in lines)) is PacketVerdict.UNCHANGED


def test_goto_returns_to_the_caller_of_its_chain() -> None:
    lines = [
        ":A - [0:0]",
        ":B - [0:0]",
        "-A FORWARD -j A",
        "-A FORWARD -j DROP",
        "-A A -g B",
        "-A A -j ACCEPT",
    ]
    assert filter_verdict(*lines) is PacketVerdict.DROPPED


def test_insert_goes_to_the_front_or_to_its_number() -> None:
    assert filter_verdict("-A FORWARD -j DROP", "-I FORWARD -j ACCEPT") is PacketVerdict.UNCHANGED
    assert filter_verdict("-A FORWARD -j DROP", "-I FORWARD 2 -j ACCEPT") is PacketVerdict.DROPPED


def test_delete_by_meaning_and_by_number() -> None:
    rule = "-A FORWARD -p tcp -s 0.0.0.0/0 -m mark ! --mark 0x1/0x1 -j DROP"
    spelled = "-D FORWARD -s 0/0 ! -p udp -j DROP"
    with pytest.raises(RulesetError, match="no such rule"):
        filter_verdict(rule, spelled.replace("0/0", "0.0.0.0/0"))
    assert (
        filter_verdict(rule, "-D FORWARD -s 0.0.0.0/0 -p 6 -m mark ! --mark 1/1 -j DROP")
        is PacketVerdict.UNCHANGED
    )
    assert (
        filter_verdict("-A FORWARD -j ACCEPT", "-A FORWARD -j DROP", "-D FORWARD 1") is PacketVerdict.DROPPED
    )


def test_delete_takes_one_of_two_equal_rules() -> None:
    assert (
        filter_verdict("-A FORWARD -j DROP", "-A FORWARD -j DROP", "-D FORWARD -j DROP")
        is PacketVerdict.DROPPED
    )


def test_a_chain_line_empties_a_user_chain_and_no_built_in_one() -> None:
    first = "*filter\n:A - [0:0]\n-A FORWARD -j A\n-A A -j DROP\nCOMMIT\n"
    again = "*filter\n:FORWARD ACCEPT [0:0]\n:A - [0:0]\n{}COMMIT"
    assert only(first).verdict is PacketVerdict.DROPPED
    assert only(first + again.format("")).verdict is PacketVerdict.UNCHANGED
    assert only(first + again.format("-A A -j REJECT\n")).verdict is PacketVerdict.REJECTED


def test_flush_policy_and_new_chain_commands() -> None:
    assert filter_verdict("-N A", "-A FORWARD -j A", "-A A -j DROP", "-F A") is PacketVerdict.UNCHANGED
    assert filter_verdict("-P FORWARD DROP") is PacketVerdict.DROPPED


def test_removed_chains_are_gone() -> None:
    removing = [":A - [0:0]", "-A FORWARD -j A", "-D FORWARD -j A", "-X A"]
    assert filter_verdict(*removing) is PacketVerdict.UNCHANGED
    with pytest.raises(RulesetError, match="no chain A"):
        filter_verdict(*removing, "-A A -j DROP")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["-A A -j DROP"], "no chain A"),
        ([":A - [0:0]", "-A FORWARD -j A", "-X A"], "still jumped to"),
        ([":A - [0:0]", "-A A -j DROP", "-X A"], "not empty"),
        (["-X FORWARD"], "built-in"),
        ([":A - [0:0]", "-N A"], "there already"),
        (["-I FORWARD 3 -j DROP"], "no place 3"),
        (["-D FORWARD 1"], "no rule 1"),
        (["-D FORWARD -j DROP"], "no such rule"),
        ([":FORWARD REJECT [0:0]"], "policy REJECT"),
        ([":FORWARD"], "chain line"),
        ([":A ACCEPT [0:0]"], "chain line"),
        ([":A - [0:0]", ":B - [0:0]", "-A A -j B", "-A B -j A"], "loop"),
        ([":A - [0:0]", "-A A -g A"], "loop"),
        (["-R FORWARD 1 -j DROP"], "no rule|unknown command"),
        (["-A FORWARD -j OUTPUT"], "neither a known target nor a chain"),
        (["*nat"], "no COMMIT"),
    ],
)
def test_what_iptables_restore_refuses_is_refused(lines: list[str], why: str) -> None:
    with pytest.raises(RulesetError, match=why):
        filter_verdict(*lines)


def test_a_table_must_be_committed_and_opened() -> None:
    with pytest.raises(RulesetError, match="without COMMIT"):
        parse_ruleset("*filter\n-A FORWARD -j DROP", Family.IPV4)
    with pytest.raises(RulesetError, match="outside a table"):
        parse_ruleset("-A FORWARD -j DROP", Family.IPV4)


def test_a_rule_in_a_table_that_is_not_traced_is_an_error_and_a_chain_is_not() -> None:
    parse_ruleset("*mangle\n:KUBE-PROXY-CANARY - [0:0]\nCOMMIT", Family.IPV4)
    with pytest.raises(UnknownRule, match="mangle"):
        parse_ruleset("*mangle\n-A FORWARD -j ACCEPT\nCOMMIT", Family.IPV4)


def met(rule: str, hook: str = "FORWARD", table: str = "filter", packet: Packet = CLIENT) -> str:
    """The verdict on a packet that meets one rule of another program, or why that is unknown."""
    text = f"*{table}\n-A {hook} {rule}\nCOMMIT"
    try:
        return trace(parse_ruleset(text, Family.IPV4, strict=False), packet, HOST).outcomes[0].verdict
    except UnknownRule as error:
        return error.why


def test_without_strict_only_a_rule_in_the_packets_way_is_an_error() -> None:
    assert met("-m quota --quota 5 -j DROP", hook="INPUT") == "unchanged"
    assert "quota" in met("-m quota --quota 5 -j DROP")
    assert met("-j DROP", table="raw", hook="PREROUTING") == "dropped"
    assert "--notrack" in met("-j CT --notrack", table="raw", hook="PREROUTING")


@pytest.mark.parametrize(
    "rule",
    [
        "-p udp -m quota --quota 5 -j DROP",
        "-m quota --quota 5 -s 10.99.0.0/16 -j DROP",
        "-m quota --quota 5 -m conntrack --ctstate RELATED,ESTABLISHED -j DROP",
        "-m quota --quota 5 -m conntrack ! --ctstate NEW -j DROP",
        "-p tcp -m tcp --dport 22 -m quota --quota 5 -j DROP",
        "-m quota --quota 5 ! -p tcp -j DROP",
    ],
)
def test_a_rule_passes_a_packet_that_does_not_meet_what_of_it_is_known(rule: str) -> None:
    assert met(rule) == "unchanged"


@pytest.mark.parametrize(
    "rule", ["-m quota --quota 5", "-m quota --quota 5 -j LOG --log-prefix in:", "-j NFLOG"]
)
def test_a_rule_that_can_decide_nothing_is_passed(rule: str) -> None:
    assert met(rule) == "unchanged"


def test_what_others_remember_of_clients_is_unknown_and_what_vipd_does_is_not() -> None:
    text = "*filter\n:{0} - [0:0]\n-A FORWARD -j {0}\n-A {0} -m recent --rcheck --name A -j DROP\nCOMMIT"

    def traced(chain: str) -> str:
        rules = parse_ruleset(text.format(chain), Family.IPV4, strict=False, prefix="VIPD")
        return trace(rules, CLIENT, HOST).outcomes[0].verdict

    assert traced("VIPD-A") == "unchanged"
    with pytest.raises(UnknownRule, match="earlier packets"):
        traced("blocked")


def test_counters_comments_and_blank_lines_do_not_count() -> None:
    assert (
        filter_verdict("# note", "", ":FORWARD ACCEPT [3:4]", "[1:60] -A FORWARD -j DROP")
        is PacketVerdict.DROPPED
    )


def test_dnat_decides_which_filter_chain_follows() -> None:
    to_host = nat("-A PREROUTING -j DNAT --to-destination 192.0.2.1:8080")
    away = nat("-A PREROUTING -j DNAT --to-destination 10.0.0.5:8080")
    drops = "*filter\n:INPUT DROP [0:0]\nCOMMIT"
    assert only(to_host + drops).verdict is PacketVerdict.DROPPED
    assert only(away + drops).verdict is PacketVerdict.DELIVERED
    assert only(away + drops).backend == "10.0.0.5:8080"


def test_dnat_is_seen_by_later_rules() -> None:
    text = nat("-A PREROUTING -j DNAT --to-destination 10.0.0.5:8080") + (
        "*filter\n:FORWARD DROP [0:0]\n-A FORWARD -d 10.0.0.5 -p tcp --dport 8080 "
        "-m conntrack --ctstate DNAT -j ACCEPT\nCOMMIT"
    )
    assert only(text).verdict is PacketVerdict.DELIVERED
    assert (
        only(text.replace("--to-destination 10.0.0.5:8080", "--to-destination 10.0.0.5")).verdict
        is PacketVerdict.DROPPED
    )


def test_a_dropped_flow_names_the_backend_it_was_meant_for_but_gives_it_no_share() -> None:
    text = nat("-A PREROUTING -j DNAT --to-destination 10.0.0.5") + "*filter\n:FORWARD DROP [0:0]\nCOMMIT"
    found = trace(parse_ruleset(text, Family.IPV4), CLIENT, HOST)
    assert [(o.verdict, o.backend) for o in found.outcomes] == [(PacketVerdict.DROPPED, "10.0.0.5:80")]
    assert found.shares() == {}
    assert found.probability(PacketVerdict.DROPPED) == 1.0


def test_dnat_ends_the_nat_chain() -> None:
    text = nat(
        "-A PREROUTING -j DNAT --to-destination 10.0.0.5:1",
        "-A PREROUTING -j DNAT --to-destination 10.0.0.6:2",
    )
    assert only(text).backend == "10.0.0.5:1"


def test_redirect_stays_on_the_host() -> None:
    text = nat(
        "-A PREROUTING -p tcp -j REDIRECT --to-ports 8080", "-A OUTPUT -p tcp -j REDIRECT --to-ports 8080"
    )
    assert only(text).backend == "192.0.2.1:8080"
    local = Packet("192.0.2.1", "203.0.113.9", "tcp", 80, arriving=Arrival.LOCAL)
    assert only(text, local).backend == "127.0.0.1:8080"


def test_ping_is_translated_without_a_port() -> None:
    ping = Packet("198.51.100.7", "203.0.113.9", "icmp")
    assert only(nat("-A PREROUTING -p icmp -j DNAT --to-destination 10.0.0.5"), ping).backend == "10.0.0.5"


def test_a_nat_target_out_of_its_place_is_an_error() -> None:
    with pytest.raises(RulesetError, match="DNAT is reached from POSTROUTING"):
        only(nat("-A POSTROUTING -j DNAT --to-destination 10.0.0.5"))
    with pytest.raises(RulesetError, match="MASQUERADE is reached from PREROUTING"):
        only(nat("-A PREROUTING -j MASQUERADE"))


def test_the_ways_of_a_packet() -> None:
    chains = {
        "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
        "filter": ("INPUT", "FORWARD", "OUTPUT"),
    }
    text = "".join(
        f"*{table}\n" + "".join(f"-A {hook} -m comment --comment {hook}\n" for hook in hooks) + "COMMIT\n"
        for table, hooks in chains.items()
    )

    def way(destination: str, arriving: Arrival) -> list[str]:
        packet = Packet("198.51.100.7", destination, "tcp", 80, arriving=arriving)
        return [f"{s.table} {s.chain}" for s in only(text, packet).steps]

    assert way("203.0.113.9", Arrival.FORWARDED) == ["nat PREROUTING", "filter FORWARD", "nat POSTROUTING"]
    assert way("192.0.2.1", Arrival.FORWARDED) == ["nat PREROUTING", "filter INPUT", "nat INPUT"]
    assert way("203.0.113.9", Arrival.LOCAL) == ["nat OUTPUT", "filter OUTPUT", "nat POSTROUTING"]
    assert way("127.0.0.9", Arrival.LOCAL) == [
        "nat OUTPUT",
        "filter OUTPUT",
        "nat POSTROUTING",
        "filter INPUT",
    ]


def test_masquerade_on_the_way_back_in_shows_the_hosts_address() -> None:
    text = nat("-A POSTROUTING -j MASQUERADE") + (
        "*filter\n-A INPUT -i lo -s 192.0.2.1 -m conntrack --ctstate SNAT -j DROP\nCOMMIT"
    )
    found = only(text, Packet("127.0.0.1", "192.0.2.1", "tcp", 80, arriving=Arrival.LOCAL))
    assert (found.verdict, found.masqueraded) == (PacketVerdict.DROPPED, True)


def test_dice_fork_and_equal_outcomes_meet_again() -> None:
    dice = "-m statistic --mode random --probability"
    text = nat(
        f"-A PREROUTING {dice} 0.25 -j DNAT --to-destination 10.0.0.1:80",
        f"-A PREROUTING {dice} 0.5 -j DNAT --to-destination 10.0.0.2:80",
        f"-A PREROUTING {dice} 0.5 -j DNAT --to-destination 10.0.0.1:80",
    )
    found = trace(parse_ruleset(text, Family.IPV4), CLIENT, HOST)
    assert found.shares() == pytest.approx({"10.0.0.1:80": 0.25 + 0.1875, "10.0.0.2:80": 0.375})
    assert found.probability(PacketVerdict.UNCHANGED) == pytest.approx(0.1875)
    assert [len(o.steps) for o in found.outcomes] == [1, 1, 0]
    assert "0.25" in found.outcomes[0].steps[0].rule


def test_families_do_not_mix() -> None:
    with pytest.raises(ValueError, match="ipv6"):
        trace(parse_ruleset("", Family.IPV6), CLIENT, HOST)


@pytest.mark.parametrize(
    ("source", "destination", "protocol", "port"),
    [
        ("10.0.0.1", "fd00::1", "tcp", 80),
        ("10.0.0.1", "10.0.0.2", "gre", None),
        ("10.0.0.1", "10.0.0.2", "tcp", None),
        ("10.0.0.1", "10.0.0.2", "icmp", 8),
        ("10.0.0.1", "10.0.0.2", "tcp", 0),
        ("10.0.0.1", "10.0.0.2", "tcp", 65536),
        ("here", "10.0.0.2", "tcp", 80),
    ],
)
def test_a_packet_that_cannot_be(source: str, destination: str, protocol: str, port: int | None) -> None:
    with pytest.raises(ValueError, match=r"."):
        Packet(source, destination, protocol, port)
