"""What keeps a check from working that only the host can tell: programs, users, certificates."""

from __future__ import annotations

import os
import pwd
import ssl
from pathlib import Path

from vipd.checks import Check, ExecProbe, HttpProbe
from vipd.health.probes.tls import tls_context, tls_trouble


def host_problems(check: Check) -> tuple[str, ...]:
    """Everything amiss, each as "what: why; hint: ..."; empty when the check can work on this host."""
    probe = check.probe
    if isinstance(probe, ExecProbe):
        return (*_program_problems(probe.command[0]), *_user_problems(probe.user))
    if isinstance(probe, HttpProbe) and probe.tls and probe.verify and probe.ca:
        return _ca_problems(probe)
    return ()


def _program_problems(program: str) -> tuple[str, ...]:
    path = Path(program)
    try:
        if not path.exists():
            return (f"{program}: no such file; hint: install it on this host, or correct the path",)
        if not path.is_file():
            return (f"{program}: not a file; hint: name the program itself",)
    except OSError as error:
        return (f"{program}: {error.strerror}; hint: its directories must be open to vipd",)
    # Not access(2): root may do anything, but nobody may run what has no x.
    if not path.stat().st_mode & 0o111:
        return (f"{program}: not executable; hint: chmod a+rx {program}",)
    return ()


def _user_problems(user: str) -> tuple[str, ...]:
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        return (f"user {user}: there is none; hint: adduser --system {user}, or use nobody",)
    if entry.pw_uid == 0:
        return (f"user {user}: checks never run as root; hint: use nobody",)
    if os.geteuid() not in (0, entry.pw_uid) and not _may_change_user():
        hint = "add the drop-in exec-checks.conf of the package, which gives CAP_SETUID and CAP_SETGID"
        return (f"user {user}: vipd may not become another user; hint: {hint}",)
    return ()


def _may_change_user() -> bool:
    """Whether this process has CAP_SETGID (6) and CAP_SETUID (7): capabilities(7)."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    held = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    return held & 0b11000000 == 0b11000000


def _ca_problems(probe: HttpProbe) -> tuple[str, ...]:
    try:
        tls_context(probe)
    except ssl.SSLError as error:
        return (f"ca {probe.ca}: no certificates: {tls_trouble(error)}; hint: it must be a PEM file",)
    except OSError as error:
        return (f"ca {probe.ca}: {error.strerror}; hint: name a file that vipd can read",)
    return ()
