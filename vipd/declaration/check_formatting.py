"""Health checks as vipd/v1: the canonical short form as JSON types. Pure."""

from __future__ import annotations

from dataclasses import fields

from vipd.declaration.check_reader import (
    CHECK_TYPES,
    PROBE_KEYS,
    REQUIRED_KEYS,
    TIMING_KEYS,
    default_probe,
)
from vipd.declaration.syntax import period_text
from vipd.model.check import Check, HttpProbe, Timing


def check_to_spec(check: Check) -> object:
    """A check, defaults left out: `tcp`, or `{type: http, path: /healthz}`. `none` without a probe."""
    if check.probe is None:
        return "none"
    kind = check_type(check)
    spec: dict[str, object] = {"type": kind}
    plain = default_probe(kind)
    for key, (name, _) in PROBE_KEYS[kind].items():
        value = getattr(check.probe, name)
        if value != getattr(plain, name) or key in REQUIRED_KEYS.get(kind, ()):
            spec[key] = _probe_value(key, value)
    for key, (name, _) in TIMING_KEYS.items():
        value = getattr(check.timing, name)
        if value != _default_timing(name, check.timing):
            spec[key] = _timing_value(key, value)
    return kind if len(spec) == 1 else spec


def check_type(check: Check) -> str:
    """The word for the kind of check: `tcp`, `http`, `https`, `udp`, `dns`, `exec` or `none`."""
    if isinstance(check.probe, HttpProbe):
        return "https" if check.probe.tls else "http"
    return next(kind for kind in CHECK_TYPES if type(default_probe(kind)) is type(check.probe))


def _default_timing(name: str, timing: Timing) -> object:
    """The default of a declaration without a value; its timeout is never longer than its interval."""
    if name == "timeout":
        return min(Timing().timeout, timing.interval)
    return next(field.default for field in fields(Timing) if field.name == name)


def _probe_value(key: str, value: object) -> object:
    if isinstance(value, bytes):
        return _payload_text(value)
    if key == "status" and isinstance(value, tuple):
        ranges = [low if low == high else f"{low}-{high}" for low, high in value]
        return ranges[0] if len(ranges) == 1 else ranges
    return list(value) if isinstance(value, tuple) else value


def _timing_value(key: str, value: object) -> object:
    if isinstance(value, float):
        return f"{round(value * 100)}%" if key == "jitter" else period_text(value)
    return value


def _payload_text(payload: bytes) -> str:
    """The text that the payload is, or `hex:` and digits where text would not be read back the same."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return f"hex:{payload.hex()}"
    return text if text.isprintable() and not text.startswith("hex:") else f"hex:{payload.hex()}"
