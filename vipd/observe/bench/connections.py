"""Connections through this network namespace, from a client to a backend that have one each.

client 198.18.0.2 ---- 198.18.0.1 this one 198.18.1.1 ---- 198.18.1.2 backend
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from vipd.observe.bench import flows
from vipd.observe.bench.declared import PORT, TARGET

CLIENT, TOWARDS_CLIENT = "198.18.0.2", "198.18.0.1"
BACKEND, TOWARDS_BACKEND = "198.18.1.2", "198.18.1.1"
TIMEOUT_SECONDS = 60.0
_PIPE = subprocess.PIPE

End = subprocess.Popen[str]


class ConnectionBenchmark:
    """Makes the two namespaces on entry; they end with their processes. Raises OSError where that fails."""

    backend = BACKEND
    """The address of the backend, which listens on `declared.TARGET`."""

    def __enter__(self) -> ConnectionBenchmark:
        with ExitStack() as stack:
            _run("ip", "link", "set", "lo", "up")
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")
            self._client = stack.enter_context(_end("connect"))
            server = stack.enter_context(_end("serve", "0.0.0.0", str(TARGET)))  # noqa: S104 (its own namespace)
            _wire(self._client, "client", TOWARDS_CLIENT, CLIENT)
            _wire(server, "backend", TOWARDS_BACKEND, BACKEND)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def direct_rate(self, count: int) -> float:
        """Connections a second to the backend's own address. Raises OSError."""
        return self._rate(f"{BACKEND} {TARGET} {count}", count)

    def service_rate(self, address: str, count: int) -> float:
        """Connections a second to a service's address. Raises OSError."""
        return self._rate(f"{address} {PORT} {count}", count)

    def _rate(self, question: str, count: int) -> float:
        assert self._client.stdin is not None  # noqa: S101 (a pipe)
        self._client.stdin.write(f"{question}\n")
        self._client.stdin.flush()
        said = _read(self._client)
        if said.startswith("failed"):
            raise OSError(f"connecting to {question.split()[0]} {said}")
        return count / float(said)


def _end(*words: str) -> End:
    """One end of the connections, in a new namespace. Leaving it closes its pipes and waits for it."""
    argv = ["unshare", "--net", sys.executable, "-I", flows.__file__, str(os.getpid()), *words]
    return subprocess.Popen(argv, stdin=_PIPE, stdout=_PIPE, text=True)


def _read(end: End) -> str:
    """Its next line. Raises OSError when there is none."""
    assert end.stdout is not None  # noqa: S101 (a pipe)
    ready, _, _ = select.select([end.stdout], [], [], TIMEOUT_SECONDS)
    line = end.stdout.readline().strip() if ready else ""
    if not line:
        raise OSError("the other end ended or kept silent")
    return line


def _wire(end: End, name: str, here: str, there: str) -> None:
    """Join the namespace of a new process to this one. Raises OSError."""
    _read(end)  # READY: until then it may still be in this namespace
    target = str(end.pid)
    inside = ("nsenter", "--target", target, "--net")
    _run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", target)
    _run("ip", "address", "add", f"{here}/24", "dev", name)
    _run("ip", "link", "set", name, "up")
    _run(*inside, "ip", "address", "add", f"{there}/24", "dev", "eth0")
    _run(*inside, "ip", "link", "set", "eth0", "up")
    _run(*inside, "ip", "route", "add", "default", "via", here)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip()}")
