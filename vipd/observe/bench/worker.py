"""The process that runs one trial in a separate network namespace: it reads a trial and writes an outcome, as
JSON. `vipd.observe.bench.namespace` starts it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from vipd.dataplane.base import ApplyError
from vipd.host.process import ProgramTimeoutError
from vipd.model.service import Service
from vipd.observe.bench.connections import ConnectionBenchmark
from vipd.observe.bench.declared import many_services, with_backends, with_one_backend_changed
from vipd.observe.bench.flows import exit_with_parent
from vipd.observe.bench.subjects import Subject, vipd_subject
from vipd.observe.bench.trial import Outcome, Trial
from vipd.observe.bench.usage import Meter, Usage, reset_peak

INTERRUPTED = 130

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


def carry_out(subject: Subject, trial: Trial) -> Outcome:
    """Run a trial."""
    services = list(many_services(trial.services, trial.backends))
    if not trial.connections:
        return asyncio.run(programmed(subject, trial, services))
    with ExitStack() as stack:
        try:
            connecting = stack.enter_context(ConnectionBenchmark())
        except OSError as error:
            return Outcome(problem=f"no connections can be made between namespaces here: {error}")
        services[-1] = with_backends(services[-1], [connecting.backend])
        rates = {"direct": connecting.direct_rate(trial.connections)}
        outcome = asyncio.run(programmed(subject, trial, services))
        if outcome.loads and not outcome.problem:
            rates["vip"] = connecting.service_rate(services[-1].addresses[0], trial.connections)
    return replace(outcome, connections=rates)


async def programmed(subject: Subject, trial: Trial, services: Sequence[Service]) -> Outcome:
    """Load and change; steps beyond the limit are left out."""
    loads: list[Usage] = []
    changes: list[Usage] = []
    sweeps: list[Usage] = []
    counts: dict[str, int] = {}
    problem = ""
    meter = Meter(trial.limit)
    subject.prepare(services)
    reset_peak()
    try:
        async with asyncio.timeout(trial.limit):
            with meter.measured(loads):
                await subject.load(meter)
        if trial.count:
            counts = await subject.counts()
        for number in range(trial.changes):
            # Spread over all services except the last, which the connections need unchanged.
            index = number * max(len(services) - 1, 1) // trial.changes
            subject.prepare_change(with_one_backend_changed(services[index], number))
            async with asyncio.timeout(trial.limit):
                with meter.measured(changes):
                    await subject.change(meter)
                with meter.measured(sweeps):
                    await subject.collect_garbage()
    except ApplyError as error:
        problem = str(error)
    except (TimeoutError, ProgramTimeoutError):
        pass  # the missing result shows it
    return Outcome(tuple(loads), tuple(changes), tuple(sweeps), counts, {}, problem)


if __name__ == "__main__":
    main()
