"""Limits on requests that are served at a time, shared fairly among users."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator

from aiohttp import web

from vipd.api.peers import credentials_of
from vipd.declaration.operations import RefusedError


class UserQuota:
    """At most `limit` at a time, half of them for one user. Root and vipd's own user may have as many beside
    those of others, so that others cannot block them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_use = Counter[int]()

    @contextlib.contextmanager
    def acquire(self, request: web.Request, what: str, hint: str) -> Iterator[None]:
        """Acquire one for a request. Raises RefusedError with the texts `what` and `hint`."""
        uid = _uid_of(request)
        privileged = {0, os.geteuid()}
        others = sum(n for other, n in self._in_use.items() if other not in privileged)
        own_most = self._limit if uid in privileged else max(1, self._limit // 2)
        if self._in_use[uid] >= own_most:
            raise RefusedError("conflict", what, f"uid {uid} has {own_most}, the most of one user", hint)
        if uid not in privileged and others >= self._limit:
            raise RefusedError("conflict", what, f"there are {others}, the most of all", hint)
        self._in_use[uid] += 1
        try:
            yield
        finally:
            self._in_use[uid] -= 1
            if not self._in_use[uid]:
                del self._in_use[uid]


class UserTurns:
    """Turns for work that keeps a processor busy: at most `limit` at a time, one for each user. Users who
    wait get them in rotation, so that the requests of one of them delay nobody else's by more than one."""

    def __init__(self, limit: int = 1) -> None:
        self._limit = limit
        self._working = set[int]()
        self._waiting: dict[int, deque[asyncio.Future[None]]] = {}
        """The requests of each user, the one whose turn is next first."""

    @contextlib.asynccontextmanager
    async def turn(self, request: web.Request) -> AsyncIterator[None]:
        """Wait for a turn, and hold it."""
        uid, granted = _uid_of(request), asyncio.get_running_loop().create_future()
        self._waiting.setdefault(uid, deque()).append(granted)
        self._grant()
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self._working.discard(uid)
                if others := self._waiting.pop(uid, None):
                    self._waiting[uid] = others  # behind all other users
            self._grant()

    def _grant(self) -> None:
        for uid in list(self._waiting):
            if len(self._working) >= self._limit:
                return
            if uid in self._working:
                continue
            requests = self._waiting.pop(uid)
            while requests:
                granted = requests.popleft()
                if not granted.cancelled():  # its requester has disconnected
                    granted.set_result(None)
                    self._working.add(uid)
                    break
            if requests:
                self._waiting[uid] = requests


def _uid_of(request: web.Request) -> int:
    """The uid of the requester; -1: it has disconnected."""
    end = request.transport.get_extra_info("socket") if request.transport else None
    try:
        return credentials_of(end)[1] if end is not None else -1
    except OSError:
        return -1
