"""A real vipd in a namespace of its own, whose files, store and etcd a test changes, and what then serves."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.lab.daemon import Daemon, UnixConnection
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

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        """One request to the API: the status and the document."""
        connection = UnixConnection(self.socket)
        try:
            connection.request(method, f"/v1/{path}", None if body is None else json.dumps(body))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

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
