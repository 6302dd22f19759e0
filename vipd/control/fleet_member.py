"""A host as a member of a fleet: all that a daemon does with etcd, where the setting `etcd` is there."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable
from datetime import datetime
from ipaddress import ip_address
from random import Random

from vipd import __version__
from vipd.control.announcements import AnnouncedKey, Announcements, OtherHosts, Reason
from vipd.control.reconciler import Reconciler
from vipd.control.registrations import Registrations
from vipd.declaration.problems import printable
from vipd.host.observer import Observer
from vipd.host.settings.etcd import EtcdSettings
from vipd.host.settings.settings import Settings
from vipd.host.supervisor import Loop, Work
from vipd.model.maintenance import Maintenance
from vipd.model.service import AnnounceMethod
from vipd.sources.cache import Cache
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.errors import EtcdError
from vipd.sources.etcd.fleet import FleetOverrides
from vipd.sources.etcd.follow import EtcdSource
from vipd.sources.etcd.leases import MAX_ANNOUNCED, HostHeartbeat, HostReport, read_report
from vipd.sources.etcd.store import EtcdStore, refused_error

log = logging.getLogger(__name__)

FIRST_ANSWER_SECONDS = 3.0
"""How long the first step waits for etcd if no earlier state is on disk."""
MAX_CONCURRENT_REQUESTS = 20
"""Number of leases queried concurrently."""
MAX_HOSTS = 5_000
"""Hosts that `hosts` reads."""
REPORTS_SECONDS = 8.0
"""How long it may take to read the reports of all hosts."""
MAX_NAME = 200
"""Characters of a host's name that are shown."""

Json = dict[str, object]


class FleetMember:
    """This host as one of a fleet. `load` first, then `run` beside the reconciler."""

    def __init__(
        self,
        settings: Settings,
        etcd: EtcdSettings,
        cache: Cache,
        clock: Callable[[], datetime],
        observer: Observer | None = None,
    ) -> None:
        """`observer` gets `overrides_changed` when those of the fleet change."""
        self._settings, self._clock = settings, clock
        self._options = options = etcd
        random = Random()  # noqa: S311 (spreads a fleet; nothing secret)
        self._client = EtcdClient(options, random)
        self.source = EtcdSource(options, cache, self._client, random)
        self.store = EtcdStore(self._client, self.source, options.prefix, clock, settings.node_name)
        self.overrides = FleetOverrides(lambda: self.source.keys.overrides, clock, observer)
        self._heartbeat: HostHeartbeat | None = None
        self._applied = 0
        self._announcements: Callable[[], Announcements] = Announcements
        self._maintenance: Callable[[], Maintenance | None] = lambda: None

    def report_announcements(
        self, announcements: Callable[[], Announcements], maintenance: Callable[[], Maintenance | None]
    ) -> None:
        """Report these, too, from now on."""
        self._announcements, self._maintenance = announcements, maintenance

    @property
    def name(self) -> str:
        """Name of this host in the fleet."""
        return self._settings.node_name

    def load(self) -> None:
        """Load the state that an earlier run saved."""
        for warning in self._options.warnings():
            log.warning("%s", warning)
        self.source.load()
        self.overrides.refresh()
        self.source.keys.take_changed()

    def registrations(self) -> Registrations:
        """Registered backends as in etcd; services accept those that their host's policy admits."""
        return self.source.registrations

    def loops(self, reconciler: Reconciler, report: bool = True) -> dict[str, Work]:
        """The loops that follow etcd and, if configured, report the state of this host. `close` after
        them."""
        self._heartbeat = HostHeartbeat(
            self._client,
            self._options.prefix,
            lambda: self._report(reconciler),
            self._clock,
            self._options.report_interval,
        )
        loops = {**self.source.loops(), "taking what etcd says": lambda: self._follow(reconciler)}
        if report:
            loops["reporting to etcd"] = Loop(self._heartbeat.run, self._heartbeat.loop_state)
        return loops

    async def close(self) -> None:
        """Delete the report, and close every connection to etcd."""
        if self._heartbeat is not None:
            await self._heartbeat.close()
        await self._client.close()

    async def wait_for_etcd(self, *, answer: bool = False) -> None:
        """Wait briefly for etcd, if no earlier run saved a state, or if its `answer` is wanted all the same;
        log it if etcd does not answer."""
        if await self.source.wait_ready(FIRST_ANSWER_SECONDS, answer=answer):
            self.overrides.refresh()
        else:
            log.warning(
                "etcd has not answered and nothing is known of it from an earlier run: what files and vipctl "
                "declare serves alone until it does; %s",
                self.source.fault or f"no answer within {FIRST_ANSWER_SECONDS:.0f} s",
            )

    def status(self) -> Json:
        """The part of the API's Status."""
        return self.source.status()

    def warnings(self) -> list[str]:
        """Problems other than the source's own faults."""
        heartbeat_fault = self._heartbeat.fault if self._heartbeat and not self.source.fault else ""
        return [*self._options.warnings(), *self.overrides.faults(), *filter(None, (heartbeat_fault,))]

    async def hosts(self) -> list[Json]:
        """Every host that has given a sign of life lately, by name; of those beyond `MAX_HOSTS` the number.
        A report that cannot be read is a fault of its host alone. Raises RefusedError."""
        keys, count = list[str](), 0
        try:
            async for answer in self._client.pages(self._hosts, keys_only=True):
                count = count or answer.count
                keys += [kv.key for kv in answer.kvs]
                if len(keys) >= MAX_HOSTS:
                    break
        except EtcdError as error:
            raise refused_error(error) from None
        limit = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        late = asyncio.get_running_loop().time() + REPORTS_SECONDS
        read = await asyncio.gather(*(self._host(key, limit, late) for key in keys[:MAX_HOSTS]))
        hosts = [host for host in read if host is not None]
        if count > MAX_HOSTS:
            why = f"{MAX_HOSTS} hosts are shown; hint: remove keys below {self._options.prefix}hosts/"
            hosts.append(_unread_host(f"{count - MAX_HOSTS} more", why))
        return hosts

    async def announced_elsewhere(self) -> OtherHosts:
        """What the other hosts announce, as they have reported. Raises OSError without an answer."""
        served, kept = set[AnnouncedKey](), set[AnnouncedKey]()
        try:
            async for answer in self._client.pages(self._hosts):
                for kv in answer.kvs:
                    if kv.key != f"{self._hosts}{self.name}":
                        _add_announced(kv.value, served, kept)
        except EtcdError as error:
            raise OSError(errno.EHOSTUNREACH, str(error)) from None
        return OtherHosts(served, kept)

    @property
    def _hosts(self) -> str:
        return f"{self._options.prefix}hosts/"

    async def _host(self, key: str, limit: asyncio.Semaphore, late: float) -> Json | None:
        """A host, unless its key is gone. `late`: the loop's time after which nothing more is asked."""
        name = printable(key.removeprefix(self._hosts)[:MAX_NAME])
        async with limit:
            try:
                async with asyncio.timeout_at(late):
                    kv = await self._client.get(key)
                    granted, left = await self._client.lease_times(kv.lease) if kv and kv.lease else (0, 0)
            except TimeoutError:
                return _unread_host(name, f"not read within {REPORTS_SECONDS:.0f} s with all others")
            except EtcdError as error:
                return _unread_host(name, f"its report cannot be read: {error}")
        if kv is None:
            return None
        report, fault = read_report(kv.value)
        return {
            "name": name,
            **report,
            "behind": None if fault else max(0, self.source.keys.last_change - int(report["revision"])),
            "seen_seconds": granted - left if granted else None,
            "fault": fault,
        }

    async def _follow(self, reconciler: Reconciler) -> None:
        async for _ in self.source.changes():
            self.overrides.refresh()
            services = sorted(self.source.keys.take_changed())
            reconciler.causes.note(services, f"etcd revision {self.source.keys.last_change}")
            reconciler.request_sync()

    def _report(self, reconciler: Reconciler) -> HostReport:
        if reconciler.progress.state in ("in-sync", "degraded"):
            self._applied = self.source.keys.last_change
        problems = sum(map(len, reconciler.problems.values())) + len(reconciler.progress.quarantined)
        problems += len(self.source.faults()) + bool(reconciler.progress.fault)
        addresses = self._announcements().addresses.values()
        found = {f"{a.key.by} {a.key.address}": a.reason.value for a in addresses if a.announced}
        return HostReport(
            self._settings.node_name,
            self._applied,
            problems,
            __version__,
            len(reconciler.services),
            maintenance=self._maintenance() is not None,
            announced=dict(sorted(found.items())[:MAX_ANNOUNCED]),
        )


def _unread_host(name: str, fault: str) -> Json:
    """A host of whose report nothing is known."""
    report, _ = read_report("{}")
    return {"name": name, **report, "behind": None, "seen_seconds": None, "fault": fault}


def _add_announced(value: str, served: set[AnnouncedKey], kept: set[AnnouncedKey]) -> None:
    """Add what a host's report says that it announces."""
    for word, reason in read_report(value)[0]["announced"].items():
        key = _announced_key(word)
        if key is not None and reason == Reason.SERVED:
            served.add(key)
        elif key is not None and reason == Reason.LAST_HOST:
            kept.add(key)


def _announced_key(word: str) -> AnnouncedKey | None:
    """The key in `l2 192.0.2.10`."""
    method, _, address = word.partition(" ")
    with contextlib.suppress(ValueError):
        return AnnouncedKey(str(ip_address(address)), AnnounceMethod(method))
    return None
