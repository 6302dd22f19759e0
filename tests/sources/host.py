"""A real vipd in a namespace of its own, whose files, store and etcd a test changes, and what then serves."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import yaml

from tests.lab.daemon import START_SECONDS, Daemon
from tests.lab.inside import Vipd, running
from tests.lab.namespace_names import new_prefix
from tests.lab.node import Node
from tests.lab.topology import delete_nodes, ip
from tests.model.samples import HEAD, block

GOOD = HEAD + block("10.96.0.10", "dns", "10.244.0.5")
OTHER = HEAD + block("10.96.0.11", "web", "10.244.0.6")
BAD = HEAD + "  - {address: 10.96.0.300}\n"
GONE = "go on serving"
"""What vipd says of files that are gone without a word."""

_saves = itertools.count(1)


class Host(Daemon):
    """A real vipd: files are written, `step` has them read, a restart or a crash may come any time."""

    def put(self, name: str, text: str | bytes) -> Path:
        """Write a file of services.d in one step. Its time is of yesterday, so that nobody waits for its
        writer to finish."""
        path, new = self.services_dir / name, self.services_dir / f".new{next(_saves)}"
        new.write_bytes(text.encode() if isinstance(text, str) else text)
        os.utime(new, (time.time() - 86_400 + next(_saves),) * 2)
        new.rename(path)
        return path

    def remove(self, *names: str) -> None:
        """Delete files of services.d; without names all of them."""
        for path in [self.services_dir / name for name in names] or list(self.services_dir.iterdir()):
            path.unlink()

    def step(self) -> set[str]:
        """Have everything read again; the services that serve."""
        self.ask("POST", "reload")
        return self.names()

    def names(self) -> set[str]:
        """The services that serve."""
        return {service["name"] for service in self.get("services")["services"]}

    def backends(self) -> dict[str, list[str]]:
        """The backends of each service that serves, as they are declared."""
        specs = self.get("export")["services"]
        return {spec["name"]: list(map(_address, spec.get("backends", []))) for spec in specs}

    def source(self, name: str) -> dict[str, Any]:
        """What the status says of a source: files, store or etcd."""
        (found,) = (source for source in self.status()["sources"] if source["name"] == name)
        return dict(found)

    def problems(self, source: str = "files") -> list[str]:
        """What the status says is wrong with a source."""
        return list(self.source(source)["problems"])

    def accept_removal(self) -> dict[str, Any]:
        """`vipctl accept-removal`, as the API has it."""
        status, answer = self.ask("POST", "accept-removal")
        assert status == 200, answer
        return answer

    def service(self, name: str) -> dict[str, Any]:
        """One service; empty while there is none."""
        return dict(self.get(f"services/{quote(name, safe='')}").get("service", {}))

    def restart(self) -> None:
        """Stop vipd and start it again."""
        self.stop()
        self.start()

    def crash(self) -> None:
        """Kill vipd and start it again."""
        self.kill()
        self.start()


class QuickHost(Host):
    """The same in a thread of this process, over a fake kernel: it starts in a tenth of the time."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(Node("", "host", "", ""), **settings)
        # `running` makes services.d wherever there is none.
        self.services_dir = self.services_dir.rename(self.directory / "declared")
        self.config.write_text(self.config.read_text().replace("services.d", "declared"))
        self.vipd: Vipd
        """What it is since it was last started."""
        self._life: Future[None] | None = None
        self._end_it: Callable[[], object] = lambda: None

    @property
    def log(self) -> str:
        """Its log since it was last started."""
        return "\n".join(map(logging.Formatter().format, self.vipd.journal))

    def start(self, timeout: float = START_SECONDS) -> None:
        """Start it; returns once what it declares is written."""
        started = Future[None]()

        async def story(vipd: Vipd) -> None:
            ended, self.vipd = asyncio.Event(), vipd
            self._end_it = partial(asyncio.get_running_loop().call_soon_threadsafe, ended.set)
            started.set_result(None)
            await ended.wait()

        settings = yaml.safe_load(self.config.read_text())
        live = partial(running, story, root=self.directory, **settings)
        self._life = ThreadPoolExecutor(1).submit(live)
        wait([started, self._life], timeout, FIRST_COMPLETED)
        if not started.done():
            self._life.result(0)

    def stop(self) -> None:
        """End it as by SIGTERM."""
        life, self._life = self._life, None
        assert life is not None, "it does not run"
        self._end_it()
        life.result(START_SECONDS)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """What it does at its end is not done."""
        with TemporaryDirectory() as aside:
            kept = shutil.copytree(self.state_dir, Path(aside) / "state")
            self.stop()
            shutil.rmtree(self.state_dir)
            shutil.copytree(kept, self.state_dir)

    def vipctl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run vipctl."""
        command = (sys.executable, "-m", "vipd.cli.main", "--socket", str(self.socket), *arguments)
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=check)

    def _close(self) -> None:
        if self._life is not None:
            self.stop()
        super()._close()


def _address(backend: object) -> str:
    return str(backend["address"] if isinstance(backend, Mapping) else backend)


@contextmanager
def namespace() -> Iterator[Node]:
    """A namespace with a loopback device, deleted at the end."""
    node = Node(f"{new_prefix()}-host", "host", "", "")
    ip("netns", "add", node.namespace)
    try:
        ip("-n", node.namespace, "link", "set", "lo", "up")
        yield node
    finally:
        delete_nodes(node)


def link_swap(directory: Path, version: str, text: str) -> None:
    """What a ConfigMap volume does: files are links into `..data`, itself a link that is renamed over."""
    target = directory / f"..{version}"
    target.mkdir()
    (target / "a.yaml").write_text(text)
    aside = directory / "..data_tmp"
    aside.symlink_to(target.name)
    aside.rename(directory / "..data")


def chown(path: Path, user: int) -> None:
    """Give a file to a user."""
    subprocess.run(["chown", str(user), str(path)], check=True, timeout=60)
