"""The processes and sockets by which vipd itself changes rules. Pure; the clock is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

REMEMBERED_SECONDS = 10.0
"""Events of a process may be read after it has ended; much later its pid may be reused."""


class OwnProcesses:
    """Give `running` to whatever starts programs that change rules, `add_socket` to what opens sockets."""

    def __init__(self, clock: Callable[[], float], pids_are_global: bool = True) -> None:
        """`pids_are_global`: this process is in the first pid namespace, whose numbers the kernel's events
        carry. Elsewhere vipd's processes are identified by their netlink address instead, which is their pid
        in this namespace."""
        self._clock, self._pids_are_global = clock, pids_are_global
        self._running: set[int] = set()
        self._ended: dict[int, float] = {}
        self._sockets: set[int] = set()

    def add_socket(self, port: int) -> None:
        """This netlink address is that of a socket of vipd's. The kernel reports the thread that uses it as
        the process, so the address identifies it everywhere. It stays known: such a socket is open as long as
        vipd runs, unless it fails."""
        self._sockets.add(port)

    @contextmanager
    def running(self, pid: int) -> Iterator[None]:
        """A process of vipd's runs while this is entered."""
        self._running.add(pid)
        try:
            yield
        finally:
            self._running.discard(pid)
            self._forget_old()
            self._ended[pid] = self._clock()

    def wrote(self, pid: int, port: int) -> bool:
        """Whether a transaction is vipd's. `pid` 0: the kernel did not report it, so the address decides."""
        return port in self._sockets or self.known(pid if pid and self._pids_are_global else port)

    def sent(self, port: int) -> bool:
        """Whether messages of this netlink address seem to be vipd's: the address of a process is mostly its
        pid."""
        return port in self._sockets or self.known(port)

    def known(self, pid: int) -> bool:
        """Whether this is a process of vipd's, or was until a moment ago."""
        ended = self._ended.get(pid)
        return pid in self._running or (ended is not None and self._clock() - ended <= REMEMBERED_SECONDS)

    def _forget_old(self) -> None:
        now = self._clock()
        self._ended = {pid: at for pid, at in self._ended.items() if now - at <= REMEMBERED_SECONDS}
