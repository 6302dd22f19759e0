"""Rules that an earlier vipd left in the iptables variant that is no longer in use, in one family.

The kernel applies the rules of both variants, so the old ones still affect flows. They are found when
everything is read, and removed once those of the variant in use are written. No step succeeds before that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from pathlib import Path

from vipd.dataplane.base import ApplyError, MissingProgramError
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.plan import Plan
from vipd.dataplane.iptables.removal import removal_plan
from vipd.dataplane.iptables.tools import Tools, find_tools, has_legacy_tables, restore, save
from vipd.host.process import Runner
from vipd.model.service import Family

log = logging.getLogger(__name__)

RETRY_SECONDS = 60.0
"""Pause after which a variant that could not be read is tried again."""
_NO_NFTABLES = ("Failed to initialize nft", "Could not fetch rule set generation id")
"""Messages of iptables-nft if the kernel has no nf_tables, and thus no rules in it."""


KeptVariants = Callable[[], Collection[tuple[Family, str]]]
"""The families and variants in which the chain that accepts translated flows stays: it is not the
dataplane's."""


def other_variant(tools: Tools) -> str:
    """The variant that these programs do not write with."""
    return "nft" if tools.legacy else "legacy"


def holds_own(saved: str, prefix: str) -> bool:
    """Whether the output of iptables-save contains chains of vipd's; those of a kube-proxy do not count."""
    return bool(_chains_of_services(saved, prefix)) and bool(own_prefix(saved, prefix))


def own_prefix(saved: str, prefix: str) -> str:
    """The prefix, unless a kube-proxy has chains with it: then none of those is vipd's."""
    return "" if f"\n:{prefix}-PROXY-CANARY " in saved else prefix


def _chains_of_services(saved: str, prefix: str) -> list[str]:
    """vipd's chains, except the one that accepts translated flows: it may exist beside either variant."""
    start, accept = f":{prefix}-", f":{prefix}-FORWARD "
    return [line for line in saved.splitlines() if line.startswith(start) and not line.startswith(accept)]


class OtherVariantRules:
    """Finds and removes them."""

    def __init__(
        self, family: Family, prefix: str, run: Runner, kept: KeptVariants = tuple, proc: Path = Path("/proc")
    ) -> None:
        self._family, self._prefix, self._run, self._kept, self._proc = family, prefix, run, kept, proc
        self._tools: Tools | None = None
        """The tools that can remove the found rules."""
        self._not_before = 0.0
        self.plan: Plan | None = None
        """The plan that removes the found rules; None: there are none."""
        self.warning = ""
        """Why they could not be read."""

    async def refresh(self, tools: Tools) -> None:
        """Look for them; `tools` are those in use. A failed read is a warning, and does not delay the
        caller."""
        clock = asyncio.get_running_loop().time
        self.plan = None
        if clock() < self._not_before:
            return
        self._not_before, self.warning = 0.0, ""
        variant = other_variant(tools)
        if variant == "legacy" and not has_legacy_tables(self._family, self._proc):
            return
        try:
            self._tools = await find_tools(self._family, variant, self._run)
            self.plan = await self._read(self._tools)
        except MissingProgramError:
            return  # it has written nothing
        except ApplyError as error:
            if any(word in error.why for word in _NO_NFTABLES) and not error.hint:
                return
            self._not_before = clock() + RETRY_SECONDS
            self.warning = f"whether iptables-{variant} holds old rules of vipd's cannot be seen: {error}"

    async def _read(self, tools: Tools) -> Plan | None:
        """The plan that removes the rules there; None: there are none. Raises ApplyError."""
        saved = await save(tools, self._run)
        if not holds_own(saved, self._prefix):
            return None
        accept = (self._family, "legacy" if tools.legacy else "nft") in self._kept()
        return removal_plan(saved, Names(self._prefix), self._family, tools, accept=accept) or None

    async def remove(self, plan: Plan) -> None:
        """Remove the found rules. Raises ApplyError."""
        if self._tools is None or plan is not self.plan:
            return
        try:
            # Read again: the chain that accepts flows may have gone in the same step.
            current = await self._read(self._tools)
            for text in current.restores if current else ():
                await restore(self._tools, text, self._run)
        except ApplyError as error:
            what = f"vipd's former {self._family} rules in {self._tools.version_text} cannot be removed"
            raise ApplyError(what, f"{error.what}: {error.why}", error.hint) from None
        self.plan = None
        log.info("removed vipd's former %s rules: %s", self._family, self._tools.version_text)
