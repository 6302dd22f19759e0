"""The composition root: settings in, objects wired, signals answered. Nothing else makes these objects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vipd import __version__
from vipd.api.healthz import healthz_listener
from vipd.api.peers import Permission, bind_socket
from vipd.api.served import Served
from vipd.api.server import application
from vipd.api.socket_server import serving
from vipd.control.admission import admit_unit
from vipd.control.backend_status_tracker import BackendStatusTracker
from vipd.control.background_tasks import (
    clean_flows,
    end_overrides,
    grow_shares,
    look_at_host,
    save_checkpoint,
    save_ended_overrides,
    sweep,
    watch_files,
    watch_rules,
)
from vipd.control.catalog import merge
from vipd.control.heartbeat import Heartbeat
from vipd.control.host import HostNet
from vipd.control.reconciler import Reconciler
from vipd.control.reload import reload
from vipd.daemon.rule_programs import rule_programs
from vipd.daemon.status_reporter import Reporter, beat_seconds, program_seconds
from vipd.dataplane.base import ApplyError
from vipd.dataplane.conntrack.checkpoint import Checkpoint
from vipd.dataplane.conntrack.netlink import ConntrackError
from vipd.dataplane.conntrack.scheduler import ConntrackScheduler
from vipd.dataplane.iptables.watch.events import pids_are_global
from vipd.dataplane.iptables.watch.own import OwnProcesses
from vipd.dataplane.iptables.watch.repair_backoff import RepairBackoff
from vipd.dataplane.registry import (
    FlowCounters,
    HostDataplanes,
    RuleWatch,
    dataplane_meant,
    watch_of,
)
from vipd.dataplane.switching import ChosenDataplane, SwitchableDataplane
from vipd.health.checker import Health
from vipd.host.changes import HostRecord
from vipd.host.gc_control import leave_out
from vipd.host.preflight import StartError, require_privileges, state_faults, state_lock
from vipd.host.process import LIMIT_SECONDS
from vipd.host.settings.settings import Settings
from vipd.host.supervisor import Loop, Pace, Supervisor, Task, Work
from vipd.host.systemd.fields import Event, fields
from vipd.host.systemd.notify import Notifier
from vipd.model.check_target import Target
from vipd.model.override import Subject
from vipd.observe.events.log_handler import recording
from vipd.observe.events.recorder import Recorder
from vipd.observe.flow_stats.collector import Numbers
from vipd.observe.health_ports import HealthPorts
from vipd.observe.listeners import Listeners, Place
from vipd.observe.observers import Observed, Observers
from vipd.observe.views import time_text
from vipd.sources.base import Source
from vipd.sources.files import FileSource
from vipd.sources.override_store import OverrideStore
from vipd.sources.store import StoreError, StoreSource

if TYPE_CHECKING:
    from vipd.control.fleet_member import Fleet
    from vipd.sources.etcd.fleet_overrides import FleetOverrides

log = logging.getLogger(__name__)

LOOK_AT_FILES = Pace(longest=5.0)
"""Each try looks at all files, which is what is left where a directory cannot be watched."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The wired objects of one daemon."""

    settings: Settings
    files: FileSource
    store: StoreSource
    dataplane: SwitchableDataplane
    foreign_chains: HostNet
    reconciler: Reconciler
    own: OwnProcesses
    peace: RepairBackoff
    overrides: OverrideStore
    health: Health
    fitness: BackendStatusTracker
    fleet: Fleet | None
    keeper: ConntrackScheduler
    numbers: Numbers
    supervisor: Supervisor

    @property
    def sources(self) -> tuple[Source, ...]:
        """All that declare services."""
        return (self.files, self.store, *((self.fleet.source,) if self.fleet else ()))

    async def rescan(self) -> None:
        """Read every source anew. Parsing runs in a thread, so that the API goes on answering."""
        await asyncio.to_thread(self.files.scan)
        self.store.reload()
        self.overrides.reload()


def check(settings: Settings) -> int:
    """Print every problem of the declarations that these settings lead to; 1 when there is any."""
    files, store = sources(settings)
    files.scan()
    foreign_chains = HostNet(settings, HostRecord(settings.state_dir))
    dataplane = ChosenDataplane(settings.state_dir).read() or settings.dataplane
    foreign_chains.served_by(lambda: dataplane)
    asyncio.run(foreign_chains.look())
    policy = replace(foreign_chains.claims(), check_problems=foreign_chains.check_problem)
    units = {name: admit_unit(unit, policy) for name, unit in {**files.units(), **store.units()}.items()}
    merged = merge(units)
    problems = [str(problem) for found in merged.problems.values() for problem in found]
    problems += [*files.faults(), *store.faults()]
    warnings = settings.etcd.warnings() if settings.etcd else []
    for line in (*problems, *(f"warning: {warning}" for warning in warnings)):
        print(line, file=sys.stderr)  # noqa: T201 (this is what the user asked for)
    if not problems:
        number = len(merged.services)
        print(f"ok: {number} service" + ("" if number == 1 else "s"))  # noqa: T201
    return 1 if problems else 0


async def once(settings: Settings) -> int:
    """Apply the declarations once. 1 when that failed, or when a declaration has problems."""
    with state_lock(settings):
        parts = await wire(settings)
        async with _following(parts):
            applied = await parts.reconciler.step()
        faults = [fault for source in parts.sources for fault in source.faults()]
        faults += parts.reconciler.progress.quarantined
        return 0 if applied and not parts.reconciler.problems and not faults else 1


async def serve(settings: Settings, notifier: Notifier) -> int:
    """Run until SIGTERM or SIGINT. The rules stay when it ends. Raises StartError."""
    # Until there is something to reload: by default this signal would end the process.
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: None)
    notifier.send("STATUS=reading declarations")
    with state_lock(settings), recording(settings.state_dir) as recorder:
        require_privileges()
        parts = await wire(settings, Heartbeat(beat_seconds(notifier)), program_seconds(notifier))
        # What is there now stays to the end: each search for garbage would go through it, for a tenth of a
        # second.
        leave_out()
        reporter = Reporter(notifier, parts.reconciler)
        stop: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
        observers = Observers(_observed(parts, recorder))
        listeners = (*_health(parts), *observers.listeners)
        async with _listening(parts, listeners, recorder, observers, notifier), asyncio.TaskGroup() as tasks:
            work = [
                tasks.create_task(parts.supervisor.run(name, loop), name=name)
                for name, loop in _loops(parts, listeners, observers).items()
            ]
            _on_signals(parts, reporter, stop, work)
            if parts.fleet:
                await parts.fleet.first_word()
            parts.reconciler.wake()
            started = fields(Event.STARTED, reason=f"vipd {__version__}")
            log.info("vipd %s serves %s", __version__, settings.socket, extra=started)
            cause = f"signal {(await stop).name}"
            reporter.stopping()
            if parts.fleet:
                parts.fleet.store.stopping = True
            await parts.reconciler.stop_waiting()
            if parts.reconciler.progress.done:  # else there are no rules yet that could have counted
                await parts.numbers.close()
            for task in work:
                task.cancel()
            await asyncio.wait(work)
            if parts.fleet:
                await parts.fleet.close()
        stopped = fields(Event.STOPPED, cause=cause, reason="the rules stay in the kernel")
        log.info("stopped; the rules stay in the kernel", extra=stopped)
        return 0


def _loops(parts: Parts, listeners: Sequence[Listeners], observers: Observers) -> dict[str, Work]:
    """All that runs in the background, by the name that status and metrics have for it."""
    reconciler = parts.reconciler
    keeper, swept, cleaned, saved = parts.keeper, *(_after_step(parts) for _ in range(3))
    switched = asyncio.Event()
    parts.dataplane.switched.append(switched.set)
    return {
        # Before the first write, so that nothing done to our rules goes unseen.
        "watching rules": lambda: _watch_rules(parts, switched),
        "reconciling": reconciler.run,
        "watching files": Loop(lambda: watch_files(parts.files, reconciler), Task(LOOK_AT_FILES)),
        "watching addresses": lambda: look_at_host(parts.foreign_chains, reconciler),
        "deleting old rules": lambda: sweep(reconciler, swept),
        "cleaning flows": lambda: clean_flows(keeper, cleaned),
        "keeping the backends of flows": lambda: save_checkpoint(keeper, saved),
        **_timed(parts),
        "checking backends": parts.health.run,
        **parts.numbers.loops(),
        **{f"answering over TCP ({number})": each.run for number, each in enumerate(listeners, 1)},
        "keeping the status page": observers.run,
        **(parts.fleet.loops(reconciler) if parts.fleet else {}),
    }


def sources(settings: Settings) -> tuple[FileSource, StoreSource]:
    """The sources that the settings name, the store loaded."""
    store = StoreSource(settings.state_dir / "services.yaml")
    store.load()
    return FileSource(settings.services_dir, settings.state_dir / "accepted"), store


async def wire(settings: Settings, pulse: Heartbeat | None = None, limit: float = LIMIT_SECONDS) -> Parts:
    """All objects, every source having delivered, nothing written to the kernel yet. Programs that read or
    write rules are killed after `limit` seconds."""
    pulse = pulse or Heartbeat()
    files, store = sources(settings)
    await asyncio.to_thread(files.scan)
    record = HostRecord(settings.state_dir)
    own = OwnProcesses(time.monotonic, pids_are_global())
    runner = rule_programs(own.running, pulse, limit)
    wanted = ChosenDataplane(settings.state_dir).read() or settings.dataplane
    name = await dataplane_meant(wanted, settings, runner)
    dataplane = await SwitchableDataplane.start(name, HostDataplanes(settings, record, runner))
    foreign_chains = HostNet(settings, record)
    foreign_chains.served_by(lambda: dataplane.name, dataplane.forget)
    overrides = OverrideStore(settings.state_dir / "overrides.json", now)
    overrides.load()
    for fault in overrides.faults():
        log.error("%s", fault, extra=fields(Event.SOURCE_FAILED))
    health = Health(settings.state_dir / "health.json", users=settings.check_users)
    fleet = await _fleet(settings)
    fitness = BackendStatusTracker((overrides, *((fleet.orders,) if fleet else ())), health, health.clock)
    declaring = (files, store, *((fleet.source,) if fleet else ()))
    registrations = fleet.registrations if fleet else dict
    reconciler = Reconciler(declaring, dataplane, foreign_chains, now, fitness, registrations)
    reconciler.pulse = pulse
    peace = RepairBackoff(settings.chain_prefix)
    return Parts(
        settings=settings,
        files=files,
        store=store,
        dataplane=dataplane,
        foreign_chains=foreign_chains,
        reconciler=reconciler,
        keeper=await _conntrack(settings.state_dir, reconciler),
        own=own,
        peace=peace,
        overrides=overrides,
        health=health,
        fitness=fitness,
        fleet=fleet,
        numbers=Numbers.of(
            FlowCounters(dataplane),
            reconciler,
            settings.state_dir / "counters.json",
            traffic=settings.traffic_accounting,
        ),
        supervisor=Supervisor((OSError, ApplyError, ConntrackError, StoreError, *_fleet_errors(fleet))),
    )


async def _fleet(settings: Settings) -> Fleet | None:
    """What an earlier run has known of etcd, if that is configured; else nothing of it is even imported."""
    if settings.etcd is None:
        return None
    from vipd.control.fleet_member import Fleet

    fleet = Fleet(settings, settings.etcd, now)
    await asyncio.to_thread(fleet.load)
    return fleet


def _fleet_errors(fleet: Fleet | None) -> tuple[type[Exception], ...]:
    """What loops that follow etcd may raise."""
    if fleet is None:
        return ()
    from vipd.sources.etcd.errors import EtcdError

    return (EtcdError,)


@contextlib.asynccontextmanager
async def _following(parts: Parts) -> AsyncIterator[None]:
    """Listening to etcd, where there is one, for a step that is the only one."""
    if parts.fleet is None:
        yield
        return
    loops = parts.fleet.loops(parts.reconciler, report=False)
    following = [asyncio.create_task(parts.supervisor.run(name, loop)) for name, loop in loops.items()]
    try:
        await parts.fleet.first_word()
        yield
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        await parts.fleet.close()


def now() -> datetime:
    """The time of day, in UTC."""
    return datetime.now(UTC)


async def _watch_rules(parts: Parts, switched: asyncio.Event) -> None:
    """Sees and repairs what others do to our rules, of whichever dataplane is in use. `switched`: set when
    that is another one."""

    def open_watch() -> RuleWatch:
        watch = watch_of(parts.dataplane, parts.settings, parts.own)
        watch.supervise = parts.supervisor.run_meanwhile
        return watch

    while True:
        switched.clear()
        watching = watch_rules(open_watch, parts.peace, parts.dataplane, parts.reconciler)
        work = [asyncio.create_task(watching), asyncio.create_task(switched.wait())]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)


def _timed(parts: Parts) -> dict[str, Work]:
    """Loops that let overrides end and shares grow when their time has come; also hears what checks find."""
    books: dict[str, OverrideStore | FleetOverrides] = {"ending overrides": parts.overrides}
    if parts.fleet:
        books["ending overrides of the fleet"] = parts.fleet.orders
    changed = {name: asyncio.Event() for name in (*books, "saving ended overrides")}
    grown = _after_step(parts)

    def overrides_changed(subjects: frozenset[Subject]) -> None:
        parts.fitness.overrides_changed(subjects)
        for event in changed.values():
            event.set()

    def verdicts_changed(targets: frozenset[Target]) -> None:
        parts.fitness.verdicts_changed(targets)
        parts.reconciler.wake()

    for book in books.values():
        book.changed = overrides_changed
    parts.health.listeners.append(verdicts_changed)
    return {
        "growing shares": lambda: grow_shares(parts.fitness, parts.reconciler, grown),
        **{
            name: partial(end_overrides, book, parts.reconciler, changed[name])
            for name, book in books.items()
        },
        "saving ended overrides": partial(
            save_ended_overrides, parts.overrides, changed["saving ended overrides"]
        ),
    }


def _after_step(parts: Parts) -> asyncio.Event:
    """An event that is set after each step."""
    woken = asyncio.Event()
    parts.reconciler.after_step.append(woken.set)
    return woken


async def _conntrack(state_dir: Path, reconciler: Reconciler) -> ConntrackScheduler:
    """What cleans flows after each change, knowing what an earlier process has left to do."""
    keeper = ConntrackScheduler(time.monotonic, checkpoint=Checkpoint(state_dir))
    reconciler.followers.append(keeper)
    reconciler.flow_resets.ended = keeper.resets
    keeper.resets_changed = reconciler.wake
    await keeper.load()
    return keeper


def _health(parts: Parts) -> tuple[Listeners, ...]:
    """What answers health checks over TCP: the services' health ports, and `health_address`."""
    ports = HealthPorts(parts.reconciler, parts.settings.node_addresses)
    parts.reconciler.followers.append(ports)
    parts.reconciler.after_step.append(ports.follow)
    place = parts.settings.health_place()
    return ports.listeners, healthz_listener(parts.reconciler, Place(*place) if place else None)


def _observed(parts: Parts, recorder: Recorder) -> Observed:
    """What metrics and the status page look at."""
    return Observed(
        parts.settings,
        parts.reconciler,
        parts.dataplane,
        parts.sources,
        parts.numbers,
        recorder,
        parts.health.durations,
        parts.supervisor.tasks,
    )


@contextlib.asynccontextmanager
async def _listening(
    parts: Parts,
    listeners: Sequence[Listeners],
    recorder: Recorder,
    observers: Observers,
    notifier: Notifier,
) -> AsyncIterator[None]:
    """The API's socket, answering."""
    settings = parts.settings
    about = {
        "version": __version__,
        "pid": os.getpid(),
        "started": time_text(datetime.now(UTC)),
        "settings": settings.model_dump(mode="json"),
    }
    served = Served(
        parts.reconciler,
        parts.dataplane,
        parts.sources,
        parts.store,
        parts.overrides,
        parts.rescan,
        about,
        warnings=lambda: [
            *state_faults(settings.state_dir),
            *(warning for each in listeners for warning in each.warnings),
            *parts.health.warnings(),
            *notifier.warnings,
            *recorder.warnings,
            *parts.foreign_chains.faults(),
            *parts.supervisor.warnings,
            *parts.reconciler.containment.warnings,
            *parts.reconciler.pulse.warnings,
            *parts.fitness.warnings(),
            *parts.peace.warnings(asyncio.get_running_loop().time()),
            *(parts.fleet.warnings() if parts.fleet else ()),
        ],
        choose=ChosenDataplane(settings.state_dir).write,
        claims=parts.foreign_chains.claims,
        check_problems=parts.foreign_chains.check_problems,
        look_at_claims=parts.foreign_chains.look_at_claims,
        warnings_of=parts.foreign_chains.warnings_of,
        events=recorder,
        numbers=parts.numbers,
        fleet=parts.fleet,
        default_store=settings.store,
        metrics=observers.metrics,
    )
    observers.warnings = served.warnings
    try:
        listener = bind_socket(settings.socket, settings.socket_group)
    except OSError as error:
        what = f"{settings.socket}: {error.strerror or error}"
        raise StartError(what, number=error.errno or 0) from None
    try:
        async with serving(application(served, Permission(settings.admin_group)), listener):
            with observers.tally.counting():
                yield
    finally:
        settings.socket.unlink(missing_ok=True)


def _on_signals(
    parts: Parts,
    reporter: Reporter,
    stop: asyncio.Future[signal.Signals],
    work: list[asyncio.Task[NoReturn]],
) -> None:
    """SIGTERM and SIGINT stop; SIGHUP reads everything anew and looks at the kernel again, beside the
    `work`."""
    hangups = asyncio.Event()

    async def reload_and_notify() -> None:
        await hangups.wait()
        hangups.clear()
        async with reporter.reloading():
            cause = "signal SIGHUP"
            await reload(parts.rescan, parts.dataplane, parts.reconciler, parts.sources, cause=cause)

    def end(number: signal.Signals) -> None:
        if not stop.done():
            stop.set_result(number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    loop.add_signal_handler(signal.SIGHUP, hangups.set)
    reloading = parts.supervisor.run("reloading", reload_and_notify)
    work.append(loop.create_task(reloading, name="reloading"))
