"""The only door to vipd's inside: what tests of many cases ask, for whom a daemon or vipctl is too slow.

A test goes through packets, the kernel's rules, the API, vipctl and files where that is fast enough. Where it
is not, it asks a function here, in values of `vipd.model` and of this file. Whoever rebuilds a package of
vipd changes the function that stands for it, and no test.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from unittest import mock

from tests.lab.namespace_programs import run_in_namespace
from tests.lab.simulated_etcd import SimulatedEtcd
from tests.lab.simulated_time import simulate
from vipd.cli.main import run
from vipd.declaration import problems
from vipd.declaration.conversion.formats import KUBERNETES, convert_text, format_of
from vipd.declaration.reader import parse_declaration
from vipd.declaration.writer import format_declaration
from vipd.host.facts import HostFacts
from vipd.host.process import ProgramResult as ProgramResult
from vipd.host.process import Runner as Runner
from vipd.model.check_target import CheckTarget
from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.service import Family, Protocol, Service, family_of, socket_text

if TYPE_CHECKING:
    from aiohttp import ClientSession

    from vipd.dataplane.base import Dataplane
    from vipd.host.settings.settings import Settings

T = TypeVar("T")

DATAPLANES = ("iptables", "nftables")


class Problem(NamedTuple):
    """A fault of a declaration. Its text is what vipctl prints, with the file."""

    line: int
    """0: the whole file."""
    path: str
    """Such as `services[2].backends[0].port`."""
    what: str
    hint: str
    printed: str
    internal: bool = False
    """An unexpected exception in vipd."""
    partial: bool = False
    """It refuses a part of a service alone."""

    def __str__(self) -> str:
        return self.printed


class Note(NamedTuple):
    line: int
    text: str
    printed: str

    def __str__(self) -> str:
        return self.printed


@dataclass(frozen=True)
class Declared:
    """What a text declares. With problems its services are those that could be read."""

    services: tuple[Service, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[Note, ...] = ()
    serving: tuple[Service, ...] = field(default=(), compare=False)
    """The services that serve when nothing of the file served before: those of no refused part."""
    understood: tuple[Service, ...] = field(default=(), compare=False)
    """The services that serve on although they stand in a text with problems, since an earlier run accepted
    it."""

    @property
    def ok(self) -> bool:
        """No fault refuses more than a part of a service."""
        return all(problem.partial for problem in self.problems)


def declare(
    text: str | bytes,
    path: str = "a.yaml",
    *,
    accepted: bool = False,
    form: str = "",
    addresses: Sequence[str] = (),
) -> Declared:
    """What the text of a file declares. `accepted`: an earlier run accepted it.

    `form`: the program whose configuration the text is, such as `haproxy`; `auto`: what it looks like.
    `addresses`: the virtual IPs for what such a program listens for on every address of the host.
    """
    if form:
        text = text if isinstance(text, str) else text.decode()
        form = format_of(text) if form == "auto" else form
        if form not in ("", KUBERNETES):
            return _declared(convert_text(text, path, form, addresses))
    return _declared(parse_declaration(text, path, accepted=accepted))


def written(services: Iterable[Service]) -> str:
    return format_declaration(tuple(services))


class Kept(NamedTuple):
    """What a store reads from its database."""

    services: Mapping[str, Service]
    revisions: Sequence[int]
    faults: Sequence[str]


def kept_in(state_dir: Path) -> Kept:
    """What a started vipd would know of what vipctl has added; nothing is repaired."""
    from vipd.sources.store import StoreSource

    store = StoreSource(state_dir / "state.db", repair=False)
    store.load()
    return Kept(store.services, [entry.revision for entry in store.history.entries], store.faults())


def keep_overrides(state_dir: Path, *rows: tuple[str, str]) -> None:
    """Put overrides into the database, as another version of vipd may have left them: the target and the text
    of each."""
    from vipd.sources.state import Connection, StateFile

    def insert(database: Connection) -> None:
        database.executemany("insert into override values (?, ?)", rows)

    StateFile(state_dir / "state.db").change(insert, lambda _: None)


def vipctl(
    arguments: Sequence[str], story: Callable[[SimulatedEtcd], Awaitable[object]] | None = None
) -> int:
    """Run vipctl in this process; returns its exit code. It prints to sys.stdout and sys.stderr.

    Beside a story it runs in simulated time, with a simulated etcd, until SIGTERM ends it after the story."""
    if story is None:
        return run(arguments)
    etcd = SimulatedEtcd()

    async def lived(command: Awaitable[None]) -> None:
        ending = asyncio.gather(command, _ended_after(story(etcd)))
        with contextlib.ExitStack() as stack:
            for target, double in _simulated_etcd(etcd).items():
                stack.enter_context(mock.patch(target, double))
            await ending

    with mock.patch("asyncio.run", lambda command: simulate(lived(command))):
        return run(arguments)


async def _ended_after(story: Awaitable[object]) -> None:
    try:
        await story
    finally:
        signal.raise_signal(signal.SIGTERM)


class Verdict(NamedTuple):
    """What the first answer to a check says of a backend."""

    healthy: bool | None
    """None: vipd could not ask, and the backend keeps its state."""
    reason: str
    """As vipctl prints it, without the number of results in a row."""
    weight: str
    """That the backend says: `7`, `50%`; empty: none that is valid."""
    seconds: float
    longest_turn: float = 0.0
    """Seconds of processor time in which the rest of vipd had no turn, if that was watched."""


def probed(*services: Service, worker: bool = False, watched: bool = False) -> list[Verdict]:
    """What one check of the only backend of each service finds, all at the same time. With `worker` a process
    of its own reads the answers, as in a daemon. `watched`: see how the checks hold up the rest of vipd."""
    import asyncio

    from vipd.health.checker import HealthChecker, ProbeOptions
    from vipd.host.settings.settings import Settings
    from vipd.host.worker import Worker
    from vipd.model.check_target import check_targets

    async def answers(checker: HealthChecker, targets: list[CheckTarget]) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}
        pending = dict(enumerate(targets))
        began, longest, worked = time.monotonic(), 0.0, time.thread_time()
        while pending:
            await asyncio.sleep(0 if watched else min(0.001 * len(pending), 0.2))
            longest, worked = max(longest, time.thread_time() - worked), time.thread_time()
            for number, target in tuple(pending.items()):
                status = checker.status(target)
                if status.reason == "not asked yet":
                    continue
                healthy = None if status.state == "unknown" else status.counts_healthy
                reason = status.reason.removesuffix("; not asked yet").removesuffix(", 1 of 1")
                weight = str(status.weight or "") if healthy else ""
                seconds = time.monotonic() - began
                verdicts[number] = Verdict(healthy, reason, weight, seconds, longest if watched else 0.0)
                del pending[number]
        return [verdicts[number] for number in range(len(targets))]

    async def story() -> list[Verdict]:
        process = Worker() if worker else None
        checker = HealthChecker(options=ProbeOptions(Settings().check_users, process))
        tasks = [
            asyncio.create_task(checker.run()),
            *([asyncio.create_task(process.run())] if process else []),
        ]
        targets = []
        for number, service in enumerate(services):
            (target,) = check_targets(service).values()
            targets.append(replace(target, timing=replace(target.timing, rise=1, fall=1)))
            checker.follow(f"{number} {service.name}", targets[-1:], service.origin.author)
        try:
            return await answers(checker, targets)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    return asyncio.run(story())


def _declared(declaration: problems.Declaration) -> Declared:
    return Declared(
        declaration.services,
        tuple(
            Problem(p.line, p.path, p.what, p.hint, str(p), bool(p.trace), p.partial)
            for p in declaration.problems
        ),
        tuple(Note(note.line, note.text, str(note)) for note in declaration.notes),
        declaration.served_parts(),
        declaration.understood().services,
    )


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: dict[str, Any]

    @property
    def kind(self) -> str:
        """The kind of error; empty when it is none."""
        return str(self.body.get("error", {}).get("kind", ""))


class Output(NamedTuple):
    code: int
    stdout: str
    stderr: str


@dataclass(slots=True)
class Kernel:
    """What the dataplane of `running` writes to, in place of rules. A test may make it fail."""

    rules: dict[ForwardingKey, Forwarding] = field(default_factory=dict)
    writes: list[dict[ForwardingKey, Forwarding | None]] = field(default_factory=list)
    """The changes of each write, in order; None: removed."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """The next writes fail, one each: which program fails, and its words."""
    refuses: Callable[[Forwarding], str] = lambda forwarding: ""
    """Why it does not take a forwarding; empty: it does."""
    unreadable: str = ""
    """Why its rules cannot be read; empty: they can."""
    new_flows: dict[tuple[str, str], int] = field(default_factory=dict)
    """New flows that the next reading of counters finds, by service and backend `address:port`."""
    live_flows: dict[tuple[str, str], int] = field(default_factory=dict)
    """Flows that have not ended, by service and backend `address:port`."""
    flow_readings: int = 0
    reading_seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is not set, a write waits; it is set at the beginning."""
    writing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever a write begins."""
    overlaps: int = 0
    """Calls that came while a write was under way, which no dataplane allows."""

    def __post_init__(self) -> None:
        self.gate.set()

    def serving(self) -> dict[str, dict[str, int]]:
        """The backends of each `name address:port/protocol` that get new flows, with their shares."""
        return {
            f"{forwarding.key.service} {address}": {
                str(endpoint): endpoint.weight for endpoint in forwarding.endpoints if endpoint.weight
            }
            for forwarding in self.rules.values()
            for address in _addresses(forwarding)
        }

    def names(self) -> set[str]:
        return {key.service for key in self.rules}


class Backends(dict[str, object]):
    """What checks find, by a backend's `address:port` or by its address. True: healthy. A text: unhealthy,
    and why. A number: healthy, and it reports this weight. None: it cannot be asked. Ellipsis: it hangs until
    the time is up. One that is not listed is healthy."""


class Vipd:
    """A vipd in this process, as `running` has it: its files and API are real, what lies below is here."""

    def __init__(self, root: Path, **settings: object) -> None:
        self.root, self.kernel, self.backends = root, Kernel(), Backends()
        self.names: dict[str, Sequence[str] | str] = {}
        """What name servers answer: of `dns:NAME` or `srv:NAME` the addresses (of SRV `address:port`), or why
        there are none."""
        self.etcd = SimulatedEtcd()
        """What `running` follows in simulated time if its settings name an etcd; else that is asked."""
        self.facts: dict[str, Any] = {}
        """What this host has besides its addresses: `gateways` and `neighbours`, each with its device,
        `sockets` (protocol, address, port, owner, protected), and so on."""
        self.announced: frozenset[str] = frozenset()
        """The addresses that routes announce."""
        self.announce_fault = ""
        """Why these cannot be read or changed; empty: they can."""
        self.asked = list[str]()
        """The backends that checks have asked, in order."""
        self.journal: list[logging.LogRecord] = []
        self.services_dir, self.state_dir = root / "services.d", root / "state"
        self.socket = root / "vipd.sock"
        self.settings: dict[str, object] = {
            "services_dir": self.services_dir,
            "state_dir": self.state_dir,
            "socket": self.socket,
            "socket_group": "no-such-group",
            "host_addresses": ["10.10.0.1", "fd00:10::1", "127.0.0.1", "::1"],
            "node_name": "host-a",
            **settings,
        }
        self.session: ClientSession

    def declare(self, *blocks: str, name: str = "services.yaml") -> None:
        """Write a file of services; without any: one that declares none. `reload` has it read."""
        self.services_dir.mkdir(parents=True, exist_ok=True)
        text = "services:\n" + "".join(blocks) if blocks else "services: []\n"
        (self.services_dir / name).write_text("apiVersion: vipd/v1\n" + text)

    async def ask(self, method: str, path: str, body: object = None, data: bytes | None = None) -> Answer:
        """One request to the API; `path` is sent as it stands."""
        from yarl import URL

        content = {"data": data} if data is not None else {} if body is None else {"json": body}
        url = URL(f"http://vipd{path}", encoded=True)
        async with self.session.request(method, url, **content) as response:
            assert response.content_type == "application/json", await response.text()
            answer = Answer(response.status, await response.json())
        assert answer.body["apiVersion"] == "vipd/v1"
        assert ("error" in answer.body) == (answer.status != 200)
        return answer

    async def add(self, spec: object) -> Answer:
        return await self.ask("POST", "/v1/services", {"service": spec})

    async def reload(self) -> Answer:
        """Have it read its files; returns once that is written or has failed."""
        return await self.ask("POST", "/v1/reload")

    async def status(self) -> dict[str, Any]:
        """What `vipctl status` shows."""
        return (await self.ask("GET", "/v1/status")).body

    async def service(self, name: str) -> dict[str, Any]:
        """What `vipctl describe` shows of a service."""
        answer = await self.ask("GET", f"/v1/services/{name}")
        assert answer.status == 200, answer
        return dict(answer.body["service"])

    async def vipctl(self, *arguments: str) -> Output:
        """Run vipctl against it. One at a time: it prints to sys.stdout."""
        stdout, stderr = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = await asyncio.to_thread(run, ["--socket", str(self.socket), *arguments])
        return Output(code, stdout.getvalue(), stderr.getvalue())

    async def until(self, condition: Callable[[], object]) -> None:
        pause = 0.01
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                await asyncio.sleep(pause)
                pause = min(1.1 * pause, 0.1)

    async def until_status(self, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        pause = 0.01
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition(status := await self.status()):
                await asyncio.sleep(pause)
                pause = min(1.1 * pause, 0.1)
        return status


PATIENCE_SECONDS = 60.0
"""A step takes milliseconds; a machine that does much else may stand still for seconds."""


def running(
    story: Callable[[Vipd], Awaitable[T]],
    prepare: Callable[[Vipd], object] = lambda vipd: None,
    root: Path | None = None,
    *,
    simulated: bool = False,
    later: float = 0.0,
    **settings: object,
) -> T:
    """Run a story beside a vipd in this process. What `prepare` declared is written when the story begins.

    Sources, decisions, API, events, metrics and pages are as in the daemon. Below are doubles: a `Kernel`
    takes the forwardings, the host has what `settings` say, checks find what `Vipd.backends` says, names what
    `Vipd.names` says. With the `root` of an earlier story it starts from what that left on disk.

    `simulated`: when all wait the clock leaps, so that every pause has its exact length on any machine, and
    hours take no time. Then nobody watches the files for changes: `reload`. The calendar begins at the same
    moment each time, or so many seconds `later`.
    """
    directory = contextlib.nullcontext(root) if root else TemporaryDirectory(prefix="vipd-")
    # Not the test's own directory: a socket's path must be shorter than 108 bytes.
    with directory as path:
        vipd = Vipd(Path(path), **settings)
        vipd.services_dir.mkdir(exist_ok=True)
        vipd.state_dir.mkdir(exist_ok=True)
        prepare(vipd)
        lived = _live(vipd, story, simulated, later)
        return simulate(lived) if simulated else asyncio.run(lived)


async def _live(vipd: Vipd, story: Callable[[Vipd], Awaitable[T]], simulated: bool, later: float) -> T:
    from aiohttp import ClientSession, UnixConnector

    from vipd.daemon import daemon
    from vipd.daemon.loops import loops
    from vipd.daemon.wiring import open_cache, wire
    from vipd.host.observer import Observers
    from vipd.host.settings.settings import load_settings
    from vipd.host.systemd.notify import Notifier
    from vipd.observe.events.log_handler import recording
    from vipd.observe.monitoring import Monitoring

    journal = _Journal(vipd.journal)
    settings = load_settings(None, vipd.settings)
    with contextlib.ExitStack() as stack:
        of_time = {**_simulated_clocks(later), **_simulated_etcd(vipd.etcd)} if simulated else {}
        for target, double in {**_doubles(vipd), **of_time}.items():
            stack.enter_context(mock.patch(target, double))
        logging.getLogger("vipd").addHandler(journal)
        stack.callback(logging.getLogger("vipd").removeHandler, journal)
        cache = open_cache(settings)
        recorder = stack.enter_context(recording(cache))
        parts = await wire(settings, cache, Observers())
        notify, listeners = daemon._notify_program(settings, recorder), [*daemon.health_listeners(parts)]
        warnings = daemon._warnings_of(parts, listeners, recorder, Notifier(), notify)
        monitoring = Monitoring(
            daemon.monitored(parts, recorder, warnings, notify.counts if notify else None)
        )
        listeners += monitoring.listeners
        context = daemon._api_context(parts, monitoring, recorder, warnings)
        work: list[asyncio.Task[Any]] = []
        async with daemon._serving_api(settings, context, monitoring):
            try:
                work += [
                    asyncio.create_task(parts.supervisor.run(name, loop), name=name)
                    for name, loop in loops(parts, listeners, monitoring, notify).items()
                    if name not in _LEFT_OUT
                ]
                if parts.fleet:
                    await parts.fleet.wait_for_etcd()
                await parts.reconciler.wait_synced(parts.reconciler.request_sync(), PATIENCE_SECONDS)
                async with ClientSession(connector=UnixConnector(str(settings.socket))) as vipd.session:
                    result = await story(vipd)
                assert not vipd.kernel.overlaps, "a dataplane was asked while it wrote"
                for task in work:
                    assert not task.done(), f"{task.get_name()} has ended"
                return result
            finally:
                await daemon._stop(parts, work)


_LEFT_OUT = frozenset(
    {"watching rules", "watching for replies", "keeping the fast path", "asking backends and name servers"}
)
"""Loops that look at the real kernel, or start a process."""


class _Journal(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__(logging.INFO)
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)


def _doubles(vipd: Vipd) -> dict[str, object]:
    """What stands in the place of what lies below, by where the composition root finds it."""
    from vipd.control.host import Host

    async def started(name: str, *_: object) -> _Dataplane:
        return _Dataplane(vipd.kernel, name)

    async def chosen(wanted: str, *_: object) -> str:
        return wanted if wanted in DATAPLANES else DATAPLANES[0]

    async def no_flows(*_: object) -> object:
        from vipd.dataplane.conntrack.cleaner import CleanupResult

        return CleanupResult(0, {}, 0.0)

    def live_flows(keys: Mapping[object, ForwardingKey], *_: object) -> object:
        from vipd.dataplane.conntrack.live_counts import LiveCounts
        from vipd.dataplane.counting import BackendKey

        kernel, asked = vipd.kernel, set(keys.values())
        kernel.flow_readings += 1
        flows = {
            BackendKey(f.key, endpoint.address, endpoint.port): kernel.live_flows[
                f.key.service, str(endpoint)
            ]
            for f in kernel.rules.values()
            if f.key in asked
            for endpoint in (*f.reachable(), *f.without_new_flows)
            if (f.key.service, str(endpoint)) in kernel.live_flows
        }
        return LiveCounts(flows, kernel.reading_seconds)

    async def finished(*_: object, **__: object) -> object:
        from vipd.host.process import ProgramResult

        return ProgramResult(0, "", "")

    def table(_: object) -> object:
        from vipd.observe.flow_stats.traffic import ConntrackTable

        return ConntrackTable(1, 2, accounting=False, events=False)

    def host(settings: Any, record: Any, **named: Any) -> Host:
        return Host(settings, record, _sysctls(vipd.root / "sys"), **named)

    return {
        "vipd.daemon.wiring.SwitchableDataplane.start": started,
        "vipd.daemon.wiring.resolve_dataplane": chosen,
        "vipd.daemon.wiring.rule_programs": lambda *_: finished,
        "vipd.daemon.wiring.Host": host,
        "vipd.control.host.VipRoutes": _Routes,
        "vipd.control.host.HostChecks": _HostChecks,
        "vipd.control.host.HostReader": lambda *_: _HostReader(vipd.facts),
        "vipd.daemon.wiring.AnnouncedRoutes": lambda *_: _Announced(vipd),
        "vipd.daemon.wiring.RemoteLookup": lambda *_: _Names(vipd.names),
        "vipd.dataplane.conntrack.scheduler.clean": no_flows,
        "vipd.control.connection_balancer.TRACKED": vipd.root / "tracked",
        "vipd.dataplane.conntrack.live_counts._read": live_flows,
        "vipd.observe.flow_stats.traffic.FlowTable.table": table,
        "vipd.health.checker._probers": lambda *_: dict.fromkeys(_CHECKS, _Checks(vipd)),
    }


def _simulated_etcd(etcd: SimulatedEtcd) -> dict[str, object]:
    """It, in the place of every endpoint."""

    async def opened(_: object) -> object:
        return etcd

    return {"vipd.sources.etcd.client.EtcdClient._open_session": opened}


_CHECKS = ("tcp", "http", "https", "udp", "dns", "exec")
_MIDNIGHT = datetime(2027, 1, 15, tzinfo=UTC)


def _simulated_clocks(later: float) -> dict[str, object]:
    """One clock in the place of all. Bounded threads do their work at once, for nobody counts them."""
    from vipd.health.checker import HealthChecker
    from vipd.resolver.resolver import Resolver
    from vipd.sources.confirmation import Clocks
    from vipd.sources.store import StoreSource

    clock = asyncio.get_running_loop().time

    def wall() -> float:
        return _MIDNIGHT.timestamp() + later + clock()

    def now() -> datetime:
        return datetime.fromtimestamp(wall(), UTC)

    async def saves(*_: object, **__: object) -> AsyncIterator[object]:
        while True:
            await asyncio.sleep(3600.0)
            yield set()

    class AtOnce:
        def __init__(self, target: Callable[[], None], **_: object) -> None:
            self.start = target

    threads = SimpleNamespace(Thread=AtOnce, Lock=threading.RLock)
    clocks = Clocks(now, clock, lambda: "boot")
    return {
        "time.monotonic": clock,
        "time.time": wall,
        "vipd.daemon.wiring.now": now,
        "vipd.control.host.monotonic": clock,
        "vipd.daemon.wiring.HealthChecker": partial(
            HealthChecker, clock=clock, wall=wall, random=Random(1).random
        ),
        "vipd.daemon.wiring.Resolver": partial(Resolver, clock=clock, wall=wall),
        "vipd.daemon.wiring.StoreSource": partial(StoreSource, clocks=clocks),
        "vipd.host.bounded_threads.threading": threads,
        "vipd.sources.cache.Cache._wake": _write_in_loop,
        "watchfiles.awatch": saves,
    }


def _write_in_loop(cache: Any) -> None:
    """A moment later, by the clock that leaps; a failure is the cache's fault, and it tries again."""

    def write() -> None:
        try:
            cache.write()
        except StoreError:
            loop.call_later(2.0, _write_in_loop, cache)

    from vipd.sources.state import StoreError

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return  # in a thread, or at the start: something else follows
    loop.call_later(0.02, write)


def _sysctls(root: Path) -> Path:
    """A directory with the kernel settings of a host on which all is well."""
    for name, value in {
        "net/ipv4/ip_forward": "1",
        "net/ipv6/conf/all/forwarding": "1",
        "net/ipv6/conf/all/disable_ipv6": "0",
        "net/netfilter/nf_conntrack_tcp_be_liberal": "1",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(value)
    return root


class _Routes:
    """Every virtual IP has a route."""

    def __init__(self, *_: object) -> None:
        pass

    def mark_dirty(self, vips: object) -> None:
        pass

    async def ensure(self, *_: object) -> tuple[str, ...]:
        return ()

    async def poll(self) -> bool:
        return False


class _HostChecks:
    """Nothing is wrong with this host."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    async def refresh(self, needs: object) -> bool:
        return False

    def warnings(self, needs: object) -> tuple[str, ...]:
        return ()


class _HostReader:
    """What else is on this host, as `Vipd.facts` says."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts

    async def read(self, own: frozenset[str]) -> HostFacts:
        from vipd.host.facts import LocalSocket
        from vipd.model.service import Protocol

        facts = {"own_addresses": own, **self._facts}
        sockets = [LocalSocket(Protocol(protocol), *rest) for protocol, *rest in facts.pop("sockets", ())]
        protected = tuple(socket for socket in sockets if socket.protected)
        return HostFacts(**facts, sockets=tuple(sockets), protected_sockets=protected)

    def faults(self) -> tuple[str, ...]:
        return ()


class _Announced:
    def __init__(self, vipd: Vipd) -> None:
        self._vipd = vipd

    async def read(self) -> frozenset[str]:
        if self._vipd.announce_fault:
            raise OSError(5, self._vipd.announce_fault)
        return self._vipd.announced

    async def ensure(self, addresses: frozenset[str]) -> None:
        await self.read()
        self._vipd.announced = frozenset(addresses)

    async def foreign(self) -> int:
        return 0


class _Names:
    def __init__(self, names: Mapping[str, Sequence[str] | str]) -> None:
        self._names = names

    async def __call__(self, question: object, *_: object) -> object:
        from vipd.resolver.answers import LookupResult, Target

        answer = self._names.get(str(question), "no such name")
        if isinstance(answer, str):
            return LookupResult(fault=answer)
        if not str(question).startswith("srv:"):
            return LookupResult(tuple(map(Target, answer)), 30.0)
        places = (address.rpartition(":") for address in answer)
        return LookupResult(tuple(Target(host, int(port)) for host, _, port in places), 30.0)


class _Checks:
    def __init__(self, vipd: Vipd) -> None:
        self._vipd = vipd

    def start(self, target: CheckTarget, done: Callable[[Any], None]) -> asyncio.TimerHandle:
        from vipd.health.result import ProbeResult, ReportedWeight

        place = socket_text(target.address, target.port)
        self._vipd.asked.append(place)
        backends = self._vipd.backends
        state = backends.get(place, backends.get(target.address, True))
        seconds = 0.001
        if state is None:
            result = ProbeResult.not_probed("no descriptors")
        elif state is ...:
            seconds += target.timing.timeout
            result = ProbeResult.timeout(target.timing.timeout)
        elif isinstance(state, str):
            result = ProbeResult.failure(state, 0.001)
        else:
            weight = None if isinstance(state, bool) else ReportedWeight(int(str(state)))
            result = ProbeResult.success(0.001, weight)
        return asyncio.get_running_loop().call_later(seconds, done, result)


class _Plan(NamedTuple):
    changes: dict[ForwardingKey, Forwarding | None]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        lines = (
            f"{'-+'[f is not None]} {key.service_port} {key.protocol}" for key, f in self.changes.items()
        )
        return "".join(f"{line}\n" for line in sorted(lines))


class _Dataplane:
    """A dataplane over a `Kernel`."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.name, self._kernel = name, kernel
        self._wanted: dict[ForwardingKey, Forwarding] = {}
        self._refused: dict[ForwardingKey, str] = {}
        self._writing = False
        self.counter = self
        self.seconds = 0.0
        self._addresses: frozenset[str] = frozenset()

    async def switch(self, name: str, before_removal: Callable[[], Awaitable[None]] | None = None) -> bool:
        if name == self.name:
            return False
        await self.apply(_Plan(dict(self._wanted)))
        if before_removal:
            await before_removal()
        self.name = name
        return True

    async def prepare(self, changes: object) -> None:
        """Nothing takes long here."""

    def update(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        self._look()
        for key, forwarding in changes.items():
            self._refused.pop(key, None)
            if forwarding is None:
                self._wanted.pop(key, None)
            else:
                self._wanted[key] = forwarding

    async def host_changed(self, addresses: frozenset[str]) -> None:
        self._addresses = addresses

    def host_addresses(self) -> frozenset[str]:
        return self._addresses

    def options_of(self, family: Family) -> object:
        """Of the rules that `explain` walks: vipd's defaults."""
        from vipd.dataplane.iptables.options import RuleOptions
        from vipd.dataplane.nftables.options import TableOptions

        return (RuleOptions if self.name == "iptables" else TableOptions)(family)

    async def plan(self) -> _Plan:
        self._look()
        return await self.difference(await self.survey())

    async def survey(self) -> dict[ForwardingKey, Forwarding]:
        await asyncio.sleep(0)
        if self._kernel.unreadable:
            raise _apply_error("iptables-save", self._kernel.unreadable)
        return dict(self._kernel.rules)

    async def difference(self, surveyed: Mapping[ForwardingKey, Forwarding]) -> _Plan:
        wanted = {key: f for key, f in self._wanted.items() if key not in self._refused}
        wanted |= {key: surveyed[key] for key in self._refused if key in surveyed}
        keys = [key for key in wanted.keys() | surveyed if wanted.get(key) != surveyed.get(key)]
        return _Plan({key: wanted.get(key) for key in sorted(keys)})

    async def apply(self, plan: _Plan) -> None:
        self._look()
        self._writing = True
        self._kernel.writing.set()
        try:
            await self._kernel.gate.wait()
            await asyncio.sleep(0)
            if self._kernel.failures:
                raise _apply_error(*self._kernel.failures.pop(0))
            for key, forwarding in plan.changes.items():
                if forwarding is None:
                    self._kernel.rules.pop(key, None)
                elif why := self._kernel.refuses(forwarding):
                    self._refused[key] = why
                else:
                    self._kernel.rules[key] = forwarding
            if plan.changes:
                self._kernel.writes.append(dict(plan.changes))
        finally:
            self._writing = False

    def retry_quarantined(self, services: Collection[str]) -> None:
        self._refused = {key: why for key, why in self._refused.items() if key.service not in services}

    def quarantined(self) -> Mapping[ForwardingKey, str]:
        return self._refused

    def invalidate_all(self) -> None:
        self._refused.clear()

    def invalidate(self, chains: object) -> None:
        self.invalidate_all()

    async def collect_garbage(self) -> dict[object, int]:
        """Nothing is left here for later."""
        return {}

    def warnings(self) -> tuple[str, ...]:
        return self._kernel.warnings

    def warnings_of(self, services: Collection[str]) -> tuple[str, ...]:
        return ()

    def chains_of(self, forwarding: Forwarding) -> tuple[str, Mapping[Endpoint, str]]:
        return f"SVC-{forwarding.key.service_port}", {e: f"SEP-{e}" for e in forwarding.reachable()}

    def versions(self) -> dict[str, str]:
        return {"ipv4": "fake v1", "ipv6": "fake v1"}

    async def take(self) -> Mapping[object, int]:
        from vipd.dataplane.counting import BackendKey

        flows, self._kernel.new_flows = self._kernel.new_flows, {}
        return {
            BackendKey(forwarding.key, endpoint.address, endpoint.port): number
            for (service, place), number in flows.items()
            for forwarding in self._kernel.rules.values()
            if forwarding.key.service == service
            for endpoint in (*forwarding.endpoints, *forwarding.without_new_flows)
            if str(endpoint) == place
        }

    async def refused(self) -> Mapping[object, int]:
        return {}

    def saved_state(self) -> object:
        return {}

    def restore(self, memory: object) -> None:
        """Nothing is counted twice here."""

    def _look(self) -> None:
        self._kernel.overlaps += self._writing


def _apply_error(program: str, words: str) -> Exception:
    from vipd.dataplane.base import ApplyError

    return ApplyError(f"{program} failed", words)


def _addresses(forwarding: Forwarding) -> Iterable[str]:
    """`address:port/protocol`, inside and outside."""
    external = (each.address for each in forwarding.external_addresses)
    for address in (*forwarding.addresses, *external):
        yield f"{socket_text(address, forwarding.port)}/{forwarding.key.protocol}"


def compiled(
    services: Iterable[Service | Forwarding],
    dataplane: str = "iptables",
    family: Family = Family.IPV4,
    *,
    own: Iterable[str] = (),
    **settings: object,
) -> str:
    """What iptables-restore or nft would be given for these services on a fresh host with `own` addresses."""
    from vipd.dataplane.iptables.options import RuleOptions
    from vipd.dataplane.iptables.render import render as render_rules
    from vipd.dataplane.nftables.options import TableOptions
    from vipd.dataplane.nftables.render import render as render_table

    valid, addresses = _settings(settings), frozenset(own)
    wanted = _forwardings(services, valid, addresses).values()
    if dataplane == "nftables":
        return render_table(wanted, TableOptions.of(valid, family, addresses))
    return render_rules(wanted, RuleOptions.of(valid, family, random_fully=True, host_addresses=addresses))


class NotWrittenError(Exception):
    """vipd could not read or write the kernel's rules; its text is what the log and status say."""


@lru_cache(maxsize=64)
def reached(table: str, client: str, addresses: tuple[str, ...], port: int) -> dict[str, frozenset[str]]:
    """The backends that flows from a client get to by a table as nft lists it, by address; none where some
    flow is refused, dropped or not translated."""
    from vipd.observe.simulator import Host, Packet, PacketVerdict, parse_tables, trace

    found, rules = {}, parse_tables(table, family_of(client))
    for address in addresses:
        outcomes = trace(rules, Packet(client, address, "tcp", port), Host(())).outcomes
        served = all(each.verdict is PacketVerdict.DELIVERED for each in outcomes)
        found[address] = frozenset(each.backend or "" for each in outcomes if served)
    return found


class Heard(NamedTuple):
    """One report of changes that other programs made to vipd's rules."""

    text: str
    """`iptables-nft (pid 812): rule deleted in ipv4 nat PREROUTING`."""
    parts: frozenset[str]
    """What may have changed: `ipv4 nat PREROUTING`, or `ipv4` for everything of a family."""


def synced(
    dataplane: str, where: Runner | str, state_dir: Path, *, own: Iterable[str] = (), **options: Any
) -> Synced:
    """A dataplane that has just started: over the programs of a fake kernel, or in a network namespace.

    `own`: this host's addresses. `through` wraps how programs are run, to disturb them; without `netlink`
    they write everything. `batch`: services or elements above which a load counts as large, and is split. All
    other options are settings.
    """
    return Synced(dataplane, where, state_dir, frozenset(own), **options)


class Synced:
    """A dataplane and the services that it was last told, as the daemon drives it."""

    def __init__(
        self,
        name: str,
        where: Runner | str,
        state_dir: Path,
        own: frozenset[str],
        *,
        through: Callable[[Runner], Runner] = lambda run: run,
        netlink: bool = True,
        batch: int = 0,
        **settings: object,
    ) -> None:
        from vipd.dataplane.iptables.watch.own_processes import OwnProcesses

        self.settings, self.own = _settings({"state_dir": state_dir, **settings}), own
        self._name, self._where, self._netlink, self._batch = name, where, netlink, batch
        self._run, self._own_processes = through(self._run_program), OwnProcesses(time.monotonic)
        self._wanted: dict[ForwardingKey, Forwarding] = {}
        self.netlink_refusals: list[int] = []
        """The error numbers with which the kernel refused what was written by netlink."""
        self.restart()

    def restart(self) -> None:
        """A new process: it remembers nothing of the kernel, and is told the same services."""

        async def start() -> Dataplane:
            from vipd.dataplane.iptables.driver import IptablesDataplane
            from vipd.dataplane.nftables.driver import NftablesDataplane
            from vipd.host.host_changes import HostChanges
            from vipd.host.netlink_socket import Sockets

            record = HostChanges(self.settings.state_dir)
            if self._name == "iptables":
                return await IptablesDataplane.start(self.settings, record, self._run)
            sockets = Sockets(self._open_reading, self._open_writing)
            return await NftablesDataplane.start(self.settings, record, self._run, sockets)

        self._dataplane = asyncio.run(start())
        asyncio.run(self._dataplane.host_changed(self.own))
        self._dataplane.update(dict(self._wanted))

    def declare(self, services: Iterable[Service | Forwarding]) -> None:
        """Tell it what differs from the services before. Writes nothing."""
        asyncio.run(self._declare(self._changes(services)))

    def busy(self, services: Iterable[Service | Forwarding]) -> tuple[float, float]:
        """The CPU seconds that the event loop is busy at a stretch while these are declared and a step is
        planned, at most; and those that it takes in all."""
        changes, longest = self._changes(services), 0.0

        async def ticking() -> None:
            nonlocal longest
            while True:
                before = time.thread_time()
                await asyncio.sleep(0)
                longest = max(longest, time.thread_time() - before)

        async def work() -> None:
            ticks = asyncio.create_task(ticking())
            await asyncio.sleep(0)
            await self._declare(changes)
            await self._dataplane.plan()
            await asyncio.sleep(0)
            ticks.cancel()

        began = time.process_time()
        asyncio.run(work())
        return longest, time.process_time() - began

    def pending(self) -> str:
        """What must be written now, as lines with + and -; empty: nothing."""
        return str(asyncio.run(self._dataplane.plan()))

    def step(self, *, tidy: bool = True) -> str:
        """Write what must be written, and clear away what is left over; returns what was. NotWrittenError."""
        return asyncio.run(self._step(tidy))

    def become(self, *services: Service | Forwarding) -> str:
        """These are all services now, and are written; returns what was. NotWrittenError."""
        self.declare(services)
        return self.step()

    def doubt(self, *parts: str) -> None:
        """Other programs may have changed these parts, named as in `Heard`; none: everything."""
        from vipd.dataplane.iptables.names import ChainId

        families, chains = {str(family): family for family in Family}, []
        for part in parts:
            family, *chain = part.split(" ")
            if chain:
                chains.append((families[family], ChainId(" ".join(chain[:-1]), chain[-1])))
        if len(chains) < len(parts) or not parts:
            self._dataplane.invalidate_all()
        else:
            self._dataplane.invalidate(chains)

    def drift(self) -> str:
        """How the kernel, read anew, differs from what is wanted. Changes nothing, nor what is known."""

        async def compare() -> str:
            return str(await self._dataplane.difference(await self._dataplane.survey()))

        return asyncio.run(compare())

    def refused(self) -> dict[str, str]:
        """The services that the kernel refuses, and its reasons."""
        return {key.service: why for key, why in self._dataplane.quarantined().items()}

    def retry(self, *services: str) -> None:
        """Try these once more that the kernel refused, with the next step."""
        self._dataplane.retry_quarantined(services)

    def warnings(self) -> tuple[str, ...]:
        return self._dataplane.warnings()

    def versions(self) -> dict[str, str]:
        """The tools in use, by family, as they name themselves."""
        return self._dataplane.versions()

    def host_changed(self, *own: str) -> None:
        self.own = frozenset(own)
        asyncio.run(self._dataplane.host_changed(self.own))

    def names(self) -> set[str]:
        """The kernel's names by which users find the services and their backends."""
        found = set()
        for forwarding in self._wanted.values():
            chain, backends = self._dataplane.chains_of(forwarding)
            assert backends.keys() == set(forwarding.reachable())
            found |= {chain, *backends.values()}
        return found - {""}

    def flows(self, *, garbage: bool = False) -> Counter[tuple[str, Protocol, Family, str]]:
        """New flows since the last call, by service, protocol, family and backend; with `garbage`, those
        whose counts the kernel need not keep any more."""
        counter = self._dataplane.counter
        taken = asyncio.run(counter.collect_garbage() if garbage else counter.take())
        found = Counter[tuple[str, Protocol, Family, str]]()
        for place, number in taken.items():
            found[place.key.service, place.key.protocol, place.key.family, place.address] += number
        return found

    def heard(
        self, work: Callable[[], object], least: int = 0, *, events: bool = True, silence: float = 0.8
    ) -> list[Heard]:
        """What is reported of others while `work` is done, and until nothing more is for `silence` seconds.
        Not before `least` reports: AssertionError after a minute. Without `events` the kernel tells none."""

        async def listen() -> list[Heard]:
            found: list[Heard] = []
            async with self._watch(events) as watch:
                await asyncio.to_thread(work)
                while True:
                    patience = silence if len(found) >= least else 60.0
                    try:
                        change = await asyncio.wait_for(anext(watch), patience)
                    except TimeoutError:
                        assert len(found) >= least, f"nothing more was reported than {found}"
                        return found
                    parts = {f"{family} {chain.table} {chain.name}" for family, chain in change.chains}
                    whole = {str(family) for family in change.families} if change.everything else set()
                    found.append(Heard(str(change), frozenset(whole or parts)))

        return asyncio.run(listen())

    def _changes(self, services: Iterable[Service | Forwarding]) -> dict[ForwardingKey, Forwarding | None]:
        new = _forwardings(services, self.settings, self.own)
        changes: dict[ForwardingKey, Forwarding | None] = dict.fromkeys(self._wanted.keys() - new.keys())
        changes.update({key: f for key, f in new.items() if self._wanted.get(key) != f})
        self._wanted = new
        return changes

    async def _declare(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        await self._dataplane.prepare(changes)
        self._dataplane.update(changes)

    async def _step(self, tidy: bool) -> str:
        from vipd.dataplane.base import ApplyError

        try:
            with self._small_batches():
                if plan := await self._dataplane.plan():
                    await self._dataplane.apply(plan)
                if tidy:
                    await self._dataplane.collect_garbage()
        except ApplyError as error:
            raise NotWrittenError(str(error)) from error
        return str(plan)

    def _small_batches(self) -> AbstractContextManager[object]:
        from vipd.dataplane.iptables.restore_text import Batches

        if not self._batch:
            return nullcontext()
        if self._name == "nftables":
            return mock.patch("vipd.dataplane.nftables.plan.BATCH_ELEMENTS", self._batch)
        small = Batches(self._batch, 2000, 1)
        return mock.patch("vipd.dataplane.iptables.restore_text.NFT_BATCHES", small)

    def _watch(self, events: bool) -> Any:
        from vipd.dataplane.iptables.names import Names
        from vipd.dataplane.iptables.watch.events import open_socket
        from vipd.dataplane.iptables.watch.legacy_tables import LegacyTables
        from vipd.dataplane.iptables.watch.stream import WatchOptions
        from vipd.dataplane.iptables.watch.watcher import RuleWatch
        from vipd.dataplane.nftables.watch import TableWatch

        def open_events() -> socket.socket:
            if not events:
                raise PermissionError(1, "Operation not permitted")
            opened: socket.socket = self._inside(open_socket)
            return opened

        def open_tables(family: Family) -> LegacyTables:
            opened: LegacyTables = self._inside(lambda: LegacyTables(family))
            return opened

        names, options = Names(self.settings.chain_prefix), WatchOptions(self._own_processes)
        if self._name == "nftables":
            return TableWatch(names, options, open_events)
        watched = self._dataplane.watched()  # type: ignore[attr-defined]
        return RuleWatch(watched, names, options, open_events=open_events, open_tables=open_tables)

    async def _run_program(self, argv: Sequence[str], stdin: str) -> ProgramResult:
        if not isinstance(self._where, str):
            return await self._where(argv, stdin)
        return await run_in_namespace(self._where, argv, stdin, self._own_processes.running)

    def _inside(self, opening: Callable[[], Any]) -> Any:
        if not isinstance(self._where, str):
            raise OSError("a fake kernel has no sockets")
        from tests.dataplane.namespace import inside

        return inside(self._where, opening)

    def _open_reading(self) -> socket.socket:
        from vipd.host.netlink_socket import open_netlink

        opened: socket.socket = self._inside(open_netlink)
        return opened

    def _open_writing(self) -> socket.socket:
        if not self._netlink:
            raise OSError("nothing is written by netlink")
        opened = self._open_reading()
        self._own_processes.add_socket(opened.getsockname()[0])
        return _Noting(opened, self.netlink_refusals)


class _Noting(socket.socket):
    """Notes the error numbers of the kernel's answers."""

    def __init__(self, opened: socket.socket, refusals: list[int]) -> None:
        super().__init__(fileno=opened.detach())
        self._refusals = refusals

    def recvmsg(self, *arguments: Any) -> Any:
        received = super().recvmsg(*arguments)
        kind, error = struct.unpack_from("=4xH10xi", received[0])
        if kind == 2 and error:
            self._refusals.append(-error)
        return received


class Flow(NamedTuple):
    to: tuple[str, int]
    """Where its client sends: an address and a port."""
    answered_by: tuple[str, int] | None = None
    """None: it is not translated, so that whoever has that address answers."""
    protocol: Protocol = Protocol.UDP
    replied: bool = False
    """Packets went both ways."""
    tcp_state: int = 0
    """The kernel's number."""
    answers_to: tuple[str, int] | None = None
    """None: the client itself; else the flow is masqueraded."""
    reply_first: bool = False
    """This host saw a reply first: the flow is another host's."""
    client: str = ""


def stale(
    before: Iterable[Service | Forwarding],
    after: Iterable[Service | Forwarding],
    flows: Iterable[Flow],
    own: Iterable[str] = (),
) -> dict[Flow, str]:
    """The flows that must end once the rules of the services before have become those after, each with the
    reason."""
    from vipd.dataplane.conntrack.scheduler import ConntrackScheduler
    from vipd.dataplane.conntrack.stale import stale_reason

    addresses = frozenset(own)
    old, new = (_forwardings(services, _settings({}), addresses) for services in (before, after))
    keeper = ConntrackScheduler(lambda: 0.0)
    keeper.host_changed(addresses)
    for changes in (old, {**dict.fromkeys(old.keys() - new.keys()), **new}):
        keeper.services_changed(changes)
        keeper.applied(wrote=True)
    wanted, found = keeper.flow_targets, dict[Flow, str]()
    for flow in flows:
        entry = _entry(flow)
        if reason := stale_reason(entry, wanted):
            assert any(query.fits(entry) for query in wanted.queries()), f"{flow} would never be read"
            found[flow] = str(reason)
    return found


def _entry(flow: Flow) -> Any:
    from vipd.dataplane.conntrack.entries import SEEN_REPLY, SOURCE_TRANSLATED, Entry

    family = family_of(flow.to[0])
    client = (flow.client or ("10.10.0.2" if family is Family.IPV4 else "fd00:10::2"), 40000)
    ends = (client, flow.to, flow.answered_by or flow.to, flow.answers_to or client)
    if flow.reply_first:
        ends = (ends[2], ends[3], ends[0], ends[1])
    status = 8 | SEEN_REPLY * flow.replied | SOURCE_TRANSLATED * flow.reply_first
    return Entry(family, flow.protocol, *ends, status, flow.tcp_state, 600, 0, b"")


def _settings(values: Mapping[str, object]) -> Settings:
    from vipd.host.settings.settings import Settings

    return Settings(**values) if values else _default_settings()  # type: ignore[arg-type]


@lru_cache
def _default_settings() -> Settings:
    from vipd.host.settings.settings import Settings

    return Settings()


def _forwardings(
    services: Iterable[Service | Forwarding], settings: Settings, own: frozenset[str]
) -> dict[ForwardingKey, Forwarding]:
    from vipd.control.selection import SelectionPolicy, select_backends

    policy = SelectionPolicy.of(settings, own)
    return {
        forwarding.key: forwarding
        for each in services
        for forwarding in ((each,) if isinstance(each, Forwarding) else select_backends(each, policy))
    }


def forwardings(services: Iterable[Service], own: Iterable[str] = (), **settings: object) -> list[Forwarding]:
    """What services come to on a host with these addresses: the dataplane is told these."""
    return list(_forwardings(services, _settings(settings), frozenset(own)).values())


class Finding(NamedTuple):
    """What the doctor says of one thing."""

    id: str
    severity: str
    """`problem`, `warning`, `unchecked` or `ok`."""
    title: str
    cause: str
    hint: str
    mend: tuple[str, ...]


def judged(facts: Mapping[str, Any]) -> tuple[Finding, ...]:
    """What the doctor says of a host of which this is known, the worst first.

    Facts are plain values by name, nested as in `tests/observe/doctor/facts.py`: a family is `ipv4` or
    `ipv6`; rules are what iptables-save printed, chains of nft what its JSON says; a name that ends with
    `fault` says why something is not known.
    """
    from vipd.observe.doctor.diagnosis import diagnose
    from vipd.observe.doctor.facts import Facts

    return tuple(
        Finding(
            finding.id,
            str(finding.severity),
            finding.result.title,
            finding.result.cause,
            finding.result.hint,
            finding.result.fix,
        )
        for finding in diagnose(_fact(Facts, facts)).findings
    )


def _fact(kind: Any, value: Any) -> Any:
    """A plain value as the doctor's type has it."""
    from typing import get_type_hints

    from vipd.host.settings.settings import Settings, load_settings
    from vipd.observe.doctor.rules import Ruleset

    if value is None or kind is Any:
        return value
    if kind is Settings:
        return load_settings(flags=value)
    if kind is Ruleset:
        return Ruleset.of(_fact(Family, value["family"]), value["variant"], value["saved"])
    if hasattr(kind, "__dataclass_fields__"):
        kinds = get_type_hints(kind, localns={"Settings": Settings})
        return kind(**{name: _fact(kinds[name], each) for name, each in value.items()})
    if kind is Family:
        return next(family for family in Family if str(family) == value)
    return _facts(kind, value)


def _facts(kind: Any, value: Any) -> Any:
    """A collection of plain values likewise."""
    from types import UnionType
    from typing import get_args, get_origin

    origin, kinds = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return _fact(kinds[0], value)
    if origin is tuple and kinds[-1] is not Ellipsis:
        return tuple(map(_fact, kinds, value))
    if origin in (tuple, frozenset):
        return origin(_fact(kinds[0], each) for each in value)
    if origin is get_origin(Mapping[str, str]):
        return {_fact(kinds[0], key): _fact(kinds[1], each) for key, each in value.items()}
    return value
