"""A backend that registers itself may have no port that its check could ask."""

from __future__ import annotations

from dataclasses import replace

from tests.health.servers import checked
from vipd.control.backend_status_tracker import BackendStatusTracker
from vipd.health.checker import HealthChecker
from vipd.model.service import Backend


def test_one_that_serves_unasked_is_a_warning() -> None:
    """What it registers is not known when the service is declared."""
    declared = checked("tcp")
    odd = tuple(replace(Backend(f"10.0.0.{n}", ports=(("dns", 53),)), registered=True) for n in range(2, 7))
    statuses = BackendStatusTracker((), HealthChecker(), lambda: 0.0)
    statuses.follow({"s": replace(declared, name="s", backends=(*declared.backends, *odd))})
    *named, more = statuses.warnings()
    assert len(named) == 3
    assert named[0].startswith("s: the check of 10.0.0.2 finds no port, so that it serves unchecked; hint: ")
    assert more == "2 more backends serve unchecked"
    statuses.follow({"s": replace(declared, name="s")})
    assert statuses.warnings() == ()
