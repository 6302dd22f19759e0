"""Reads the text of the rules that a trace's events name by number: from iptables, nft and the kernel."""

from __future__ import annotations

from collections.abc import Callable, Collection

from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.saved_rules import listed_rules
from vipd.dataplane.iptables.tools import LOCK_WAIT_SECONDS, find_tools
from vipd.dataplane.nftables import codec
from vipd.dataplane.nftables.layout import COMMENT_START
from vipd.dataplane.nftables.saved_table import read_chains
from vipd.host.netlink import MalformedMessageError, attributes, text
from vipd.host.netlink_socket import open_netlink, read_whole
from vipd.host.process import ProgramTimeoutError, Runner
from vipd.model.service import Family
from vipd.observe.live_trace.events import Chain
from vipd.observe.live_trace.matching import IPTABLES, ChainRules

ANSWER_SECONDS = 10.0
_FAMILIES = {"ip": Family.IPV4, "ip6": Family.IPV6}


async def read_rules(
    chains: Collection[Chain], run: Runner, warn: Callable[[str], None] = lambda text: None
) -> dict[Chain, ChainRules]:
    """The current content of these chains; without those that are gone, or that no tool can show. `warn`
    receives what could not be read, and why."""
    found = await _by_iptables([chain for chain in chains if _may_be_iptables(chain)], run)
    left = [chain for chain in chains if chain not in found]
    for family, table in dict.fromkeys((chain.family, chain.table) for chain in left):
        shown, fault = await _by_nft(family, table, run)
        found.update({chain: shown[chain] for chain in left if chain in shown})
        if fault:
            warn(f"the rules of table {family} {table} cannot be read: {fault}")
    return found


async def _by_iptables(chains: Collection[Chain], run: Runner) -> dict[Chain, ChainRules]:
    programs: dict[str, str] = {}
    found = {}
    for chain in chains:
        try:
            if chain.family not in programs:
                programs[chain.family] = await _program(chain, run)
            listed = await _listed(chain, programs[chain.family], run)
        except (ApplyError, OSError, ProgramTimeoutError, MalformedMessageError):
            continue  # nft shows them, or says why not
        if listed is not None:
            found[chain] = listed
    return found


def _may_be_iptables(chain: Chain) -> bool:
    return chain.table in IPTABLES and chain.family in _FAMILIES


async def _program(chain: Chain, run: Runner) -> str:
    """The iptables that shows a family's chains; empty when there is none."""
    for variant in ("nft", "auto"):
        try:
            tools = await find_tools(_FAMILIES[chain.family], variant, run)
        except ApplyError:
            continue
        if not tools.legacy:
            return tools.save.removesuffix("-save")
    return ""


async def _listed(chain: Chain, program: str, run: Runner) -> ChainRules | None:
    """None if iptables does not show the chain, or not all of it."""
    if not program:
        return None
    ended = await run([program, "-w", str(LOCK_WAIT_SECONDS), "-t", chain.table, "-S", chain.name], "")
    if ended.exit_code:
        return None
    rules = listed_rules(ended.stdout, chain.name)
    lines = [line for line in ended.stdout.splitlines() if line.strip()]
    if len(rules) + sum(line.startswith((f"-P {chain.name} ", f"-N {chain.name}")) for line in lines) != len(
        lines
    ):
        return None
    handles = _handles(chain)
    if len(handles) != len(rules):
        return None
    return ChainRules(dict(zip(handles, rules, strict=True)))


async def _by_nft(family: str, table: str, run: Runner) -> tuple[dict[Chain, ChainRules], str]:
    """Every chain of a table, or why they cannot be read. Reading one by one would take longer: nft reads all
    elements each time, -t or not (1.0.6; 0.6 s with 5,000 services)."""
    try:
        ended = await run(["nft", "-a", "-t", "list", "table", family, table], "")
        ours = _is_ours(family, table)
    except (OSError, ProgramTimeoutError, MalformedMessageError) as error:
        return {}, str(error)
    if ended.exit_code:
        return {}, " ".join(ended.stderr.split()) or f"nft: exit code {ended.exit_code}"
    found = {
        Chain(family, table, name): ChainRules(
            {rule.handle: rule.text for rule in listed.rules},
            iptables=False,
            ours=ours,
            hook=_hook(listed.hook),
        )
        for name, listed in read_chains(ended.stdout).items()
    }
    return found, "" if found else "what nft prints is not understood"


def _hook(declared: str) -> str:
    """The hook in `type filter hook forward priority 0; ...`; empty for none."""
    return declared.partition(" hook ")[2].partition(" ")[0]


def _handles(chain: Chain) -> list[int]:
    """The handles of a chain's rules, in order."""
    found = _dumped(codec.GET_RULE, _FAMILIES[chain.family], chain.table, chain.name)
    return [int.from_bytes(each.get(3, b""), "big") for each in found if text(each.get(2)) == chain.name]


def _is_ours(family: str, table: str) -> bool:
    """Whether a table has vipd's comment."""
    if family not in _FAMILIES:
        return False
    tables = [t for t in _dumped(codec.GET_TABLE, _FAMILIES[family]) if text(t.get(1)) == table]
    return any(codec.comment(each.get(6)).startswith(COMMENT_START) for each in tables)


def _dumped(kind: int, family: Family, table: str = "", chain: str = "") -> list[dict[int, bytes]]:
    """Raises OSError and MalformedMessageError."""
    with open_netlink() as opened:
        opened.settimeout(ANSWER_SECONDS)
        return read_whole(
            opened,
            lambda sequence: codec.request(kind, family, sequence, table, chain),
            lambda datagram, answers: (
                attributes(codec.answer(datagram, *each).attributes) for each in answers
            ),
        )
