"""Reads this host's network at intervals, in a thread beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from vipd.declaration.problems import PLEASE_REPORT, internal_error
from vipd.declaration.syntax import parse_frontend
from vipd.host.accounts import CachedLookup
from vipd.host.facts import ANY_IPV6, NO_FACTS, HostFacts, LocalSocket
from vipd.host.local_sockets import LocalSockets
from vipd.host.netlink import MalformedMessageError
from vipd.host.network import HostNetwork, read_neighbours, read_network, read_proxied
from vipd.host.processes import Processes
from vipd.host.resolv_conf import resolv_conf_servers
from vipd.host.settings.settings import Settings
from vipd.host.vip_routes import ADDRESS_CHANGES, ROUTE_CHANGES, RouteWatcher
from vipd.model.service import Family, Protocol

log = logging.getLogger(__name__)

RESOLV_CONFS = (Path("etc/resolv.conf"), Path("run/systemd/resolve/resolv.conf"))
"""The name servers of this host; and those that systemd-resolved asks, whose own address is a loopback
one."""
_MAX_ADDRESSES_OF_NAME = 64

_ETCD_HINT = "choose an address that no host has: vipd would not reach etcd any more"
_NAME_SERVER_HINT = "choose an address that no host has, or set dns_servers to servers that no service has"

READ_TIMEOUT_SECONDS = 1.0
"""How long a caller waits for a reading, which takes some milliseconds. A longer one continues in the
background."""

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
        self._etcd: tuple[_Endpoint, ...] = ()
        self._name_servers: Mapping[str, str] = {}
        self._resolv_confs = tuple(root / path for path in RESOLV_CONFS)
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
        self._etcd = self._read_or_keep("its etcd", lambda: tuple(_endpoints(self._settings)), self._etcd)
        self._name_servers = self._read_or_keep(
            "its name servers", self._read_name_servers, self._name_servers
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
        local_etcd = [e for e in self._etcd if e.loopback or e.address in own]
        sockets = (*_own_sockets(settings), *map(_etcd_socket, local_etcd), *self._listening)
        return HostFacts(
            network.gateways,
            network.reserved_addresses,
            tuple(each for each in sockets if each.protected),
            frozenset(e.address for e in self._etcd if e.of_settings and not e.loopback),
            tuple(_etcd_socket(e) for e in local_etcd if e.of_settings),
            self._dependencies(),
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

    def _dependencies(self) -> dict[str, tuple[str, str]]:
        etcd = {
            e.address: (f"an address of etcd, which feeds this host ({e.name})", _ETCD_HINT)
            for e in self._etcd
            if not (e.of_settings or e.loopback)
        }
        servers = {
            address: (f"a name server that vipd asks ({by})", _NAME_SERVER_HINT)
            for address, by in self._name_servers.items()
        }
        return {**servers, **etcd}

    def _read_name_servers(self) -> dict[str, str]:
        """The name servers that vipd asks, without loopback ones, each with who names it. The C library asks
        those of resolv.conf for the names of etcd's endpoints, whatever the settings say."""
        servers = {parse_frontend(place).address: "dns_servers" for place in self._settings.dns_servers}
        if not servers or any(endpoint.name for endpoint in self._etcd):
            for path in self._resolv_confs:
                with contextlib.suppress(FileNotFoundError):
                    for address in resolv_conf_servers(path):
                        servers.setdefault(_canonical(address), str(path))
        return {address: by for address, by in servers.items() if not ip_address(address).is_loopback}


def _canonical(text: str) -> str:
    """An address as services name it: without a zone, and IPv4 as such. Raises ValueError."""
    address = ip_address(text.partition("%")[0])
    return str((address.version == 6 and address.ipv4_mapped) or address)


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
    return frozenset(_canonical(str(entry[4][0])) for entry in socket.getaddrinfo(name, None))


_name_service: CachedLookup[str, frozenset[str]] = CachedLookup(_addresses_of, "the name service")


class _Endpoint(NamedTuple):
    """An address of an endpoint of etcd."""

    address: str
    port: int
    name: str = ""
    """The name that it was found by; empty: the settings have the address."""

    @property
    def loopback(self) -> bool:
        """Whether it is on this host, by an address that no service may have anyway."""
        return ip_address(self.address).is_loopback

    @property
    def of_settings(self) -> bool:
        """Whether it follows from the settings, and not from what a name server says."""
        return not self.name or self.loopback


def _endpoints(settings: Settings) -> Iterator[_Endpoint]:
    """The addresses of etcd's endpoints. A name that cannot be looked up keeps its last ones."""
    for url in settings.etcd.endpoints if settings.etcd else ():
        parts = urlsplit(url)
        name, port = parts.hostname or "", parts.port or 0
        with contextlib.suppress(ValueError):
            yield _Endpoint(_canonical(name), port)
            continue
        with contextlib.suppress(OSError, KeyError):
            _name_service.get(name)
        for address in sorted(_name_service.cached(name) or ())[:_MAX_ADDRESSES_OF_NAME]:
            yield _Endpoint(address, port, name)


def _etcd_socket(endpoint: _Endpoint) -> LocalSocket:
    """The port of an etcd on this host, by whichever address others reach it."""
    owner = "etcd, which feeds this host"
    return LocalSocket(Protocol.TCP, ANY_IPV6, endpoint.port, owner, protected=True)
