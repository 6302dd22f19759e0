"""What is missing, foreign or otherwise than vipd means it is marked, and nothing else is."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.observe.explain.asking import Declared, Json
from tests.observe.rule_tree.kernel_rules import KernelRules, faults, nodes
from vipd.model.service import Family

pytestmark = pytest.mark.root

SETTINGS = {"host_addresses": ["192.0.2.1"]}
WEB = Declared(
    """
apiVersion: vipd/v1
services:
  - name: shop/web
    address: 10.96.0.1
    ports: [{name: http, port: 80, protocol: tcp, target: 8080, node_port: 30080}]
    backends: [10.244.0.1, 10.244.0.2, 10.244.0.3]
    affinity: {by: client-ip, timeout: 10m}
""",
    SETTINGS,
)
BY_TABLE = Declared(WEB.text, SETTINGS | {"dataplane": "nftables"})
TEXT = WEB.render(Family.IPV4)
SVC, EXT = (re.findall(rf"VIPD-{kind}-[A-Z2-7]{{16}}", TEXT)[0] for kind in ("SVC", "EXT"))
SEPS = sorted(set(re.findall(r"^:(VIPD-SEP-[A-Z2-7]{16})", TEXT, re.MULTILINE)))
NOT_OURS, EMPTY = "not written by vipd", "it is empty, so new flows go past it"
UNREACHED = "nothing leads to it"
NOTHING = "the kernel has nothing for it"
OTHER_BACKEND = "--to-destination 10.244.0."

Edit = Callable[[str], str]


@pytest.fixture(autouse=True)
def nobody(kernel: KernelRules) -> None:
    """No daemon answers, unless a test has one."""
    kernel.meant(None)


def without(pattern: str) -> Edit:
    """The text without the lines in which this is found; there must be some."""

    def edit(text: str) -> str:
        left = [line for line in text.splitlines() if not re.search(pattern, line)]
        assert len(left) < len(text.splitlines())
        return "\n".join(left) + "\n"

    return edit


def with_first(chain: str, rule: str) -> Edit:
    """The text with a rule at the head of a chain of nat."""
    head, rest = f"-A {chain} ", f"-A {chain} {rule}\n-A {chain} "
    return lambda text: text[: text.index("*nat")] + text[text.index("*nat") :].replace(head, rest, 1)


def differing(
    kernel: KernelRules, damage: list[tuple[Edit, str]], faults_of: Callable[[], list[str]]
) -> list[str]:
    """The damage that is not told; a text of which `|` separates what each may be said."""
    wrong = []
    for edit, expected in damage:
        kernel.load(edit(TEXT))
        told = faults_of()
        if not any(any(part in fault for part in expected.split("|")) for fault in told):
            wrong.append(f"{expected}: {told}")
    return wrong


FOREIGN = [
    (SVC, "-j RETURN"),
    (SVC, "-j ACCEPT"),
    (SVC, '-s 10.244.0.1/32 -m comment --comment "shop/web:http" -j VIPD-MARK-MASQ'),
    (SEPS[0], "-s 1.2.3.4/32 -j ACCEPT"),
    (SEPS[0], "-p tcp -j DNAT --to-destination 1.2.3.4:5"),
    (EXT, f"-m comment --comment x -j {SVC}"),
]
"""Also what stands in other chains of vipd."""
FOREIGN_TO_ALL = [
    ("VIPD-SERVICES", "-s 9.9.9.9/32 -j RETURN"),
    ("VIPD-SERVICES", "-d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 1.2.3.4:5"),
    ("VIPD-POSTROUTING", "-j ACCEPT"),
    ("VIPD-MARK-MASQ", "-j RETURN"),
]


def test_damage_to_a_service_is_told_without_a_daemon(kernel: KernelRules) -> None:
    kernel.load(TEXT)
    whole = kernel.rules("shop/web")
    assert faults(whole) == []
    # Clients are pinned by rules before these, but a backend's chain is shown where it gets its share.
    below = [node["children"][0] for node in nodes(whole["services"], "backend")]
    assert [(len(chain["children"]), chain.get("repeated")) for chain in below] == [(2, None)] * 3
    damage = [
        *((with_first(chain, rule), f"{rule}: {NOT_OURS}") for chain, rule in FOREIGN),
        (without(f"^-A {SVC} "), EMPTY),
        (without(f"^-A {SEPS[0]} "), EMPTY),
        (without("--to-destination 10.244.0.2:8080"), "no rule translates to a backend"),
        (without("10.244.0.3:8080.*-j VIPD-SEP"), "50.0% of new flows go past it|33.3% of new flows"),
        (without("statistic|-> 10.244.0.3:8080. -j|rcheck"), "no rule leads on to a backend"),
        (without(f"-j {SVC}"), UNREACHED),
        (
            lambda text: text.replace(f"{OTHER_BACKEND}2:", f"{OTHER_BACKEND}9:"),
            "the chain is another backend's",
        ),
    ]
    assert differing(kernel, damage, lambda: faults(kernel.rules("shop/web"))) == []


def test_damage_to_what_all_share_is_told(kernel: KernelRules) -> None:
    damage = [
        *((with_first(chain, rule), f"{rule}: {NOT_OURS}") for chain, rule in FOREIGN_TO_ALL),
        (without("^-A OUTPUT .*VIPD-SERVICES"), "jump to VIPD-SERVICES: no rule of OUTPUT leads there"),
        (without("^-A PREROUTING "), "jump to VIPD-PREROUTING: no rule of PREROUTING leads there"),
        (without("^-A VIPD-POSTROUTING .*MASQUERADE"), "no rule leads to MASQUERADE"),
        (without("^-A VIPD-MARK-MASQ "), EMPTY),
        (without(f"-j {SVC}"), UNREACHED),
    ]
    assert differing(kernel, damage, lambda: faults(kernel.rules("--all"))) == []
    kernel.load(TEXT)
    assert faults(kernel.rules("--all")) == []


def test_the_daemon_s_word_tells_more(kernel: KernelRules) -> None:
    kernel.meant(WEB)
    damage = [
        (without("--dport 80 .*-j VIPD-SVC"), f"frontend 10.96.0.1:80/tcp: {NOTHING}"),
        (without("--dport 30080"), f"frontend node port 30080/tcp: {NOTHING}"),
        (without("10.244.0.2:8080. -m statistic"), "backend 10.244.0.2:8080: no share of new flows"),
        (
            lambda text: text.replace("--probability 0.3333333333", "--probability 0.9000000000"),
            "vipd means it to have 33.3%, not 90.0%",
        ),
        (lambda text: text.replace("10.244.0.1", "10.244.0.7"), "vipd means no new flows to go there"),
        (lambda text: "", f"frontend 10.96.0.1:80/tcp: {NOTHING}"),
    ]
    assert differing(kernel, damage, lambda: faults(kernel.rules("shop/web"))) == []
    kernel.load(TEXT)
    assert faults(kernel.rules("shop/web")) == []


PLACES: list[tuple[str, bool, bool]] = [
    # what the daemon says of where its rules are, whether they are there, whether others are left over
    ("iptables v1.8.7 (nf_tables)", True, False),
    ("iptables v2.0.11 (nf_tables)", True, False),
    ("iptables v1.8.9 (legacy)", False, True),
    ("iptables v1.6.2", False, True),
    ("iptables cannot be run: there is no such program", False, False),
]


def test_an_upgrade_of_iptables_moves_no_rules(kernel: KernelRules) -> None:
    """The daemon says the version that it had when it started."""
    kernel.load(TEXT)
    for place, there, left in PLACES:
        kernel.meant(WEB, ipv4=place)
        found = kernel.rules("shop/web")
        missing = list(nodes(found["services"], "missing"))
        notes = [note for note in found["notes"] if "has rules that vipd does not use now" in note]
        assert (not missing, bool(notes)) == (there, left), place
    kernel.meant(BY_TABLE)
    found = kernel.rules("shop/web")
    assert len(found["notes"]) == 1
    assert [tree["faults"] for tree in found["services"] if tree["place"].startswith("iptables")] == [[]]


def test_the_owner_of_a_chain_is_named(kernel: KernelRules) -> None:
    for edit in (lambda text: text, *(without(f"-j {chain}") for chain in (SVC, SEPS[0]))):
        kernel.load(edit(TEXT))
        for chain in (SVC, *SEPS):
            assert kernel.vipctl(chain).out.startswith(f"{chain} is of "), chain
            assert "shop/web:http" in kernel.vipctl(chain).out
    kernel.load(TEXT)
    assert kernel.vipctl("VIPD-SEP-AAAAAAAAAAAAAAAA").code == 3
    found = kernel.rules("VIPD-SERVICES")["shared"][0]["nodes"][0]
    assert [child["name"] for child in found["children"] if "name" in child][:1] == ["10.96.0.1:80/tcp"]
    for target in ("VIPD-", "vipd-svc-x", "VIPD-NOTHING"):
        assert kernel.vipctl(target).code == 3


def test_a_chain_that_is_gone_is_known_by_its_hash(kernel: KernelRules) -> None:
    kernel.meant(WEB)
    kernel.load("")
    said = kernel.vipctl(SEPS[0]).out
    expected = rf"{SEPS[0]} was of backend 10\.244\.0\.\d:8080 of shop/web:http; it is not there now\n"
    assert re.match(expected, said)
    assert kernel.vipctl("VIPD-SEP-AAAAAAAAAAAAAAAA").code == 3


def table_faults(kernel: KernelRules, *commands: str) -> list[str]:
    """The faults of the service in a table that nft has changed."""
    kernel.load(BY_TABLE.render(Family.IPV4, "nftables"), *commands)
    return faults(kernel.rules("shop/web"))


def test_damage_to_a_table_is_told(kernel: KernelRules) -> None:
    kernel.meant(BY_TABLE)
    assert table_faults(kernel) == []
    found: Json = kernel.rules("shop/web")
    spread = next(n["name"] for n in nodes(found["services"], "chain") if n["name"].startswith("random-3"))
    assert f"counter accept: {NOT_OURS}" in [
        re.sub(r" packets \d+ bytes \d+", "", fault)
        for fault in table_faults(kernel, f"insert rule ip vipd {spread} counter accept")
    ]
    assert any(EMPTY in fault for fault in table_faults(kernel, f"flush chain ip vipd {spread}"))
    picks = kernel.node.run("nft", "list", "map", "ip", "vipd", "picks").stdout
    slot = picks.partition("elements = {")[2].partition(" : ")[0].strip()
    said = table_faults(kernel, f"delete element ip vipd picks {{ {slot} }}")
    assert any("2 of 3 slots are filled" in fault for fault in said), said
    said = table_faults(kernel, "flush map ip vipd frontends")
    assert f"frontend 10.96.0.1:80/tcp: {NOTHING}" in said


def test_without_a_daemon_a_table_knows_frontends_only(kernel: KernelRules) -> None:
    kernel.load(BY_TABLE.render(Family.IPV4, "nftables"))
    assert kernel.vipctl("shop/web").code == 3
    found = kernel.rules("10.96.0.1:80/tcp")["services"]
    assert [tree["service_port"] for tree in found] == ["10.96.0.1:80/tcp"]
