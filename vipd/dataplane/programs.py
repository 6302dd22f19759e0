"""Finds and runs the programs that read and write rules. This is the one place where a failure of such a
program becomes an `ApplyError` with program, reason and remedy."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from vipd.dataplane.base import ApplyError, MissingProgramError
from vipd.host.process import ProgramResult, ProgramTimeoutError, Runner, identity

VERSION_SECONDS = 5.0
"""How long a program may take to print its version, which does not involve the kernel."""
PROBE_SECONDS = 15.0
"""How long it may take to probe this host's features; that loads modules."""

PACKAGES = {"nft": "nftables", "conntrack": "conntrack"}
"""Packages of programs; iptables is that of all others."""

_HINTS = {
    errno.EACCES: "ls -l $(command -v {program}); it must be executable: chmod 755, or install it again",
    errno.EPERM: "vipd may not run it: look at the unit's restrictions and at security modules (dmesg)",
    errno.ENOEXEC: "it is not a program of this machine: install it again",
    errno.EMFILE: "raise vipd's limit of open files: LimitNOFILE= in its unit, or ulimit -n",
    errno.ENFILE: "raise this host's limit of open files: sysctl fs.file-max",
    errno.EAGAIN: "raise vipd's limit of processes: TasksMax= in its unit, or ulimit -u",
    errno.ENOMEM: "this host is out of memory; vipd tries again",
}
_WHY = {errno.EMFILE: "vipd is out of file descriptors", errno.ENFILE: "this host is out of file descriptors"}
HANGS = "see dmesg, and whether another program changes rules all the time; vipd tries again"


async def finish(argv: Sequence[str], text: str, run: Runner, limit: float | None = None) -> ProgramResult:
    """Run a program to its end, whatever its exit code. Raises ApplyError if that fails, and
    MissingProgramError if there is no such program; none of these is a fault of the rules given to it.

    `limit`: seconds after which it is killed; None: the limit of `run`.
    """
    program = argv[0]
    try:
        async with asyncio.timeout(limit):
            return await run(argv, text)
    except ProgramTimeoutError as error:
        raise ApplyError(f"{error.program} hangs", str(error), HANGS) from None
    except TimeoutError:
        why = f"{program} did not end within {limit:.0f} s and was killed" if limit else "it timed out"
        raise ApplyError(f"{program} hangs", why, HANGS) from None
    except FileNotFoundError:
        package = PACKAGES.get(program, "iptables")
        what = f"{program} cannot be run"
        raise MissingProgramError(what, "there is no such program", f"apt install {package}") from None
    except OSError as error:
        number = error.errno or 0
        why = _WHY.get(number) or error.strerror or str(error) or type(error).__name__
        hint = _HINTS.get(number, "vipd tries again").format(program=program)
        raise ApplyError(f"{program} cannot be run", why, hint) from error
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ApplyError(f"{program} cannot be run", why, "vipd tries again; please report it") from error


T = TypeVar("T")


class Programs(Generic[T]):
    """Result of a search for some programs. The search is repeated if no program was usable, and if other
    programs have replaced them, as `update-alternatives` and upgrades do."""

    def __init__(self, names: Sequence[str], find: Callable[[], Awaitable[T]]) -> None:
        """`names`: the programs; `find`: searches for them and raises ApplyError."""
        self._names, self._find = tuple(names), find
        self._identities: tuple[object, ...] | None = None
        self.found: T | ApplyError = ApplyError(f"{names[0]} was not looked for", "vipd has just started")

    async def refresh(self, *, needed: bool = True) -> bool:
        """Search for them if that is due; returns whether the result changed. If they are not
        `needed` a failure is kept until the programs are replaced."""
        identities = tuple(map(identity, self._names))
        failed = isinstance(self.found, ApplyError)
        if identities == self._identities and not (failed and needed):
            return False
        before, self._identities = self.found, identities
        try:
            self.found = await self._find()
        except ApplyError as error:
            self.found = error
            return not failed or str(before) != str(error)
        return self.found != before


def require_found(found: T | ApplyError) -> T:
    """The programs, or their ApplyError raised: a new one each time, for it carries a traceback."""
    if isinstance(found, MissingProgramError):
        raise MissingProgramError(found.what, found.why, found.hint)
    if isinstance(found, ApplyError):
        raise ApplyError(found.what, found.why, found.hint)
    return found


def local_limit_hint(number: int) -> str:
    """The hint for an error number that is a limit of this process or host; empty for others."""
    return _HINTS[number] if number in (errno.EMFILE, errno.ENFILE) else ""
