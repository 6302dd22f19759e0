"""Reads this host's network at intervals, in a thread beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from vipd.declaration.problems import PLEASE_REPORT, internal_error
from vipd.declaration.syntax import parse_frontend
from vipd.host.accounts import CachedLookup
from vipd.host.facts import NO_FACTS, HostFacts, LocalSocket
from vipd.host.local_sockets import LocalSockets
from vipd.host.netlink import MalformedMessageError
from vipd.host.network import HostNetwork, read_neighbours, read_network, read_proxied
from vipd.host.processes import Processes
from vipd.host.settings.settings import Settings
from vipd.host.vip_routes import ADDRESS_CHANGES, ROUTE_CHANGES, RouteWatcher
from vipd.model.service import Family, Protocol

log = logging.getLogger(__name__)

READ_TIMEOUT_SECONDS = 1.0
"""How long a caller waits for a reading, which takes some milliseconds. A longer one continues in the
background."""

MAX_RESOLV_CONF = 16 * 1024
"""Characters of /etc/resolv.conf that are read."""

T = TypeVar("T")


class HostReader:
    """Reads the configuration only after a change of it; neighbours and sockets each time."""

    def __init__(self, settings: Settings, root: Path = Path("/")) -> None:
        self._settings = settings
        self._changes = RouteWatcher(ROUTE_CHANGES | ADDRESS_CHANGES)
        self._stale = True
        self._network = HostNetwork()
        self._neighbours: dict[str, str] = {}
        self._proxied = frozenset[str]()
        self._etcd_servers = self._name_servers = frozenset[str]()
        self._processes, self._vrrp = Processes(root), False
        self._sockets = LocalSockets(root)
        self._listening: tuple[LocalSocket, ...] = ()
        self._facts = NO_FACTS
        self._faults: dict[str, str] = {}
        self._reading: asyncio.Future[None] | None = None
        self._slow = False
        """The last awaited reading took longer than the timeout."""

    async def read(self, own: frozenset[str]) -> HostFacts:
        """The current facts, on a host with these addresses. Unreadable ones keep their last known value."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._read))
            await asyncio.wait((self._reading,), timeout=READ_TIMEOUT_SECONDS)
            self._slow = not self._reading.done()
        else:  # it takes long, or hangs, and has already been waited for
            await asyncio.wait((self._reading,), timeout=0.05)
        self._facts = self._read_or_keep("what was read of it", lambda: self._combine(own), self._facts)
        return self._facts

    def faults(self) -> tuple[str, ...]:
        """Facts that cannot be read now, and why."""
        # A reading that has just begun is not slow, whoever calls at that moment.
        slow = self._slow and self._reading is not None and not self._reading.done()
        hangs = "this host cannot be looked at: reading its routes, neighbours and sockets takes long"
        return (*self._faults.values(), *((hangs,) if slow else ()))

    def _read(self) -> None:
        self._stale = self._read_or_keep("its changes", self._changes.changed, True) or self._stale
        if self._stale:
            device = self._settings.vip_device
            self._network = self._read_or_keep("its routes", lambda: read_network(device), self._network)
            # It runs before it adds an address, and adding one is a change.
            self._vrrp = self._read_or_keep("its processes", self._vrrp_runs, self._vrrp)
        devices = self._network.devices
        self._neighbours = self._read_or_keep(
            "its neighbours", lambda: read_neighbours(devices), self._neighbours
        )
        self._proxied = self._read_or_keep("its proxies", read_proxied, self._proxied)
        self._etcd_servers = self._read_or_keep(
            "its etcd", lambda: _etcd_servers(self._settings), self._etcd_servers
        )
        self._name_servers = self._read_or_keep(
            "its name servers", lambda: _name_servers(self._settings), self._name_servers
        )
        self._listening = self._read_or_keep("its sockets", self._sockets.read, self._listening)
        self._stale = bool(self._faults)

    def _vrrp_runs(self) -> bool:
        return bool(self._processes.running(("keepalived",)))

    def _read_or_keep(self, name: str, read: Callable[[], T], known: T) -> T:
        """The value read now, else the known one. A failure is logged once until it ends."""
        try:
            found = read()
        except Exception as error:
            expected = isinstance(error, OSError | MalformedMessageError)
            why = str(error) if expected else f"{internal_error(error, 'reading')}; {PLEASE_REPORT}"
            fault = f"this host cannot be looked at, {name}: {why}"
            if self._faults.get(name) != fault:
                log.warning("%s", fault, exc_info=None if expected else error)
            self._faults[name] = fault
            return known
        self._faults.pop(name, None)
        return found

    def _combine(self, own: frozenset[str]) -> HostFacts:
        settings, network = self._settings, self._network
        answering = {family: settings.node_addresses(family, own) for family in Family}
        sockets = (*_own_sockets(settings), *self._listening)
        return HostFacts(
            network.gateways,
            network.reserved_addresses,
            tuple(each for each in sockets if each.protected),
            self._etcd_servers,
            self._name_servers,
            {family: None if some is None else frozenset(some) for family, some in answering.items()},
            settings.answers_on_localhost,
            network.subnets,
            {**self._neighbours, **network.peers},
            sockets,
            own,
            {} if settings.compat == "kube-proxy" else network.addresses,
            self._vrrp,
            self._proxied,
        )


def _own_sockets(settings: Settings) -> tuple[LocalSocket, ...]:
    """The sockets on which vipd itself listens."""
    places = {
        "health_address": settings.health_socket_address(),
        "metrics_address": settings.metrics_socket_address(),
        "status_page": settings.page_socket_address(),
    }
    return tuple(
        LocalSocket(Protocol.TCP, *place, f"vipd itself ({name})", protected=True)
        for name, place in places.items()
        if place
    )


def _addresses_of(name: str) -> frozenset[str]:
    return frozenset(str(ip_address(entry[4][0])) for entry in socket.getaddrinfo(name, None))


_name_service: CachedLookup[str, frozenset[str]] = CachedLookup(_addresses_of, "the name service")


def _etcd_servers(settings: Settings) -> frozenset[str]:
    """The addresses of etcd's endpoints, without loopback ones, which no service may have anyway. A name that
    cannot be looked up keeps its last addresses."""
    servers = set[str]()
    for url in settings.etcd.endpoints if settings.etcd else ():
        name = urlsplit(url).hostname or ""
        with contextlib.suppress(ValueError):
            servers.add(str(ip_address(name)))
            continue
        with contextlib.suppress(OSError, KeyError):
            _name_service.get(name)
        servers.update(_name_service.cached(name) or ())
    return frozenset(server for server in servers if not ip_address(server).is_loopback)


def _name_servers(settings: Settings, resolv_conf: Path = Path("/etc/resolv.conf")) -> frozenset[str]:
    """The addresses of the name servers that are set, else of those in /etc/resolv.conf."""
    texts = [parse_frontend(place).address for place in settings.dns_servers]
    if not texts:
        with (
            contextlib.suppress(FileNotFoundError),
            resolv_conf.open(encoding="utf-8", errors="replace") as file,
        ):
            lines = map(str.split, file.read(MAX_RESOLV_CONF).splitlines())
            texts = [words[1] for words in lines if len(words) > 1 and words[0] == "nameserver"]
    servers = set[str]()
    for text in texts:
        with contextlib.suppress(ValueError):
            servers.add(str(ip_address(text)))
    return frozenset(servers)
