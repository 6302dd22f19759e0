"""Reads everything again on SIGHUP or `vipctl reload`: its result, and its log line."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from vipd.control.reconciler import Reconciler
from vipd.control.service_status import refused_units, what_serves
from vipd.dataplane.base import Dataplane
from vipd.declaration.problems import problem_texts
from vipd.host.systemd.fields import Event, fields
from vipd.sources.base import Source

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""How long a reload waits for the kernel."""
PROBLEMS_LOGGED = 20


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """The outcome of a reload."""

    services: int
    actions: dict[str, Literal["created", "changed", "removed"]]
    """The services that are not as before."""
    fault: str
    """Why the kernel does not have all of it; empty when it has."""
    problems: tuple[str, ...]
    """The problems of the sources."""
    serves: str
    """The part of the refused files and keys that serves; empty if none is refused."""

    def __str__(self) -> str:
        numbers = Counter(self.actions.values())
        done = ", ".join(f"{numbers[a]} {a}" for a in ("created", "changed", "removed") if numbers[a])
        known = "1 service" if self.services == 1 else f"{self.services} services"
        return f"{known}, {done or 'none changed'}"


async def reload(
    rescan: Callable[[], Awaitable[None]],
    dataplane: Dataplane,
    reconciler: Reconciler,
    sources: Sequence[Source],
    patience: float = PATIENCE_SECONDS,
    cause: str = "",
) -> ReloadResult:
    """Read every source and the kernel again, and wait until a step has applied the result.

    `cause` is the requester, as in `vipd.host.systemd.fields`.
    """
    before = reconciler.services
    await rescan()
    dataplane.invalidate_all()
    settled = await reconciler.wait_synced(reconciler.request_sync(), patience)
    refused = [f"{name} is quarantined: {why}" for name, why in reconciler.progress.quarantined.items()]
    fault = "; ".join(refused) if settled else reconciler.progress.why_pending(patience)
    problems = problem_texts(p for found in reconciler.problems.values() for p in found)
    problems += [fault for source in sources for fault in source.faults()]
    after = reconciler.services
    units = {name: unit for source in sources for name, unit in source.units().items()}
    refused_of = refused_units(units, reconciler.problems, reconciler.serving)
    reloaded = ReloadResult(len(after), {}, fault, tuple(problems), what_serves(refused_of))
    reloaded.actions.update({name: "removed" for name in before if name not in after})
    for name, service in after.items():
        known = before.get(name)
        if known != service:
            reloaded.actions[name] = "changed" if known else "created"
    _log(reloaded, cause)
    return reloaded


def _log(reloaded: ReloadResult, cause: str) -> None:
    more = f"; problems: {len(reloaded.problems)}" if reloaded.problems else ""
    more += f"; not all of it is in the kernel: {reloaded.fault}" if reloaded.fault else ""
    extra = fields(Event.RELOADED, cause=cause, reason=f"{reloaded}{more}")
    if reloaded.problems:
        named = reloaded.problems[:PROBLEMS_LOGGED]
        serves = f", {reloaded.serves}" if reloaded.serves else ""
        what = "reloaded: %s; problems: %d%s: %s"
        log.warning(what, reloaded, len(reloaded.problems), serves, "; ".join(named), extra=extra)
    elif reloaded.fault:
        log.warning("reloaded: %s; not all of it is in the kernel: %s", reloaded, reloaded.fault, extra=extra)
    else:
        log.info("reloaded: %s", reloaded, extra=extra)
