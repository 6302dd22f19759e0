"""Finds what prevents a check on this host: programs, users, certificates.

It reads files and queries NSS, so it may block: never call it on the event loop. Any thread may.
"""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path

from vipd.declaration.problems import PLEASE_REPORT
from vipd.health.probes.tls import tls_context, tls_trouble
from vipd.health.result import one_line
from vipd.host.accounts import CHECK_USER, CheckUsers, UserRefusedError
from vipd.host.containment import log_once
from vipd.host.processes import effective_capabilities
from vipd.model.check import Check, ExecProbe, HttpProbe


def host_problems(check: Check, users: CheckUsers) -> tuple[str, ...]:
    """Every problem as "what: why; hint: ..."; empty when the check can work on this host.

    Never raises, whatever the check contains, and waits for NSS for `accounts.PATIENCE_SECONDS` at most.
    """
    try:
        return _problems(check, users)
    except Exception as error:
        return (f"{one_line(log_once(error, 'looking at a check'))}; hint: {PLEASE_REPORT}",)


def _problems(check: Check, users: CheckUsers) -> tuple[str, ...]:
    probe = check.probe
    if isinstance(probe, ExecProbe):
        return (*program_problems(probe.command), *_user_problems(probe.user, users))
    if isinstance(probe, HttpProbe) and probe.tls and probe.verify and probe.ca:
        return _ca_problems(probe)
    return ()


def program_problems(command: tuple[str, ...]) -> tuple[str, ...]:
    """Why this host cannot run a command, as `host_problems` returns it."""
    if not command or not command[0]:
        return ("command is missing; hint: write command: [/usr/local/bin/check, --quick]",)
    program = command[0]
    try:
        mode = Path(program).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        hint = "install it on this host, or correct the path"
        if " " in program:
            hint = f"write each word as an item of the list: [{', '.join(program.split())}]"
        return (f"{program}: no such file; hint: {hint}",)
    except OSError as error:
        return (f"{program}: {error.strerror}; hint: its directories must be open to vipd",)
    except ValueError:
        return (f"{program!r}: no path that a file can have; hint: correct the path",)
    if not stat.S_ISREG(mode):
        return (f"{program}: not a file; hint: name the program itself",)
    # Not access(2): it allows root anything, but even root cannot execute a file without an x bit.
    if not mode & 0o111:
        return (f"{program}: not executable; hint: chmod a+rx {program}",)
    return ()


def _user_problems(user: str, users: CheckUsers) -> tuple[str, ...]:
    try:
        users.account(user)
    except KeyError:
        user = user or CHECK_USER
        return (f"user {user}: there is none; hint: adduser --system {user}, or leave user out",)
    except OSError as error:
        why = error.strerror or str(error)
        what = f"user {user or CHECK_USER}: cannot be looked up: {why}"
        return (f"{what}; hint: see /etc/nsswitch.conf",)
    except UserRefusedError as error:
        return (str(error),)
    if os.geteuid() != 0 and not _may_change_user():
        hint = "add the drop-in exec-checks.conf of the package, which gives the rights for it"
        return (f"user {user or CHECK_USER}: vipd may not become another user; hint: {hint}",)
    return ()


def _may_change_user() -> bool:
    """Whether this process has CAP_SETGID (6) and CAP_SETUID (7): capabilities(7)."""
    return effective_capabilities() & 0b11000000 == 0b11000000


def _ca_problems(probe: HttpProbe) -> tuple[str, ...]:
    try:
        tls_context(probe)
    except ssl.SSLError as error:
        return (f"ca {probe.ca}: no certificates: {tls_trouble(error)}; hint: it must be a PEM file",)
    except OSError as error:
        return (f"ca {probe.ca}: {error.strerror}; hint: name a file that vipd can read",)
    return ()
