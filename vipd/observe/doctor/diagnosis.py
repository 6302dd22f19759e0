"""Runs all checks, and gathers their findings. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from vipd.observe.doctor.checks import (
    addresses,
    announcing,
    backends,
    conntrack,
    daemon,
    declared,
    firewalls,
    kernel_settings,
    names,
    other_proxies,
    programs,
    state_dir,
)
from vipd.observe.doctor.facts import Facts
from vipd.observe.doctor.finding import (
    Check,
    CheckResult,
    Finding,
    Severity,
    internal_error_text,
    ok,
    unchecked,
)

CHECKS: tuple[Check, ...] = (
    *daemon.CHECKS,
    *declared.CHECKS,
    *state_dir.CHECKS,
    *programs.CHECKS,
    *firewalls.CHECKS,
    *other_proxies.CHECKS,
    *addresses.CHECKS,
    *announcing.CHECKS,
    *names.CHECKS,
    *backends.CHECKS,
    *kernel_settings.CHECKS,
    *conntrack.CHECKS,
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Every finding, the worst first, else in the order of the checks."""

    findings: tuple[Finding, ...]

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """Those of one severity."""
        return tuple(finding for finding in self.findings if finding.severity is severity)

    @property
    def healthy(self) -> bool:
        """Whether there is no problem; warnings do not count."""
        return not self.of(Severity.PROBLEM)

    def view(self) -> dict[str, object]:
        """As JSON values."""
        counts = Counter(str(finding.severity) for finding in self.findings)
        return {
            "healthy": self.healthy,
            "counts": {str(severity): counts[str(severity)] for severity in Severity},
            "findings": [_finding_view(finding) for finding in self.findings],
        }


def diagnose(facts: Facts) -> Diagnosis:
    """Run every check on the facts."""
    findings = [finding for check in CHECKS for finding in _run(check, facts)]
    return Diagnosis(tuple(sorted(findings, key=lambda finding: finding.severity)))


def _run(check: Check, facts: Facts) -> Iterator[Finding]:
    judgements: list[CheckResult] = []
    try:
        for judgement in check.check(facts):
            judgements.append(judgement)
        judgements = judgements or [_ok_or_unchecked(check, facts)]
    except Exception as error:
        judgements.append(unchecked(f"whether {check.ok_text}", internal_error_text("check", error)))
    yield from (Finding(check.id, check.group, judgement) for judgement in judgements)


def _ok_or_unchecked(check: Check, facts: Facts) -> CheckResult:
    why = check.skipped_because(facts)
    return unchecked(f"whether {check.ok_text}", why) if why else ok(check.ok_text)


def _finding_view(finding: Finding) -> dict[str, object]:
    judgement = finding.result
    return {
        "id": finding.id,
        "group": finding.group,
        "severity": str(finding.severity),
        "title": judgement.title,
        "cause": judgement.cause,
        "hint": judgement.hint,
        "mend": list(judgement.fix),
    }
