"""Where the documentation's commands are run: a client, the host, two backends, and the real vipd.

The host has directories of its own in place of /etc, /run, /var/lib and /home, so that the paths of the pages
are the paths used; everything else of the machine's files is read-only. `vipd` runs as after an installation
by package: started, the group vipd there, the user alice in no group.
"""

from __future__ import annotations

import json
import os
import shlex
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from types import TracebackType

from tests.docs.markdown import ROOT, blocks
from tests.docs.script import File
from tests.docs.transcript import HOST, Step
from tests.lab.daemon import UnixConnection
from tests.lab.flow import read_line
from tests.lab.node import Node
from tests.lab.topology import Lab, Wiring
from tests.lab.waiting import wait_until

HERE = Path(__file__).parent
GUIDE = ROOT / "docs/guide.md"
REFUSED = (
    *("apt", "apt-get", "dpkg", "pip", "reboot", "shutdown", "poweroff", "modprobe", "rmmod"),
    *("docker", "firewall-cmd", "ufw", "kubectl", "loginctl", "hostnamectl"),
)
"""What may not be run from a page that forgot to say so."""
STEP_SECONDS = 150.0
NOTICE_SECONDS = 30.0
"""vipd sees a changed file at once, in odd cases after two seconds; many labs share the machine."""
DECLARATIONS, CACHE = Path("/etc/vipd/services.d"), Path("/var/lib/vipd/cache.db")

ALICE = 4711

PREPARE = f"""
set -e
mount --bind /tmp /tmp
mount -t tmpfs tmpfs "$LAB/ram"
cp -a /etc "$LAB/ram/etc"
rm -rf "$LAB/ram/etc/vipd"
mkdir -p "$LAB"/ram/{{run,lib,root,alice}} "$LAB"/ram/etc/vipd/services.d
echo 'alice:x:{ALICE}:{ALICE}::/tmp:/bin/bash' >>"$LAB/ram/etc/passwd"
printf '%s\\n' 'alice:x:{ALICE}:' 'vipd:x:4712:' 'vipd-admin:x:4713:' >>"$LAB/ram/etc/group"
chown alice "$LAB/ram/alice" 2>/dev/null || chown {ALICE} "$LAB/ram/alice"
mount --bind "$LAB/ram/etc" /etc
mount --bind "$LAB/ram/run" /run
mount --bind "$LAB/ram/lib" /var/lib
mount -o remount,bind,ro /
echo READY
exec cat
"""


def _last_good(cache: Path) -> dict[str, str]:
    """The last good versions of files that a vipd keeps."""
    with closing(sqlite3.connect(":memory:")) as database:
        try:
            database.deserialize(cache.read_bytes())  # SQLite would look for its path in this namespace
            rows = database.execute("select key, value from entry where bucket = 'accepted' and key != x''")
            return {bytes(key).decode(): bytes(text).decode() for key, text in rows}
        except (FileNotFoundError, sqlite3.DatabaseError):  # or just being written
            return {}


class PageLab:
    """Made on entry, gone on exit; one page's commands are run in it."""

    def __init__(self) -> None:
        self._lab = Lab(Wiring(backends=3))
        self._directory = tempfile.TemporaryDirectory(prefix="vipd-docs-")
        self.directory = Path(self._directory.name)
        self._holder = 0

    def __enter__(self) -> PageLab:
        self._lab.__enter__()
        try:
            self._prepare()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lab.delete()
        self._directory.cleanup()

    def run(self, step: Step) -> tuple[int, str]:
        """Exit code of a step, and what it printed, as a terminal shows it."""
        # Who types sudo stands in the project's directory.
        command, sudo = step.command.removeprefix("sudo "), step.command.startswith("sudo ")
        home = ROOT if sudo else self.directory / "ram" / ("root" if step.root else "alice")
        with tempfile.TemporaryFile("w+") as printed:
            # A file and not a pipe: what a step leaves behind in the background holds it open.
            done = subprocess.run(
                self.inside(step.machine, step.root or sudo, f"cd {home} && {command}"),
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                timeout=STEP_SECONDS,
                check=False,
            )
            printed.seek(0)
            text = printed.read()
        if DECLARATIONS.name in step.command:
            self._wait_for_notice()
        return done.returncode, text

    def write(self, file: File) -> None:
        """Put a file there as an editor does; returns once vipd has read it, if it is one of its own."""
        place = self._place(file.path)
        place.parent.mkdir(exist_ok=True)
        new = place.with_name(f".{place.name}.new")
        new.write_text(file.text)
        new.rename(place)
        self._wait_for_notice()

    def inside(self, machine: str, root: bool, command: str) -> list[str]:
        """The command line that runs a shell's command on a machine, by root or by alice."""
        namespace = {node.name: node.namespace for node in self._lab.nodes}[machine]
        path = f"{self.directory}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
        # The project may lie in a directory that is root's alone; reading it is all that alice may do there.
        capability = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
        become = ("setpriv", "--reuid=alice", "--regid=alice", "--init-groups", *capability)
        return [
            *("nsenter", f"--mount=/proc/{self._holder}/ns/mnt", f"--net=/run/netns/{namespace}"),
            *(() if root else become),
            *("env", f"PATH={path}", f"LAB={self.directory}", "LC_ALL=C.UTF-8", "PYTHONDONTWRITEBYTECODE=1"),
            *("bash", "-c", command),
        ]

    def _prepare(self) -> None:
        (self.directory / "ram").mkdir()
        (self.directory / "bin").mkdir()
        self.directory.chmod(0o755)
        for program in (HERE / "bin").iterdir():
            (self.directory / "bin" / program.name).symlink_to(program)
        for name in REFUSED:
            (self.directory / "bin" / name).symlink_to(HERE / "bin" / "refused")
        for number, backend in enumerate(self._lab.backends, 11):
            self._serve(backend, f"192.0.2.{number}")
        argv = ("env", f"LAB={self.directory}", "unshare", "--mount", "--propagation", "private")
        holder = self._lab.host.start(*argv, "bash", "-c", PREPARE)
        assert read_line(holder) == "READY", "the host's directories could not be made"
        self._holder = holder.pid
        code, said = self.run(Step("lab", HOST, True, "systemctl start vipd", ()))
        assert code == 0, said

    def _serve(self, backend: Node, address: str) -> None:
        """The program that the guide has its readers paste. It ends with whoever started it."""
        (program,) = blocks(GUIDE, "python")
        file = self.directory / "backend.py"
        file.write_text(program.text)
        words = shlex.join([sys.executable, "-I", str(file), backend.name, address])
        server = backend.start("bash", "-c", f"{words} 2>/dev/null & echo $!; read -r; kill $!")
        (self.directory / f"{backend.name}.pid").write_text(read_line(server))
        listening = ("ss", "-Hltn", "sport = :8080")
        wait_until(lambda: backend.run(*listening).stdout, lambda: f"the server in {backend.namespace}")

    def _place(self, path: Path) -> Path:
        """Where a path of the host is."""
        return Path(f"/proc/{self._holder}/root{path}")

    def _status(self) -> str:
        """What vipd says of itself; nothing while it does not run."""
        connection = UnixConnection(self._place(Path("/run/vipd/vipd.sock")))
        try:
            connection.request("GET", "/v1/status")
            return connection.getresponse().read().decode()
        except OSError:
            return ""
        finally:
            connection.close()

    def _wait_for_notice(self) -> None:
        """Return once vipd has done what its files say, or has had its time to. Not while it does not run."""
        end = time.monotonic() + NOTICE_SECONDS
        while time.monotonic() < end and (said := self._status()):
            files = {
                str(DECLARATIONS / path.name): path.read_text()
                for path in self._place(DECLARATIONS).glob("[!.]*")
                if path.suffix in (".yaml", ".yml", ".json")
            }
            kept = _last_good(self._place(CACHE))
            # What serves is kept; of what is wrong the status tells.
            noticed = kept.keys() <= files.keys() and all(
                kept.get(path) == text or f"{path}:" in said for path, text in files.items()
            )
            if noticed and json.loads(said)["state"] not in ("pending", "starting"):
                return
            time.sleep(0.05)
