"""DNS names of backends: name servers that do not answer, and names that have no answer. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vipd.observe.doctor.facts import Facts
from vipd.observe.doctor.finding import Check, CheckResult, listed, problem, warning

GROUP = "Names of backends"
_SILENT = ("no answer within", "cannot be reached", "names no", "sent no usable answer")
"""In the fault of a name that no name server answers for."""
_ASK = "ask yourself: dig NAME, or dig SRV NAME"


def check_servers(facts: Facts) -> Iterator[CheckResult]:
    """A name server that is silent concerns every name."""
    failing = [each for each in _failing(facts) if _is_silent(each)]
    if not failing:
        return
    asked = ", ".join(facts.settings.dns_servers) or "those in /etc/resolv.conf"
    cause = f"{listed(_texts(failing))}; asked: {asked}; {_effect(failing)}"
    hint = f"{_ASK}; see whether a firewall drops port 53; dns_servers in vipd's settings names others"
    yield _result(failing, "the name servers do not answer for backends' names", cause, hint)


def check_names(facts: Facts) -> Iterator[CheckResult]:
    """A name that does not exist, or has no records of the wanted type."""
    failing = [each for each in _failing(facts) if not _is_silent(each)]
    if not failing:
        return
    cause = f"{listed(_texts(failing))}; {_effect(failing)}"
    hint = f"{_ASK}; correct the record, or the name in the declaration"
    number = "a name has" if len(failing) == 1 else f"{len(failing)} names have"
    yield _result(failing, f"{number} no answer", cause, hint)


def _failing(facts: Facts) -> Sequence[Mapping[str, Any]]:
    return list((facts.daemon.status.get("names") or {}).get("faults", ()))


def _is_silent(name: Mapping[str, Any]) -> bool:
    return any(text in name["fault"] for text in _SILENT)


def _texts(failing: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{each['name']}: {each['fault']}" for each in failing]


def _effect(failing: Sequence[Mapping[str, Any]]) -> str:
    without = [str(each["name"]) for each in failing if not each["serves"]]
    parts = [f"there is no earlier answer for {listed(without)}"] if without else []
    if len(without) < len(failing):
        parts.append("the last good answers serve on")
    return "; ".join(parts)


def _result(failing: Sequence[Mapping[str, Any]], title: str, cause: str, hint: str) -> CheckResult:
    """A name without any answer breaks traffic; one whose last answer serves does not, for now."""
    judged = warning if all(each["serves"] for each in failing) else problem
    return judged(title, cause, hint=hint)


CHECKS = (
    Check("name-servers", GROUP, "the name servers answer", check_servers, Facts.daemon_unread),
    Check("names", GROUP, "every name has an answer", check_names, Facts.daemon_unread),
)
