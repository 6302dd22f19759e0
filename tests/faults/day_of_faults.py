"""The daemon's real loops through a day in simulated time in which seams fail from the first second to the
last: `python -m tests.faults.day_of_faults DIRECTORY MODE SEAM...`. Prints what it found as JSON.

What takes real time is replaced: threads run at once, the kernel is a dictionary, programs and sockets answer
at once. Meant to run in a network namespace of its own.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import logging
import pathlib
import pkgutil
import sys
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any, cast

import vipd
from tests.dataplane.fake_dataplane import FakeDataplane
from tests.faults.faulty_vipd import install
from tests.faults.seams import ETCD, SEAMS, Seam
from tests.faults.simulated_etcd import SimulatedEtcd
from tests.lab.simulated_time import SimulatedLoop
from vipd.daemon import daemon, wiring
from vipd.daemon.loops import loops
from vipd.daemon.status_reporter import StatusReporter
from vipd.dataplane.base import ApplyError, DataplanePlan
from vipd.dataplane.conntrack.cleaner import CleanupResult
from vipd.dataplane.iptables.watch.stream import ExternalChangeStream
from vipd.dataplane.programs import finish
from vipd.dataplane.switching import SwitchedCounter
from vipd.host.process import ProgramResult
from vipd.host.settings.etcd import EtcdSettings
from vipd.host.settings.settings import Settings, load_settings
from vipd.host.systemd.notify import Notifier
from vipd.host.worker import Channel
from vipd.observe.events.log_handler import recording
from vipd.observe.flow_stats.traffic import ConntrackTable
from vipd.observe.monitoring import Monitoring
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.registration import Registration

ENDPOINT = "http://127.0.0.1:2379"
FOLLOWED = "address: 10.96.7.4\nports: 80\nbackends: [10.244.9.{number}]\n"
REGISTERED = "/vipd/v1/backends/followed/10.244.8.8:80"
HALF_A_DAY_SECONDS = 43_200.0
HOUR_SECONDS = 3600.0
RECOVERY_SECONDS = 200.0
"""The longest pause between two tries is 60 s, and what is found may wait for another try."""
MIDNIGHT = 1_800_000_000.0
DECLARED = """\
apiVersion: vipd/v1
services:
  - name: watched
    address: 10.96.7.1
    ports: [80/tcp]
    backends: [10.244.0.{number}]
    traffic_policy: {{external: local}}
    health_port: 31000
  - name: asked
    address: 10.96.7.2
    ports: [8080/tcp]
    backends: [10.244.0.11]
    balance: least-connections
    check: {{type: http, path: /{number}, interval: 60s, timeout: 1s}}
"""
ASKED = """\
apiVersion: vipd/v1
services:
  - name: run
    address: 10.96.7.3
    ports: [80/tcp]
    backends: [10.244.0.11]
    check: {{type: exec, command: [/bin/true, x{number}], user: nobody, interval: 60m}}
"""

Json = dict[str, Any]


class Kernel(FakeDataplane):
    """A kernel that is written by a program."""

    def __init__(self) -> None:
        super().__init__()
        self.run: Any = None

    @property
    def counter(self) -> Any:
        """Counts nothing."""
        return Counters()

    def watch(self, options: object) -> Any:
        """Reports nothing."""
        return Watch()

    async def apply(self, plan: DataplanePlan) -> None:
        """Have the program write, then know what it wrote."""
        finished = await finish(["nft", "-f", "-"], "rules", self.run)
        if finished.exit_code:
            raise ApplyError("nft failed", finished.stderr or f"exit code {finished.exit_code}")
        await super().apply(plan)
        self.events.clear()
        self.updates.clear()


class Counters:
    """Of a kernel in which nothing happens; their reading passes the seam."""

    seconds = 0.0

    async def take(self) -> object:
        """No new flows."""
        return await SwitchedCounter.take(self)  # type: ignore[arg-type]

    async def refused(self) -> dict[object, int]:
        """No limits."""
        return {}

    async def collect_garbage(self) -> dict[object, int]:
        """No rules that are gone."""
        return {}

    def saved_state(self) -> object:
        """Nothing."""
        return {}

    def restore(self, memory: object) -> None:
        """Nothing."""


class Watch:
    """Hears nothing, for ever."""

    async def __aenter__(self) -> Watch:
        return self

    async def __aexit__(self, *_: object) -> None:
        """It holds nothing."""

    async def __anext__(self) -> object:
        return await ExternalChangeStream.__anext__(self)  # type: ignore[arg-type]  # the seam is in its place


class Worker:
    """A worker process that finds every backend healthy, and its end of the channel."""

    pid = 0

    def __init__(self, channel: Channel) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._channel = channel
        channel.connection_made(cast("asyncio.Transport", self))
        self._say([[0]])

    def write(self, frame: bytes) -> None:
        """Answer what the daemon sends."""
        rows = [[n, [True, "fine", 0.001, None]] if rest else [n] for n, *rest in json.loads(frame[4:])]
        asyncio.get_running_loop().call_soon(self._say, rows)

    def _say(self, rows: list[list[Any]]) -> None:
        data = json.dumps(rows).encode()
        frame = len(data).to_bytes(4, "big") + data
        self._channel.get_buffer(-1)[: len(frame)] = frame
        self._channel.buffer_updated(len(frame))

    def is_closing(self) -> bool:
        """It stays open."""
        return False

    def abort(self) -> None:
        """Nothing is open."""

    def kill(self) -> None:
        """Nothing runs."""


async def _worker(channel: Channel) -> Worker:
    return Worker(channel)


class InlineThread:
    """Does its work when it is started."""

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self.start = target


async def at_once(function: Callable[..., Any], *arguments: object, **named: object) -> object:
    """`asyncio.to_thread` on the event loop itself, whose time must not pass meanwhile."""
    await asyncio.sleep(0)
    return function(*arguments, **named)


async def saves(*_: object, **__: object) -> AsyncIterator[object]:
    """What the watch of a directory yields where no event comes."""
    while True:
        await asyncio.sleep(60.0)
        yield set()


async def _forever(*_: object) -> object:
    return await asyncio.Event().wait()


async def _finished(*_: object, **__: object) -> ProgramResult:
    return ProgramResult(0, "", "")


async def _cleaned(*_: object, **__: object) -> CleanupResult:
    return CleanupResult(0, {}, 0.0)


async def _counted(*_: object) -> dict[object, int]:
    return {}


async def _addresses() -> frozenset[str]:
    return frozenset({"10.10.0.1"})


async def _no_routes(*_: object) -> tuple[str, ...]:
    return ()


async def _same(*_: object) -> bool:
    return False


def _opened(etcd: SimulatedEtcd | None) -> Callable[..., object]:
    async def opened(_: object) -> SimulatedEtcd:
        assert etcd, "only a fleet asks"
        return etcd

    return opened


async def _not_diagnosed(endpoint: str, error: object, found: object, *_: object) -> object:
    """That would open connections."""
    return found


CALM: dict[str, Callable[..., object]] = {
    "addresses of this host": _addresses,
    "neighbours and sockets of this host": lambda *_: {},
    "routes": _no_routes,
    "checks of this host": _same,
    "connection tracking": _cleaned,
    "counters of rules": _counted,
    "table of flows": lambda *_: ConntrackTable(1, 2, accounting=False, events=False),
    "watch of rules": _forever,
    "name service": lambda *_: (),
    "programs that write rules": _finished,
}
"""What a seam does that does not fail, where the real thing takes real time."""


class Control:
    """Which seams fail now."""

    def __init__(self, mode: str, names: Iterable[str]) -> None:
        self._mode, self._names = mode, frozenset(names)
        self.failing = False
        self.etcd = SimulatedEtcd() if self._names & {seam.name for seam in ETCD} else None
        """What the daemon is a part of the fleet of; None: of none."""

    def mode(self, seam: Seam) -> str:
        """How a seam fails now; empty when it works."""
        return self._mode if self.failing and seam.name in self._names else ""


class Lines(logging.Handler):
    """Counts what is logged at the level of the daemon's log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note a line."""
        self.lines.append(f"{record.created - MIDNIGHT:.0f} {record.name}: {record.getMessage()}")


def prepare(control: Control, loop: SimulatedLoop) -> None:
    """Put seams and what is calm in their places, and one clock in the place of all."""
    for found in pkgutil.walk_packages(vipd.__path__, "vipd."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    for seam in SEAMS:
        install(seam, control, CALM.get(seam.name))
    for target, value in {
        "time:monotonic": loop.time,
        "time:time": lambda: MIDNIGHT + loop.time(),
        "time:time_ns": lambda: int((MIDNIGHT + loop.time()) * 1e9),
        "asyncio:to_thread": at_once,
        "watchfiles:awatch": saves,
        "vipd.host.bounded_threads:threading": _Threading,
        "vipd.health.record_file:threading": _Threading,
        "vipd.daemon.wiring:HostDataplanes": lambda settings, record, runner, **_: runner,
        "vipd.dataplane.switching:SwitchableDataplane.start": _kernel,
        "vipd.host.vip_routes:VipRoutes.poll": _same,
        "vipd.sources.etcd.transport:Transport._open": _opened(control.etcd),
        "vipd.sources.etcd.transport:diagnose": _not_diagnosed,
        "vipd.host.local_sockets:LocalSockets.read": lambda _: (),
        # Each look takes real time. What is said, or kept, at each is too much at one a minute, too.
        "vipd.control.background_tasks:POLL_HOST_SECONDS": 60.0,
        "vipd.control.background_tasks:CONNTRACK_POLL_SECONDS": 60.0,
        "vipd.health.checker:SAVE_SECONDS": 60.0,
        "vipd.host.worker:start_process": _worker,
        "vipd.host.worker:BEAT_SECONDS": 60.0,
        "vipd.health.lag:BEAT_SECONDS": 60.0,
        "vipd.observe.flow_stats.collector:EVERY_SECONDS": 60.0,
        "vipd.observe.flow_stats.traffic_counting:POLL_SECONDS": 60.0,
        "vipd.observe.listeners:RETRY_SECONDS": 60.0,
    }.items():
        replace(target, value)


def replace(target: str, value: object) -> None:
    """Put something in the place of `module:name` or `module:Class.name`."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    setattr(owner, name, value)


class _Threading:
    Thread, Lock = InlineThread, threading.RLock  # it is started under the lock


async def _kernel(name: str, opening: Any, switched: object) -> Kernel:
    kernel = Kernel()
    kernel.run = opening
    return kernel


async def day(directory: Path, control: Control) -> Json:
    """Wire a daemon, let seams fail for a day, and see how it is then and afterwards."""
    settings = _settings(directory, control)
    lines = Lines()
    logging.getLogger("vipd").addHandler(lines)
    logging.getLogger("vipd").setLevel(logging.INFO)
    _declare(directory, 1, control)
    with recording(settings.state_dir) as recorder:
        parts = await wiring.wire(settings)
        reporter = StatusReporter(Notifier(), parts.reconciler)
        observers = Monitoring(daemon.monitored(parts, recorder))
        listeners = (*daemon.health_listeners(parts), *observers.listeners)
        work: list[asyncio.Task[Any]] = [
            asyncio.create_task(parts.supervisor.run(name, loop))
            for name, loop in loops(parts, listeners, observers).items()
        ]
        told: list[str] = []
        if settings.etcd:
            work.append(asyncio.create_task(_register(settings.etcd, told)))
        parts.reconciler.request_sync()
        await asyncio.sleep(90.0)  # not a moment at which something is just being looked at
        found: Json = {"before": parts.reconciler.progress.state}
        found["warned_before"] = _warnings(parts, listeners, recorder)
        control.failing = True
        lines.lines.clear()
        await _half(directory, 2, control)
        noon = _traced(), len(lines.lines)
        found["told_by_noon"] = len(told)
        await _half(directory, 20, control)
        found |= {"grown": _traced() - noon[0], "lines": len(lines.lines), "lines_by_noon": noon[1]}
        found |= {"some": lines.lines[:100], "told": told, **_on_disk(settings.state_dir)}
        found["alive"] = not any(task.done() for task in work)
        found["events"] = len(recorder.read())
        found["warned"] = _warnings(parts, listeners, recorder)
        found |= await _recovered(directory, control, parts)
        found["still_warned"] = _warnings(parts, listeners, recorder)
        found["registered"] = control.etcd is not None and REGISTERED.encode() in control.etcd.kvs
        for task in work:
            task.cancel()
        await asyncio.wait(work)
        del reporter
    return found


def _settings(directory: Path, control: Control) -> Settings:
    for name in ("services.d", "state"):
        (directory / name).mkdir()
    return load_settings(
        flags={
            "services_dir": str(directory / "services.d"),
            "state_dir": str(directory / "state"),
            "dataplane": "nftables",
            "manage_sysctls": False,
            **({"etcd": {"endpoints": [ENDPOINT], "report_interval": 10}} if control.etcd else {}),
        }
    )


async def _register(settings: EtcdSettings, told: list[str]) -> None:
    """What `vipctl register` does."""
    client = EtcdClient(settings, Random(1))
    await Registration(client, REGISTERED, "{}", 60, lambda _, what: told.append(what)).run()


async def _recovered(directory: Path, control: Control, parts: Any) -> Json:
    """How it is some time after the end of the fault."""
    control.failing = False
    _declare(directory, 99, control)
    await asyncio.sleep(RECOVERY_SECONDS)
    kernel = cast("Kernel", parts.dataplane).kernel
    serves = sorted(str(e) for f in kernel.values() for e in f.endpoints)
    return {"after": parts.reconciler.progress.state, "serves": serves}


def _on_disk(state_dir: Path) -> Json:
    paths = list(state_dir.rglob("*"))
    return {"files": len(paths), "bytes": sum(p.stat().st_size for p in paths if p.is_file())}


async def _half(directory: Path, first: int, control: Control) -> None:
    """Half a day in which somebody changes a file each hour."""
    for hour in range(12):
        await asyncio.sleep(HALF_A_DAY_SECONDS / 12)
        _declare(directory, first + hour, control)


def _declare(directory: Path, number: int, control: Control) -> None:
    (directory / "services.d" / "watched.yaml").write_text(DECLARED.format(number=number))
    (directory / "services.d" / "asked.yaml").write_text(ASKED.format(number=number))
    if control.etcd:
        control.etcd.put("/vipd/v1/services/followed", FOLLOWED.format(number=number))


def _warnings(parts: Any, listeners: Any, recorder: Any) -> list[str]:
    """What status warns of, and the problems."""
    return [
        *(warning for each in listeners for warning in each.warnings),
        *parts.health.warnings(),
        *recorder.warnings,
        *parts.host.faults(),
        *parts.supervisor.warnings,
        *parts.reconciler.containment.warnings,
        *parts.reconciler.progress.warnings,
        *(parts.fleet.warnings() if parts.fleet else ()),
        *(str(problem) for found in parts.reconciler.problems.values() for problem in found),
        *(fault for source in parts.sources for fault in source.faults()),
        *parts.reconciler.progress.quarantined.values(),
        *filter(None, [parts.reconciler.progress.fault]),
    ]


def _traced() -> int:
    """Bytes in use, without the interpreter's own table of strings, which doubles at any time by 2 MB: a path
    that is made puts its names there."""
    gc.collect()
    found = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, pathlib.__file__)])
    return sum(trace.size for trace in found.traces)


def main() -> None:
    """Run a day as the command line says."""
    directory, mode, *names = sys.argv[1:]
    loop, control = SimulatedLoop(), Control(mode, names)
    real = time.perf_counter()
    prepare(control, loop)
    tracemalloc.start()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        found = runner.run(day(Path(directory), control))
    print(json.dumps({**found, "took": time.perf_counter() - real}))


if __name__ == "__main__":
    main()
