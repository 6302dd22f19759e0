"""Users and groups by NSS, which may query a directory over the network and hang: each lookup has a timeout.

Results are cached for a while. Everything here may be called from any thread; blocking functions must not be
called on the event loop.
"""

from __future__ import annotations

import contextlib
import grp
import logging
import os
import pwd
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Generic, TypeVar

from vipd.host.bounded_threads import BoundedThreads, BusyError

log = logging.getLogger(__name__)

LOOKUP_TIMEOUT_SECONDS = 3.0
"""Longest wait for one answer."""

CACHE_SECONDS = 10.0
"""Lifetime of a cached result, or of a timeout."""

MAX_CACHED = 1024
MAX_LOOKUPS = 8
"""Maximum number of concurrent lookups; one that hangs occupies its slot until it ends."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class CachedLookup(Generic[K, V]):
    """Looks values up, and caches the results."""

    def __init__(self, ask: Callable[[K], V], source: str = "the account database") -> None:
        """`ask` raises KeyError, OSError or ValueError. `source` is what it asks, for messages."""
        self._ask, self._source = ask, source
        self._lock = threading.Lock()
        self._kept: dict[K, tuple[float, V | Exception]] = {}
        self._last: dict[K, V] = {}
        self._threads = BoundedThreads("vipd account", MAX_LOOKUPS)

    def cached(self, key: K) -> V | None:
        """The last result, however old; never blocks."""
        return self._last.get(key)

    def get(self, key: K) -> V:
        """The answer. Raises KeyError when there is none, OSError when it cannot be had in time."""
        with self._lock:
            at, found = self._kept.get(key, (0.0, None))
        if found is None or time.monotonic() - at > CACHE_SECONDS:
            found = self._asked(key)
            with self._lock:
                self._keep(key, found)
        if isinstance(found, Exception):
            raise found.with_traceback(None)
        return found

    def _keep(self, key: K, found: V | Exception) -> None:
        if len(self._kept) >= MAX_CACHED:
            self._kept.clear()
            self._last.clear()
        self._kept[key] = time.monotonic(), found
        if not isinstance(found, Exception):
            self._last[key] = found
        elif isinstance(found, KeyError):
            self._last.pop(key, None)

    def _asked(self, key: K) -> V | Exception:
        try:
            answer = self._threads.submit(lambda: self._ask(key), queue=False)
        except BusyError:
            return TimeoutError(f"{self._source} does not answer")
        except RuntimeError as error:
            return OSError(str(error))
        try:
            return answer.result(LOOKUP_TIMEOUT_SECONDS)
        except TimeoutError:
            return TimeoutError(f"{self._source} does not answer")
        except (KeyError, OSError) as error:
            return error
        except Exception as error:
            # A name that no database can contain: with a zero byte, or half of a surrogate pair.
            return KeyError(str(error))


users: CachedLookup[str, pwd.struct_passwd] = CachedLookup(pwd.getpwnam)
"""Accounts by name."""

user_names: CachedLookup[int, str] = CachedLookup(lambda uid: pwd.getpwuid(uid).pw_name)
"""Names of users by number."""

groups: CachedLookup[str, int] = CachedLookup(lambda name: grp.getgrnam(name).gr_gid)
"""Numbers of groups by name."""


memberships: CachedLookup[str, frozenset[int]] = CachedLookup(
    lambda name: frozenset(os.getgrouplist(name, pwd.getpwnam(name).pw_gid))
)
"""Numbers of all groups of a user, the primary one among them."""

CHECK_USER, FORMER_CHECK_USER = "vipd-check", "nobody"
"""Users that run programs of checks that name no user: the first if it exists, as the package creates it."""


class UserRefusedError(Exception):
    """A user that no program of a check may run as: which, why; hint."""


@dataclass(frozen=True, slots=True)
class CheckUsers:
    """Decides which users may run programs of checks: no user that could change vipd's behaviour."""

    admin_group: str = ""
    """Group whose members may change services over the API."""
    state_dir: Path | None = None
    """Directory whose owner is the daemon's own user, even if root has started this process by hand."""
    author_uids: range = range(0)
    """Numbers of users for programs of checks that name no user, one for each author; empty: they run as the
    default user."""

    def account(self, name: str) -> pwd.struct_passwd:
        """The account of a user, or the one for checks that name none (empty). Blocks: not for the loop.

        Raises KeyError if there is none, OSError if it cannot be looked up, UserRefusedError.
        """
        found = users.get(name) if name else _usual()
        if why := self._privileged(found):
            raise UserRefusedError(f"user {found.pw_name}: {why}; hint: {_hint()}")
        return found

    def _privileged(self, user: pwd.struct_passwd) -> str:
        """Why no program of others may run as this user. Raises KeyError, OSError."""
        if user.pw_uid == 0:
            return "checks never run as root"
        if user.pw_uid == os.geteuid():
            return "vipd itself runs as this user, whom its API lets change services"
        # A check's program drops them; but files of that user may restore them.
        numbers = memberships.get(user.pw_name)
        if 0 in numbers | {user.pw_gid}:
            return "it is in root's group"
        if self._admins() in numbers | {user.pw_gid}:
            return f"it is in the group {self.admin_group}, which the API lets change services"
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if self.state_dir and self.state_dir.stat().st_uid == user.pw_uid:
                return f"it owns {self.state_dir}, where vipd keeps what it does"
        return ""

    def _admins(self) -> int | None:
        with contextlib.suppress(KeyError):
            return groups.get(self.admin_group) if self.admin_group else None
        return None


def _usual() -> pwd.struct_passwd:
    with contextlib.suppress(KeyError):
        return users.get(CHECK_USER)
    return users.get(FORMER_CHECK_USER)


def _hint() -> str:
    with contextlib.suppress(KeyError, OSError):
        return f"leave user out, for {users.get(CHECK_USER).pw_name}"
    return f"adduser --system --group --no-create-home {CHECK_USER}, and leave user out"


class AuthorUids:
    """Numbers of users without an account, a different one for each author of checks. Safe for any thread.

    The kernel lets a process signal, trace, limit and renice those of its own user, and counts processes by
    user (RLIMIT_NPROC). The number of a user needs no account, and follows from the author's name, so that
    it is the same after a restart; two names with one number are a matter of millions.
    """

    def __init__(self, numbers: range) -> None:
        """`numbers`: those to use. None is used where the kernel does not map them all, as in a container
        with few users; a warning says so."""
        self._numbers = numbers if _are_mapped(numbers) else range(0)
        self._lock = threading.Lock()
        self._authors: dict[int, str] = {}
        if numbers and not self._numbers:
            spelled = f"{numbers[0]}-{numbers[-1]}"
            log.warning(
                "check_uids: this container has no users %s: programs of checks share one user; "
                "hint: name numbers that /proc/self/uid_map maps",
                spelled,
            )

    def of(self, author: str) -> int | None:
        """The number of an author, for as long as this object lives; None: there are none."""
        size = len(self._numbers)
        start = int.from_bytes(blake2b(author.encode(errors="surrogatepass"), digest_size=8).digest(), "big")
        with self._lock:
            for offset in range(size):
                uid = self._numbers[(start + offset) % size]
                if self._authors.setdefault(uid, author) == author:
                    return uid
        return None


def _are_mapped(uids: range) -> bool:
    """Whether each of these users exists in this user namespace: user_namespaces(7). A kernel without them
    has no such file, and all users."""
    try:
        lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    except OSError:
        return True
    mapped = [range(int(first), int(first) + int(length)) for first, _, length in map(str.split, lines)]
    return any(uids and uids[0] in users and uids[-1] in users for users in mapped)
