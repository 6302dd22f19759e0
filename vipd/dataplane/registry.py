"""Creates the available dataplanes, and removes their rules from the kernel."""

from __future__ import annotations

import logging
from pathlib import Path

from vipd.dataplane.base import ApplyError, Dataplane, DataplaneName, MissingProgramError
from vipd.dataplane.forward_accept.driver import ForwardAccepts
from vipd.dataplane.iptables import removal as iptables_removal
from vipd.dataplane.iptables.driver import IptablesDataplane
from vipd.dataplane.iptables.tools import has_legacy_tables
from vipd.dataplane.nftables import removal as nftables_removal
from vipd.dataplane.nftables.driver import NftablesDataplane
from vipd.dataplane.nftables.foreign_chains import dropping_chains
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.probe import Capabilities, probe
from vipd.dataplane.nftables.tools import find_nft
from vipd.dataplane.switching import Ready, no_preparation
from vipd.host.host_changes import HostChanges
from vipd.host.netlink_socket import Sockets
from vipd.host.process import Runner
from vipd.host.settings.settings import Settings
from vipd.model.service import Family

log = logging.getLogger(__name__)


class HostDataplanes:
    """Implements `DataplaneRegistry` on this host, in the network namespace in which `run` runs programs."""

    def __init__(
        self,
        settings: Settings,
        record: HostChanges,
        run: Runner,
        proc: Path = Path("/proc"),
        sockets: Sockets = Sockets(),  # noqa: B008 (immutable)
    ) -> None:
        self._settings, self._record, self._run, self._proc = settings, record, run, proc
        self._sockets = sockets
        self.prefix = settings.chain_prefix
        self.accepts = ForwardAccepts(settings, record, run)

    async def open(self, name: DataplaneName) -> Dataplane:
        """A dataplane that has written nothing yet. Raises ApplyError when this host cannot do it."""
        if name == "nftables":
            return await NftablesDataplane.start(self._settings, self._record, self._run, self._sockets)
        return await IptablesDataplane.start(
            self._settings, self._record, self._run, self.accepts.variants_to_keep
        )

    async def remove(self, name: DataplaneName, ready: Ready = no_preparation) -> bool:
        """Remove everything of a dataplane under vipd's prefix from the kernel; returns whether there was
        anything. Accepts in FORWARD stay if `accepts` requires them.

        `ready` is awaited just before. Raises ApplyError.
        """
        prefixes = (self._settings.chain_prefix,)
        if name == "nftables":
            tables = await nftables_removal.find_leftovers(prefixes)
            await ready()
            await nftables_removal.remove(tables, self._run)
            return bool(tables)
        # A process that may not read the list of legacy tables writes none of them. iptables-legacy-save
        # fails on that list, and then the rules of the nft variant would stay, too.
        rules = await iptables_removal.find_leftovers(
            prefixes,
            self._run,
            self.accepts.variants_to_keep(),
            has_legacy=lambda family: has_legacy_tables(family, self._proc),
        )
        await ready()
        await iptables_removal.remove(rules, self._run)
        return bool(rules)


async def resolve_dataplane(setting: str, settings: Settings, run: Runner) -> DataplaneName:
    """The dataplane for a setting. `auto` is nftables if nft and kernel have all required features,
    and no other table drops packets for health ports, or forwarded flows that vipd cannot accept there;
    else iptables. While a table of vipd's exists, a failure of nft does not decide: it may be
    temporary.
    """
    if setting != "auto":
        return "nftables" if setting == "nftables" else "iptables"
    try:
        nft = await find_nft(run)
        able = [await probe(nft, TableOptions.of(settings, family), run) for family in Family]
        accepts = ForwardAccepts(settings, HostChanges(settings.state_dir), run)
        drops = await dropping_chains() or await accepts.obstacles("nftables")
        if any(abilities != Capabilities() for abilities in able) or drops:
            return "iptables"
    except MissingProgramError:
        return "iptables"
    except (ApplyError, OSError) as error:
        chosen: DataplaneName = "nftables" if await _has_table(settings) else "iptables"
        log.warning("dataplane auto: %s, for nftables cannot be tried: %s", chosen, error)
        return chosen
    return "nftables"


async def _has_table(settings: Settings) -> bool:
    try:
        return bool(await nftables_removal.find_leftovers((settings.chain_prefix,)))
    except ApplyError:
        return False
