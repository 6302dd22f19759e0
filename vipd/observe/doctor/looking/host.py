"""All facts about this host, in order: the daemon first, for its settings are those that count."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vipd.model import Family
from vipd.observe.doctor.facts import Daemon, Facts, ServedPort
from vipd.observe.doctor.looking.daemon import ask, describe, held_prefixes, serves_elsewhere
from vipd.observe.doctor.looking.firewall_rules import read_nft, read_rulesets
from vipd.observe.doctor.looking.kernel import read_kernel
from vipd.observe.doctor.looking.network import read_network
from vipd.observe.doctor.looking.processes import Processes
from vipd.observe.doctor.looking.programs import find_programs
from vipd.observe.doctor.looking.services import from_daemon, from_files, named
from vipd.observe.doctor.looking.state import read_socket_file, read_state_dir
from vipd.process import Runner
from vipd.process import run as run_program
from vipd.settings import Settings

ASKED_AFTER = ("kube-proxy",)
"""Processes that a check wants to know of."""


class UnknownTargetError(LookupError):
    """No service has this name or frontend."""


@dataclass(frozen=True, slots=True)
class Question:
    """What to look at, and where."""

    settings: Settings
    """As files say; a daemon that answers has the last word on its own."""
    settings_faults: tuple[str, ...] = ()
    socket: str = ""
    """The daemon's, if named; else as the settings say."""
    target: str = ""
    """The only service to look at; empty: all."""
    root: Path = Path("/")
    """What stands for `/` of /proc and /sys."""
    run: Runner = run_program
    as_root: bool = True


def look(question: Question) -> Facts:
    """Look at everything. Raises UnknownTargetError."""
    return asyncio.run(_look(question))


async def _look(question: Question) -> Facts:
    root, run, privileged = question.root, question.run, question.as_root
    status, views, fault = ask(question.socket or str(question.settings.socket))
    elsewhere = bool(status) and serves_elsewhere(int(status["pid"]), root)
    if elsewhere:
        status, views = {}, []
    settings = _settings_of(status) or question.settings
    daemon = describe(status, fault, held_prefixes(root), settings.chain_prefix, elsewhere)
    every, refused = await _declared(settings, daemon, views)
    services = named(every, question.target) if question.target else every
    if question.target and not services:
        raise UnknownTargetError(question.target)
    rulesets, rules_fault = await read_rulesets(root / "proc", run) if privileged else ((), "")
    families = tuple(sorted({port.family for port in services}))
    chains, tables = await read_nft(settings.chain_prefix, run) if privileged else ((), frozenset())
    dataplane = _dataplane(status, settings, tables)
    programs = await find_programs(settings, families, privileged, run, dataplane)
    return Facts(
        settings,
        question.settings_faults if not status else (),
        privileged,
        dataplane,
        services,
        refused,
        programs,
        rulesets,
        rules_fault,
        chains,
        tables,
        await asyncio.to_thread(read_kernel, root, netlink=privileged, clock=_uses_etcd(settings)),
        await read_network(_addresses(services), _ports(services), root, run),
        daemon,
        read_socket_file(settings),
        read_state_dir(settings, privileged),
        Processes(root).running(ASKED_AFTER),
    )


async def _declared(
    settings: Settings, daemon: Daemon, views: list[Mapping[str, Any]]
) -> tuple[tuple[ServedPort, ...], tuple[str, ...]]:
    """Services and problems of declarations, of the daemon if it answered."""
    if daemon.status:
        refused = [str(p) for source in daemon.status["sources"] for p in source["problems"]]
        return from_daemon(views), tuple(refused)
    return await from_files(settings)


def _settings_of(status: Mapping[str, Any]) -> Settings | None:
    """The daemon's own settings; those that this version does not know are left out."""
    told = status.get("settings")
    if not isinstance(told, dict):
        return None
    try:
        return Settings(**{name: value for name, value in told.items() if name in Settings.model_fields})
    except ValueError:
        return None  # of another version


def _dataplane(status: Mapping[str, Any], settings: Settings, tables: frozenset[Family]) -> str:
    """The one in use, as the daemon says, else as set; where that is left open, by what is in the kernel."""
    named = status["dataplane"]["name"] if status else str(settings.dataplane)
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
    """Whether rules and other people's sockets can be read."""
    return os.geteuid() == 0
