"""The composition root: settings in, objects wired, signals answered. Nothing else makes these objects."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from aiohttp import web

from vipd import __version__
from vipd.admission import admit_unit
from vipd.api.healthz import healthz_listener
from vipd.api.peers import Permission, bind_socket
from vipd.api.server import Served, application
from vipd.api.views import time_text
from vipd.catalog import merge
from vipd.dataplane.conntrack.keeper import ConntrackKeeper
from vipd.dataplane.iptables.driver import IptablesDataplane
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.watch.door import Watch
from vipd.dataplane.iptables.watch.events import pids_are_global
from vipd.dataplane.iptables.watch.own import OwnProcesses
from vipd.dataplane.iptables.watch.peace import Peace
from vipd.host_record import HostRecord
from vipd.hostnet import HostNet
from vipd.observe.health_ports import HealthPorts
from vipd.observe.listeners import Listeners, Place
from vipd.process import run
from vipd.reconciler import Reconciler
from vipd.settings import Settings
from vipd.sources.files import FileSource
from vipd.sources.store import StoreSource
from vipd.upkeep import keep_conntrack, sweep, watch_files, watch_host, watch_rules

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0


class StartError(RuntimeError):
    """The daemon cannot start: what and why."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The wired objects of one daemon."""

    settings: Settings
    files: FileSource
    store: StoreSource
    dataplane: IptablesDataplane
    surroundings: HostNet
    reconciler: Reconciler
    own: OwnProcesses
    peace: Peace

    async def rescan(self) -> None:
        """Read every source anew. Parsing runs in a thread, so that the API goes on answering."""
        await asyncio.to_thread(self.files.scan)
        self.store.reload()


def check(settings: Settings) -> int:
    """Print every problem of the declarations that these settings lead to; 1 when there is any."""
    files, store = sources(settings)
    files.scan()
    surroundings = HostNet(settings, HostRecord(settings.state_dir))
    asyncio.run(surroundings.look())
    policy = surroundings.claims()
    units = {name: admit_unit(unit, policy) for name, unit in {**files.units(), **store.units()}.items()}
    merged = merge(units)
    problems = [str(problem) for found in merged.problems.values() for problem in found]
    problems += [*files.faults(), *store.faults()]
    for problem in problems:
        print(problem, file=sys.stderr)  # noqa: T201 (this is what the user asked for)
    if not problems:
        print(f"ok: {len(merged.services)} services")  # noqa: T201
    return 1 if problems else 0


async def once(settings: Settings) -> int:
    """Apply the declarations once. 1 when that failed, or when a declaration has problems."""
    with state_lock(settings):
        parts = await wire(settings)
        applied = await parts.reconciler.step()
        faults = [fault for source in (parts.files, parts.store) for fault in source.faults()]
        faults += parts.reconciler.progress.quarantined
        return 0 if applied and not parts.reconciler.problems and not faults else 1


async def serve(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT. The rules stay when it ends."""
    with state_lock(settings):
        parts = await wire(settings)
        stop = asyncio.Event()
        listeners = _health(parts)
        async with _listening(parts, listeners), asyncio.TaskGroup() as tasks:
            work = [
                # Before the first write, so that nothing done to our rules goes unseen.
                tasks.create_task(_watch_rules(parts), name="watch rules"),
                tasks.create_task(parts.reconciler.run(), name="reconcile"),
                tasks.create_task(watch_files(parts.files, parts.reconciler), name="watch files"),
                tasks.create_task(watch_host(parts.surroundings, parts.reconciler), name="watch addresses"),
                tasks.create_task(sweep(parts.reconciler, _after_step(parts)), name="sweep"),
                tasks.create_task(keep_conntrack(*_conntrack(parts)), name="clean flows"),
                *(tasks.create_task(each.run(), name="answer health checks") for each in listeners),
            ]
            _on_signals(parts, stop, tasks)
            parts.reconciler.wake()
            log.info("vipd %s serves %s", __version__, settings.socket)
            await stop.wait()
            for task in work:
                task.cancel()
        log.info("stopped; the rules stay in the kernel")
        return 0


def sources(settings: Settings) -> tuple[FileSource, StoreSource]:
    """The sources that the settings name, the store loaded."""
    store = StoreSource(settings.state_dir / "services.yaml")
    store.load()
    return FileSource(settings.services_dir, settings.state_dir / "accepted"), store


async def wire(settings: Settings) -> Parts:
    """All objects, every source having delivered, nothing written to the kernel yet."""
    files, store = sources(settings)
    await asyncio.to_thread(files.scan)
    for fault in (*files.faults(), *store.faults()):
        log.error("%s", fault)
    record = HostRecord(settings.state_dir)
    own = OwnProcesses(time.monotonic, pids_are_global())
    dataplane = await IptablesDataplane.start(settings, record, partial(run, started=own.running))
    surroundings = HostNet(settings, record)
    reconciler = Reconciler((files, store), dataplane, surroundings, lambda: datetime.now(UTC))
    peace = Peace(settings.chain_prefix)
    return Parts(settings, files, store, dataplane, surroundings, reconciler, own, peace)


@contextlib.contextmanager
def state_lock(settings: Settings) -> Iterator[None]:
    """Hold the state directory: two daemons on one would undo each other. Raises StartError."""
    path = settings.state_dir / "lock"
    try:
        settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise StartError(f"{path}: {error.strerror}; hint: run as root, or set state_dir") from None
    try:
        _take_lock(descriptor, settings)
        with _namespace_lock(settings):
            yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _namespace_lock(settings: Settings) -> Iterator[None]:
    """Hold the chain prefix in this network namespace, whatever the state directory: abstract sockets belong
    to a network namespace (unix(7)), and the kernel lets go of them when their process ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held:
        try:
            held.bind(f"\0vipd/{settings.chain_prefix}")
        except OSError:
            what = f"another vipd writes the chains {settings.chain_prefix}-* in this network namespace"
            raise StartError(f"{what}; hint: stop it, or use another chain_prefix") from None
        yield


def _take_lock(descriptor: int, settings: Settings) -> None:
    """Lock the file and leave our pid in it, by which cleanup knows that we run."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StartError(f"another vipd runs on {settings.state_dir}; hint: systemctl status vipd") from None
    os.truncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())


def _watch_rules(parts: Parts) -> Coroutine[None, None, None]:
    """Sees and repairs what others do to our rules."""
    names = Names(parts.settings.chain_prefix)

    def open_watch() -> Watch:
        return Watch(parts.dataplane.watched(), names, parts.own)

    return watch_rules(open_watch, parts.peace, parts.dataplane, parts.reconciler)


def _after_step(parts: Parts) -> asyncio.Event:
    """An event that is set after each step."""
    woken = asyncio.Event()
    parts.reconciler.after_step.append(woken.set)
    return woken


def _conntrack(parts: Parts) -> tuple[ConntrackKeeper, asyncio.Event]:
    """What cleans flows after each change, and the event that tells it to look."""
    keeper = ConntrackKeeper(time.monotonic)
    parts.reconciler.followers.append(keeper)
    return keeper, _after_step(parts)


def _health(parts: Parts) -> tuple[Listeners, ...]:
    """What answers health checks over TCP: the services' health ports, and `health_address`."""
    ports = HealthPorts(parts.reconciler, parts.settings.node_addresses)
    parts.reconciler.after_step.append(ports.follow)
    place = parts.settings.health_place()
    return ports.listeners, healthz_listener(parts.reconciler, Place(*place) if place else None)


@contextlib.asynccontextmanager
async def _listening(parts: Parts, listeners: Sequence[Listeners]) -> AsyncIterator[None]:
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
        (parts.files, parts.store),
        parts.store,
        parts.rescan,
        about,
        warnings=lambda: [
            *(warning for each in listeners for warning in each.warnings),
            *parts.peace.warnings(asyncio.get_running_loop().time()),
        ],
        claims=parts.surroundings.claims,
    )
    try:
        listener = bind_socket(settings.socket, settings.socket_group)
    except OSError as error:
        raise StartError(f"{settings.socket}: {error.strerror or error}") from None
    runner = web.AppRunner(application(served, Permission(settings.admin_group)), access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, listener, shutdown_timeout=STOP_SECONDS).start()
        yield
    finally:
        await runner.cleanup()
        settings.socket.unlink(missing_ok=True)


def _on_signals(parts: Parts, stop: asyncio.Event, tasks: asyncio.TaskGroup) -> None:
    """SIGTERM and SIGINT stop; SIGHUP reads everything anew and looks at the kernel again."""

    async def reload() -> None:
        log.info("reloading")
        await parts.rescan()
        parts.dataplane.forget()
        parts.reconciler.wake()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: tasks.create_task(reload(), name="reload"))
