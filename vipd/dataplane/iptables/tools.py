"""Finds the iptables programs of this host, and runs them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vipd.dataplane.base import ApplyError, MissingProgramError
from vipd.dataplane.iptables.names import ChainId
from vipd.dataplane.iptables.saved_rules import MalformedRulesError, check_saved, listed_rules
from vipd.dataplane.programs import VERSION_SECONDS, finish
from vipd.host.process import ProgramResult, Runner
from vipd.model.service import Family

LOCK_WAIT_SECONDS = 5
RANDOM_FULLY_SINCE = (1, 6, 2)
BROKEN_BEFORE = (1, 8, 3)
"""1.8.0 to 1.8.2 compare some rules wrongly and so duplicate them (contract 7.3)."""

_VERSION = re.compile(r"v(\d+)\.(\d+)\.(\d+)(?: \((nf_tables|legacy)\))?")
_NO_CHAIN = "No chain/target/match by that name"
_NO_TARGET = ("does not exist", "Couldn't load target")
_NO_RULE = "Bad rule"
INCOMPATIBLE = "is incompatible, use 'nft' tool"
"""Message of iptables-nft about chains and tables with rules that it cannot show."""

_TABLES_OF_LEGACY = {Family.IPV4: "net/ip_tables_names", Family.IPV6: "net/ip6_tables_names"}


@dataclass(frozen=True, slots=True)
class Tools:
    """The programs for one family."""

    restore: str
    save: str
    version_text: str
    version: tuple[int, ...]

    @property
    def program(self) -> str:
        """The program for single commands."""
        return self.save.removesuffix("-save")

    @property
    def legacy(self) -> bool:
        """Whether they write to the legacy tables. Versions before 1.8 do not report it, and always do."""
        return "nf_tables" not in self.version_text

    @property
    def random_fully(self) -> bool:
        """Whether MASQUERADE supports --random-fully."""
        return self.version >= RANDOM_FULLY_SINCE


class IncompatibleError(ApplyError):
    """A chain contains rules that iptables cannot show, though it can write beside them."""

    def __init__(self, chain: ChainId) -> None:
        what = f"chain {chain.name} of iptables' table {chain.table} cannot be read"
        super().__init__(what, "it holds a rule that only nft can show", "look: nft list ruleset")


def has_legacy_tables(family: Family, proc: Path = Path("/proc"), table: str = "") -> bool:
    """Whether legacy iptables has a table in this network namespace, of this name if one is given. Does not
    use its programs, which create every table that they read."""
    try:
        found = (proc / _TABLES_OF_LEGACY[family]).read_text().split()
        return table in found if table else bool(found)
    except OSError:
        return False


def program_names(family: Family, variant: str) -> tuple[str, ...]:
    """The iptables programs of a family: the one for single commands, and its -restore and -save."""
    stem = "iptables" if family is Family.IPV4 else "ip6tables"
    base = stem if variant == "auto" else f"{stem}-{variant}"
    return base, f"{base}-restore", f"{base}-save"


async def find_tools(family: Family, variant: str, run: Runner) -> Tools:
    """The iptables programs of a family; `variant` is auto, nft or legacy. Raises ApplyError, and
    MissingProgramError when there are none that could ever have written rules of vipd's."""
    base, restoring, saving = program_names(family, variant)
    try:
        said = await finish([base, "--version"], "", run, VERSION_SECONDS)
    except MissingProgramError as error:
        hint = error.hint if variant == "auto" else "set iptables_variant: auto"
        raise MissingProgramError(error.what, error.why, hint) from None
    match = _VERSION.search(said.stdout)
    if not match:
        raise ApplyError(f"{base} --version is not understood", (said.stdout + said.stderr).strip())
    version = tuple(int(part) for part in match.groups()[:3])
    if (1, 8, 0) <= version < BROKEN_BEFORE:
        raise MissingProgramError(
            f"{said.stdout.strip()} is unusable", "it duplicates rules", "install 1.8.3 or later"
        )
    return Tools(restoring, saving, said.stdout.strip(), version)


async def save(tools: Tools, run: Runner, *, counters: bool = False) -> str:
    """The rules of every existing table, as text, each after its counters if requested. Raises ApplyError.

    Without `-t`: with it iptables-nft-save shows a table that does not exist, and
    iptables-legacy-save creates one.
    """
    finished = await finish([tools.save, *(("-c",) if counters else ())], "", run)
    _check(finished, tools.save)
    try:
        await asyncio.to_thread(check_saved, finished.stdout)
    except MalformedRulesError as error:
        raise ApplyError(f"{tools.save} is not understood", str(error), "vipd tries again") from None
    return finished.stdout


async def list_chain(
    tools: Tools, chain: ChainId, run: Runner, *, counters: bool = False
) -> tuple[str, ...] | None:
    """One chain's rules in the form of iptables-save; None if it does not exist. Raises ApplyError,
    and IncompatibleError if iptables cannot show the chain.

    With `counters` in the form of `iptables -v -S`. Takes a few milliseconds however large the table is;
    `save` takes seconds.
    """
    listing = (*(("-v",) if counters else ()), "-S", chain.name)
    finished = await _command(tools, chain.table, listing, run)
    if finished.exit_code:
        if _NO_CHAIN in finished.stderr or await _is_absent(tools, chain, finished, run):
            return None
        _check(finished, tools.program)
    return listed_rules(finished.stdout, chain.name)


async def has_rule(tools: Tools, chain: ChainId, rule: Sequence[str], run: Runner) -> bool:
    """Whether a chain has a rule, given in words; works for chains that iptables cannot show. Raises
    ApplyError."""
    finished = await _command(tools, chain.table, ("-C", chain.name, *rule), run)
    if finished.exit_code and not any(word in finished.stderr for word in (_NO_RULE, _NO_CHAIN, *_NO_TARGET)):
        _check(finished, tools.program)
    return finished.exit_code == 0


async def restore(tools: Tools, text: str, run: Runner) -> None:
    """Apply a restore input without flushing other chains. Raises ApplyError."""
    argv = [tools.restore, "--noflush", "-w", str(LOCK_WAIT_SECONDS)]
    finished = await finish(argv, text, run)
    _check(finished, tools.restore, text)


async def _command(tools: Tools, table: str, words: Sequence[str], run: Runner) -> ProgramResult:
    return await finish([tools.program, "-w", str(LOCK_WAIT_SECONDS), "-t", table, *words], "", run)


async def _is_absent(tools: Tools, chain: ChainId, listed: ProgramResult, run: Runner) -> bool:
    """Whether a chain that could not be listed does not exist. iptables-nft reports the same error for a
    missing chain and one with rules that only nft can show; so this checks whether a rule could jump
    there."""
    if INCOMPATIBLE not in listed.stderr:
        return False
    asked = await _command(tools, chain.table, ("-C", "OUTPUT", "-j", chain.name), run)
    if asked.exit_code and any(word in asked.stderr for word in _NO_TARGET):
        return True
    raise IncompatibleError(chain)


def _check(finished: ProgramResult, what: str, text: str = "") -> None:
    if finished.exit_code == 0:
        return
    why = " ".join(finished.stderr.split()) or f"exit code {finished.exit_code}"
    line = re.search(r"line:? (\d+)", finished.stderr)
    lines = text.splitlines()
    if line and 0 < int(line[1]) <= len(lines):
        why = f"{why} (line {line[1]}: {lines[int(line[1]) - 1]})"
    hint = _hint(finished)
    raise ApplyError(
        f"{what} failed with exit code {finished.exit_code}",
        why,
        hint,
        rules_at_fault=bool(text) and not hint,
    )


def _hint(finished: ProgramResult) -> str:
    said = finished.stderr.lower()
    if "permission" in said or "must be root" in said:
        return "vipd needs root, or CAP_NET_ADMIN; for legacy iptables the drop-in legacy-iptables.conf"
    if finished.exit_code == 4 and "lock" in said:
        return "another program holds the xtables lock; vipd tries again"
    return ""
