"""What is missing, foreign or otherwise than vipd means it is marked, and nothing else is."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.observe.rule_tree.made import PLACE, forwardings, in_use, read, table
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.render import render
from vipd.dataplane.iptables.saved_rules import Count
from vipd.model.service import Affinity, Backend, Family, Protocol, Service, ServicePort
from vipd.observe.rule_tree.expected import NOT_EXPECTED
from vipd.observe.rule_tree.iptables_shared import shared_tree, single_chain
from vipd.observe.rule_tree.iptables_tree import EMPTY, NOT_OURS, UNREACHED, IptablesRules
from vipd.observe.rule_tree.kernel_rules import ChainName, DaemonRules, KernelRules
from vipd.observe.rule_tree.nftables_table import TableReading, TableRule
from vipd.observe.rule_tree.rows import rows_of, summary
from vipd.observe.rule_tree.tree import NodeKind, ServicePortKey, ServiceTree, faults

WEB = Service(
    "shop/web",
    ("10.96.0.1",),
    (ServicePort(80, Protocol.TCP, "http", 8080, 30080),),
    (Backend("10.244.0.1"), Backend("10.244.0.2"), Backend("10.244.0.3")),
    affinity=Affinity(600),
)
KEY = ServicePortKey("shop/web:http", "tcp")
FOUND = forwardings([WEB])
TEXT = render(tuple(FOUND), RuleOptions(Family.IPV4))
SVC = re.findall(r"VIPD-SVC-[A-Z2-7]{16}", TEXT)[0]
SEPS = sorted(set(re.findall(r"^:(VIPD-SEP-[A-Z2-7]{16})", TEXT, re.MULTILINE)))

Edit = Callable[[str], str]


def without(pattern: str) -> Edit:
    """The text without the lines in which this is found; there must be some."""

    def edit(text: str) -> str:
        left = [line for line in text.splitlines() if not re.search(pattern, line)]
        assert len(left) < len(text.splitlines())
        return "\n".join(left)

    return edit


def with_first(chain: str, rule: str) -> Edit:
    """The text with a rule at the head of a chain of nat."""
    return lambda text: text.replace(f"-A {chain} ", f"-A {chain} {rule}\n-A {chain} ", 1)


def tree_of(text: str) -> tuple[IptablesRules, ServiceTree]:
    """The tree of the service, as it is without a daemon."""
    rules = read(text)
    return rules, rules.tree(KEY)


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (with_first(SVC, "-j RETURN"), f"-j RETURN: {NOT_OURS}"),
        (with_first(SEPS[0], "-s 1.2.3.4/32 -j ACCEPT"), f"-s 1.2.3.4/32 -j ACCEPT: {NOT_OURS}"),
        (without(f"^-A {SVC} "), EMPTY),
        (without(f"^-A {SEPS[0]} "), EMPTY),
        (without("--to-destination 10.244.0.2:8080"), "no rule translates to a backend"),
        (without("10.244.0.3:8080.*-j VIPD-SEP"), "50.0% of new flows go past it|33.3% of new flows"),
        (without("statistic|-> 10.244.0.3:8080. -j|rcheck"), "no rule leads on to a backend"),
        (without(f"-j {SVC}"), UNREACHED),
        (
            lambda text: text.replace("--to-destination 10.244.0.2:8080", "--to-destination 10.244.0.9:8080"),
            "the chain is another backend's",
        ),
    ],
)
def test_damage_to_a_service_is_told_without_a_daemon(edit: Edit, fault: str) -> None:
    _, tree = tree_of(edit(TEXT))
    parsed = faults(tree.nodes)
    assert any(re.search(re.escape(fault) if "|" not in fault else fault, each) for each in parsed), parsed
    assert any(row.colour == "red" and row.text.strip("│ ").startswith("!") for row in rows_of(tree.nodes))
    assert summary(tree).faults == len(parsed)


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (without("^-A OUTPUT .*VIPD-SERVICES"), "jump to VIPD-SERVICES: no rule of OUTPUT leads there"),
        (without("^-A PREROUTING "), "jump to VIPD-PREROUTING: no rule of PREROUTING leads there"),
        (without("^-A VIPD-POSTROUTING .*MASQUERADE"), "no rule leads to MASQUERADE"),
        (without("^-A VIPD-MARK-MASQ "), EMPTY),
        (with_first("VIPD-SERVICES", "-s 9.9.9.9/32 -j RETURN"), NOT_OURS),
        (without(f"-j {SVC}"), UNREACHED),
    ],
)
def test_damage_to_what_all_share_is_told(edit: Edit, fault: str) -> None:
    # The text of iptables-restore names no chain that it does not change.
    text = edit(TEXT).replace("*nat", "*nat\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]")
    rules, tree = tree_of(text)
    reached = set(tree.named(NodeKind.CHAIN)) if rules.service_ports() else set()
    parsed = faults(shared_tree(rules, reached - {SVC}).nodes)
    assert any(fault in each for each in parsed), parsed


def compared(text: str) -> list[str]:
    """The faults of the service where a daemon says what it means."""
    forest = KernelRules([read(text)], [], in_use(FOUND))
    return [fault for tree in forest.find("shop/web") for fault in faults(tree.nodes)]


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda text: text, ""),
        (without("--dport 80 -j VIPD-SVC"), "frontend 10.96.0.1:80/tcp: the kernel has nothing for it"),
        (without("--dport 30080"), "frontend node port 30080/tcp: the kernel has nothing for it"),
        (without("10.244.0.2:8080. -m statistic"), "backend 10.244.0.2:8080: no share of new flows"),
        (
            lambda text: text.replace("--probability 0.3333333333", "--probability 0.9000000000"),
            "vipd means it to have 33.3%, not 90.0%",
        ),
        (lambda text: text.replace("10.244.0.1", "10.244.0.7"), NOT_EXPECTED),
        (lambda text: "", "frontend 10.96.0.1:80/tcp: the kernel has nothing for it"),
    ],
)
def test_the_daemon_s_word_tells_more(edit: Edit, fault: str) -> None:
    parsed = compared(edit(TEXT))
    assert any(fault in each for each in parsed) if fault else parsed == [], parsed


def test_rules_where_the_daemon_keeps_none_are_left_over_and_not_compared() -> None:
    daemon = DaemonRules({Family.IPV4: "table ip vipd"}, ())
    forest = KernelRules([read(TEXT)], [], daemon)
    assert forest.unused_places() == [PLACE]
    assert [faults(tree.nodes) for tree in forest.find("shop/web")] == [[]]


def test_counters_are_kept_by_rule_and_summed_by_frontend() -> None:
    text = "\n".join(
        f"[7:420] {line}" if f"-j {SVC}" in line and "--dport 80" in line else line
        for line in TEXT.splitlines()
    )
    tree = read(text).tree(KEY)
    frontend = next(node for node in tree.walk() if node.name == "10.96.0.1:80/tcp")
    assert frontend.count == Count(7, 420)
    assert tree.incoming_count() == Count(7, 420)


@pytest.mark.parametrize("name", [SVC, *SEPS])
def test_the_owner_of_a_chain_is_found(name: str) -> None:
    rules = read(TEXT)
    assert rules.owners(name) == [KEY]
    stranded = read(without(f"-j {name}")(TEXT))
    assert stranded.owners(name) == [KEY]
    assert read(TEXT).owners("VIPD-SEP-AAAAAAAAAAAAAAAA") == []


def test_a_chain_that_is_gone_is_known_by_its_hash() -> None:
    chain = ChainName.read(SEPS[0])
    assert chain is not None
    wanted = in_use(FOUND).expected
    assert re.fullmatch(r"backend 10\.244\.0\.\d:8080 of shop/web:http", chain.role_in(wanted[0]))
    other = ChainName.read("VIPD-SEP-AAAAAAAAAAAAAAAA")
    assert other is not None
    assert other.role_in(wanted[0]) == ""


@pytest.mark.parametrize("text", ["web", "shop/web:http", "10.96.0.1:80/tcp", "VIPD-", "", "vipd-svc-x"])
def test_a_target_that_is_no_chain_is_not_taken_for_one(text: str) -> None:
    assert ChainName.read(text) is None


def test_a_chain_of_all_is_shown_rule_by_rule() -> None:
    nodes = single_chain(read(TEXT), "VIPD-SERVICES").nodes
    assert [child.name for child in nodes[0].children if child.name] == ["10.96.0.1:80/tcp"]
    assert single_chain(read(TEXT), "VIPD-NOTHING").nodes == ()


def reading(**changes: object) -> TableReading:
    """The service's table, with something changed."""
    made = table(FOUND, Family.IPV4)
    fields = {
        name: getattr(made, name)
        for name in ("family", "table", "chains", "elements", "flows", "affinity_entries")
    }
    return TableReading(**(fields | changes))


def nft_faults(changed: TableReading) -> list[str]:
    """What is said to be wrong with the service in a table."""
    forest = KernelRules([], [changed], in_use(FOUND, "table ip vipd"))
    return [fault for tree in forest.find("shop/web") for fault in faults(tree.nodes)]


def test_damage_to_a_table_is_told() -> None:
    whole = reading()
    assert nft_faults(whole) == []
    spread = next(name for name in whole.chains if name.startswith("random-3"))
    foreign = (TableRule("counter accept", ours=False), *whole.chains[spread])
    assert f"counter accept: {NOT_OURS}" in nft_faults(reading(chains={**whole.chains, spread: foreign}))
    assert any(EMPTY in parsed for parsed in nft_faults(reading(chains={**whole.chains, spread: ()})))
    picks = dict(list(whole.elements["picks"].items())[1:])
    parsed = nft_faults(reading(elements={**whole.elements, "picks": picks}))
    assert any("2 of 3 slots are filled" in each for each in parsed), parsed
    parsed = nft_faults(reading(elements={**whole.elements, "frontends": {}}))
    assert "frontend 10.96.0.1:80/tcp: the kernel has nothing for it" in parsed


def test_a_table_counts_flows_and_pins() -> None:
    number, endpoint = next(
        (key.rpartition(" . ")[2], value) for key, value in reading().elements["numbered"].items()
    )
    service = reading().elements["services"]["10.96.0.1 . tcp . 80"]
    flows = {
        f"10.96.0.1 . tcp . 80 . {endpoint}": Count(5, 300),
        f"192.0.2.1 . tcp . 30080 . {endpoint}": Count(2, 9),
    }
    forest = KernelRules(
        [], [reading(flows=flows, affinity_entries={(service, number): 4})], in_use(FOUND, "table ip vipd")
    )
    tree = forest.find("shop/web")[0]
    assert tree.incoming_count() == Count(7, 309)
    assert any(node.text.endswith(": 4 pinned") for node in tree.walk())


def test_without_a_daemon_a_table_knows_frontends_only() -> None:
    forest = KernelRules([], [reading()], None)
    assert forest.find("shop/web") == []
    assert [tree.key.service_port for tree in forest.find("10.96.0.1:80/tcp")] == ["10.96.0.1:80/tcp"]


@pytest.mark.parametrize(
    ("said", "same"),
    [
        ("iptables v1.8.7 (nf_tables)", True),
        ("ip6tables v2.0.11 (nf_tables)", True),
        ("iptables v1.8.9 (legacy)", False),
        ("iptables v1.6.2", False),
        ("table ip vipd", False),
    ],
)
def test_an_upgrade_of_iptables_moves_no_rules(said: str, same: bool) -> None:
    """The daemon says the version that it found when it started."""
    forest = KernelRules([read(TEXT)], [], in_use(FOUND, said))
    trees = forest.find("shop/web")
    assert [tree.place for tree in trees] == ([PLACE] if same else [PLACE, said])
    missing = [node for tree in trees for node in tree.nodes if node.kind is NodeKind.MISSING]
    assert bool(missing) is not same
    assert forest.unused_places() == ([] if same else [PLACE])


def test_rules_are_not_left_over_while_the_daemons_tool_is_gone() -> None:
    said = "iptables cannot be run: there is no such program"
    assert KernelRules([read(TEXT)], [], in_use(FOUND, said)).unused_places() == []
    assert KernelRules([read(TEXT)], [], DaemonRules({Family.IPV6: PLACE}, ())).unused_places() == [PLACE]
