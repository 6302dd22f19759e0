"""An attack, how it is run, and the row of figures that it gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.attacks.arena import INTERVAL, Arena
from tests.attacks.measuring import MIB, Figures, memory_of

CHANGE_SECONDS, VERDICT_SECONDS, NAME_SECONDS, HEALTHZ_SECONDS = 2.0, INTERVAL + 1.0, 5.0, 0.1
"""Within which, under attack, a change is in the kernel, a failure and a name's new address are followed, and
99 of 100 requests for `/healthz` are answered."""
MEMORY_MIB = 512
FACTOR = 10
"""Times what the same took before the attack: a busy machine is slow at everything."""
QUIET_SECONDS = 4.0
GIVE_BACK_SECONDS = 30.0
CHANGES = ("by file", "by API", "by etcd")
VERDICTS = ("tcp check", "http check", "program")

Check = Callable[[], object]
Run = Callable[[Arena], Check | None]


@dataclass(frozen=True)
class Attack:
    """What an attacker does. `run` begins it; what it returns is called at its end, and raises AssertionError
    if something is wrong that no figure shows."""

    name: str
    who: str
    """A row of SECURITY.md's table."""
    budget: str
    """What the attacker uses up."""
    run: Run
    seconds: float
    etcd: bool
    dataplane: str


ATTACKS: dict[str, Attack] = {}


def attack(
    who: str, budget: str, *, seconds: float = 8.0, etcd: bool = False, dataplane: str = "iptables"
) -> Callable[[Run], Run]:
    """Register an attack under the name of its function. It is measured for `seconds`."""

    def register(run: Run) -> Run:
        name = run.__name__.replace("_", " ")
        ATTACKS[name] = Attack(name, who, budget, run, seconds, etcd, dataplane)
        return run

    return register


@dataclass
class Row:
    name: str
    quiet: Figures
    attacked: Figures
    memory_before: int
    memory_after: int
    fault: str = ""
    problems: tuple[str, ...] = ()
    """What the status said at the end of the attack, so that one that was refused is seen as such."""

    def failures(self) -> list[str]:
        """What is beyond the bounds. On a machine that others use each time may be longer, by the factor by
        which a short computation was, or ten times what the same took before the attack."""
        failed = [self.fault] if self.fault else []
        slowness = max(self.quiet.slowness(), self.attacked.slowness())
        bounds = {
            **dict.fromkeys(CHANGES, (0.0, CHANGE_SECONDS)),
            **dict.fromkeys(VERDICTS, (INTERVAL, VERDICT_SECONDS - INTERVAL)),
            "name": (1.0, NAME_SECONDS - 1.0),
        }
        for what, (expected, late) in bounds.items():
            allowed = expected + max(late * slowness, FACTOR * (self.quiet.worst(what) - expected))
            if self.attacked.worst(what) > allowed:
                failed.append(f"{what}: {self.attacked.worst(what):.1f} s, at most {allowed:.1f} s")
        allowed = max(HEALTHZ_SECONDS * slowness, FACTOR * self.quiet.healthz_p99())
        if self.attacked.healthz_p99() > allowed:
            failed.append(f"healthz: {self.attacked.healthz_p99():.3f} s, at most {allowed:.3f} s")
        if self.peak() > MEMORY_MIB:
            failed.append(f"memory: {self.peak():.0f} MiB, at most {MEMORY_MIB} MiB")
        allowed = max(1.5 * self.memory_before, self.memory_before + 64 * MIB)
        if self.memory_after > allowed:
            failed.append(
                f"memory afterwards: {self.memory_after / MIB:.0f} MiB, before {self.memory_before / MIB:.0f}"
            )
        return failed

    def peak(self) -> float:
        return max(self.attacked.memory, default=0) / MIB

    def cells(self) -> tuple[str, ...]:
        """As a row of the table: quiet and attacked, in seconds; memory before, peak and after, in MiB."""

        def both(value: Callable[[Figures], float], digits: int = 1) -> str:
            return f"{value(self.quiet):.{digits}f} {value(self.attacked):.{digits}f}"

        return (  # in the order of HEAD
            self.name,
            both(lambda figures: max(map(figures.worst, CHANGES)), 2),
            both(lambda figures: max(map(figures.worst, VERDICTS))),
            both(lambda figures: figures.worst("name")),
            both(Figures.slowness),
            both(lambda figures: 1000 * figures.healthz_p99(), 0),
            f"{self.memory_before / MIB:.0f} {self.peak():.0f} {self.memory_after / MIB:.0f}",
            "; ".join(self.failures()) or "holds",
        )


HEAD = (
    "attack",
    "change, s",
    "failure, s",
    "name, s",
    "slowness",
    "healthz p99, ms",
    "memory, MiB",
    "verdict",
)


def run_attacks(arena: Arena, attacks: Sequence[Attack]) -> Row:
    """Run attacks at the same time, between a quiet phase and the time in which memory is given back."""
    name = " + ".join(each.name for each in attacks)
    pid = arena.daemon.status()["pid"]
    quiet = arena.measure(QUIET_SECONDS)
    before, fault = memory_of(pid), ""
    checks: list[Check] = []

    def begin() -> None:
        checks.extend(filter(None, (each.run(arena) for each in attacks)))

    attacked = arena.measure(max(each.seconds for each in attacks), begin)
    try:
        for check in checks:
            check()
    except AssertionError as error:
        fault = str(error).partition("\n")[0][:300]
    problems = tuple(line[:200] for line in arena.problems().splitlines())
    arena.attack.close()
    arena.daemon.wait_in_sync()
    row = Row(name, quiet, attacked, before, memory_of(pid), fault, problems)
    end = time.monotonic() + GIVE_BACK_SECONDS
    while row.failures() and time.monotonic() < end:
        row.memory_after = memory_of(pid)
        if not any("afterwards" in each for each in row.failures()):
            break
        time.sleep(0.2)
    if arena.daemon.status()["pid"] != pid:
        row.fault = "vipd ended"
    return row


def table(rows: Sequence[Row]) -> str:
    """Rows in columns, under their heads. Two figures are before and under attack."""
    lines = [HEAD, *(row.cells() for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(HEAD))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )
