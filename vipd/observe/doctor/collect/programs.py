"""The installed iptables, nft and kernel, and their features."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from vipd.control.host_checks import variant_of
from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.probe import probe
from vipd.dataplane.iptables.tools import Tools, find_tools
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.probe import probe as probe_nft
from vipd.dataplane.nftables.tools import find_nft
from vipd.host.process import ProgramResult, ProgramTimeoutError, Runner
from vipd.host.settings.settings import Settings
from vipd.model.service import Family
from vipd.observe.doctor.facts import Feature, Program, Programs

NEW_NAMESPACE = ("unshare", "--net")
"""Features are tried in a network namespace that ends with the program: nothing remains here, not even an
empty table."""
MAX_SHOWN = 80
"""Characters of an output that is not understood."""
INSTALL = "apt install iptables"


async def find_programs(
    settings: Settings,
    families: Iterable[Family],
    root: bool,
    run: Runner,
    dataplane: str = "iptables",
) -> Programs:
    """The installed programs; features of the dataplane are tried for these families, and only as root."""
    found = {}
    programs = []
    for family in Family:
        try:
            tools = found[family] = await find_tools(family, settings.iptables_variant, run)
        except ApplyError as error:
            fault = f"{error.what}: {error.why}"
            programs.append(Program(family, "", fault=fault, fix=_command(error.hint)))
        except (OSError, ProgramTimeoutError) as error:
            programs.append(Program(family, "", fault=f"it cannot be run: {error}"))
        else:
            programs.append(Program(family, tools.version_text, variant_of(tools)))
    lacks, fault = await _try_all(found, families, settings, run, dataplane) if root else ([], "")
    nft, nft_fault = await _nft(run)
    return Programs(os.uname().release, tuple(programs), nft, nft_fault, tuple(lacks), fault)


async def _try_all(
    found: Mapping[Family, Tools], families: Iterable[Family], settings: Settings, run: Runner, dataplane: str
) -> tuple[list[Feature], str]:
    """Missing features, and why some could not be tried."""
    lacks: list[Feature] = []
    if fault := await _why_no_namespace(run):
        return lacks, fault
    try:
        for family in families:
            if dataplane == "nftables":
                lacks += await _try_nft(family, settings, run)
            elif family in found:
                lacks += await _try(found[family], family, settings, run)
    except (OSError, ProgramTimeoutError) as error:
        return lacks, f"a rule could not be tried: {error}"
    return lacks, ""


async def _try(tools: Tools, family: Family, settings: Settings, run: Runner) -> list[Feature]:
    async def run_apart(argv: Sequence[str], stdin: str) -> ProgramResult:
        return await run([*NEW_NAMESPACE, *argv], stdin)

    try:
        abilities = await probe(tools, Names(settings.chain_prefix), family, run_apart)
    except ApplyError as error:
        return [Feature(family, error.what, True, error.why, _command(error.hint))]
    return _missing_features(family, asdict(abilities))


async def _try_nft(family: Family, settings: Settings, run: Runner) -> list[Feature]:
    """nft itself can check without writing."""
    try:
        abilities = await probe_nft(await find_nft(run), TableOptions.of(settings, family), run)
    except ApplyError as error:
        return [Feature(family, error.what, True, error.why, _command(error.hint))]
    return _missing_features(family, asdict(abilities))


def _missing_features(family: Family, abilities: Mapping[str, bool]) -> list[Feature]:
    return [Feature(family, name, False) for name, there in abilities.items() if not there]


async def _why_no_namespace(run: Runner) -> str:
    """Why no other network namespace can be made; empty when it can."""
    try:
        tried = await run([*NEW_NAMESPACE, "true"], "")
    except (OSError, ProgramTimeoutError) as error:
        return f"unshare cannot be run: {error}"
    return (
        ""
        if tried.exit_code == 0
        else " ".join(tried.stderr.split()) or f"unshare: exit code {tried.exit_code}"
    )


async def _nft(run: Runner) -> tuple[str, str]:
    """The version of nft, or why it cannot be run."""
    try:
        said = await run(["nft", "--version"], "")
    except FileNotFoundError:
        return "", "there is no such program"
    except (OSError, ProgramTimeoutError) as error:
        return "", str(error)
    if said.exit_code or not said.stdout.startswith("nftables "):
        output = " ".join((said.stdout + said.stderr).split())[:MAX_SHOWN]
        return "", f"nft --version is not understood: exit code {said.exit_code}, {output!r}"
    return said.stdout.strip(), ""


def _command(hint: str) -> str:
    """A hint that is a command, otherwise empty."""
    if hint.startswith(("apt ", "modprobe ")):
        return hint
    return INSTALL if hint.startswith("install ") else ""
