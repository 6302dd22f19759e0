"""A Debian machine with a real systemd, between the client and the backends of a lab."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.lab.topology import Lab
from tests.lab.waiting import wait_until

SCRIPT = Path(__file__).parent / "machine.sh"
PACKAGES = "/srv/packages"
"""Where the machine's apt finds packages; there is no network to find them in."""
COMMAND_SECONDS = 240.0


class Machine:
    """A machine in a lab's host namespace. `start` it first; `delete` it in any case."""

    def __init__(self, release: str, root: Path, lab: Lab) -> None:
        self.release, self.lab = release, lab
        self._root, self._name = root, f"{lab.host.namespace}-{release}"

    def leader(self) -> int:
        return int(self._script("leader").stdout)

    @property
    def disk(self) -> Path:
        return Path("/run/vipd-machines") / self._name / "disk"

    def start(self) -> None:
        """Boot; the second time from the disk as it was left."""
        again = self.disk.exists()
        self._script("start", *(() if again else (str(self._root), self.lab.host.namespace)))

    def stop(self) -> None:
        """Power off in order. The lab's namespace keeps what a machine would lose: see `forget_network`."""
        self._script("stop")

    def delete(self) -> None:
        self._script("delete")

    def run(
        self, *argv: str, check: bool = True, timeout: float = COMMAND_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        return self._script("run", *argv, check=check, timeout=timeout)

    def said(self, *argv: str) -> str:
        return self.run(*argv).stdout.strip()

    def write(self, path: str, text: str) -> None:
        (self.disk / path.lstrip("/")).write_text(text)

    def property(self, name: str, unit: str = "vipd") -> str:
        return self.said("systemctl", "show", "--value", "--property", name, unit)

    def main_pid(self) -> int:
        pid = int(self.property("MainPID"))
        assert pid > 1, "the service has no process"
        return pid

    def journal(self, *options: str) -> str:
        """The service's messages, all that were sent before."""
        self.run("journalctl", "--sync", check=False)
        return self.said("journalctl", "--unit", "vipd", "--no-pager", "--output", "cat", *options)

    def wait_until(self, condition: Callable[[], object], what: str, timeout: float = 90.0) -> None:
        """Return once `condition()` is true; raises AssertionError with the journal's end after `timeout`
        seconds."""
        wait_until(condition, lambda: f"{what}\n{self.journal('-n', '20')}", timeout)

    def apt(self, *arguments: str) -> str:
        done = self.run("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y", *arguments)
        return done.stdout + done.stderr

    def offer(self, *packages: Path) -> None:
        """Give the machine's apt these packages, besides those that came with the root."""
        directory = self.disk / PACKAGES.lstrip("/")
        added = Path(tempfile.mkdtemp(dir=directory))
        for package in packages:
            (added / package.name).write_bytes(package.read_bytes())
        added.chmod(0o755)
        scan = ["dpkg-scanpackages", "--multiversion", added.name]
        index = subprocess.run(
            scan, cwd=directory, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True
        )
        with (directory / "Packages").open("a") as known:  # what came with the root is in it
            known.write(f"\n{index.stdout}")
        for old in (self.disk / "etc/apt/sources.list.d").iterdir():
            old.unlink()
        self.write("/etc/apt/sources.list", f"deb [trusted=yes] file:{PACKAGES} ./\n")
        self.apt("update")

    def rules(self) -> str:
        nft = self.lab.host.run("nft", "list", "ruleset").stdout
        legacy = [self.lab.host.run(f"{stem}-legacy-save").stdout for stem in ("iptables", "ip6tables")]
        lines = [line for text in legacy for line in text.splitlines() if line.startswith(("-A", ":"))]
        builtin = [line for line in lines if line.startswith(":") and line.split()[1] != "-"]
        return nft + "\n".join(line for line in lines if line not in builtin)

    def forget_network(self) -> None:
        """What a real machine's network loses when it is switched off: rules, flows, settings, devices."""
        for argv in (
            ("nft", "flush", "ruleset"),
            ("conntrack", "-F"),
            ("sysctl", "-qw", "net.ipv4.ip_forward=0", "net.ipv6.conf.all.forwarding=0"),
            ("sysctl", "-qw", "net.netfilter.nf_conntrack_tcp_be_liberal=0"),
            ("ip", "link", "delete", "vipd0"),
        ):
            self.lab.host.run(*argv, check=False)

    def _script(
        self, action: str, *argv: str, check: bool = True, timeout: float = COMMAND_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(SCRIPT), action, self._name, *argv]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
        )
        said = f"{done.stdout}\n{done.stderr}".strip()
        assert not check or done.returncode == 0, f"{' '.join(command[2:])}: exit {done.returncode}: {said}"
        return done
