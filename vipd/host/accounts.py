"""Users and groups by NSS, which may ask a directory over the network and hang: each question is bounded.

Answers are kept for a while. Everything here may be called from any thread; what waits must not be called on
the event loop.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from vipd.host.bounded_threads import BoundedThreads, BusyError

PATIENCE_SECONDS = 3.0
"""Longest wait for one answer."""

KEPT_SECONDS = 10.0
"""An answer, or that none came, counts so long."""

MOST_KEPT = 1024
MOST_ASKING = 8
"""Questions under way at once; one that hangs keeps its place until it ends."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lookup(Generic[K, V]):
    """Asks, and keeps what was answered."""

    def __init__(self, ask: Callable[[K], V]) -> None:
        """`ask` raises KeyError, OSError or ValueError."""
        self._ask = ask
        self._lock = threading.Lock()
        self._kept: dict[K, tuple[float, V | Exception]] = {}
        self._last: dict[K, V] = {}
        self._threads = BoundedThreads("vipd account", MOST_ASKING)

    def known(self, key: K) -> V | None:
        """What was answered last, however long ago; never waits."""
        return self._last.get(key)

    def get(self, key: K) -> V:
        """The answer. Raises KeyError when there is none, OSError when it cannot be had in time."""
        with self._lock:
            at, found = self._kept.get(key, (0.0, None))
        if found is None or time.monotonic() - at > KEPT_SECONDS:
            found = self._asked(key)
            with self._lock:
                self._keep(key, found)
        if isinstance(found, Exception):
            raise found.with_traceback(None)
        return found

    def _keep(self, key: K, found: V | Exception) -> None:
        if len(self._kept) >= MOST_KEPT:
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
            return TimeoutError("the account database does not answer")
        except RuntimeError as error:
            return OSError(str(error))
        try:
            return answer.result(PATIENCE_SECONDS)
        except TimeoutError:
            return TimeoutError("the account database does not answer")
        except (KeyError, OSError) as error:
            return error
        except Exception as error:
            # A name that no database can hold: with a zero byte, or half of a surrogate pair.
            return KeyError(str(error))


users: Lookup[str, pwd.struct_passwd] = Lookup(pwd.getpwnam)
"""Accounts by name."""

user_names: Lookup[int, str] = Lookup(lambda uid: pwd.getpwuid(uid).pw_name)
"""Names of users by number."""

groups: Lookup[str, int] = Lookup(lambda name: grp.getgrnam(name).gr_gid)
"""Numbers of groups by name."""


memberships: Lookup[str, frozenset[int]] = Lookup(
    lambda name: frozenset(os.getgrouplist(name, pwd.getpwnam(name).pw_gid))
)
"""Numbers of all groups of a user, the primary one among them."""

CHECK_USER, FORMER_CHECK_USER = "vipd-check", "nobody"
"""Who runs programs of checks that name no user: the first where there is one, as the package makes it."""


class UserRefusedError(Exception):
    """A user that no program of a check may run as: who, why; hint."""


@dataclass(frozen=True, slots=True)
class CheckUsers:
    """Who may run programs of checks: nobody who could change what vipd does."""

    admin_group: str = ""
    """Whose members may change services over the API."""
    state_dir: Path | None = None
    """Whose owner is the daemon's own user, also where root has started this one by hand."""

    def account(self, name: str) -> pwd.struct_passwd:
        """The account of a user, or the one for checks that name none (empty). Waits: not for the loop.

        Raises KeyError when there is none, OSError when it cannot be looked up, UserRefusedError.
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
        # Of a check's program they are dropped; but what belongs to that user may get them back.
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
