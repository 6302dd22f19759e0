"""The daemon's life: it starts, serves until a signal ends it, and leaves the rules in the kernel."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from vipd import __version__
from vipd.api.context import ApiContext
from vipd.api.healthz import healthz_listener
from vipd.api.peers import Permission, bind_socket
from vipd.api.server import application
from vipd.api.socket_server import serving
from vipd.control.address_policy import L2_HINT
from vipd.control.admission import Admission
from vipd.control.catalog import merge
from vipd.control.host import Host
from vipd.control.reload import reload
from vipd.daemon.loops import loops
from vipd.daemon.status_reporter import StatusReporter, heartbeat_seconds, program_seconds
from vipd.daemon.wiring import Parts, now, open_cache, sources, wire
from vipd.dataplane.chosen import ChosenDataplane
from vipd.health.host_problems import host_problems
from vipd.host.bounded_threads import started_threads
from vipd.host.gc_control import freeze_objects
from vipd.host.host_changes import HostChanges
from vipd.host.observer import Observers
from vipd.host.preflight import StartError, require_privileges, state_faults, state_lock
from vipd.host.settings.settings import Settings
from vipd.host.supervisor import Loop
from vipd.host.systemd.fields import Event, fields
from vipd.host.systemd.notify import Notifier
from vipd.model.check import Check, ExecProbe
from vipd.model.formatting import time_text
from vipd.model.service import AnnounceMethod
from vipd.observe.announcement_views import announcement_warnings
from vipd.observe.events.log_handler import recording
from vipd.observe.events.notify_program import NotifyProgram
from vipd.observe.events.recorder import Recorder
from vipd.observe.health_ports import HealthPorts
from vipd.observe.listeners import ListenAddress, Listeners
from vipd.observe.monitoring import Monitored, Monitoring
from vipd.observe.name_views import name_warnings

log = logging.getLogger(__name__)

WORKER_THREADS = 8
"""Threads for work that blocks or computes for long. Calls that may hang have threads of their own."""

Warnings = Callable[[], Sequence[str]]
"""Current warnings besides the reconciler's own."""


def check(settings: Settings) -> int:
    """Print every problem of the declarations that these settings lead to; 1 when there is any."""
    # The daemon may run.
    files, store = sources(settings, open_cache(settings, repair=False), repair=False)
    files.scan()
    dataplane = ChosenDataplane(settings.state_dir).read() or settings.dataplane
    host = Host(settings, HostChanges(settings.state_dir), dataplane=lambda: dataplane)
    asyncio.run(host.refresh())
    policy = replace(host.claims(), check_problems=host.check_problem)
    admission = Admission()
    admission.admit(admission.update_units([files.units(), store.units()], policy))
    merged = merge(admission.units)
    problems = [str(problem) for found in merged.problems.values() for problem in found]
    problems += [*files.faults(), *store.faults()]
    warnings = settings.etcd.warnings() if settings.etcd else []
    if settings.notify:
        probe = ExecProbe(command=settings.notify)
        found = host_problems(Check(probe), settings.check_users)
        warnings = [*warnings, *(f"notify: {problem}" for problem in found)]
    if os.geteuid() and any(os.strerror(errno.EACCES) in problem for problem in problems):
        problems.append("this user may not read all files: run vipd --check as root (sudo)")
    for line in (*problems, *(f"warning: {warning}" for warning in warnings)):
        print(line, file=sys.stderr)  # noqa: T201 (this is what the user asked for)
    if not problems:
        number = len(merged.services)
        print(f"ok: {number} service" + ("" if number == 1 else "s"))  # noqa: T201
    return 1 if problems else 0


async def once(settings: Settings) -> int:
    """Apply the declarations once. 1 when that failed, or when a declaration has problems."""
    with state_lock(settings):
        parts = await wire(settings, open_cache(settings))
        async with _following_etcd(parts):
            applied = await parts.reconciler.step()
            if await _first_answers(parts):
                applied = await parts.reconciler.step()
        parts.resolver.close()
        await asyncio.to_thread(parts.cache.close)
        faults = [fault for source in parts.sources for fault in source.faults()]
        faults += parts.reconciler.progress.quarantined
        return 0 if applied and not parts.reconciler.problems and not faults else 1


async def _first_answers(parts: Parts) -> bool:
    """Look up every name once; whether anything else serves then."""
    asking = asyncio.create_task(
        parts.supervisor.run("asking name servers", Loop(parts.worker.run, parts.worker.state))
    )
    try:
        return await parts.resolver.first_answers()
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def serve(settings: Settings, notifier: Notifier) -> int:
    """Run until SIGTERM or SIGINT. The rules stay when it ends. Raises StartError."""
    # Until there is something to reload: by default this signal would end the process.
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: None)
    asyncio.get_running_loop().set_default_executor(started_threads(WORKER_THREADS))
    notifier.send("STATUS=reading declarations")
    with state_lock(settings), recording(cache := open_cache(settings)) as recorder:
        require_privileges()
        parts = await wire(settings, cache, Observers(heartbeat_seconds(notifier)), program_seconds(notifier))
        # Current objects live until the end: each garbage collection would walk through them, for a tenth of
        # a second.
        freeze_objects()
        reporter = StatusReporter(notifier, parts.reconciler)
        stop: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
        listeners = [*health_listeners(parts)]
        notify = _notify_program(settings, recorder)
        warnings = _warnings_of(parts, listeners, recorder, notifier, notify)
        monitoring = Monitoring(monitored(parts, recorder, warnings, notify.counts if notify else None))
        listeners += monitoring.listeners
        context = _api_context(parts, monitoring, recorder, warnings)
        async with _serving_api(settings, context, monitoring), asyncio.TaskGroup() as tasks:
            work = [
                tasks.create_task(parts.supervisor.run(name, loop), name=name)
                for name, loop in loops(parts, listeners, monitoring, notify).items()
            ]
            _on_signals(parts, reporter, stop, work)
            if parts.fleet:
                await parts.fleet.wait_for_etcd()
            parts.reconciler.request_sync()
            started = fields(Event.STARTED, reason=f"vipd {__version__}")
            log.info("vipd %s serves %s", __version__, settings.socket, extra=started)
            cause = f"signal {(await stop).name}"
            reporter.stopping()
            await _stop(parts, work)
        stopped = fields(Event.STOPPED, cause=cause, reason="the rules stay in the kernel")
        log.info("stopped; the rules stay in the kernel", extra=stopped)
        return 0


async def _stop(parts: Parts, work: Sequence[asyncio.Task[NoReturn]]) -> None:
    """End waiting requests, save the counters, end the loops."""
    if parts.fleet:
        parts.fleet.store.stop_waiting()
    await parts.reconciler.stop_waiting()
    if parts.reconciler.progress.written:  # else there are no rules with counters yet
        await parts.flow_stats.close()
    for task in work:
        task.cancel()
    await asyncio.wait(work)
    parts.resolver.close()
    if parts.settings.announce_on_stop == "withdraw":
        with contextlib.suppress(OSError):
            await parts.announcer.withdraw()
    if parts.lan:
        await parts.lan.close()
    if parts.fleet:
        await parts.fleet.close()


@contextlib.asynccontextmanager
async def _following_etcd(parts: Parts) -> AsyncIterator[None]:
    """Follow etcd, if configured, during a single step."""
    if parts.fleet is None:
        yield
        return
    work = parts.fleet.loops(parts.reconciler, report=False)
    following = [asyncio.create_task(parts.supervisor.run(name, loop)) for name, loop in work.items()]
    try:
        await parts.fleet.wait_for_etcd(answer=True)
        yield
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        await parts.fleet.close()


def health_listeners(parts: Parts) -> tuple[Listeners, ...]:
    """The listeners for health checks over TCP: the services' health ports, and `health_address`."""
    ports = HealthPorts(
        parts.reconciler, parts.settings.node_addresses, lambda: parts.overrides.maintenance is not None
    )
    parts.reconciler.observers.add(ports)
    place = parts.settings.health_socket_address()
    return ports.listeners, healthz_listener(parts.reconciler, ListenAddress(*place) if place else None)


def _notify_program(settings: Settings, recorder: Recorder) -> NotifyProgram | None:
    """What runs the program of the setting `notify`; None without one."""
    if not settings.notify:
        return None
    return NotifyProgram(settings.notify, settings.check_users, recorder, settings.node_name)


def monitored(
    parts: Parts,
    recorder: Recorder,
    warnings: Warnings = tuple,
    notifications: Callable[[], Mapping[str, int]] | None = None,
) -> Monitored:
    """The objects for metrics and the status page."""
    return Monitored(
        parts.settings,
        parts.reconciler,
        parts.dataplane,
        parts.sources,
        parts.flow_stats,
        recorder,
        parts.health.durations,
        parts.supervisor.loops,
        warnings,
        notifications,
        parts.announcer,
    )


def without_etcd(host: Host) -> list[str]:
    """The warning that addresses of LANs have no holder, because hosts cannot agree on one."""
    asking = host.announced_addresses(AnnounceMethod.L2)
    if not asking:
        return []
    number = "1 address" if len(asking) == 1 else f"{len(asking)} addresses"
    return [f"no host answers for {number} with announce: l2, which needs etcd; hint: {L2_HINT}"]


def _warnings_of(
    parts: Parts,
    listeners: Sequence[Listeners],
    recorder: Recorder,
    notifier: Notifier,
    notify: NotifyProgram | None,
) -> Warnings:
    return lambda: [
        *state_faults(parts.settings.state_dir),
        *(warning for each in listeners for warning in each.warnings),
        *parts.cache.warnings,
        *parts.health.warnings(),
        *name_warnings(parts.resolver),
        *notifier.warnings,
        *recorder.warnings,
        *(notify.warnings() if notify else ()),
        *parts.fast_path.warnings(),
        *parts.host.faults(),
        *parts.overrides.faults(),
        *(parts.lan.warnings() if parts.lan else without_etcd(parts.host)),
        *announcement_warnings(parts.announcer.state, parts.announcer.others_fault),
        *parts.supervisor.warnings,
        *parts.reconciler.containment.warnings,
        *parts.status_tracker.warnings(),
        *parts.silent_backends.warnings(),
        *parts.repair_backoff.warnings(asyncio.get_running_loop().time()),
        *(parts.fleet.warnings() if parts.fleet else ()),
    ]


def _api_context(parts: Parts, monitoring: Monitoring, recorder: Recorder, warnings: Warnings) -> ApiContext:
    """The objects that the API shows and changes."""
    settings, host = parts.settings, parts.host
    about = {
        "version": __version__,
        "pid": os.getpid(),
        "started": time_text(now()),
        "settings": settings.model_dump(mode="json"),
    }
    return ApiContext(
        parts.reconciler,
        parts.dataplane,
        parts.sources,
        parts.store,
        parts.overrides,
        parts.rescan,
        about,
        fast_path=parts.fast_path.view,
        warnings=warnings,
        save_dataplane_choice=ChosenDataplane(settings.state_dir).write,
        address_policy=host.claims,
        check_problems=host.check_problems,
        refresh_address_policy=host.refresh_claims,
        warnings_of=lambda services: (
            *host.warnings_of(services),
            *parts.dataplane.warnings_of({service.name for service in services}),
        ),
        events=recorder,
        flow_stats=parts.flow_stats,
        fleet=parts.fleet,
        announcer=parts.announcer,
        default_store=settings.store,
        metrics=monitoring.metrics,
    )


@contextlib.asynccontextmanager
async def _serving_api(
    settings: Settings, context: ApiContext, monitoring: Monitoring
) -> AsyncIterator[None]:
    """The API's socket, answering. Raises StartError."""
    try:
        listener = bind_socket(settings.socket, settings.socket_group)
    except OSError as error:
        what = f"{settings.socket}: {error.strerror or error}"
        raise StartError(what, number=error.errno or 0) from None
    try:
        async with serving(application(context, Permission(settings.admin_group)), listener):
            with monitoring.counters.count_events():
                yield
    finally:
        settings.socket.unlink(missing_ok=True)


def _on_signals(
    parts: Parts,
    reporter: StatusReporter,
    stop: asyncio.Future[signal.Signals],
    work: list[asyncio.Task[NoReturn]],
) -> None:
    """SIGTERM and SIGINT stop; SIGHUP reads everything and the kernel again, as one more task of
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
