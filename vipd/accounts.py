"""Users and groups by NSS, which may ask a directory over the network and hang: each question is bounded.

Answers are kept for a while. Everything here may be called from any thread; what waits must not be called on
the event loop.
"""

from __future__ import annotations

import grp
import os
import pwd
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

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
        self._places = threading.BoundedSemaphore(MOST_ASKING)

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
        if not self._places.acquire(blocking=False):
            return TimeoutError("the account database does not answer")
        answer: Future[V] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._ask(key))
            except Exception as error:
                answer.set_exception(error)
            finally:
                self._places.release()

        try:
            # A daemon: one that hangs for ever must not keep vipd from ending.
            threading.Thread(target=ask, name="vipd account", daemon=True).start()
        except RuntimeError as error:
            self._places.release()
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


def privileged(uid: int) -> str:
    """Why no program of others may run as this user: it is root, or vipd's own, which may change services."""
    if uid == 0:
        return "checks never run as root"
    if uid == os.geteuid():
        return "vipd itself runs as this user, whom its API lets change services"
    return ""
