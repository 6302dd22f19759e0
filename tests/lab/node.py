"""One machine of the lab: a network namespace, its processes, and traffic from it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.lab.client import LONGEST_LIFE
from tests.lab.flow import COMMAND_SECONDS, Flow, Process, client_argv, client_options, finish, read_line
from tests.lab.fork_server import CLONE_NEWNET, can_fork, fork_server, own_environment
from tests.lab.traffic import Result

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Node:
    """A network namespace with its main address in each family."""

    namespace: str
    name: str
    ipv4: str
    ipv6: str
    started: list[Process] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=dict)
    """What every command here gets in its environment, besides this process's own."""
    _idle: list[Process] = field(default_factory=list, init=False, repr=False)

    def address(self, family: int) -> str:
        return self.ipv4 if family == 4 else self.ipv6

    def with_environment(self, **environment: str) -> Node:
        """The same node with this environment besides; the lab ends what is started there, too."""
        both = {**self.environment, **environment}
        return Node(self.namespace, self.name, self.ipv4, self.ipv6, self.started, both)

    def run(
        self, *argv: str, check: bool = True, text: str | None = None, timeout: float = COMMAND_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Run a command here with `text` as its standard input. AssertionError when it fails."""
        if self._can_fork(argv):
            done = fork_server(argv[2]).run(self.namespace, argv, text, timeout, self.environment)
        else:
            pipe = subprocess.PIPE
            with self._popen(argv, stdin=None if text is None else pipe, stdout=pipe, stderr=pipe) as process:
                try:
                    output, errors = process.communicate(text, timeout)
                except BaseException:
                    process.kill()
                    raise
            done = subprocess.CompletedProcess(argv, process.returncode, output, errors)
        said = done.stderr.strip() or done.stdout.strip()
        assert not check or done.returncode == 0, f"{' '.join(argv)}: exit {done.returncode}: {said}"
        return done

    def start(
        self, *argv: str, stdout: IO[str] | None = None, stderr: IO[str] | int | None = None
    ) -> Process:
        """Start a process here with pipes to its standard input and output, which may be a file too. With
        `stderr=subprocess.STDOUT` its errors come by the same pipe."""
        pipe = subprocess.PIPE
        process: Process
        if self._can_fork(argv):
            process = fork_server(argv[2]).start(
                self.namespace,
                argv,
                self.environment,
                stdout=stdout.fileno() if stdout else None,
                stderr=2 if stderr is None else stderr if isinstance(stderr, int) else stderr.fileno(),
            )
        else:
            process = self._popen(argv, stdin=pipe, stdout=stdout or pipe, stderr=stderr)
        self.started.append(process)
        return process

    def _can_fork(self, argv: Sequence[str]) -> bool:
        """Whether the fork server starts this: not what a node of another kind wraps into other commands."""
        return type(self).inside is Node.inside and can_fork(argv)

    def _popen(
        self, argv: Sequence[str], *, stdin: int | None, stdout: IO[str] | int, stderr: IO[str] | int | None
    ) -> Process:
        options: dict[str, Any] = {
            "stdin": stdin,
            "stdout": stdout,
            "stderr": stderr,
            "text": True,
            "bufsize": 1,
        }
        # `ip netns exec` takes as long as a short command. It mounts the namespace's /sys, which few read.
        reads_sys = argv[0] == sys.executable or any("/sys/" in word for word in argv)
        if reads_sys or type(self).inside is not Node.inside:
            return subprocess.Popen(self.inside(argv), **options)
        with self.entered():
            return subprocess.Popen(argv, env={**own_environment(), **self.environment}, **options)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and what it starts, is in the namespace meanwhile."""
        with contextlib.ExitStack() as stack:
            own, other = (
                stack.enter_context(Path(path).open("rb"))
                for path in ("/proc/thread-self/ns/net", f"/run/netns/{self.namespace}")
            )
            _move(other.fileno())
            try:
                yield
            finally:
                _move(own.fileno())

    def inside(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` in this namespace and environment."""
        pairs = [f"{name}={value}" for name, value in self.environment.items()]
        return ["ip", "netns", "exec", self.namespace, *(["env", *pairs] if pairs else []), *argv]

    def sysctl(self, name: str, value: int | None = None) -> str:
        if value is not None:
            self.run("sysctl", "-qw", f"{name}={value}")
        return self.run("sysctl", "-n", name).stdout.strip()

    def serve(
        self, *, tcp: Sequence[int] = (), udp: Sequence[int] = (), sctp: Sequence[int] = (), name: str = ""
    ) -> Process:
        argv = [sys.executable, "-m", "tests.lab.server", "--name", name or self.name]
        for protocol, ports in (("tcp", tcp), ("udp", udp), ("sctp", sctp)):
            argv += [f"--{protocol}", *map(str, ports)] if ports else []
        process = self.start(*argv)
        said = read_line(process)
        assert said == "READY", f"the server in {self.namespace} did not start (stderr says why): {said!r}"
        return process

    def send(
        self,
        to: str,
        port: int,
        protocol: str = "tcp",
        *,
        count: int = 1,
        source: str = "",
        source_port: int = 0,
        timeout: float = 10.0,
    ) -> Result:
        """Make `count` connections (or datagrams) to an address; returns their outcomes. `timeout` is in
        seconds, for each; use a short one where no answer is expected."""
        options = client_options(
            to, port, protocol=protocol, count=count, source=source, source_port=source_port, timeout=timeout
        )
        client = self._idle_client() or self.start(*client_argv("bursts"))
        assert client.stdin is not None
        client.stdin.write(json.dumps(options) + "\n")
        said = read_line(client, LONGEST_LIFE + COMMAND_SECONDS)
        assert said, f"the client in {self.namespace} ended (stderr says why)"
        self._idle.append(client)
        return Result.of(json.loads(said)["outcomes"])

    def _idle_client(self) -> Process | None:
        """A running client, taken from the list so that no other thread uses it."""
        with contextlib.suppress(IndexError):
            while True:
                client = self._idle.pop()
                if client.poll() is None:
                    return client
        return None

    def open(
        self,
        to: str,
        port: int,
        protocol: str = "tcp",
        *,
        source: str = "",
        source_port: int = 0,
        timeout: float = 10.0,
    ) -> Flow:
        """Open one flow and keep it: a TCP connection, or a UDP socket."""
        options = client_options(
            to, port, protocol=protocol, source=source, source_port=source_port, timeout=timeout
        )
        return Flow(self.start(*client_argv("flow", *options)), timeout)

    def kill(self) -> None:
        """End every process started here, and all others in the namespace."""
        for process in self.started:
            finish(process)
        self.started.clear()
        self._idle.clear()
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _pids(self) -> list[int]:
        """As `ip netns pids`, which takes several times as long."""
        pids = []
        with contextlib.suppress(FileNotFoundError):
            own = Path("/run/netns", self.namespace).stat()
            for pid in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208
                with contextlib.suppress(OSError):  # it has ended, or is the kernel's
                    if os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), own):  # noqa: PTH116 (it is faster)
                        pids.append(int(pid))
        return pids


def _move(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")
