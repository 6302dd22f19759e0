"""Which iptables programs this host has, and running them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.names import ChainId
from vipd.model import Family
from vipd.process import Finished, ProgramTimeoutError, Runner

LOCK_WAIT_SECONDS = 5
RANDOM_FULLY_SINCE = (1, 6, 2)
BROKEN_BEFORE = (1, 8, 3)
"""1.8.0 to 1.8.2 compare some rules wrongly and so duplicate them (contract 7.3)."""

_VERSION = re.compile(r"v(\d+)\.(\d+)\.(\d+)(?: \((nf_tables|legacy)\))?")


_TABLES_OF_LEGACY = {Family.IPV4: "net/ip_tables_names", Family.IPV6: "net/ip6_tables_names"}


@dataclass(frozen=True, slots=True)
class Tools:
    """The programs for one family."""

    restore: str
    save: str
    version_text: str
    version: tuple[int, ...]

    @property
    def legacy(self) -> bool:
        """Whether they write to the legacy tables. Before 1.8 they did not say, and always did."""
        return "nf_tables" not in self.version_text

    @property
    def random_fully(self) -> bool:
        """Whether MASQUERADE knows --random-fully."""
        return self.version >= RANDOM_FULLY_SINCE


def has_legacy_tables(family: Family, proc: Path = Path("/proc"), table: str = "") -> bool:
    """Whether legacy iptables has a table in this network namespace, of this name if one is given. Asked
    without its programs, which make every table that they are asked for."""
    try:
        found = (proc / _TABLES_OF_LEGACY[family]).read_text().split()
        return table in found if table else bool(found)
    except OSError:
        return False


async def find_tools(family: Family, variant: str, run: Runner) -> Tools:
    """The iptables programs of a family; `variant` is auto, nft or legacy. Raises ApplyError."""
    stem = "iptables" if family is Family.IPV4 else "ip6tables"
    base = stem if variant == "auto" else f"{stem}-{variant}"
    try:
        said = await _finish([base, "--version"], "", run)
    except FileNotFoundError:
        hint = "apt install iptables" if variant == "auto" else "set iptables_variant: auto"
        raise ApplyError(f"{base} cannot be run", "there is no such program", hint) from None
    match = _VERSION.search(said.output)
    if not match:
        raise ApplyError(f"{base} --version is not understood", (said.output + said.errors).strip())
    version = tuple(int(part) for part in match.groups()[:3])
    if (1, 8, 0) <= version < BROKEN_BEFORE:
        raise ApplyError(
            f"{said.output.strip()} is unusable", "it duplicates rules", "install 1.8.3 or later"
        )
    return Tools(f"{base}-restore", f"{base}-save", said.output.strip(), version)


async def save(tools: Tools, run: Runner, *, counters: bool = False) -> str:
    """The rules of every table that exists, as text, each after its counters if wanted. Raises ApplyError.

    Without `-t` because with it iptables-nft-save shows a table that does not exist, and
    iptables-legacy-save brings one into being.
    """
    finished = await _finish([tools.save, *(("-c",) if counters else ())], "", run)
    _check(finished, tools.save)
    return finished.output


async def list_chain(tools: Tools, chain: ChainId, run: Runner) -> tuple[str, ...] | None:
    """One chain's rules as iptables-save spells them; None when there is no such chain. Raises ApplyError.

    A few milliseconds however large the table is, where `save` takes seconds.
    """
    program = tools.save.removesuffix("-save")
    argv = [program, "-w", str(LOCK_WAIT_SECONDS), "-t", chain.table, "-S", chain.name]
    finished = await _finish(argv, "", run)
    if finished.code:
        return None
    head = f"-A {chain.name} "
    return tuple(line.removeprefix(head) for line in finished.output.splitlines() if line.startswith(head))


async def restore(tools: Tools, text: str, run: Runner) -> None:
    """Apply a restore input without flushing what it does not name. Raises ApplyError."""
    argv = [tools.restore, "--noflush", "-w", str(LOCK_WAIT_SECONDS)]
    finished = await _finish(argv, text, run)
    _check(finished, tools.restore, text)


async def _finish(argv: Sequence[str], text: str, run: Runner) -> Finished:
    """Run a program; one that had to be killed is no fault of the rules that it was given."""
    try:
        return await run(argv, text)
    except ProgramTimeoutError as error:
        hint = "see dmesg, and whether another program changes rules all the time; vipd tries again"
        raise ApplyError(f"{error.program} hangs", str(error), hint) from None


def _check(finished: Finished, what: str, text: str = "") -> None:
    if finished.code == 0:
        return
    why = " ".join(finished.errors.split()) or f"exit code {finished.code}"
    line = re.search(r"line:? (\d+)", finished.errors)
    lines = text.splitlines()
    if line and 0 < int(line[1]) <= len(lines):
        why = f"{why} (line {line[1]}: {lines[int(line[1]) - 1]})"
    hint = _hint(finished)
    raise ApplyError(
        f"{what} failed with exit code {finished.code}", why, hint, rules_at_fault=bool(text) and not hint
    )


def _hint(finished: Finished) -> str:
    said = finished.errors.lower()
    if "permission" in said or "must be root" in said:
        return "vipd needs root, or CAP_NET_ADMIN (legacy: CAP_NET_RAW too)"
    if finished.code == 4 and "lock" in said:
        return "another program holds the xtables lock; vipd tries again"
    return ""
