"""The process that runs one trial in a separate network namespace: it reads a trial and writes an outcome, as
JSON. `tests.bench.trials.namespace` starts it.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tests.bench.trials.subjects import Subject, vipd_subject
from tests.bench.trials.trial import Outcome, Trial
from tests.bench.trials.usage import Meter, Usage
from vipd.dataplane.base import ApplyError
from vipd.host.process import ProgramTimeoutError
from vipd.model.service import Backend, Protocol, Service, ServicePort

INTERRUPTED = 130
_PR_SET_PDEATHSIG = 1
PORT, TARGET = 80, 8080
_USED_OF_256 = 250
_SPARE = 64_000 * 100
"""First number of backends that belong to no service: changes use those."""

MakeSubject = Callable[[str, Path], Subject]


def main(make: MakeSubject = vipd_subject) -> None:
    """Run the trial on standard input; the argument is the pid of the parent."""
    exit_with_parent(int(sys.argv[1]))
    trial = Trial.read(json.load(sys.stdin))
    with tempfile.TemporaryDirectory(prefix="vipd-bench-") as directory:
        try:
            outcome = carry_out(make(trial.subject, Path(directory)), trial)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
    json.dump(outcome.view(), sys.stdout)


def exit_with_parent(parent: int) -> None:
    """Make the kernel end this process when its parent ends, for whatever reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the parent has ended already")


def many_services(count: int, backends: int) -> tuple[Service, ...]:
    """One TCP port each, on 10.96.0.0/12, their own backends in 10.128.0.0/9; 200,000 of five fit."""
    return tuple(_service(index, backends) for index in range(count))


def with_one_backend_changed(service: Service, number: int) -> Service:
    """The service with another first backend, a different one for each number."""
    spare = Backend(_address(10, 128, _SPARE + number))
    return replace(service, backends=(spare, *service.backends[1:]))


def _service(index: int, backends: int) -> Service:
    return Service(
        name=f"bench/web-{index}",
        addresses=(_address(10, 96, index),),
        ports=(ServicePort(PORT, Protocol.TCP, "http", TARGET),),
        backends=tuple(Backend(_address(10, 128, index * backends + n)) for n in range(backends)),
    )


def _address(first: int, second: int, number: int) -> str:
    high, low = divmod(number, _USED_OF_256)
    return f"{first}.{second + high // 256}.{high % 256}.{low + 1}"


def carry_out(subject: Subject, trial: Trial) -> Outcome:
    """Run a trial."""
    return asyncio.run(programmed(subject, trial, many_services(trial.services, trial.backends)))


async def programmed(subject: Subject, trial: Trial, services: Sequence[Service]) -> Outcome:
    """Load and change; steps beyond the limit are left out."""
    loads: list[Usage] = []
    changes: list[Usage] = []
    counts: dict[str, int] = {}
    problem = ""
    meter = Meter(trial.limit)
    subject.prepare(services)
    try:
        async with asyncio.timeout(trial.limit):
            with meter.measured(loads):
                await subject.load(meter)
        if trial.count:
            counts = await subject.counts()
        for number in range(trial.changes):
            # Spread over all services except the last, as in every record so far.
            index = number * max(len(services) - 1, 1) // trial.changes
            subject.prepare_change(with_one_backend_changed(services[index], number))
            async with asyncio.timeout(trial.limit):
                with meter.measured(changes):
                    await subject.change(meter)
                await subject.collect_garbage()
    except ApplyError as error:
        problem = str(error)
    except (TimeoutError, ProgramTimeoutError):
        pass  # the missing result shows it
    return Outcome(tuple(loads), tuple(changes), counts, problem)


if __name__ == "__main__":
    main()
