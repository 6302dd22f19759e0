"""Runs a sample of mutants and prints those that no test catches.

python -m tests.mutation                     the sample, two processes
python -m tests.mutation --target health     of one target
python -m tests.mutation --part 3            another sample
python -m tests.mutation --all vipd/x.py     every mutant of the modules whose path has this in it
python -m tests.mutation --seams             the faults of seams.toml, as root
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.mutation.mutants import Mutant, Seam, mutants_of, read_accepted, read_seams
from tests.mutation.run import MIN_LIMIT_SECONDS, TIMES_BASELINE, Job, Outcome, run, run_baselines
from tests.mutation.targets import ROOT, TARGETS, Target

BASELINE_SECONDS = 600.0


def main() -> int:
    """0: all are caught or accepted; 1: some are not; 2: tests fail without a mutant."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description="Mutation testing of vipd.")
    parser.add_argument("--target", choices=[each.name for each in TARGETS], action="append")
    parser.add_argument("--part", type=int, default=0, help="which sample; each has other mutants")
    parser.add_argument(
        "--all", metavar="PATH", help="every mutant of matching modules, in place of a sample"
    )
    parser.add_argument("--seams", action="store_true", help="the faults between packages, of seams.toml")
    options = parser.parse_args()

    targets = [each for each in TARGETS if not options.target or each.name in options.target]
    # As ctrl-C: the copies are deleted, and their processes end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    chosen = (
        [(Target("seams", (), seam.tests, 1, marks=""), seam) for seam in read_seams()]
        if options.seams
        else [(target, m) for target in targets for m in _sample(target, options.part, options.all)]
    )
    with tempfile.TemporaryDirectory(prefix="vipd-mutation-") as folder:
        limits = dict[Target, float]()
        baselines = [
            Job(each, None, BASELINE_SECONDS) for each in dict.fromkeys(target for target, _ in chosen)
        ]
        for job in run_baselines(baselines, Path(folder, "tree")):
            print(f"{job.target.name}: tests take {job.seconds:.0f} s", flush=True)
            if job.outcome is not Outcome.SURVIVED:
                print(job.output)
                return 2
            limits[job.target] = max(MIN_LIMIT_SECONDS, TIMES_BASELINE * job.seconds)
        jobs = [Job(target, mutant, limits[target]) for target, mutant in chosen]
        return _report(jobs, Path(folder, "tree"))


def _sample(target: Target, part: int, everything: str | None) -> list[Mutant]:
    files = [file for file in target.files() if everything is None or everything in file]
    found = [mutant for file in files for mutant in mutants_of(file, (ROOT / file).read_text())]
    return [
        each for each in found if everything is not None or each.lot % target.one_in == part % target.one_in
    ]


def _report(jobs: list[Job], tree: Path) -> int:
    accepted = read_accepted()
    counts = Counter[tuple[str, str]]()
    missed = 0
    for number, job in enumerate(run(jobs, tree), 1):
        assert job.mutant
        said: str = job.outcome
        if job.outcome is Outcome.SURVIVED and job.mutant in accepted:
            said = "accepted"
        elif job.outcome in (Outcome.CAUGHT, Outcome.TIMED_OUT) and job.mutant in accepted:
            said = "caught, but accepted: remove it from accepted.toml"
        missed += said in (Outcome.SURVIVED, Outcome.BROKEN)
        counts[job.target.name, said] += 1
        line = f"{number}/{len(jobs)} {said} ({job.seconds:.0f} s)  {job.mutant.path}  {job.mutant.name}"
        print(line, flush=True)
        if job.outcome is Outcome.BROKEN:
            print(job.output)
        if isinstance(job.mutant, Seam):
            print(*(line for line in job.output.splitlines() if line.startswith(("E ", "FAILED"))), sep="\n")
    print()
    for (target, said), count in sorted(counts.items()):
        print(f"{target:15} {said:20} {count:5}")
    equivalent = sum(count for (_, said), count in counts.items() if said == "accepted")
    caught = len(jobs) - equivalent - missed
    print(f"{caught} of {len(jobs)} caught; {equivalent} accepted; {missed} not caught")
    print(f"caught of those that change behaviour: {100 * caught / max(len(jobs) - equivalent, 1):.1f} %")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
