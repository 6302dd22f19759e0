"""Lets flows that vipd translated pass foreign chains that would drop them, whichever dataplane is used.

vipd's iptables dataplane itself accepts them in FORWARD of the variant that it writes; this module only
reads that chain. It reads all of them when the families in use change, and when one changed, and knows which
rules of others refuse translated flows before vipd accepts them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from pathlib import Path

from vipd.dataplane.base import ApplyError
from vipd.dataplane.forward_accept.accepts import (
    FORWARD,
    NFT_FAMILIES,
    AcceptOptions,
    AcceptPlan,
    AcceptStep,
    ForwardChain,
    ForwardChainState,
    make_plan,
)
from vipd.dataplane.forward_accept.reading import ForwardReader, is_of_iptables, tools_of
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.tools import find_tools, restore
from vipd.dataplane.iptables.watch.messages import Change, MessageKind, adds_chain_at_hook
from vipd.dataplane.nftables.tools import apply_transaction
from vipd.dataplane.refusals import ForwardedFlow, denial_text, refusal_text
from vipd.host.host_changes import HostChanges
from vipd.host.netlink_socket import OpenSocket, open_netlink
from vipd.host.process import Runner
from vipd.host.settings.settings import Settings
from vipd.model.forwarding import Forwarding
from vipd.model.service import Family

log = logging.getLogger(__name__)

NOTHING = AcceptPlan()


class ForwardAccepts:
    """vipd's accepts in the network namespace in which `run` runs programs."""

    def __init__(
        self,
        settings: Settings,
        record: HostChanges,
        run: Runner,
        open_socket: OpenSocket = open_netlink,
        proc: Path = Path("/proc"),
    ) -> None:
        self._settings, self._record, self._run = settings, record, run
        self._options = AcceptOptions(
            settings.chain_prefix,
            1 << settings.mark_bit,
            1 << settings.flow_mark_bit,
            first=settings.accept_forwarded == "first",
            kube_proxy=settings.compat == "kube-proxy",
        )
        self._reader = ForwardReader(self._options, run, open_socket, proc)
        self._own_chain = Names(settings.chain_prefix).fixed(FORWARD)
        self._wanted: tuple[str, frozenset[Family]] | None = None
        """The dataplane and the families that were planned for last."""
        self._in_doubt = True
        self._looked = False
        """Whether foreign chains were read for the last plan: accepts of an earlier vipd there may have to be
        removed."""
        self._managed: frozenset[ForwardChain] = frozenset()
        self._found: tuple[ForwardChainState, ...] = ()
        self._problems: tuple[str, ...] = ()

    def invalidate(self) -> None:
        """Chains of the forward hook may have changed: the next plan reads them."""
        self._in_doubt = True

    def warnings(self, forwardings: Collection[Forwarding] = ()) -> tuple[str, ...]:
        """Where translated flows are dropped, and why; which rules of others may refuse flows of these
        forwardings, and what an administrator may take for such a rule."""
        if not any(found.refusals or found.denials for found in self._found):
            return self._problems
        flows = [ForwardedFlow.of(forwarding) for forwarding in forwardings]
        return (*self._problems, *self._refusal_texts(flows), *self._denial_texts(flows))

    def notes_on(self, flow: ForwardedFlow) -> tuple[str, ...]:
        """Which rules of others may refuse one flow."""
        return (*self._refusal_texts([flow]), *self._denial_texts([flow]))

    def _refusal_texts(self, flows: Collection[ForwardedFlow]) -> Iterator[str]:
        for found in self._found:
            here = [flow for flow in flows if found.forward_chain.serves((flow.family,))]
            refusals = [each for each in found.refusals if any(map(each.may_match, here))]
            if refusals:
                yield refusal_text(str(found.forward_chain), refusals)

    def _denial_texts(self, flows: Collection[ForwardedFlow]) -> Iterator[str]:
        for found in self._found:
            here = [flow for flow in flows if found.forward_chain.serves((flow.family,))]
            denials = [
                each
                for each in found.denials
                if any(scope.may_match_untranslated(flow) for scope in each.scopes for flow in here)
            ]
            if denials:
                yield denial_text(denials)

    async def plan(self, dataplane: str, families: Collection[Family]) -> AcceptPlan:
        """The changes that let flows of these families pass. Raises ApplyError."""
        used = frozenset(families) if self._settings.accept_forwarded else frozenset()
        look = bool(families or self._record.read().accepts)
        if self._wanted == (dataplane, used) and not self._in_doubt and look == self._looked:
            return NOTHING
        self._in_doubt = True
        self._looked = look
        if look:
            self._managed = await self._of_dataplane(dataplane)
            self._found = await self._reader.read(self._managed)
        else:
            self._found = ()
        plan, self._problems = make_plan(self._found, used)
        self._wanted, self._in_doubt = (dataplane, used), bool(plan)
        return plan

    async def rules_written(self) -> None:
        """The dataplane in use has written its rules: if its accept in FORWARD was not in place, read that
        again. Raises ApplyError."""
        if self._wanted and any(found.managed and not found.in_place for found in self._found):
            self._in_doubt = True
            await self.plan(*self._wanted)

    async def apply(self, plan: AcceptPlan) -> None:
        """Write a plan, and check its effect. Raises ApplyError."""
        if not plan:
            return
        for step in plan.steps:
            await self._do(step)
        assert self._wanted is not None  # noqa: S101 (a plan was made)
        self._in_doubt = True
        if left := await self.plan(*self._wanted):
            raise ApplyError(
                "flows that vipd translated are not accepted", f"still to do: {str(left).strip()}"
            )

    async def require(self, dataplane: str, families: Collection[Family]) -> None:
        """Before a switch to another dataplane: let its flows pass. Deletes nothing: the old one is still in
        use.

        Raises ApplyError if that is impossible; `plan` and `apply` for the one in use undo the rest.
        """
        plan = await self.plan(dataplane, families)
        self._in_doubt = True
        if problems := _obstacles_of_dataplane(self._found, self._wanted[1] if self._wanted else ()):
            raise ApplyError(f"with {dataplane} connections would fail", problems[0])
        for step in plan.steps:
            if step.writes:
                await self._do(step)

    async def obstacles(self, dataplane: str) -> tuple[str, ...]:
        """Reasons why flows of a dataplane cannot pass, independent of services. Raises ApplyError."""
        if not self._settings.accept_forwarded:
            return ()
        found = await self._reader.read(await self._of_dataplane(dataplane))
        return _obstacles_of_dataplane(found, frozenset(Family))

    def variants_to_keep(self) -> frozenset[tuple[Family, str]]:
        """The iptables variants in which the accept has to stay when the iptables dataplane ends."""
        if self._wanted is None:
            return frozenset((family, variant) for family in Family for variant in ("nft", "legacy"))
        families = self._wanted[1]
        return frozenset(
            (family, found.forward_chain.variant)
            for family in families
            for found in self._found
            if found.drops
            and found.forward_chain.variant
            and found.forward_chain.family == NFT_FAMILIES[family]
        )

    def concerns(self, change: Change) -> bool:
        """Whether a foreign change of nf_tables may matter here. Raises ValueError (malformed)."""
        if change.kind is MessageKind.TABLE_DELETED or not (self._wanted and self._wanted[1]):
            return False  # a table's chains are reported one by one
        family, _, table = change.table.rpartition(" ")
        family = family or NFT_FAMILIES[change.family]
        if is_of_iptables(family, table, change.chain) or change.chain == self._own_chain:
            return True
        if table == "filter" and any(
            change.chain in found.called and found.forward_chain.serves((change.family,))
            for found in self._found
        ):
            return True
        places = [found.forward_chain for found in self._found if not found.forward_chain.variant]
        known = any((place.family, place.table) == (family, table) for place in places)
        return known or adds_chain_at_hook(change)

    async def differs(self) -> bool:
        """Whether anything changed since it was read, for which the kernel sends no events:
        a chain FORWARD of iptables-legacy, or an obstacle. Raises ApplyError."""
        if self._in_doubt or not (self._wanted and self._wanted[1]):
            return False
        if self._problems:
            return await self._reader.read(self._managed) != self._found
        known = tuple(found for found in self._found if found.forward_chain.variant == "legacy")
        return await self._reader.read_legacy(self._managed) != known

    async def _of_dataplane(self, dataplane: str) -> frozenset[ForwardChain]:
        """The chains that already have an accept of the dataplane."""
        if dataplane != "iptables":
            return frozenset()
        places = set()
        for family in Family:
            try:
                tools = await find_tools(family, self._settings.iptables_variant, self._run)
            except ApplyError:
                continue  # the dataplane reports it
            places.add(ForwardChain.of_iptables(family, "legacy" if tools.legacy else "nft"))
        return frozenset(places)

    async def _do(self, step: AcceptStep) -> None:
        found, place = step.found, step.found.forward_chain
        if step.writes:
            try:
                self._record.record_accept(self._settings.chain_prefix, str(place))
            except OSError as error:
                what = "what is done to this host cannot be recorded"
                raise ApplyError(what, str(error), "mend state_dir; nothing was written") from None
        await write(place, found.insert_text if step.writes else found.delete_text, self._run)
        if step.writes:
            log.info("%s accepts flows that vipd translated from now on", place)
        else:
            self._reader.forget(place)
            self._record.forget_accept(str(place))
            log.info("%s: vipd's accept is removed", place)


def _obstacles_of_dataplane(
    found: Collection[ForwardChainState], families: Collection[Family]
) -> tuple[str, ...]:
    """The obstacles with one dataplane, without those that exist with each."""
    return make_plan([each for each in found if each.forward_chain.writable], families)[1]


async def write(place: ForwardChain, text: str, run: Runner) -> None:
    """Give a place's program its input. Raises ApplyError."""
    if place.variant:
        await restore(await tools_of(place, run), text, run)
    else:
        await apply_transaction(text, run)
