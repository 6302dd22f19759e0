"""A verb's connection to the daemon. Errors contain fault, reason and remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import click

from vipd.cli.errors import FAILED, NOT_FOUND, UNREACHABLE, CliError
from vipd.cli.session import session_address
from vipd.observe.api_client import (
    DEFAULT_SOCKET,
    DEFAULT_TIMEOUT,
    BadResponseError,
    Client,
    ClientError,
    DaemonError,
    Json,
    UnreachableError,
    url_path,
)

EXACT = "vipd.exact"
"""Key in a click context's `meta`: the daemon's answer is printed as a document, which keeps every text
unchanged. All other forms are for people, and every text is one line."""

_SOCKET = "vipd.socket"
"""Key in a click context's `meta`, which a verb shares with the group."""

_STORE = "vipd.store"
_STORED = ("services", "apply", "rollback", "confirm")
"""Requests that change services, so that it matters which store they are for."""

_CODES = {"forbidden": UNREACHABLE, "not-found": NOT_FOUND, "busy": UNREACHABLE}
"""By the kind of an error; for all others it is FAILED."""


def choose_socket(ctx: click.Context, path: str | None) -> None:
    """Store `path` as the daemon's socket for this command line; None changes nothing."""
    if path:
        ctx.meta[_SOCKET] = path


def chosen_socket() -> str:
    """The socket that this command line or its environment names; empty when neither does."""
    return str(click.get_current_context().meta.get(_SOCKET, ""))


def choose_store(ctx: click.Context, store: str | None) -> None:
    """Store the target store for changes of services; None changes nothing."""
    if store:
        ctx.meta[_STORE] = store


class Daemon:
    """Answers of the daemon; each method raises CliError when there is none."""

    def __init__(self, client: Client, store: str = "") -> None:
        """`store` is the one for changes of services; empty: the daemon's default."""
        self._client, self._store = client, store

    def get(self, *segments: str) -> Json:
        """The answer to a GET of `/v1/SEGMENTS`."""
        query = f"?store={self._store}" if self._store and segments[0] == "history" else ""
        return self.request("GET", url_path(*segments) + query)

    def get_query(self, segment: str, query: str) -> Json:
        """The answer to a GET of `/v1/SEGMENT?QUERY`."""
        return self.request("GET", f"{url_path(segment)}?{query}")

    def stream(self, segment: str, query: str) -> Iterator[Json]:
        """The lines of the answer to a GET of `/v1/SEGMENT?QUERY`, as they arrive, until the answer ends."""
        try:
            yield from self._client.stream(f"{url_path(segment)}?{query}")
        except ClientError as err:
            raise _explained(err, self._client.socket_path) from err

    def change(
        self,
        method: str,
        *segments: str,
        body: Json | None = None,
        dry_run: bool = False,
        fleet: bool = False,
        version: str = "",
        confirm: int | None = None,
    ) -> Json:
        """The answer to a change; with `dry_run` the daemon only returns what it would answer.

        `fleet`: for every host, not only the daemon's. `version`: of the service that is to be changed,
        refused if it is another one by then; empty: any. `confirm`: it is taken back unless it is confirmed
        within so many seconds.
        """
        flags = ["dry_run=1"] if dry_run else []
        flags += ["fleet=1"] if fleet else []
        flags += [f"version={version}"] if version else []
        flags += [f"confirm={confirm}"] if confirm is not None else []
        flags += [f"store={self._store}"] if self._store and segments[0] in _STORED else []
        query = f"?{'&'.join(flags)}" if flags else ""
        if segments[0] in _STORED:
            self._client.session = session_address()
        return self.request(method, url_path(*segments) + query, body)

    def request(self, method: str, path: str, body: Json | None = None) -> Json:
        """The answer to any request; `path` is the part after `/v1/`."""
        try:
            return self._client.request(method, path, body)
        except ClientError as err:
            raise _explained(err, self._client.socket_path) from err


def connect(timeout: float = DEFAULT_TIMEOUT, *, exact: bool = False) -> Daemon:
    """The daemon for this command line. Nothing is sent before the first request.

    `timeout` is the maximum silence in seconds. `exact`: its texts are unchanged in any form of
    output.
    """
    chosen = click.get_current_context().meta
    client = Client(chosen_socket() or DEFAULT_SOCKET, timeout, exact=exact or chosen.get(EXACT, False))
    return Daemon(client, chosen.get(_STORE, ""))


def _explained(err: ClientError, socket_path: str) -> CliError:
    if isinstance(err, DaemonError):
        code = _CODES.get(err.kind, FAILED)
        # The message already contains the only problem of a request.
        details = tuple(problem for problem in err.problems if not problem.startswith(err.what))
        return CliError(err.what, err.why, err.hint, code=code, details=details)
    if isinstance(err, UnreachableError):
        why = err.cause.strerror or str(err.cause)
        return CliError(f"cannot reach vipd at {socket_path}", why, _way_to(err), code=UNREACHABLE)
    hint = "is it vipd that listens there? see ss -xlp" if isinstance(err, BadResponseError) else ""
    return CliError(f"no answer of vipd at {socket_path}", str(err), hint, code=UNREACHABLE)


def _way_to(err: UnreachableError) -> str:
    if err.cause.errno in (errno.EACCES, errno.EPERM):
        return f"run it as root, or as a member of {_group_of(err.socket_path)}"
    if isinstance(err.cause, BlockingIOError):
        return "too many others connect at this moment: ss -xp shows who; try again later"
    if isinstance(err.cause, TimeoutError):
        return "a change may still be carried out; see journalctl -u vipd"
    return "systemctl status vipd, or give another socket with --socket"


def _group_of(path: str) -> str:
    # Imported here because only a refused user needs it.
    from grp import getgrgid

    try:
        return f"the group {getgrgid(os.stat(path).st_gid).gr_name}"  # noqa: PTH116  as in main.py
    except (OSError, KeyError):
        return "the group that owns the socket"
