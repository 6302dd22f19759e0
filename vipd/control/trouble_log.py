"""Logs when declarations, sources, rules or services have problems, and when those end."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from vipd.declaration.problems import Problem
from vipd.host.batches import in_batches
from vipd.host.systemd.fields import ATTRIBUTE, Event, fields
from vipd.model.limits import ALL_PROBLEMS

log = logging.getLogger(__name__)

AT_ONCE = 20
"""Units whose problems are logged before the event loop gets its turn: each takes up to a
millisecond."""
PROBLEMS_NAMED = 20
TRACEBACKS_LOGGED = 3
"""For internal errors of one unit; most have the same cause."""

Problems = Mapping[str, tuple[Problem, ...]]
Faults = Mapping[str, tuple[str, ...]]
"""Reasons why sources cannot be read, by the place of each."""


async def log_problems(before: Problems, after: Problems) -> None:
    """Log which units have other problems than before, and which have none any more. The event loop gets its
    turns, however many they are."""
    changed = {unit: found for unit, found in after.items() if found and found != before.get(unit)}
    if len(changed) > ALL_PROBLEMS:
        log.error(
            "%d more files and keys have problems; vipctl status names some", len(changed) - ALL_PROBLEMS
        )
        changed = dict(islice(changed.items(), ALL_PROBLEMS))
    async for part in in_batches(changed, AT_ONCE):
        for unit, problems in part.items():
            _log_refused(unit, problems)
    for unit in before.keys() - after.keys():
        where = unit.removeprefix("file:")
        extra = fields(
            Event.DECLARATION_ACCEPTED, unit=unit, cause=_cause(unit), reason="no problems any more"
        )
        log.info("%s has no problems any more", where, extra=extra)


def _log_refused(unit: str, problems: Sequence[Problem]) -> None:
    first, more = problems[0], len(problems) - 1
    what = f"{first.path}: {first.what}" if first.path else first.what
    reason = what + (f"; and {more} more problems" if more > 1 else "; and 1 more problem" if more else "")
    line = f":{first.line}" if first.line else ""
    extra = fields(Event.DECLARATION_REFUSED, unit=unit, cause=f"{_cause(unit)}{line}", reason=reason)
    named = [str(problem) for problem in problems[:PROBLEMS_NAMED]]
    if more >= PROBLEMS_NAMED:
        named.append(f"{unit.removeprefix('file:')}: {more + 1 - PROBLEMS_NAMED} more problems")
    named += [problem.trace.rstrip() for problem in problems if problem.trace][:TRACEBACKS_LOGGED]
    log.error("%s", named[0], extra=extra)
    for line in named[1:]:
        log.error("%s", line, extra={ATTRIBUTE: {"VIPD_UNIT": (unit,)}})  # the first one is the event


def log_faults(before: Faults, after: Faults) -> None:
    """Log new faults of sources, and sources that are usable again."""
    for place, faults in after.items():
        known, cause = before.get(place, ()), _source(place)
        for fault in faults:
            if fault not in known:
                reason = fault.removeprefix(f"{place}: ")
                log.error("%s", fault, extra=fields(Event.SOURCE_FAILED, cause=cause, reason=reason))
        if known and not faults:
            extra = fields(Event.SOURCE_MENDED, cause=cause, reason="can be used again")
            log.info("%s can be used again", place, extra=extra)


def _source(place: str) -> str:
    return f"file {place}" if place.startswith("/") else f"etcd {place}"


def log_applied(number: int, seconds: float, first: bool) -> None:
    """Log that the kernel has all services; the first time this is the event of a load."""
    told = "1 service" if number == 1 else f"{number} services"
    what = f"{told} in the kernel after {seconds:.3f} s"
    event = Event.SERVICES_LOADED if first else Event.RULES_APPLIED
    log.info("%s", what, extra=fields(event, reason=what))


def log_recovered(fault: str) -> None:
    """Log that a step has worked after some that failed."""
    extra = fields(Event.APPLY_RECOVERED, reason=f"after: {fault}")
    log.info("the kernel is as declared again, after: %s", fault, extra=extra)


def log_readmitted(before: Collection[str], after: Collection[str], known: Collection[str]) -> None:
    """Log services that are still `known` and no longer quarantined."""
    for name in sorted(set(before) - set(after)):
        if name in known:
            extra = fields(
                Event.SERVICE_READMITTED, service=name, cause="kernel", reason="takes its rules again"
            )
            log.info("%s is not quarantined any more", name, extra=extra)


def _cause(unit: str) -> str:
    return unit.replace(":", " ", 1)
