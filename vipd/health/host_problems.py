"""What keeps a check from working that only the host can tell: programs, users, certificates.

It asks files and NSS, so it may wait: never call it on the event loop. Any thread may.
"""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path

from vipd import accounts
from vipd.checks import Check, ExecProbe, HttpProbe
from vipd.declaration.problems import PLEASE_REPORT
from vipd.health.faults import log_once
from vipd.health.probes.tls import tls_context, tls_trouble
from vipd.health.result import one_line


def host_problems(check: Check) -> tuple[str, ...]:
    """Everything amiss, each as "what: why; hint: ..."; empty when the check can work on this host.

    Never raises, whatever the check holds, and waits for NSS for `accounts.PATIENCE_SECONDS` at most.
    """
    try:
        return _problems(check)
    except Exception as error:
        return (f"{one_line(log_once(error, 'looking at a check'))}; hint: {PLEASE_REPORT}",)


def _problems(check: Check) -> tuple[str, ...]:
    probe = check.probe
    if isinstance(probe, ExecProbe):
        return (*_program_problems(probe.command), *_user_problems(probe.user))
    if isinstance(probe, HttpProbe) and probe.tls and probe.verify and probe.ca:
        return _ca_problems(probe)
    return ()


def _program_problems(command: tuple[str, ...]) -> tuple[str, ...]:
    if not command or not command[0]:
        return ("command is missing; hint: write command: [/usr/local/bin/check, --quick]",)
    program = command[0]
    try:
        mode = Path(program).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return (f"{program}: no such file; hint: install it on this host, or correct the path",)
    except OSError as error:
        return (f"{program}: {error.strerror}; hint: its directories must be open to vipd",)
    except ValueError:
        return (f"{program!r}: no path that a file can have; hint: correct the path",)
    if not stat.S_ISREG(mode):
        return (f"{program}: not a file; hint: name the program itself",)
    # Not access(2): root may do anything, but nobody may run what has no x.
    if not mode & 0o111:
        return (f"{program}: not executable; hint: chmod a+rx {program}",)
    return ()


def _user_problems(user: str) -> tuple[str, ...]:
    try:
        entry = accounts.users.get(user)
    except KeyError:
        return (f"user {user}: there is none; hint: adduser --system {user}, or use nobody",)
    except OSError as error:
        why = error.strerror or str(error)
        return (f"user {user}: cannot be looked up: {why}; hint: see /etc/nsswitch.conf, or use nobody",)
    if why := accounts.privileged(entry.pw_uid):
        return (f"user {user}: {why}; hint: use nobody",)
    if os.geteuid() != 0 and not _may_change_user():
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
