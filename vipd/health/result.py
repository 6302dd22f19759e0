"""The result of one probe. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from vipd.model.service import MAX_WEIGHT
from vipd.model.text import shortened

_MAX_REASON_LENGTH = 120


class ReportedWeight(NamedTuple):
    """The weight that a backend reports for itself. 0: no new flows."""

    value: int
    """0..65535, or 0..100 if it is a percentage."""
    percent: bool = False
    """Whether `value` is a percentage of the declared weight."""

    def __str__(self) -> str:
        return f"{self.value}%" if self.percent else str(self.value)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of one probe: success, failure, timeout, or none because vipd could not probe."""

    good: bool | None
    """None: no result, because vipd itself could not probe."""
    reason: str
    """`connection refused`, `status 500`, `answered in 3 ms`: one line of printable text."""
    seconds: float = 0.0
    """Duration of the probe."""
    weight: ReportedWeight | None = None

    @classmethod
    def success(cls, seconds: float, weight: ReportedWeight | None = None, note: str = "") -> ProbeResult:
        """A good answer; `note` describes anything unusual about it."""
        return cls(True, f"answered in {milliseconds(seconds)}{note and f'; {note}'}", seconds, weight)

    @classmethod
    def failure(cls, reason: str, seconds: float = 0.0) -> ProbeResult:
        """A bad answer."""
        return cls(False, one_line(reason), seconds)

    @classmethod
    def timeout(cls, timeout: float, doing: str = "") -> ProbeResult:
        """No answer within `timeout` seconds; `doing` says what the probe was doing when the time was up."""
        return cls(False, f"timeout after {timeout:g} s{doing and f' {doing}'}", timeout)

    @classmethod
    def not_probed(cls, reason: str) -> ProbeResult:
        """vipd could not probe: the backend's state stays."""
        return cls(None, one_line(f"cannot be asked: {reason}"))


def milliseconds(seconds: float) -> str:
    """`3 ms`, `0.4 ms` or `1.2 s`."""
    if seconds >= 1.0:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.{0 if seconds >= 0.01 else 1}f} ms"


def one_line(text: str) -> str:
    """Untrusted text made safe to print: one short line without control characters."""
    return shortened(text, _MAX_REASON_LENGTH)


_WEIGHT = re.compile(r"0*([0-9]{1,5})(%?)")
"""ASCII digits only, after any number of leading zeros."""


def parse_weight(text: str) -> ReportedWeight | None:
    """A weight 0..65535, or a percentage 0%..100%, in decimal; None if it is neither. Leading zeros, and
    spaces and tabs around it, are ignored."""
    match = _WEIGHT.fullmatch(text.strip(" \t"))
    if match is None:
        return None
    said = ReportedWeight(int(match[1]), bool(match[2]))
    return said if said.value <= (100 if said.percent else MAX_WEIGHT) else None
