"""Finds conditions on this host that make services misbehave. It warns, and never changes anything.

Rules in the iptables variant that vipd does not use are applied beside its own (contract 7.2), and affinity
lists have a limit (contract 1.7).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.other_variant import holds_own, other_variant, own_prefix
from vipd.dataplane.iptables.tools import Tools, find_tools, has_legacy_tables, save
from vipd.dataplane.nftables import foreign_chains as foreign_chains
from vipd.dataplane.nftables.foreign_chains import dropping_chains
from vipd.host.process import Runner, run
from vipd.host.requirements import HostRequirements
from vipd.host.settings.settings import Settings
from vipd.model.forwarding import Forwarding
from vipd.model.service import Family

log = logging.getLogger(__name__)

CHECK_SECONDS = 60.0
CHAINS_SECONDS = 5.0
"""Others' chains are few, and looking at them costs milliseconds."""
DEFAULT_LIST_LIMIT = 100
"""xt_recent's ip_list_tot unless configured otherwise."""
LISTS_AT_ONCE = 2000
"""Number of affinity lists whose length one check reads, so that thousands do not slow it down."""
NAMED_SERVICES = 3


class HostChecks:
    """Checks once a minute. `root` replaces `/`."""

    def __init__(
        self,
        settings: Settings,
        run: Runner = run,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
        dataplane: Callable[[], str] = lambda: "iptables",
        found_own: Callable[[], None] = lambda: None,
    ) -> None:
        """`found_own` is called if vipd's rules are in the iptables variant that is not in use."""
        self._variants = OtherVariant(settings, run, root / "proc", found_own)
        self._names = Names(settings.chain_prefix)
        self._root, self._clock = root, clock
        self._next = 0.0
        self._looked_at = ""
        self._mixed = ""
        self._full: tuple[str, ...] = ()
        self._dropping: tuple[str, ...] = ()
        self.dataplane = dataplane

    async def refresh(self, needs: HostRequirements) -> bool:
        """Check if it is time to; returns whether the warnings changed."""
        dataplane = self.dataplane()
        if self._clock() < self._next and dataplane == self._looked_at:
            return False
        native, self._looked_at = dataplane == "nftables", dataplane
        self._next = self._clock() + (CHAINS_SECONDS if native else CHECK_SECONDS)
        before = self._mixed, self._full, self._dropping
        if native:
            self._mixed, self._full = "", ()
            self._dropping = await self._chains_that_drop(needs)
            return before != (self._mixed, self._full, self._dropping)
        self._dropping = ()
        self._mixed, own = await self._variants.check(needs.families)
        self._full = await asyncio.to_thread(self._full_lists, tuple(needs.with_affinity), self._limit())
        return own or before != (self._mixed, self._full, self._dropping)

    async def _chains_that_drop(self, needs: HostRequirements) -> tuple[str, ...]:
        """Foreign chains that drop packets for health ports, which vipd's own table cannot prevent."""
        try:
            chains = await dropping_chains()
        except (ApplyError, OSError) as error:
            log.warning("other tables cannot be looked at: %s", error)
            return self._dropping
        return foreign_chains.warnings(chains, needs.health_ports)

    def warnings(self, needs: HostRequirements) -> tuple[str, ...]:
        """The current warnings about this host."""
        if self.dataplane() == "nftables":
            return self._dropping
        pinned = {forwarding.key.service for forwarding in needs.with_affinity}
        full = tuple(name for name in self._full if name in pinned)
        return tuple(filter(None, (self._mixed, affinity_warning(self._limit(), pinned, full))))

    def _limit(self) -> int | None:
        try:
            return int((self._root / "sys/module/xt_recent/parameters/ip_list_tot").read_text())
        except (OSError, ValueError):
            return None  # the module is not loaded, or we are not root

    def _full_lists(self, pinned: Iterable[Forwarding], limit: int | None) -> tuple[str, ...]:
        """The services with affinity of which a list is full."""
        lists = [
            (f.key.service, self._names.endpoint(f.key, endpoint))
            for f in pinned
            if limit
            for endpoint in f.reachable()
        ]
        directory = self._root / "proc/net/xt_recent"
        full = {
            service for service, name in lists[:LISTS_AT_ONCE] if _lines(directory / name) >= (limit or 0)
        }
        return tuple(sorted(full))


class OtherVariant:
    """The iptables variant that vipd does not write with: nft's or legacy's. It is only read."""

    def __init__(
        self, settings: Settings, run: Runner, proc: Path, found_own: Callable[[], None] = lambda: None
    ) -> None:
        """`found_own` is called if vipd's rules are there; the dataplane must remove them."""
        self._settings, self._run, self._proc = settings, run, proc
        self._found_own = found_own

    async def check(self, families: Iterable[Family]) -> tuple[str, bool]:
        """A warning if it has foreign rules in any of these families; and whether it has vipd's own."""
        found: dict[str, str] = {}
        used, own = "", False
        for family in sorted(families):
            try:
                tools = await find_tools(family, self._settings.iptables_variant, self._run)
                used, other = variant_of(tools), other_variant(tools)
                if other == "legacy" and not has_legacy_tables(family, self._proc):
                    continue
                saved = await save(await find_tools(family, other, self._run), self._run)
            except ApplyError as error:
                log.debug("the other iptables variant cannot be read: %s", error)
                continue
            ours = holds_own(saved, self._settings.chain_prefix)
            own = own or ours
            if foreign := tables_with_rules(saved, own_prefix(saved, self._settings.chain_prefix)):
                stem = "iptables" if family is Family.IPV4 else "ip6tables"
                found[f"{stem}-{other}-save"] = f"{family} {', '.join(foreign)}"
        if own:
            self._found_own()
        return mixed_warning(used, found), own


def variant_of(tools: Tools) -> str:
    """`nft` or `legacy`. Programs older than the choice between them name no variant, and are legacy."""
    return "nft" if "(nf_tables)" in tools.version_text else "legacy"


def tables_with_rules(saved: str, own_prefix: str) -> tuple[str, ...]:
    """The tables in an iptables-save output that contain a rule, or a policy other than ACCEPT.

    Rules in a chain with the prefix, or that jump to one, do not count. An empty prefix exempts none.
    """
    found: dict[str, None] = {}
    table = ""
    for line in saved.splitlines():
        if line.startswith("*"):
            table = line[1:].strip()
            continue
        policy = line.startswith(":") and line.split()[1] not in ("ACCEPT", "-")
        rule = line.startswith("-A ") and not (own_prefix and f" {own_prefix}-" in line)
        if policy or rule:
            found[table] = None
    return tuple(found)


def mixed_warning(used: str, found: Mapping[str, str]) -> str:
    """The warning about foreign rules: command that shows them -> family and tables; empty for none."""
    if not found:
        return ""
    where = "; ".join(found.values())
    other = "legacy" if used == "nft" else "nft"
    return (
        f"iptables-{other} holds rules of other programs ({where}) while vipd writes iptables-{used}: the "
        f"kernel applies both, and services may behave oddly; look: {' and '.join(found)}; hint: let every "
        "program use one variant (update-alternatives --config iptables, or iptables_variant here)"
    )


def affinity_warning(limit: int | None, services: Collection[str], full: Collection[str]) -> str:
    """The warning about the limit of affinity lists, `full` being the services that have reached it."""
    if limit is None or not services or (limit != DEFAULT_LIST_LIMIT and not full):
        return ""
    names = _listed(full or services)
    reached = "and a list is full, so that clients are sent to other backends; " if full else ""
    return (
        f"affinity of {names}: each backend's list remembers {limit} clients, {reached or 'then forgets; '}"
        f"hint: put `options xt_recent ip_list_tot={max(10000, limit * 10)}` into /etc/modprobe.d/vipd.conf "
        "and restart the host, for the limit is set when the module is loaded"
    )


def _listed(names: Collection[str]) -> str:
    first = sorted(names)[:NAMED_SERVICES]
    more = len(names) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")


def _lines(path: Path) -> int:
    try:
        with path.open("rb") as lines:
            return sum(1 for _ in lines)
    except OSError:
        return 0
