"""Declarations: refused ones, and services that the kernel rejects. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vipd.observe.doctor.facts import Facts
from vipd.observe.doctor.finding import Check, CheckResult, listed, problem

GROUP = "Declarations"


def check_refused(facts: Facts) -> Iterator[CheckResult]:
    """Files with problems keep serving their last good version, if there was one."""
    faults = facts.state.store_faults
    refused = [text for text in facts.refused if text not in faults]
    if refused:
        count = len(refused)
        title = "a declaration is refused" if count == 1 else f"declarations are refused: {count} problems"
        cause = f"{listed(refused)}; the last good version serves, if there is one"
        hint = "correct the file; vipd reads it when it is saved"
        yield problem(title, cause, f"vipctl check {facts.settings.services_dir}", hint=hint)


def check_quarantined(facts: Facts) -> Iterator[CheckResult]:
    """Services of which the kernel did not take the rules."""
    found = facts.daemon.status.get("quarantined") or {}
    if found:
        cause = listed([f"{name}: {reason}" for name, reason in found.items()])
        title = f"the kernel does not take the rules of {listed(list(found))}"
        yield problem(title, f"{cause}; it keeps what it had for them", "vipctl reload")


CHECKS = (
    Check(
        "refused-declarations", GROUP, "every declaration is accepted", check_refused, Facts.services_unread
    ),
    Check("quarantined", GROUP, "no service is quarantined", check_quarantined, Facts.daemon_unread),
)
