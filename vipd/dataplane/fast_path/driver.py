"""Keeps the fast path as the setting, the services and the devices of this host want it.

A packet of an offloaded flow goes from the ingress hook straight to the device it leaves by: it passes no
chain, so nothing here may depend on that. A fault is a state with a reason and never one of the dataplane.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from vipd.dataplane.base import ApplyError, MissingProgramError
from vipd.dataplane.fast_path.table import (
    FoundTable,
    devices_text,
    fast_path_table,
    read_table,
    removal_text,
    table_text,
    usable_devices,
)
from vipd.dataplane.nftables.tools import NFT, apply_transaction
from vipd.dataplane.programs import finish
from vipd.host.observer import Observer
from vipd.host.process import Runner
from vipd.host.rtnetlink import NEW_LINK, listing
from vipd.host.settings.settings import Settings
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Protocol

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0
"""Listing the devices and one small table takes some milliseconds."""
RETRY_POLLS = 12
"""Polls between two tries while the kernel refuses the table."""
MAX_LINKS = 20_000
DELETES_OFFLOADED = (6, 4)
"""The first Linux that deletes a conntrack entry whose flow is offloaded; earlier ones answer EBUSY."""
_MODULES = "modprobe nf_flow_table_inet nft_flow_offload, or fast_path: off"
_UP, _LOOPBACK, _ETHERNET = 0x1, 0x8, 1
_IFNAME, _MASTER = 3, 10
"""IFLA_IFNAME and IFLA_MASTER."""
_RELEASE = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class FastPathState:
    """Whether the fast path is in use."""

    active: bool
    reason: str
    """Why not; empty if it is active."""
    devices: tuple[str, ...] = ()
    fault: bool = False
    """It is wanted, and this host cannot do it."""


OFF = FastPathState(False, "fast_path is off in vipd.yaml")
IDLE = FastPathState(False, "no service has TCP ports")


def read_devices() -> frozenset[str]:
    """The Ethernet devices that are up and by which packets are routed: not ports of a bridge, bond or VRF,
    of which the device above counts. Raises OSError."""
    found = set()
    for link in listing(NEW_LINK, 0, MAX_LINKS):
        kind, _, flags = struct.unpack_from("=HiI", link.body, 2)
        routed = flags & _UP and not flags & _LOOPBACK and _MASTER not in link.attributes
        if kind == _ETHERNET and routed:
            found.add(link.attributes.get(_IFNAME, b"").rstrip(b"\0").decode("utf-8", "replace"))
    return frozenset(found)


class FastPath(Observer):
    """The fast path in the network namespace in which `run` runs programs."""

    def __init__(
        self,
        settings: Settings,
        run: Runner,
        devices: Callable[[], Collection[str]] = read_devices,
        release: str | None = None,
    ) -> None:
        """`release`: of the kernel; default: of this one."""
        self._settings, self._run, self._devices = settings, run, devices
        self._release = release or os.uname().release
        self._tcp: set[ForwardingKey] = set()
        self._resetting: set[ForwardingKey] = set()
        """Those whose flows end when their backend is removed."""
        self._changed = asyncio.Event()
        """There is now a first TCP service, or none any more; likewise for one whose flows end."""
        self._stepped = False
        """The kernel has been brought to all services once: that there is none with TCP is known then."""
        self._wait = 0
        """Polls that are left before the next try after a failure."""
        self._cleared = False
        """The kernel has no table of this name, as far as vipd did not write one."""
        self.state = FastPathState(False, "vipd has just started") if self._wanted else OFF

    def services_changed(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Take new forwardings, and None for those that are gone."""
        before = bool(self._tcp), bool(self._resetting)
        for key, forwarding in changes.items():
            if key.protocol is not Protocol.TCP:
                continue
            self._tcp.discard(key)
            self._resetting.discard(key)
            if forwarding is not None:
                self._tcp.add(key)
                if forwarding.ends_flows:
                    self._resetting.add(key)
        if before != (bool(self._tcp), bool(self._resetting)):
            self._changed.set()

    def stepped(self) -> None:
        """A step is over."""
        if not self._stepped:
            self._stepped = True
            self._changed.set()

    def warnings(self) -> tuple[str, ...]:
        """Why a wanted fast path is not in use."""
        if not self.state.fault:
            return ()
        reason, _, hint = self.state.reason.partition("; hint: ")
        told = f"no fast path: {reason}; flows pass the rules, as with fast_path: off"
        return (f"{told}; hint: {hint}" if hint else told,)

    def view(self) -> Mapping[str, object] | None:
        """The member `fast_path` of the API's Status; None if the settings do not ask for a fast path."""
        if not self._wanted:
            return None
        state = self.state
        return {"active": state.active, "reason": state.reason, "devices": list(state.devices)}

    async def poll(self) -> None:
        """One round of a loop: bring the kernel to what is wanted, then wait until that may have changed."""
        self._changed.clear()
        await self.sync()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_SECONDS):
                await self._changed.wait()

    async def sync(self) -> None:
        """Bring the kernel to what is wanted. A failure becomes the state, and is tried again later."""
        unwanted = self._unwanted()
        if unwanted is None and self._wait:
            self._wait -= 1
            return
        if unwanted is IDLE and not self._stepped:
            return  # flows that an earlier vipd offloaded stay so
        try:
            state = await self._remove(unwanted) if unwanted else await self._ensure()
        except (ApplyError, OSError, ValueError) as error:
            self._wait, self._cleared = RETRY_POLLS, False
            state = FastPathState(False, _reason(error), fault=self._wanted)
        self._take(state)

    @property
    def _wanted(self) -> bool:
        return self._settings.fast_path == "auto"

    def _unwanted(self) -> FastPathState | None:
        """Why no fast path is to be there; None: it is to be."""
        if not self._wanted:
            return OFF
        if self._settings.compat == "kube-proxy":
            return FastPathState(False, "compat: kube-proxy does not mark vipd's flows", fault=True)
        if not self._tcp:
            return IDLE
        if self._resetting and not _deletes_offloaded(self._release):
            named = min(str(key.service) for key in self._resetting)
            return FastPathState(
                False,
                f"Linux {self._release} cannot end an offloaded flow, and {named} has on_remove: reset; "
                "hint: Linux 6.4 or later, or fast_path: off",
                fault=True,
            )
        return None

    async def _remove(self, state: FastPathState) -> FastPathState:
        """Without a table, also without one that an earlier vipd left."""
        if not self._cleared and await self._read() is not None:
            await apply_transaction(removal_text(self._settings.chain_prefix), self._run)
        self._cleared = True
        return state

    async def _ensure(self) -> FastPathState:
        devices = await self._current_devices()
        while devices:
            try:
                await self._write(devices)
                return FastPathState(True, "", devices)
            except ApplyError:
                # The kernel refuses a device that has just vanished.
                before, devices = devices, await self._current_devices()
                if set(before) <= set(devices):
                    raise
        return await self._remove(FastPathState(False, "no Ethernet device is up", fault=True))

    async def _write(self, devices: Collection[str]) -> None:
        """Write what differs from the kernel. Only a device more leaves offloaded flows where they are."""
        prefix, found = self._settings.chain_prefix, await self._read()
        self._cleared = False
        if found is None or not found.complete or found.devices - set(devices):
            text = table_text(prefix, 1 << self._settings.flow_mark_bit, devices)
            await apply_transaction(text, self._run)
        elif missing := set(devices) - found.devices:
            await apply_transaction(devices_text(prefix, missing), self._run)

    async def _current_devices(self) -> tuple[str, ...]:
        return usable_devices(await asyncio.to_thread(self._devices), self._settings.vip_device)

    async def _read(self) -> FoundTable | None:
        """The table in the kernel; None: there is none. Raises ApplyError and ValueError."""
        family, name = fast_path_table(self._settings.chain_prefix).split()
        try:
            said = await finish([NFT, "-j", "list", "table", family, name], "", self._run)
        except MissingProgramError:
            return None  # to write it fails for the same reason
        if said.exit_code:
            if "No such file" in said.stderr or "not supported" in said.stderr:
                return None
            raise ApplyError("nft list failed", said.stderr.strip()[:200])
        return read_table(said.stdout)

    def _take(self, state: FastPathState) -> None:
        before, self.state = self.state, state
        if state == before:
            return
        if state.active:
            log.info("fast path: established TCP flows between %s skip the rules", ", ".join(state.devices))
        elif state.fault:
            log.warning("no fast path: %s", state.reason)


async def find_fast_paths(prefixes: Collection[str], run: Runner) -> tuple[str, ...]:
    """The chain prefixes that have a fast path in the kernel. Raises ApplyError."""
    try:
        said = await finish([NFT, "-j", "list", "tables", "inet"], "", run)
    except MissingProgramError:
        return ()  # without nft nobody wrote one
    return tuple(p for p in prefixes if f'"name": "{fast_path_table(p).split()[1]}"' in said.stdout)


async def remove_fast_paths(prefixes: Collection[str], run: Runner) -> None:
    """Remove them. Raises ApplyError."""
    for prefix in prefixes:
        await apply_transaction(removal_text(prefix), run)


def _deletes_offloaded(release: str) -> bool:
    match = _RELEASE.match(release)
    return match is not None and (int(match[1]), int(match[2])) >= DELETES_OFFLOADED


def _reason(error: Exception) -> str:
    if isinstance(error, ApplyError) and ("No such file" in error.why or "not supported" in error.why):
        return f"the kernel has no flowtables; hint: {_MODULES}"
    return str(error)
