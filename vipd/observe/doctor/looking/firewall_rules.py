"""The rules of both iptables variants, and nft's chains at the hook forward. Nothing is made by reading."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vipd.dataplane.base import ApplyError, MissingProgramError
from vipd.dataplane.forward_accept.fates import NftForward, read_nft_table
from vipd.dataplane.iptables.tools import find_tools, has_legacy_tables, save
from vipd.dataplane.nftables.options import table_name
from vipd.model import Family
from vipd.observe.doctor.rules import Ruleset
from vipd.process import ProgramTimeoutError, Runner

VARIANTS = ("nft", "legacy")
IPTABLES_CHAINS = ("FORWARD",)
"""How iptables-nft calls its own base chains at the hook forward."""
FAMILIES = {"ip": Family.IPV4, "ip6": Family.IPV6}


async def read_rulesets(proc: Path, run: Runner) -> tuple[tuple[Ruleset, ...], str]:
    """What each variant holds for each family, and why something could not be read."""
    found, faults = [], []
    for variant in VARIANTS:
        for family in Family:
            if variant == "legacy" and not has_legacy_tables(family, proc):
                continue
            try:
                tools = await find_tools(family, variant, run)
                found.append(Ruleset.of(family, variant, await save(tools, run)))
            except MissingProgramError:
                continue  # it has written nothing
            except ApplyError as error:
                faults.append(f"{error.what}: {error.why}")
    return tuple(found), "; ".join(faults)


async def read_nft(prefix: str, run: Runner) -> tuple[tuple[NftForward, ...] | None, frozenset[Family]]:
    """nft's chains at the hook forward but iptables' and vipd's (None without a program to show them), and
    the families for which there is a table of vipd's."""
    listed = await _nft(["list", "chains"], run)
    if listed is None:
        return None, frozenset()
    own_table = table_name(prefix)
    places = {(item["chain"]["family"], item["chain"]["table"]) for item in listed if "chain" in item}
    own = frozenset(family for name, family in FAMILIES.items() if (name, own_table) in places)
    found = []
    for item in listed:
        chain = item.get("chain", {})
        if chain.get("hook") == "forward" and not _known(chain, own_table):
            table = await _nft(["list", "table", chain["family"], chain["table"]], run) or []
            found.append(
                NftForward(
                    chain["family"],
                    chain["table"],
                    chain["name"],
                    chain.get("policy", "accept"),
                    read_nft_table(table),
                )
            )
    return tuple(found), own


async def _nft(words: list[str], run: Runner) -> list[Mapping[str, Any]] | None:
    """The objects that nft prints; None when it cannot."""
    try:
        said = await run(["nft", "-j", *words], "")
    except (OSError, ProgramTimeoutError):
        return None
    try:
        return list(json.loads(said.output)["nftables"]) if said.code == 0 else None
    except (ValueError, KeyError, TypeError):
        return None


def _known(chain: Mapping[str, Any], own_table: str) -> bool:
    iptables = chain["family"] in ("ip", "ip6") and chain["name"] in IPTABLES_CHAINS
    return iptables or chain["table"] == own_table or chain["family"] not in ("inet", "ip", "ip6")
