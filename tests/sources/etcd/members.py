"""Real etcd servers on free loopback ports, each in a directory of its own, ended by pid."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.lab.held_ports import held_ports
from tests.lab.waiting import wait_until

START_SECONDS = 90.0
ANSWER_SECONDS = 30.0
"""For one answer of a member on a busy machine."""
RARE_ELECTIONS = ("--heartbeat-interval", "100", "--election-timeout", "1500")
"""For members that vote: a busy machine may keep one from its heartbeats for a while."""
PACKAGES = {"etcd": "etcd-server", "etcdctl": "etcd-client", "openssl": "openssl"}


def install() -> None:
    """Debian's packages of what is missing."""
    missing = [package for program, package in PACKAGES.items() if shutil.which(program) is None]
    if missing:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (
            ["apt-get", "update", "-qq"],
            ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *missing],
        ):
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def _stopped(stat: Path) -> bool:
    """Whether a thread is stopped, by its /proc/PID/task/TID/stat."""
    return stat.read_text().rpartition(")")[2].split()[0] == "T"


class Member:
    """One etcd server."""

    def __init__(self, root: Path, name: str, ports: tuple[int, int], flags: Sequence[str] = ()) -> None:
        self.name, self.directory = name, root / name
        self.scheme = "https" if any(flag.startswith("--cert-file") for flag in flags) else "http"
        self.url = f"{self.scheme}://127.0.0.1:{ports[0]}"
        self.peer = f"http://127.0.0.1:{ports[1]}"
        self.flags = list(flags)
        self.speaks = self.scheme == "http" and "--enable-grpc-gateway=false" not in flags
        """Whether this module can talk to it."""
        self._log = root / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, cluster: str = "") -> None:
        """Start it; `wait` for it afterwards."""
        command = [
            *("etcd", "--name", self.name, "--data-dir", str(self.directory)),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", self.peer, "--initial-advertise-peer-urls", self.peer),
            *("--initial-cluster", cluster or f"{self.name}={self.peer}"),
            *("--heartbeat-interval", "50", "--election-timeout", "500", "--log-level", "warn"),
            *("--logger", "zap", *self.flags),
        ]
        with self._log.open("ab") as log:
            environment = {"PATH": os.environ["PATH"]}
            if platform.machine() == "aarch64":
                environment["ETCD_UNSUPPORTED_ARCH"] = "arm64"  # 3.4 starts there only when told so
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def wait(self) -> None:
        """Until it listens, or fail with its log."""
        end = time.monotonic() + START_SECONDS
        host, port = self.url.partition("://")[2].split(":")
        while time.monotonic() < end:
            assert self._process is not None
            assert self._process.poll() is None, self._log.read_text()[-2000:]
            try:
                socket.create_connection((host, int(port)), 1).close()
            except OSError:
                time.sleep(0.02)
            else:
                return
        raise AssertionError(f"{self.name} does not listen: {self._log.read_text()[-2000:]}")

    @property
    def running(self) -> bool:
        return self._process is not None

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; returns once SIGSTOP has stopped all of its threads, which run on until the one
        that takes the signal has a processor."""
        assert self._process is not None
        self._process.send_signal(number)
        if number is signal.SIGSTOP:
            threads = list(Path(f"/proc/{self._process.pid}/task").glob("*/stat"))
            wait_until(lambda: all(map(_stopped, threads)), f"{self.name} does not stop")

    def stop(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def wipe(self) -> None:
        """Forget all that it stored. It must not run."""
        shutil.rmtree(self.directory, ignore_errors=True)


class KeyValue(NamedTuple):
    """A key as it is stored."""

    value: str
    revision: int
    """That of its last write."""
    lease: str
    """Empty: it has none."""

    @classmethod
    def of(cls, kv: dict[str, str]) -> KeyValue:
        """From the gateway's JSON."""
        return cls(b64decode(kv.get("value", "")).decode(), int(kv["mod_revision"]), kv.get("lease", ""))


class Cluster:
    """Members of one cluster, and a plain way to write to it that shares no code with vipd."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(member.url for member in self.members)

    @property
    def _names(self) -> str:
        return ",".join(f"{member.name}={member.peer}" for member in self.members)

    def member(self, url: str) -> Member:
        """The member with an endpoint."""
        return next(member for member in self.members if member.url == url)

    def start(self) -> None:
        for member in self.members:
            member.start(self._names)
        for member in self.members:
            member.wait()
        if self.members[0].speaks:
            self.wait_for_writes()

    def start_again(self, *urls: str) -> None:
        """Start members that were stopped, and wait until all take writes."""
        for url in urls:
            self.member(url).start(self._names)
        for url in urls:
            self.member(url).wait()
        self.wait_for_writes()

    def ensure(self) -> None:
        """Start what does not run."""
        self.start_again(*(member.url for member in self.members if not member.running))

    def stop(self) -> None:
        for member in self.members:
            member.stop()

    def post(self, path: str, body: dict[str, object], url: str = "") -> dict[str, object]:
        """One request, to the first member unless told otherwise; again while there is no leader."""
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                return self.post_once(path, body, url)
            except urllib.error.HTTPError as error:
                if error.code < 500 or time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def post_once(
        self, path: str, body: dict[str, object], url: str = "", token: str = ""
    ) -> dict[str, object]:
        """One request, to the first member unless told otherwise. Raises OSError."""
        request = urllib.request.Request((url or self.urls[0]) + path, json.dumps(body).encode())  # noqa: S310
        if token:
            request.add_header("Authorization", token)
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:  # noqa: S310
            found = json.loads(answer.read())
            assert isinstance(found, dict)
            return found

    def token(self, user: str, password: str) -> str:
        """What a user who logs in gets."""
        return str(self.post("/v3/auth/authenticate", {"name": user, "password": password})["token"])

    def allowed(self, path: str, body: dict[str, object], token: str = "") -> bool:
        """Whether etcd does what somebody asks for. Raises OSError for any other reason than permissions."""
        try:
            self.post_once(path, body, token=token)
        except urllib.error.HTTPError as error:
            said = error.read().decode()
            if "permission denied" in said or "user name is empty" in said:
                return False
            raise
        return True

    def put(self, key: str, value: str, url: str = "") -> int:
        """Write a key; the revision of that."""
        return _revision(self.post("/v3/kv/put", {"key": _b(key), "value": _b(value)}, url))

    def put_bytes(self, key: bytes, value: bytes) -> None:
        """Write a key of any bytes."""
        self.post("/v3/kv/put", {"key": b64encode(key).decode(), "value": b64encode(value).decode()})

    def create(self, key: str, value: str, url: str = "") -> None:
        """Write a key unless it is there, so that doing it again does nothing. Raises OSError."""
        absent = {"key": _b(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        put = {"request_put": {"key": _b(key), "value": _b(value)}}
        self.post_once("/v3/kv/txn", {"compare": [absent], "success": [put]}, url)

    def read(self, key: str, revision: int = 0) -> KeyValue | None:
        """A key as it is stored; None: it is not there."""
        answer = self.post("/v3/kv/range", {"key": _b(key), "revision": str(revision)})
        found = answer.get("kvs", [])
        assert isinstance(found, list)
        return KeyValue.of(found[0]) if found else None

    def lease_seconds(self, lease: str) -> int:
        """Seconds that a lease has left; -1: it is over."""
        return int(str(self.post("/v3/lease/timetolive", {"ID": lease}).get("TTL", 0)))

    def put_all(self, values: dict[str, str]) -> int:
        """Write many keys, 100 in a transaction; the last revision."""
        revision, pairs = 0, list(values.items())
        for at in range(0, len(pairs), 100):
            puts = [{"request_put": {"key": _b(k), "value": _b(v)}} for k, v in pairs[at : at + 100]]
            revision = _revision(self.post("/v3/kv/txn", {"success": puts}))
        return revision

    def delete(self, key: str, url: str = "") -> int:
        """Delete a key, or with a final `*` all that begin so; the revision of that."""
        body: dict[str, object] = {"key": _b(key)}
        if key.endswith("*"):
            start = key[:-1]
            body = {"key": _b(start), "range_end": _b(start[:-1] + chr(ord(start[-1]) + 1))}
        return _revision(self.post("/v3/kv/deleterange", body, url))

    def compact(self, revision: int) -> None:
        self.post("/v3/kv/compaction", {"revision": str(revision), "physical": True})

    def clear(self) -> None:
        """Delete every key."""
        self.post("/v3/kv/deleterange", {"key": "AA==", "range_end": "AA=="})

    def wait_for_writes(self) -> None:
        """Wait until it takes writes."""
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                for url in self.urls:
                    self.post_once("/v3/kv/range", {"key": _b("x")}, url)
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
            else:
                return


def etcdctl(url: str, *arguments: str) -> str:
    """Run the real etcdctl."""
    command = ["etcdctl", "--endpoints", url, *arguments]
    done = subprocess.run(command, capture_output=True, env=etcdctl_environment(), timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def etcdctl_environment() -> dict[str, str]:
    """That of an etcdctl which waits for as long as a busy machine takes; by itself it gives up after 5 s."""
    patience = {"ETCDCTL_DIAL_TIMEOUT": "60s", "ETCDCTL_COMMAND_TIMEOUT": "60s"}
    return {"PATH": os.environ["PATH"], "ETCDCTL_API": "3", **patience}


@contextmanager
def cluster(root: Path, size: int = 1, flags: Sequence[str] = ()) -> Iterator[Cluster]:
    """A running cluster, ended at the end."""
    install()
    root.mkdir(parents=True, exist_ok=True)
    flags = [*(RARE_ELECTIONS if size > 1 else ()), *flags]
    with held_ports(2 * size) as ports:
        made = Cluster([Member(root, f"m{n}", (ports[2 * n], ports[2 * n + 1]), flags) for n in range(size)])
        try:
            made.start()
            yield made
        finally:
            made.stop()


def _b(text: str) -> str:
    return b64encode(text.encode()).decode()


def _revision(answer: dict[str, object]) -> int:
    header = answer["header"]
    assert isinstance(header, dict)
    return int(header["revision"])
