"""Routes to VIPs, so that processes on this host reach them too.

Routing precedes nat OUTPUT: without a route to a VIP a local process gets "network is unreachable", and so
do forwarded clients of a service without backends, instead of a refusal (contract 7.9). A VIP that no
other route covers therefore gets a host route to a device that drops all packets that no rule has translated.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import logging
import os
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from vipd.host.host_changes import HostChanges
from vipd.host.netlink_socket import open_netlink
from vipd.host.route_table import (
    LINK_SCOPE,
    METRIC,
    PROTOCOL,
    WRONG_DEVICE,
    Device,
    RouteTable,
    Routing,
    read_routing,
    route_content,
)
from vipd.host.rtnetlink import write_routes
from vipd.model.service import Family, family_of

log = logging.getLogger(__name__)

IFF_UP, IFF_NOARP = 0x1, 0x80
IPV6_SETTINGS = Path("/proc/sys/net/ipv6/conf")
BATCH_SIZE = 500
"""VIPs that are checked before the event loop runs other tasks."""

ROUTE_CHANGES = 0x1 | 0x40 | 0x80 | 0x400 | 1 << 18
"""Netlink groups: links (IPv4 routes disappear silently with their device), routes and rules of both
families."""
ADDRESS_CHANGES = 0x10 | 0x100
"""Those of addresses of both families."""


class VipRoutes:
    """Maintains the routes of one network namespace. It costs nothing while neither VIPs nor routes
    change."""

    def __init__(self, device: str, record: HostChanges) -> None:
        self._device, self._record = device, record
        self._changes = RouteWatcher()
        self._vips: Mapping[str, str] = {}
        self._always: Collection[str] = ()
        self._moved: set[str] = set()
        """VIPs that are new, gone, or lead to another backend, since the routes were last updated."""
        self._stale = True
        self._warnings: tuple[str, ...] = ()
        self._foreign: RouteTable | None = None
        """The host's own routes as last read, while vipd needs none beside them."""

    def mark_dirty(self, vips: Collection[str]) -> None:
        """These VIPs are new, gone, or now lead to another backend."""
        self._moved.update(vips)

    async def ensure(self, vips: Mapping[str, str], always: Collection[str] = ()) -> tuple[str, ...]:
        """Make the routes right for these VIPs, each with a backend; a warning when that failed. Both are
        kept; call `mark_dirty` when their contents change later.

        `always`: VIPs that need a route whatever others there are. A router sends this host all packets to an
        address that it announces. One that no rule translates must not follow the default route back to the
        router, in a loop.
        """
        self._always = always
        if not self._device and not self._record.read().devices:
            return ()
        moved, self._moved, self._vips = self._moved, set(), vips
        if not self._stale and self._still_covered(moved, vips):
            return self._warnings
        self._changes.changed()
        problem = await self._attempt(vips)
        if problem and (problem,) != self._warnings:
            log.warning("%s", problem)
        self._stale = False
        self._warnings = (problem,) if problem else ()
        return self._warnings

    def _still_covered(self, moved: Collection[str], vips: Mapping[str, str]) -> bool:
        """Whether the routes are still right: nothing has changed, or the host's own lead to every VIP."""
        foreign = self._foreign
        if foreign is None:
            return not moved
        return all(foreign.covers(vip) and vip not in self._always for vip in moved if vip in vips)

    async def poll(self) -> bool:
        """Whether the routes must be updated because the host's own have changed."""
        if not self._device or not (self._changes.changed() or self._warnings):
            return False
        try:
            async with _Netlink() as netlink:
                routing = await read_routing(self._device)
                wanted, problem = await self._desired_routes(netlink, routing, dict(self._vips))
        except _failures():
            return self._stale
        warned = (problem,) if problem else ()
        self._stale = self._stale or wanted != routing.own_routes or warned != self._warnings
        return self._stale

    async def _attempt(self, vips: Mapping[str, str]) -> str:
        """Make it right; why that failed, if it did."""
        try:
            async with _Netlink() as netlink:
                return await self._reconcile(netlink, vips)
        except _failures() as error:
            return self._failed(error)

    async def _desired_routes(
        self, netlink: _Netlink, routing: Routing, vips: Mapping[str, str]
    ) -> tuple[dict[str, str], str]:
        """The routes to have, and why those that are needed cannot be."""
        wanted = await _missing(netlink, routing, vips, frozenset(self._always)) if self._device else {}
        if not wanted or routing.device is None or routing.device.usable:
            return wanted, ""
        return {}, (
            f"no route leads to {len(wanted)} VIPs, and {self._device} cannot carry one: it is "
            f"{routing.device.unusable_reason}; processes on this host do not reach them; "
            "hint: set vip_device to "
            "a name that is free"
        )

    async def _reconcile(self, netlink: _Netlink, vips: Mapping[str, str]) -> str:
        routing = await read_routing(self._device)
        wanted, problem = await self._desired_routes(netlink, routing, vips)
        self._foreign = None if wanted or problem else routing.table
        # Removing the device removes its routes, ten thousand at once.
        made = self._record.read().devices.get(self._device) == "made"
        device_goes = made and not wanted and routing.device is not None and routing.device.usable
        for vip in routing.own_routes.keys() - wanted.keys():
            if not device_goes or routing.own_routes[vip] == WRONG_DEVICE:
                await _delete(netlink, vip)
        new = {vip: source for vip, source in wanted.items() if routing.own_routes.get(vip) != source}
        if new:
            problem = await self._add_all(await self._device_up(netlink, routing.device), new)
            told = "1 VIP has" if len(new) == 1 else f"{len(new)} VIPs have"
            log.info("%s no other route; routed to %s from now on", told, self._device)
        for name in self._record.read().devices:
            if not wanted or name != self._device:
                await _restore_device(netlink, name, self._record)
        return problem

    async def _add_all(self, index: int, sources: Mapping[str, str]) -> str:
        """Add routes; returns the first failure. A family that the host does not have does not block the
        other."""
        routes = [route_content(vip, index, source) for vip, source in sources.items()]
        errors = await asyncio.to_thread(write_routes, routes)
        failed = next(((vip, error) for vip, error in zip(sources, errors, strict=True) if error), None)
        return self._failed(f"{failed[0]}: {os.strerror(failed[1])}") if failed else ""

    def _failed(self, why: object) -> str:
        return (
            f"no route to VIPs over {self._device or 'any device'}: {why}; processes on this host may not "
            "reach them; hint: a default route serves too, and vip_device: '' ends the attempts"
        )

    async def _device_up(self, netlink: _Netlink, device: Device | None) -> int:
        """The index of the device, made if need be, recorded and up."""
        name = self._device
        if device is None:
            self._record.forget_device(name)
            self._record.record_device(name, "made")
            await _make(netlink, name)
            device = (await read_routing(name)).device
            if device is None:
                raise OSError(f"{name} vanished as soon as it was made")
            _settle_ipv6(name)
        else:
            self._record.record_device(name, "up" if device.up else "down")
        if not device.up:
            # No host behind it resolves addresses; a bridge would query each, and answer "no such host".
            quiet = IFF_NOARP if self._record.read().devices[name] == "made" else 0
            await netlink.link("set", index=device.index, flags=IFF_UP | quiet, change=IFF_UP | quiet)
        return device.index


class RouteWatcher:
    """Detects that routes have changed, not which."""

    def __init__(self, groups: int = ROUTE_CHANGES) -> None:
        self._groups = groups
        self._socket: socket.socket | None = None

    def __del__(self) -> None:
        """An owner may live shorter than the process."""
        if self._socket is not None:
            self._socket.close()

    def changed(self) -> bool:
        """Whether anything has changed since the last call; True at the first, or if there are no
        notifications."""
        try:
            if self._socket is None:
                self._socket = open_netlink(socket.NETLINK_ROUTE, self._groups)
                self._socket.setblocking(False)
                return True
            return _drained(self._socket)
        except OSError:
            return True


def _drained(listening: socket.socket) -> bool:
    """Whether a socket held any message; afterwards it holds none."""
    found = False
    while True:
        try:
            listening.recv(1)  # the rest of the message is dropped
        except BlockingIOError:
            return found
        except OSError as error:
            if error.errno != errno.ENOBUFS:  # that means more changes than the buffer held
                raise
        found = True


async def restore_routes(record: HostChanges, dry_run: bool = False) -> list[str]:
    """Delete every route and device of vipd; returns what was done, or would be. Raises OSError."""
    done = []
    try:
        async with _Netlink() as netlink:
            ours = (await read_routing("")).own_routes
            for vip in () if dry_run else ours:
                await _delete(netlink, vip)
            number = "1 route" if len(ours) == 1 else f"{len(ours)} routes"
            done += [f"{number} to VIPs"] if ours else []
            for name, state in record.read().devices.items():
                done += [f"the device {name}"] if state == "made" else []
                if not dry_run:
                    await _restore_device(netlink, name, record)
    except _failures() as error:
        raise OSError(f"routes to VIPs: {error}") from None
    return done


async def _missing(
    netlink: _Netlink, routing: Routing, vips: Mapping[str, str], always: Collection[str]
) -> dict[str, str]:
    """The VIPs that no foreign route covers, and those in `always`, each with the source address of its
    route.

    That is the address from which this host reaches the backend. The kernel would choose the first
    address of any device, to which a backend may have no way back: on a router that is the address on lo.
    """
    found: dict[str, str] = {}
    sources: dict[object, str] = {}
    for number, (vip, backend) in enumerate(vips.items()):
        if number % BATCH_SIZE == BATCH_SIZE - 1:
            await asyncio.sleep(0)  # the event loop gets its turn: ten thousand take 0.1 s
        if vip not in always and routing.table.covers(vip):
            continue
        route = routing.table.best(backend) if backend and family_of(backend) is family_of(vip) else None
        if route is not None and route not in sources:
            sources[route] = await _source_towards(netlink, backend)
        found[vip] = sources[route] if route is not None else ""
    return found


async def _source_towards(netlink: _Netlink, address: str) -> str:
    with contextlib.suppress(*_failures()):
        for answer in await netlink.route("get", dst=address):
            return str(answer.get_attr("RTA_PREFSRC") or "")
    return ""


async def _make(netlink: _Netlink, name: str) -> None:
    """A dummy device, or a bridge without ports where the kernel has no dummies."""
    try:
        await netlink.link("add", ifname=name, kind="dummy")
    except _failures():
        await netlink.link("add", ifname=name, kind="bridge")
    log.info("made the device %s", name)


def _settle_ipv6(name: str) -> None:
    """IPv6 on, or its routes are refused; and no link-local address, which would be one of this host's."""
    for setting, value in (("addr_gen_mode", "1"), ("disable_ipv6", "0")):
        with contextlib.suppress(OSError):  # a kernel without IPv6
            (IPV6_SETTINGS / name / setting).write_text(value)


async def _delete(netlink: _Netlink, vip: str) -> None:
    with contextlib.suppress(*_failures()):  # already gone; after any other failure a poll finds the rest
        await netlink.route("del", **_route_to(vip))


def _route_to(vip: str) -> dict[str, object]:
    """The identity of a route of vipd's. IPv4 routes have a scope, also for deletion."""
    family = family_of(vip)
    scope = {"scope": LINK_SCOPE} if family is Family.IPV4 else {}
    return {"dst": f"{vip}/{family.bits}", "proto": PROTOCOL, "priority": METRIC, **scope}


async def _restore_device(netlink: _Netlink, name: str, record: HostChanges) -> None:
    """Restore a device to its original state; one that vipd made is deleted, unless it is in use by now."""
    device = (await read_routing(name)).device
    state = record.read().devices[name]
    if device and state == "made" and device.usable:
        await netlink.link("del", index=device.index)
        log.info("deleted the device %s", name)
    elif device and state == "down":
        await netlink.link("set", index=device.index, state="down")
    record.forget_device(name)


class _Netlink:
    """Changes devices and routes, by an `AsyncIPRoute` from the first use on: on most hosts there is nothing
    to change, and pyroute2 takes 9 MiB and a tenth of a second."""

    def __init__(self) -> None:
        self._stack = contextlib.AsyncExitStack()
        self._opened: Any = None

    async def __aenter__(self) -> _Netlink:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def link(self, *command: str, **arguments: object) -> Any:
        """A command for a device. Raises OSError and NetlinkError."""
        return await (await self._open()).link(*command, **arguments)

    async def route(self, *command: str, **arguments: object) -> Any:
        """A command for a route. Raises OSError and NetlinkError."""
        return await (await self._open()).route(*command, **arguments)

    async def _open(self) -> Any:
        if self._opened is None:
            pyroute2 = await asyncio.to_thread(importlib.import_module, "pyroute2")
            self._opened = await self._stack.enter_async_context(pyroute2.AsyncIPRoute())
        return self._opened


def _failures() -> tuple[type[Exception], ...]:
    from pyroute2.netlink.exceptions import NetlinkError

    return (OSError, NetlinkError)
