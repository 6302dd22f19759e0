"""The table that marks packets for tracing, and the socket that owns it. It blocks for an instant."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Sequence
from types import TracebackType

from vipd.host.netlink_socket import acknowledge, open_netlink
from vipd.observe.live_trace.packets import Flow
from vipd.observe.live_trace.table_messages import table_name, transaction

ANSWER_SECONDS = 10.0
SINCE = "Linux 5.12 and nf_tables"
"""Requirement for a table that lives as long as its socket."""


class TraceError(RuntimeError):
    """Packets cannot be traced: what, why, hint."""

    def __init__(self, what: str, why: str = "", hint: str = "", *, forbidden: bool = False) -> None:
        super().__init__(what)
        self.what, self.why, self.hint, self.forbidden = what, why, hint, forbidden

    @classmethod
    def of(cls, what: str, number: int) -> TraceError:
        """From the kernel's error number."""
        said = os.strerror(number)
        if number in (errno.EPERM, errno.EACCES):
            hint = "sudo vipctl trace; vipctl explain needs no root"
            return cls("trace needs root", f"{what}: {said.lower()}", hint, forbidden=True)
        return cls(what, said, f"it needs {SINCE}")


class TraceTable:
    """Exists from entry to exit, and never longer than this process: `with TraceTable(flows): ...`.

    Raises TraceError on entry.
    """

    def __init__(self, flows: Sequence[Flow]) -> None:
        self.name = table_name(os.getpid())
        self._flows = flows
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> TraceTable:
        what = "cannot put the trace rule into the kernel"
        try:
            made = self._opened.enter_context(open_netlink())
            made.settimeout(ANSWER_SECONDS)
            _make(made, transaction(self.name, self._flows))
        except OSError as error:
            self._opened.close()
            raise TraceError.of(what, error.errno or 0) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()


def _make(owner: socket.socket, messages: Sequence[bytes]) -> None:
    """Send them as one; raises OSError with the kernel's error for the first bad one."""
    owner.send(b"".join(messages))
    for _ in messages[1:-1]:
        acknowledge(owner)
