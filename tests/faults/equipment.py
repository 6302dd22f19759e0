"""What tests of faults need besides the lab: tools that fail, a host that has them, rules of a cold start."""

from __future__ import annotations

import http.client
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from tests.dataplane.namespace import Namespace
from tests.faults.dataplanes import Equipment, Rules
from tests.lab.daemon import Daemon
from tests.lab.node import Node
from tests.lab.stored import stored

REFUSAL = "is refused by the test"
SWEPT_SECONDS = 60
_SCRIPT = """\
#!/usr/bin/env bash
# Passes everything on to {real}, unless the test makes it fail.
here=${{0%/*}}
name=${{0##*/}}
if [ "$*" = "{asks}" ]; then
    exec {real} "$@"
fi
read -r up _ </proc/uptime
echo "$up" >>"$here/calls"
if [ -e "$here/broken" ]; then
    echo "$name: broken by the test" >&2
    exit 1
fi
[ -e "$here/hanging" ] && exec sleep 1000
[ -e "$here/slow" ] && sleep 1
input=$(cat)
if [ -s "$here/refused" ] && line=$(grep -nm1 -Ff "$here/refused" <<<"$input"); then
    line=${{line%%:*}}
    echo "{complaint}" >&2
    exit 1
fi
exec {real} "$@" <<<"$input"
"""


@dataclass
class MountingNode(Node):
    """A node whose processes see a directory through a mount of their own."""

    directory: str = ""
    script: str = ""
    """Shell script that mounts something on the directory `$0`, and then runs its arguments."""

    def inside(self, argv: Any) -> list[str]:
        return super().inside(["unshare", "--mount", "sh", "-c", self.script, self.directory, *argv])


class ToolsOnlyDaemon(Daemon):
    """A daemon that writes every change by programs: the kernel takes no transaction from itself."""

    module = "tests.faults.supervised_vipd"

    def __init__(self, host: Node, declaration: str = "", **settings: object) -> None:
        super().__init__(host, declaration, **settings)
        (self.directory / "faults").write_text("ENOBUFS .* send netlink 12 16\n")
        (self.directory / "calls").write_text("sendto")


class FailingTools:
    """A directory with the programs that write a dataplane's rules, to be first in PATH."""

    def __init__(self, directory: Path, equipment: Equipment) -> None:
        self._directory = directory
        complaint = equipment.complaint.format(name="$name", line="$line", refusal=REFUSAL)
        for name in equipment.programs:
            real = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
            assert real, f"{name} is not installed"
            script = directory / name
            script.write_text(_SCRIPT.format(real=real, complaint=complaint, asks=equipment.asks))
            script.chmod(0o755)

    def equip(self, node: Node) -> Node:
        return node.with_environment(PATH=f"{self._directory}:{os.environ['PATH']}")

    @contextmanager
    def refusing(self, *texts: str) -> Iterator[None]:
        """For a while, fail when the input holds one of these texts, and none else."""
        refused = self._directory / "refused"
        before = refused.read_text() if refused.exists() else ""
        refused.write_text("".join(f"{text}\n" for text in texts))
        try:
            yield
        finally:
            refused.write_text(before)

    @contextmanager
    def being(self, fault: Literal["broken", "hanging", "slow"]) -> Iterator[None]:
        """For a while, fail always; or never end; or take a second."""
        mark = self._directory / fault
        mark.touch()
        try:
            yield
        finally:
            mark.unlink()

    def calls(self) -> list[float]:
        path = self._directory / "calls"
        return [float(line) for line in path.read_text().split()] if path.exists() else []


def resident(daemon: Daemon) -> int:
    """The daemon's own resident memory in KiB; parts of files in memory come and go as others need room."""
    return next(int(line.split()[1]) for line in daemon.memory() if line.startswith("RssAnon"))


GONE = (OSError, http.client.HTTPException, ValueError)
"""What asking a daemon raises that has ended."""


def cold_rules(equipment: Equipment, declarations: Mapping[str, str], added: str) -> Rules:
    """The rules that vipd gives these files and this store in a namespace that knew nothing before."""
    with tempfile.TemporaryDirectory(prefix="vipd-cold-") as text, Namespace() as namespace:
        directory = Path(text)
        for part in ("services.d", "state"):
            (directory / part).mkdir()
        for file, declaration in declarations.items():
            (directory / "services.d" / file).write_text(declaration)
        (directory / "state" / "services.yaml").write_text(added)  # it is taken over
        config = directory / "vipd.yaml"
        places = {"services_dir": "services.d", "state_dir": "state", "socket": "vipd.sock"}
        settings = {key: str(directory / place) for key, place in places.items()}
        config.write_text(yaml.safe_dump({**settings, **equipment.settings}))
        node = Node(namespace.name, "cold", "", "")
        node.run(sys.executable, "-m", "vipd", "--config", str(config), "--once")
        return equipment.rules_of(node)


def as_from_a_cold_start(equipment: Equipment, daemon: Daemon) -> None:
    """The rules are those of a cold start from what this daemon has now on disk, in a moment at the latest:
    what nothing leads to any more is cleared away after a change. Raises AssertionError."""
    files = {path.name: path.read_text() for path in daemon.services_dir.glob("*.yaml")}
    wanted = cold_rules(equipment, files, stored(daemon.state_dir))
    daemon.wait_until(lambda: difference(equipment.rules_of(daemon.host), wanted), [], SWEPT_SECONDS)


def difference(found: Rules, wanted: Rules) -> list[str]:
    """The chains that are not the same, to be shown; empty when all are."""
    return [
        f"{chain}: {found.get(chain)} instead of {wanted.get(chain)}"
        for chain in sorted(found.keys() | wanted.keys())
        if found.get(chain) != wanted.get(chain)
    ]
