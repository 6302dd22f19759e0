"""Rules of others, and whatever else programs print: read, or said to be unreadable; nothing crashes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.examples import examples
from tests.observe.rule_tree.made import in_use, read, table
from tests.observe.rule_tree.test_faults import FOUND, TEXT
from vipd.dataplane.base import ApplyError
from vipd.dataplane.forward_accept.chain_verdicts import ForwardVerdict, NftForward
from vipd.dataplane.iptables.saved_rules import MalformedRulesError, read_tables
from vipd.dataplane.iptables.words import target_of
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.render import render as render_table
from vipd.dataplane.nftables.saved_table import rules_by_chain
from vipd.host.process import ProgramResult, ProgramTimeoutError
from vipd.model.service import Family
from vipd.observe.doctor.rules import Ruleset
from vipd.observe.live_trace.events import Chain
from vipd.observe.live_trace.rule_reader import read_rules as read_traced
from vipd.observe.rule_tree.kernel_rules import KernelRules
from vipd.observe.rule_tree.nftables_table import TableReading, read_table_rules
from vipd.observe.rule_tree.read_iptables import read_rules
from vipd.observe.simulator import parse_ruleset, parse_tables
from vipd.observe.simulator.errors import RulesetError

LINES = [
    "",
    "garbage",
    "-A",
    "-A VIPD-SERVICES",
    ":",
    ":VIPD-X",
    ":VIPD-X -",
    "*",
    "*nat",
    "COMMIT",
    "[1:2]",
    "[x:y] -A VIPD-SERVICES -j VIPD-SVC-AAAAAAAAAAAAAAAA",
    '-A VIPD-SERVICES -m comment --comment "not closed -j DROP',
    "-A VIPD-SERVICES -d 999.1.2.3/99 -j VIPD-GRP-AAAAAAAAAAAAAAAA",
    "-A PREROUTING -m newmatch --new-option x -j NEWTARGET --what",
    "-A VIPD-SVC-AAAAAAAAAAAAAAAA -m statistic --mode random --probability x -j VIPD-SEP-AAAAAAAAAAAAAAAA",
    "-A PREROUTING -j",
    "-A PREROUTING -g",
    "# Table `nat' is incompatible, use 'nft' tool.",
    "\x00\x01\x02",
    "\N{SNOWMAN}",
]
MUTATIONS = 150


def garbled(text: str, seed: int) -> Iterator[str]:
    """Lines left out, put in, mixed up, cut, and characters changed."""
    draw = random.Random(seed)
    for _ in range(MUTATIONS):
        lines = text.splitlines()
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(lines) + 1)
            match draw.randrange(4):
                case 0:
                    del lines[at : at + draw.randint(1, 3)]
                case 1:
                    lines.insert(at, draw.choice(LINES))
                case 2 if at < len(lines) and lines[at]:
                    place = draw.randrange(len(lines[at]))
                    lines[at] = lines[at][:place] + draw.choice('x9/:"-{}@ ') + lines[at][place + 1 :]
                case _ if at < len(lines):
                    lines[at] = lines[at][: draw.randrange(len(lines[at]) + 1)]
        yield "\n".join(lines) + "\n"


@pytest.mark.parametrize("seed", range(3))
def test_what_iptables_prints(seed: int) -> None:
    for text in garbled(TEXT, seed):
        try:
            forest = KernelRules([read(text)], [], in_use(FOUND))
        except MalformedRulesError:
            continue
        forest.all_trees()
        forest.find("shop/web")


@pytest.mark.parametrize("seed", range(3))
def test_what_iptables_prints_for_the_doctor(seed: int) -> None:
    for text in garbled(TEXT, seed):
        try:
            found = Ruleset.of(Family.IPV4, "nft", text)
        except MalformedRulesError:
            continue
        assert found.forward_chain_verdict("VIPD") in ForwardVerdict
        found.foreign_tables("VIPD")
        found.vipd_prefixes()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_what_is_explained(seed: int, strict: bool) -> None:
    for text in garbled(TEXT, seed):
        try:
            parse_ruleset(text, Family.IPV4, strict=strict)
        except RulesetError:
            continue


@pytest.mark.parametrize("seed", range(3))
def test_what_nft_prints(seed: int) -> None:
    listing, whole = render_table(FOUND, TableOptions(Family.IPV4)), table(FOUND, Family.IPV4)
    for text in garbled(listing, seed):
        reading = TableReading(whole.family, whole.table, read_table_rules(text), whole.elements, {}, {})
        KernelRules([], [reading], in_use(FOUND, "table ip vipd")).all_trees()
        try:
            parse_tables(text, Family.IPV4)
        except RulesetError:
            continue


@settings(max_examples=examples(200))
@given(st.text(max_size=60))
def test_any_line(text: str) -> None:
    target_of(text)
    for reading in (read_tables, lambda line: parse_ruleset(line, Family.IPV4)):
        try:
            reading(f"*nat\n{text}\nCOMMIT\n")
        except ValueError:
            continue


KEYS = ("match", "left", "right", "accept", "jump", "target", "ct", "key")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=12,
)


@settings(max_examples=examples(200))
@given(st.lists(JSON, max_size=4))
def test_statements_of_others(expressions: list[object]) -> None:
    """What nft prints in JSON is JSON, but its statements may be of any form."""
    rule: dict[str, object] = {"chain": "forward", "expr": expressions}
    chains = rules_by_chain([{"chain": {"name": "forward"}}, {"rule": rule}])
    assert NftForward("inet", "filter", "forward", "drop", chains).forward_verdict(0x2000) in ForwardVerdict


FAULTS = {
    "fails": ProgramResult(4, "", "another app is currently holding the xtables lock"),
    "prints garbage": ProgramResult(0, "\x00garbage\n-A\n# handle 3\nchain {\n", ""),
    "prints nothing": ProgramResult(0, "", ""),
    "prints a number without end": ProgramResult(0, f"rule # handle {'9' * 5000}\n", ""),
    "is missing": FileNotFoundError("iptables"),
    "is not executable": PermissionError("iptables"),
    "hangs": ProgramTimeoutError("iptables", 10.0),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("family", ["ip", "inet", "legacy"])
def test_a_trace_whose_rules_cannot_be_read(family: str, fault: ProgramResult | Exception) -> None:
    async def run(argv: Sequence[str], stdin: str) -> ProgramResult:
        if isinstance(fault, Exception):
            raise fault
        version = "iptables v1.8.9 (legacy)" if family == "legacy" else "iptables v1.8.9 (nf_tables)"
        return ProgramResult(0, version, "") if "--version" in argv else fault

    parsed: list[str] = []
    chain = Chain(family, "nat", "PREROUTING")
    found = asyncio.run(read_traced([chain], run, parsed.append))
    if family != "inet" and fault is FAULTS["prints nothing"]:
        assert found[chain].rules == {}
        return
    assert found == {}
    assert len(parsed) == 1
    assert "cannot be read: " in parsed[0]


@pytest.mark.parametrize("fault", [f for f in FAULTS.values() if f is not FAULTS["prints nothing"]])
def test_rules_that_cannot_be_read(fault: ProgramResult | Exception) -> None:
    async def run(argv: Sequence[str], stdin: str) -> ProgramResult:
        if "--version" in argv:
            return ProgramResult(0, "iptables v1.8.9 (nf_tables)", "")
        if isinstance(fault, Exception):
            raise fault
        return ProgramResult(fault.exit_code, "*nat\n" + fault.stdout, fault.stderr)

    with pytest.raises(ApplyError) as caught:
        asyncio.run(read_rules("VIPD", None, run, print))
    assert caught.value.why
