"""Runs a trial in a separate process and network namespace, which the kernel removes when it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.trials.trial import Outcome, Trial

WORKER = "tests.bench.trials.worker"
OVERHEAD_SECONDS = 120.0
"""Time for a worker besides the trial's own limits: preparing, counting, connecting, removing."""


class TrialError(RuntimeError):
    """A trial failed; the text is the worker's output."""


def run_trial(trial: Trial, worker: str = WORKER) -> Outcome:
    """Carry out a trial by a worker module, to its end. Raises TrialError.

    Nothing of it is left, neither when this is interrupted nor when this process is killed: the namespaces
    have no names, and the worker ends with its parent.
    """
    with tempfile.TemporaryDirectory(prefix="vipd-bench-") as directory:
        argv = ["unshare", "--net", sys.executable, "-P", "-m", worker, str(os.getpid())]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=_environment(Path(directory))
        )
        limit = trial.limit * (2 + trial.changes) + OVERHEAD_SECONDS
        try:
            said, complained = process.communicate(json.dumps(trial.view()), timeout=limit)
        except subprocess.TimeoutExpired:
            raise TrialError(f"{trial.subject} did not end within {limit:.0f} s") from None
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        lines = complained.strip().splitlines() or [f"exit code {process.returncode}"]
        raise TrialError(f"{trial.subject} with {trial.services} services: {lines[-1]}")
    return Outcome.read(json.loads(said))


def _environment(directory: Path) -> dict[str, str]:
    """This process's environment without the daemon's settings; with the same modules, and a separate lock
    for iptables-legacy, whose usual one all network namespaces share."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VIPD_")}
    return kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "XTABLES_LOCKFILE": str(directory / "xtables.lock"),
    }
