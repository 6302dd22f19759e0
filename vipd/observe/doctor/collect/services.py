"""The services: from the daemon, or from files and store if no daemon answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from vipd.control.address_policy import AddressPolicy
from vipd.control.admission import admit_unit
from vipd.control.catalog import MergeResult, merge
from vipd.control.host import Host
from vipd.control.selection import select_backends
from vipd.declaration.syntax import InvalidTextError, parse_frontend
from vipd.host.host_changes import HostChanges
from vipd.host.settings.settings import Settings
from vipd.model.backend_status import UNCHECKED
from vipd.model.forwarding import Forwarding
from vipd.model.service import Family, Protocol
from vipd.observe.doctor.facts import ServedPort
from vipd.sources.cache import FILE_NAME as CACHE_FILE
from vipd.sources.cache import Cache
from vipd.sources.files import FileSource
from vipd.sources.state import FILE_NAME
from vipd.sources.store import StoreSource

FAMILIES = {str(family): family for family in Family}


def from_daemon(services: Iterable[Mapping[str, Any]]) -> tuple[ServedPort, ...]:
    """From the API's ServiceViews."""
    return tuple(_of_view(service, view) for service in services for view in service["forwardings"])


async def from_files(settings: Settings) -> tuple[tuple[ServedPort, ...], tuple[str, ...]]:
    """The forwardings of a daemon with these settings on this host, and the problems of declarations.

    Raises OSError if this host's addresses cannot be read.
    """
    foreign_chains = Host(settings, HostChanges(settings.state_dir))
    policy, claims = await foreign_chains.policy(), foreign_chains.claims()
    merged, faults = await asyncio.to_thread(_read, settings, claims)
    chosen = (f for service in merged.services.values() for f in select_backends(service, policy))
    problems = [str(problem) for found in merged.problems.values() for problem in found]
    return tuple(map(_of_forwarding, chosen)), (*problems, *faults)


def _read(settings: Settings, claims: AddressPolicy) -> tuple[MergeResult, tuple[str, ...]]:
    """Files and store, as `vipd --check` reads them; a separate check reports faults of the store."""
    files = FileSource(settings.services_dir, Cache(settings.state_dir / CACHE_FILE, repair=False))
    store = StoreSource(settings.state_dir / FILE_NAME, repair=False)
    files.scan()
    store.load()
    units = {**files.units(), **store.units()}
    return merge({name: admit_unit(unit, claims) for name, unit in units.items()}), files.faults()


def _of_view(service: Mapping[str, Any], view: Mapping[str, Any]) -> ServedPort:
    announced = {each["address"] for each in service.get("announced", ())}
    frontends = [parse_frontend(text) for text in (*view["frontends"], *view["external"])]
    return ServedPort(
        service["name"],
        FAMILIES[view["family"]],
        Protocol(view["protocol"]),
        frontends[0].port if frontends else 0,
        tuple(frontend.address for frontend in frontends),
        view["node_port"],
        tuple((endpoint["address"], endpoint["port"]) for endpoint in view["endpoints"]),
        frozenset((each["address"], each["port"]) for each in view["endpoints"] if each["ready"]),
        frozenset((e["address"], e["port"]) for e in view["endpoints"] if e["health"] != UNCHECKED),
        view["affinity_seconds"] is not None,
        view["masquerade"],
        frozenset(parse_frontend(text).address for text in view["external"]) - announced,
    )


def _of_forwarding(forwarding: Forwarding) -> ServedPort:
    known = (*forwarding.reachable(), *forwarding.without_new_flows, *forwarding.unavailable)
    external = frozenset(each.address for each in forwarding.external_addresses)
    return ServedPort(
        forwarding.key.service,
        forwarding.key.family,
        forwarding.key.protocol,
        forwarding.port,
        (*forwarding.addresses, *(each.address for each in forwarding.external_addresses)),
        forwarding.node_port,
        tuple((endpoint.address, endpoint.port) for endpoint in known),
        frozenset((endpoint.address, endpoint.port) for endpoint in forwarding.reachable()),
        frozenset(),  # without a daemon nobody checks them
        forwarding.affinity_timeout is not None,
        str(forwarding.masquerade),
        external.difference(forwarding.announced_addresses() if forwarding.announcement else ()),
    )


def named(services: Iterable[ServedPort], target: str) -> tuple[ServedPort, ...]:
    """The ports that a target matches: a name, a frontend or a virtual IP."""
    try:
        frontend = parse_frontend(target)
    except InvalidTextError:
        frontend = None
    return tuple(
        port
        for port in services
        if target == port.service
        or target in port.addresses
        or (frontend and frontend.address in port.addresses and frontend[1:] == (port.port, port.protocol))
    )
