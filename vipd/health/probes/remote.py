"""Probes in the worker process (`vipd/host/worker.py`): its end and the daemon's.

A request is a list: kind, address, port, timeout in seconds, and the fields of the probe. An answer is a
list: the fields of a ProbeResult.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any

from vipd.health.lag import LoopLag
from vipd.health.probes.base import Attempt, CoroutineProber, ProbeCallback, internal_error_result
from vipd.health.probes.dns import probe_dns
from vipd.health.probes.http import probe_http
from vipd.health.probes.tls import with_content
from vipd.health.result import ProbeResult, one_line, parse_weight
from vipd.host.file_calls import file_calls
from vipd.host.processes import effective_capabilities
from vipd.host.worker import Worker
from vipd.model.check import MAX_CHECK_SECONDS, DnsProbe, HttpProbe, Probe, Timing
from vipd.model.check_target import CheckTarget
from vipd.model.service import Protocol

AT_ONCE = {"http": 3000, "https": 1200, "dns": 2000}
"""The types of checks whose answers the worker reads, and how many may run at once. A check by TCP reads
nothing, one by UDP compares bytes. A backend that never ends its answer takes 75 KiB of the worker's memory,
with TLS 180 KiB: one author, who has half of the places, cannot take all of it."""

_READ_ANY_FILE = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, of which a root has the first."""
_MOST_CA_BYTES = 64 * 1024
"""Of certificates that are passed to the worker with each check. It reads larger files itself."""

_FIELDS = {probe: tuple(field.name for field in fields(probe)) for probe in (HttpProbe, DnsProbe)}
_VALUES = {probe: attrgetter(*names) for probe, names in _FIELDS.items()}


class RemoteProber:
    """Has the worker probe."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._reads_more = bool(effective_capabilities() & _READ_ANY_FILE)
        """Whether this process may read files that the worker, which has no capabilities, may not."""

    def start(self, target: CheckTarget, done: ProbeCallback) -> Attempt:
        """Probe once."""
        attempt, probe = _Asked(self._worker, target, done), target.probe
        if self._reads_more and isinstance(probe, HttpProbe) and probe.tls and probe.verify and probe.ca:
            attempt.reading = asyncio.create_task(attempt.ask_with_content(probe), name=f"ask {target}")
        else:
            attempt.ask(probe)
        return attempt


class _Asked:
    """A probe that the worker was asked for."""

    __slots__ = ("_done", "_number", "_target", "_worker", "reading")

    def __init__(self, worker: Worker, target: CheckTarget, done: ProbeCallback) -> None:
        self._worker, self._target, self._done = worker, target, done
        self._number = 0
        self.reading: asyncio.Task[None] | None = None

    def ask(self, probe: Probe) -> None:
        """Ask the worker."""
        target = self._target
        values = _VALUES[type(probe)](probe)  # type: ignore[index]  # only these come here
        request = [target.kind, target.address, target.port, target.timing.timeout, *values]
        self._number = self._worker.ask("probe", request, self, target.timing.timeout)

    async def ask_with_content(self, probe: HttpProbe) -> None:
        """Ask the worker, with what the file `ca` contains."""
        try:
            read = partial(with_content, probe, _MOST_CA_BYTES)
            self.ask(await file_calls.run((probe, _MOST_CA_BYTES), read))
        except OSError as error:
            self._done(ProbeResult.not_probed(f"{probe.ca}: {error.strerror or error}"))
        except Exception as error:
            self._done(internal_error_result(self._target, error))

    def answered(self, answer: Any) -> None:
        """Report the result. Raises ValueError for what is none."""
        self._done(read_result(answer))

    def failed(self, why: str) -> None:
        """Report that there is none."""
        self._done(ProbeResult.not_probed(why))

    def cancel(self) -> None:
        """End it."""
        if self.reading is not None:
            self.reading.cancel()
        self._worker.cancel(self._number)


class ProbeServer:
    """Probes in the worker."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._lag = LoopLag(loop)
        http = CoroutineProber(probe_http, self._lag)
        self._probers = {"http": http, "https": http, "dns": CoroutineProber(probe_dns, self._lag)}

    def start(self, request: list[Any], done: Callable[[list[Any]], None]) -> Attempt:
        """Begin a probe."""
        self._lag.start()
        kind, address, port, timeout, *values = request
        made: type[HttpProbe | DnsProbe] = DnsProbe if kind == "dns" else HttpProbe
        named = dict(zip(_FIELDS[made], values, strict=True))
        if "status" in named:
            named["status"] = tuple(map(tuple, named["status"]))
        protocol = Protocol.UDP if kind == "dns" else Protocol.TCP
        target = CheckTarget(address, port, protocol, made(**named), Timing(timeout=timeout))
        return self._probers[kind].start(target, lambda result: done(written_result(result)))

    def rest(self) -> None:
        """There is no probe: it is not to wake the process ten times a second."""
        self._lag.stop()


def written_result(result: ProbeResult) -> list[Any]:
    """A result as an answer."""
    return [result.good, result.reason, result.seconds, str(result.weight) if result.weight else None]


def read_result(answer: Any) -> ProbeResult:
    """The result in an answer, which may be anything. Raises ValueError."""
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        good, reason, seconds, weight = answer
        weight = None if weight is None else parse_weight(weight)
        if (good is None or type(good) is bool) and 0 <= seconds <= 2 * MAX_CHECK_SECONDS:
            return ProbeResult(good, one_line(reason), float(seconds), weight)
    raise ValueError("no result of a check")
