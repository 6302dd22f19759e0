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
from pathlib import Path

from tests.bench.trials.declared import many_services, with_one_backend_changed
from tests.bench.trials.subjects import Subject, vipd_subject
from tests.bench.trials.trial import Outcome, Trial
from tests.bench.trials.usage import Meter, Usage
from vipd.dataplane.base import ApplyError
from vipd.host.process import ProgramTimeoutError
from vipd.model.service import Service

INTERRUPTED = 130
_PR_SET_PDEATHSIG = 1

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
