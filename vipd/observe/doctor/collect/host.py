"""Collects all facts about this host, in order: the daemon first, because its settings apply."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from vipd.dataplane.base import ApplyError
from vipd.host.process import ProgramTimeoutError, Runner
from vipd.host.process import run as run_program
from vipd.host.processes import Processes
from vipd.host.settings.settings import Settings
from vipd.model.service import Family
from vipd.observe.doctor.collect.announcing import read_announcing
from vipd.observe.doctor.collect.contacts import Connect, connect_to, contact, read_unresolved
from vipd.observe.doctor.collect.daemon import ask_daemon, describe, serves_elsewhere
from vipd.observe.doctor.collect.firewall_rules import (
    read_flowtables,
    read_nft,
    read_rulesets,
    tables_of_iptables,
)
from vipd.observe.doctor.collect.kernel import read_kernel, reread
from vipd.observe.doctor.collect.network import read_network
from vipd.observe.doctor.collect.programs import find_programs
from vipd.observe.doctor.collect.services import from_daemon, from_files, named
from vipd.observe.doctor.collect.state import read_socket_file, read_state_dir
from vipd.observe.doctor.facts import (
    Announcing,
    Contacts,
    Daemon,
    Facts,
    Kernel,
    Network,
    Programs,
    ServedPort,
    SocketFile,
    StateDir,
)
from vipd.observe.doctor.finding import internal_error_text
from vipd.observe.doctor.rules import NftForward, Ruleset

WATCHED_PROGRAMS = ("kube-proxy", "keepalived")
"""Processes that checks look for."""


WATCHED_SECONDS = 1.0
"""Minimum time for which the counters of connection tracking are watched: totals show no current problem."""

T = TypeVar("T")


class UnknownTargetError(LookupError):
    """No service has this name or frontend."""


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """The scope of a diagnosis."""

    settings: Settings
    """From files; the settings of a running daemon take precedence."""
    settings_faults: tuple[str, ...] = ()
    socket: str = ""
    """The daemon's, if named; else the one of the settings."""
    target: str = ""
    """The only service to check; empty: all."""
    root: Path = Path("/")
    """Replaces `/` for /proc and /sys."""
    run: Runner = run_program
    connect: Connect = connect_to
    as_root: bool = True


def collect(options: CollectOptions) -> Facts:
    """Collect all facts. Raises UnknownTargetError."""
    return asyncio.run(_collect(options))


async def _collect(options: CollectOptions) -> Facts:
    root, run, privileged = options.root, options.run, options.as_root
    status, views, fault = ask_daemon(options.socket or str(options.settings.socket))
    in_other_namespace = bool(status) and serves_elsewhere(int(status.get("pid", 0)), root)
    if in_other_namespace:
        status, views = {}, []
    settings = _settings_of(status) or options.settings
    before = await _or_on_error(_kernel(root, settings, privileged), lambda why: Kernel(fault=why))
    began = time.monotonic()
    daemon = describe(status, fault, root, settings.chain_prefix, in_other_namespace)
    every, refused, services_fault = await _or_on_error(
        _declared(settings, daemon, views), lambda why: ((), (), why)
    )
    services = named(every, options.target) if options.target else every
    if options.target and not services and not services_fault:
        raise UnknownTargetError(options.target)
    rulesets, rules_fault = await _or_on_error(_rulesets(root, run, privileged), lambda why: ((), why))
    chains, tables, nft_fault = await _or_on_error(
        _nft(settings, run, privileged), lambda why: ((), frozenset(), why)
    )
    flowtables, offload_fault = await _or_on_error(_flowtables(run, privileged), lambda why: ((), why))
    nft_fault = nft_fault or offload_fault
    dataplane = _dataplane(status, settings, tables)
    families = tuple(sorted({port.family for port in services}))
    programs = await _or_on_error(
        find_programs(settings, families, privileged, run, dataplane), lambda why: Programs(fault=why)
    )
    network = await _or_on_error(
        read_network(_addresses(services), _ports(services), root, run),
        lambda why: Network(fault=why, listeners_fault=why),
    )
    socket, socket_fault = await _or_on_error(_socket(settings), lambda why: (None, why))
    state = await _or_on_error(_state(settings, privileged), lambda why: StateDir(fault=why))
    running = await _or_on_error(_running(root), lambda why: None)
    announcing, announcing_fault = await _or_on_error(
        _announcing(status, run, root), lambda why: (Announcing(), why)
    )
    contacts = await _or_on_error(
        contact(services, bool(options.target), options.connect, root), lambda why: Contacts(fault=why)
    )
    unresolved, neighbours_fault = await _or_on_error(
        _unresolved(services, contacts, network, run), lambda why: ({}, why)
    )
    await asyncio.sleep(max(0.0, began + WATCHED_SECONDS - time.monotonic()))
    watched = time.monotonic() - began
    return Facts(
        settings,
        options.settings_faults if not status else (),
        privileged,
        dataplane,
        services,
        services_fault,
        refused,
        programs,
        rulesets,
        rules_fault,
        chains,
        flowtables,
        nft_fault,
        tables,
        await _or_on_error(_later(root, before, watched), lambda why: replace(before, counters_fault=why)),
        network,
        daemon,
        socket,
        socket_fault,
        state,
        running,
        announcing,
        announcing_fault,
        replace(contacts, unresolved=unresolved, neighbours_fault=neighbours_fault),
    )


async def _or_on_error(collecting: Awaitable[T], without: Callable[[str], T]) -> T:
    """The result of a collector; if it failed, the substitute for it, with the reason."""
    try:
        return await collecting
    except (OSError, ProgramTimeoutError, ApplyError) as error:
        return without(str(error))
    except Exception as error:
        return without(internal_error_text("look", error))


async def _kernel(root: Path, settings: Settings, privileged: bool) -> Kernel:
    return await asyncio.to_thread(read_kernel, root, netlink=privileged, clock=_uses_etcd(settings))


async def _later(root: Path, before: Kernel, watched: float) -> Kernel:
    return reread(root, before, watched)


async def _rulesets(root: Path, run: Runner, privileged: bool) -> tuple[tuple[Ruleset, ...], str]:
    return await read_rulesets(root / "proc", run, tables_of_iptables) if privileged else ((), "")


async def _nft(
    settings: Settings, run: Runner, privileged: bool
) -> tuple[tuple[NftForward, ...], frozenset[Family], str]:
    return await read_nft(settings.chain_prefix, run) if privileged else ((), frozenset(), "")


async def _flowtables(run: Runner, privileged: bool) -> tuple[tuple[str, ...], str]:
    return (await read_flowtables(run) if privileged else ()), ""


async def _socket(settings: Settings) -> tuple[SocketFile | None, str]:
    return read_socket_file(settings), ""


async def _state(settings: Settings, privileged: bool) -> StateDir:
    return read_state_dir(settings, privileged)


async def _running(root: Path) -> frozenset[str] | None:
    return Processes(root).running(WATCHED_PROGRAMS)


async def _announcing(status: Mapping[str, Any], run: Runner, root: Path) -> tuple[Announcing, str]:
    return await read_announcing(status, run, root), ""


async def _unresolved(
    services: tuple[ServedPort, ...], contacts: Contacts, network: Network, run: Runner
) -> tuple[Mapping[str, str], str]:
    return await read_unresolved(services, contacts.results, network.routes, run), ""


async def _declared(
    settings: Settings, daemon: Daemon, views: list[Mapping[str, Any]]
) -> tuple[tuple[ServedPort, ...], tuple[str, ...], str]:
    """Services and problems of declarations, of the daemon if it answered."""
    if daemon.status:
        refused = [str(p) for source in daemon.status["sources"] for p in source["problems"]]
        return from_daemon(views), tuple(refused), ""
    return *await from_files(settings), ""


def _settings_of(status: Mapping[str, Any]) -> Settings | None:
    """The daemon's own settings; those that this version does not know are left out."""
    settings = status.get("settings")
    if not isinstance(settings, dict):
        return None
    try:
        return Settings(**{name: value for name, value in settings.items() if name in Settings.model_fields})
    except ValueError:
        return None  # of another version


def _dataplane(status: Mapping[str, Any], settings: Settings, tables: frozenset[Family]) -> str:
    """The one in use, as the daemon reports, else as set; if that is open, by the rules in the kernel."""
    named = status.get("dataplane", {}).get("name") or str(settings.dataplane)
    if named in ("iptables", "nftables"):
        return str(named)
    return "nftables" if tables else "iptables"


def _uses_etcd(settings: Settings) -> bool:
    return any(name.startswith("etcd") and value for name, value in settings.model_dump().items())


def _addresses(services: tuple[ServedPort, ...]) -> list[str]:
    found = (
        address
        for port in services
        for address in (*port.addresses, *(backend for backend, _ in port.backends))
    )
    return list(dict.fromkeys(found))


def _ports(services: tuple[ServedPort, ...]) -> frozenset[int]:
    wanted = {number for port in services for _, number in port.backends}
    return frozenset(wanted | {port.node_port for port in services if port.node_port})


def is_root() -> bool:
    """Whether rules and other users' sockets can be read."""
    return os.geteuid() == 0
