"""vipd's own ways of programming services, driven as its reconciler drives them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from tests.bench.trials.usage import Meter
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.dataplane.iptables.driver import IptablesDataplane
from vipd.dataplane.nftables.driver import NftablesDataplane
from vipd.host.gc_control import gc_paused
from vipd.host.host_changes import HostChanges
from vipd.host.process import Runner, run
from vipd.host.settings.settings import Settings
from vipd.model.service import Service


class Subject(Protocol):
    """Programs services into the network namespace that it runs in. Its preparation is not measured."""

    def prepare(self, services: Sequence[Service]) -> None:
        """Set all services."""

    async def load(self, meter: Meter) -> None:
        """Program them into the empty kernel. Raises ApplyError and ProgramTimeoutError."""

    def prepare_change(self, service: Service) -> None:
        """Set one service's new form."""

    async def change(self, meter: Meter) -> None:
        """Program that change. Raises as `load`."""

    async def collect_garbage(self) -> None:
        """Delete the leftovers of the change. Raises as `load`."""

    async def counts(self) -> dict[str, int]:
        """Current `chains`, `rules` and `elements` in the kernel, of all programs."""


class Vipd:
    """From parsed services to a kernel in sync: selects, compiles, plans and applies."""

    def __init__(self, dataplane: str, variant: Literal["auto", "nft", "legacy"], state_dir: Path) -> None:
        self._name = dataplane
        self._settings = Settings(state_dir=state_dir, iptables_variant=variant)
        self._policy = SelectionPolicy.of(self._settings, ())
        self._services: Sequence[Service] = ()
        self._dataplane: IptablesDataplane | NftablesDataplane | None = None

    def prepare(self, services: Sequence[Service]) -> None:
        """Set all services."""
        self._services = services

    async def load(self, meter: Meter) -> None:
        """Everything that a cold start does once it has read its files."""
        record = HostChanges(self._settings.state_dir)
        kind = NftablesDataplane if self._name == "nftables" else IptablesDataplane
        with gc_paused():
            self._dataplane = await kind.start(self._settings, record, meter.run)
            await self._step(self._services)

    def prepare_change(self, service: Service) -> None:
        """Set one service's new form."""
        self._services = (service,)

    async def change(self, meter: Meter) -> None:
        """Like the reconciler for a changed service; `meter` is the one of the load."""
        await self._step(self._services)

    async def collect_garbage(self) -> None:
        """Like the daemon a second after the last change."""
        assert self._dataplane is not None
        await self._dataplane.collect_garbage()

    async def counts(self) -> dict[str, int]:
        """Counts the output of the tools."""
        if self._name == "nftables":
            return await count_nft(run)
        return await count_iptables(self._settings.iptables_variant, run)

    async def _step(self, services: Sequence[Service]) -> None:
        assert self._dataplane is not None
        chosen = [forwarding for service in services for forwarding in select_backends(service, self._policy)]
        self._dataplane.update({forwarding.key: forwarding for forwarding in chosen})
        await self._dataplane.apply(await self._dataplane.plan())


async def count_iptables(variant: str, run: Runner) -> dict[str, int]:
    """Chains and rules of all IPv4 tables of an iptables variant, built-in chains included."""
    program = "iptables-save" if variant == "auto" else f"iptables-{variant}-save"
    lines = (await run([program], "")).stdout.splitlines()
    return {
        "chains": sum(line.startswith(":") for line in lines),
        "rules": sum(line.startswith("-A ") for line in lines),
        "elements": 0,
    }


async def count_nft(run: Runner) -> dict[str, int]:
    """Chains, rules and elements of sets and maps of all nftables tables."""
    listed = json.loads((await run(["nft", "-j", "list", "ruleset"], "")).stdout)["nftables"]
    holders = [each.get("map") or each.get("set") for each in listed]
    return {
        "chains": sum("chain" in each for each in listed),
        "rules": sum("rule" in each for each in listed),
        "elements": sum(len(holder.get("elem", ())) for holder in holders if holder),
    }


VIPD: dict[str, tuple[str, Literal["auto", "nft", "legacy"]]] = {
    "vipd iptables-nft": ("iptables", "nft"),
    "vipd iptables-legacy": ("iptables", "legacy"),
    "vipd nftables": ("nftables", "auto"),
}
"""Dataplane and iptables variant by the name in tables."""


def vipd_subject(name: str, directory: Path) -> Vipd:
    """The subject of that name, with its files in a directory. Raises KeyError."""
    return Vipd(*VIPD[name], directory / "state")
