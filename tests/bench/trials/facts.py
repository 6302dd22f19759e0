"""Facts about the machine that a reader needs to judge a figure. They do not identify the machine."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from vipd import __version__
from vipd.host.process import SYSTEM_PATH

_TIMEOUT_SECONDS = 5.0

PROGRAMS = {
    "iptables-nft": ["iptables-nft", "--version"],
    "iptables-legacy": ["iptables-legacy", "--version"],
    "nft": ["nft", "--version"],
}
"""Programs whose versions matter, and the commands that print those."""


def machine_facts(more: dict[str, list[str]] | None = None) -> dict[str, object]:
    """Versions, size and current load. `more` are further programs, and the commands that print their
    versions."""
    asked = PROGRAMS | (more or {})
    return {
        "kernel": platform.release().partition("-")[0],
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_memory_kib() / (1 << 20), 1),
        "load_average": round(os.getloadavg()[0], 2),
        "system": _system(),
        "python": platform.python_version(),
        "vipd": __version__,
        "programs": {name: version for name, argv in asked.items() if (version := _version(argv))},
    }


def is_installed(program: str) -> bool:
    """Whether this host has a program."""
    return shutil.which(program, path=_path()) is not None


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"


def _version(argv: list[str]) -> str:
    """The first version number that a program prints; empty when there is none."""
    if not is_installed(argv[0]):
        return ""
    environment = {**os.environ, "PATH": _path(), "LC_ALL": "C"}
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    number = re.search(r"\d+\.\d+(\.\d+)?", done.stdout + done.stderr)
    return number[0] if number else ""


def _field(path: str, name: str) -> str:
    """The value of the first line `name: value` or `name=value` of a file; empty when there is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
    line = re.search(rf"^{re.escape(name)}\s*[:=]\s*(.*)$", text, re.MULTILINE)
    return line[1].strip().strip('"') if line else ""


def _processor() -> str:
    return _field("/proc/cpuinfo", "model name") or "unknown"


def _memory_kib() -> int:
    return int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0])


def _system() -> str:
    return _field("/etc/os-release", "PRETTY_NAME") or "unknown"
