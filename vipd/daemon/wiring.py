"""The composition root: settings in, objects wired. No other module creates these objects."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from vipd.control.announcer import AnnounceDriver, Announcer, Reconciled
from vipd.control.backend_status_tracker import BackendStatusTracker
from vipd.control.connection_balancer import ConnectionBalancer
from vipd.control.host import Host
from vipd.control.reconciler import Reconciler, ReconcilerDependencies
from vipd.control.silent_backends import SilentBackends
from vipd.daemon.rule_programs import rule_programs
from vipd.dataplane.base import ApplyError
from vipd.dataplane.chosen import ChosenDataplane
from vipd.dataplane.conntrack.netlink import ConntrackError
from vipd.dataplane.conntrack.scheduler import ConntrackScheduler
from vipd.dataplane.fast_path.driver import FastPath
from vipd.dataplane.iptables.watch.events import pids_are_global
from vipd.dataplane.iptables.watch.own_processes import OwnProcesses
from vipd.dataplane.iptables.watch.repair_backoff import RepairBackoff
from vipd.dataplane.registry import HostDataplanes, resolve_dataplane
from vipd.dataplane.switching import SwitchableDataplane
from vipd.declaration.syntax import parse_frontend
from vipd.health.checker import HealthChecker, ProbeOptions
from vipd.host.announced_routes import AnnouncedRoutes
from vipd.host.host_changes import HostChanges
from vipd.host.netlink_socket import Sockets, open_netlink
from vipd.host.observer import Observers
from vipd.host.process import TIMEOUT_SECONDS
from vipd.host.settings.settings import Settings
from vipd.host.supervisor import Supervisor
from vipd.host.worker import Worker
from vipd.model.service import AnnounceMethod
from vipd.observe.flow_stats.collector import FlowStats
from vipd.resolver.answers import AnswerLimits
from vipd.resolver.lookup import ServerOptions
from vipd.resolver.resolver import Resolver, ResolverOptions
from vipd.resolver.worker_lookups import RemoteLookup
from vipd.sources.base import Source
from vipd.sources.cache import FILE_NAME as CACHE_FILE
from vipd.sources.cache import Cache
from vipd.sources.files import FileSource
from vipd.sources.overrides import OverrideStore
from vipd.sources.state import FILE_NAME as STATE_FILE
from vipd.sources.state import StoreError
from vipd.sources.store import StoreSource

if TYPE_CHECKING:
    from vipd.control.fleet_member import FleetMember
    from vipd.control.lan_announcer import LanAnnouncer


@dataclass(frozen=True, slots=True)
class Parts:
    """The wired objects of one daemon."""

    settings: Settings
    cache: Cache
    files: FileSource
    store: StoreSource
    overrides: OverrideStore
    announcer: Announcer
    lan: LanAnnouncer | None
    fleet: FleetMember | None
    worker: Worker
    health: HealthChecker
    resolver: Resolver
    status_tracker: BackendStatusTracker
    own_processes: OwnProcesses
    dataplane: SwitchableDataplane
    host: Host
    conntrack: ConntrackScheduler
    silent_backends: SilentBackends
    fast_path: FastPath
    reconciler: Reconciler
    flow_stats: FlowStats
    balancer: ConnectionBalancer
    repair_backoff: RepairBackoff
    supervisor: Supervisor

    @property
    def sources(self) -> tuple[Source, ...]:
        """All that declare services."""
        return (self.files, self.store, *((self.fleet.source,) if self.fleet else ()))

    async def rescan(self) -> None:
        """Read every source again. Parsing runs in a thread, so that the API still answers."""
        await asyncio.to_thread(self.files.scan)
        async with self.store.change_lock:
            await asyncio.to_thread(self.store.reload)
        await self.overrides.reload()


def open_cache(settings: Settings, repair: bool = True) -> Cache:
    """The cache of the state directory."""
    return Cache(settings.state_dir / CACHE_FILE, repair)


def sources(settings: Settings, cache: Cache, repair: bool = True) -> tuple[FileSource, StoreSource]:
    """The sources that the settings name, the store loaded. `repair`: as of the store."""
    store = StoreSource(settings.state_dir / STATE_FILE, repair=repair)
    store.load()
    return FileSource(settings.services_dir, cache), store


async def wire(
    settings: Settings,
    cache: Cache,
    observers: Observers | None = None,
    program_timeout: float = TIMEOUT_SECONDS,
) -> Parts:
    """All objects, every source having delivered, nothing written to the kernel yet. Programs that read or
    write rules are killed after `program_timeout` seconds."""
    observers = observers or Observers()
    files, store = sources(settings, cache)
    # Before the first step: a change whose time to confirm is over does not serve again.
    store.take_back_due()
    with contextlib.suppress(StoreError):  # a loop tries again, and says why
        store.save_taken_back()
    await asyncio.to_thread(files.scan)
    overrides = OverrideStore(store.file, now, observers)
    overrides.load()
    fleet = await _fleet(settings, cache, observers)

    worker = Worker()
    health = HealthChecker(
        cache,
        options=ProbeOptions(settings.check_users, worker),
        observer=observers,
    )
    override_stores = (overrides, *((fleet.overrides,) if fleet else ()))
    statuses = BackendStatusTracker(override_stores, health, health.clock)
    observers.add(statuses)

    record = HostChanges(settings.state_dir)
    own = OwnProcesses(time.monotonic, pids_are_global())
    runner = rule_programs(own.running, observers, program_timeout)
    wanted = ChosenDataplane(settings.state_dir).read() or settings.dataplane
    name = await resolve_dataplane(wanted, settings, runner)
    dataplanes = HostDataplanes(
        settings, record, runner, sockets=Sockets(writing=partial(_open_writing, own))
    )
    dataplane = await SwitchableDataplane.start(name, dataplanes, observers.dataplane_switched)
    host = Host(settings, record, dataplane=lambda: dataplane.name, invalidate=dataplane.invalidate_all)

    conntrack = ConntrackScheduler(time.monotonic, cache=cache)
    await conntrack.load()  # left over by an earlier process
    observers.add(conntrack)
    fast_path = FastPath(settings, runner)
    observers.add(fast_path)
    resolver = await _resolver(settings, cache, observers, worker)
    dependencies = ReconcilerDependencies(
        statuses, fleet.registrations if fleet else dict, resolver, conntrack.resets, observers
    )
    declaring = (files, store, *((fleet.source,) if fleet else ()))
    reconciler = Reconciler(declaring, dataplane, host, now, dependencies)
    lan = _lan_announcer(settings, record, host)
    drivers: dict[AnnounceMethod, AnnounceDriver] = {
        AnnounceMethod.ROUTES: AnnouncedRoutes(settings.announce_table, settings.vip_device, record),
        **({AnnounceMethod.L2: lan} if lan else {}),
    }
    announcer = Announcer(
        settings,
        drivers,
        Reconciled(reconciler.progress, host.announcing),
        lambda: overrides.maintenance,
        fleet.announced_elsewhere if fleet else None,
    )
    observers.add(announcer)
    if fleet:
        fleet.report_announcements(lambda: announcer.state, lambda: overrides.maintenance)
    flow_stats = FlowStats.of(
        dataplane.counter,
        reconciler,
        cache,
        traffic=settings.traffic_accounting,
    )
    return Parts(
        settings=settings,
        cache=cache,
        files=files,
        store=store,
        overrides=overrides,
        announcer=announcer,
        lan=lan,
        fleet=fleet,
        worker=worker,
        health=health,
        resolver=resolver,
        status_tracker=statuses,
        own_processes=own,
        dataplane=dataplane,
        host=host,
        conntrack=conntrack,
        silent_backends=SilentBackends(conntrack, lambda: reconciler.forwardings, now),
        fast_path=fast_path,
        reconciler=reconciler,
        flow_stats=flow_stats,
        balancer=ConnectionBalancer(reconciler, statuses),
        repair_backoff=RepairBackoff(
            settings.chain_prefix, accept_first=settings.accept_forwarded == "first"
        ),
        supervisor=Supervisor((OSError, ApplyError, ConntrackError, StoreError, *_fleet_errors(fleet))),
    )


def _open_writing(own: OwnProcesses) -> socket.socket:
    """A netlink socket whose changes count as vipd's own. Raises OSError."""
    opened = open_netlink()
    own.add_socket(opened.getsockname()[0])
    return opened


async def _resolver(settings: Settings, cache: Cache, observers: Observers, worker: Worker) -> Resolver:
    """The resolver of backends' names, with the answers of an earlier run."""
    servers = tuple((s.address, s.port) for s in map(parse_frontend, settings.dns_servers))
    limits = AnswerLimits(
        settings.dns_min_ttl, settings.dns_max_ttl, settings.dns_hold, settings.dns_max_addresses
    )
    options = ResolverOptions(limits, settings.dns_max_names, cache)
    look_up = RemoteLookup(worker, ServerOptions(servers, settings.dns_timeout), limits.max_targets)
    resolver = Resolver(options, observers, look_up)
    await asyncio.to_thread(resolver.load)
    return resolver


async def _fleet(settings: Settings, cache: Cache, observers: Observers) -> FleetMember | None:
    """An earlier run's state of etcd, if that is configured; otherwise its modules are not even imported."""
    if settings.etcd is None:
        return None
    from vipd.control.fleet_member import FleetMember

    fleet = FleetMember(settings, settings.etcd, cache, now, observers)
    await asyncio.to_thread(fleet.load)
    return fleet


def _lan_announcer(settings: Settings, record: HostChanges, host: Host) -> LanAnnouncer | None:
    """The driver of `announce: l2`, whose hosts agree in etcd; None without etcd."""
    if settings.etcd is None:
        return None
    from vipd.control.lan_announcer import LanAnnouncer

    return LanAnnouncer(
        settings, settings.etcd, record, partial(host.announced_addresses, AnnounceMethod.L2), now
    )


def _fleet_errors(fleet: FleetMember | None) -> tuple[type[Exception], ...]:
    """Exceptions of loops that follow etcd."""
    if fleet is None:
        return ()
    from vipd.sources.etcd.errors import EtcdError

    return (EtcdError,)


def now() -> datetime:
    """The time of day, in UTC."""
    return datetime.now(UTC)
