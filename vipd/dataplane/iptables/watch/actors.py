"""Finds the author of a rule change: the process that the kernel names, and the program behind it.

The kernel reports the iptables or nft program that wrote. It may have ended before vipd reads its parent:
so vipd remembers the last parent of such a program, and looks for services that are
known to run it. Both are guesses, and are marked as such."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from vipd.dataplane.iptables.watch.external_change import Actor, is_tool
from vipd.dataplane.iptables.watch.messages import Generation

_MOST_ANCESTORS = 8
_MOST_SEEN = 100
_MAX_COMM_LENGTH = 15
_INIT = 1
_WRAPPERS = frozenset(
    {"sudo", "env", "timeout", "nice", "ionice", "setsid", "xargs", "flock", "nsenter", "ip"}
)
_SHELLS = frozenset({"sh", "dash"})
"""With -c: system(3) of a program. `bash -c` is more often an independent script."""
_RUNS = {
    "firewalld": ("iptables", "ip6tables", "ebtables"),
    "docker": ("iptables", "ip6tables"),
    "fail2ban": ("iptables", "ip6tables", "nft"),
    "libvirtd": ("iptables", "ip6tables"),
    "kubelet": ("iptables", "ip6tables"),
}
"""Services that change rules by programs, and the prefixes of their names."""
_ONLY_SINGLY = frozenset({"docker", "fail2ban", "libvirtd"})
"""Those that use no iptables-restore."""
_GROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/systemd"))
"""Directories in which systemd keeps one for each service, in the unified and in the old hierarchy."""


class _Process(NamedTuple):
    pid: int
    name: str
    words: tuple[str, ...]
    parent: int


class Actors:
    """Identifies processes while they exist, or from earlier observations."""

    def __init__(self, processes: Path = Path("/proc"), groups: tuple[Path, ...] = _GROUPS) -> None:
        self._proc, self._groups = processes, groups
        self._seen: dict[str, tuple[int, str]] = {}
        """By the tool's name: the last program that ran it."""

    def of(self, generation: Generation) -> Actor:
        """The author of a transaction, as far as it can be observed or guessed."""
        process = self._read(generation.pid)
        if process is None or process.name[:_MAX_COMM_LENGTH] != generation.name:
            # A pid of another pid namespace, or already reused, or gone.
            return self._guessed(Actor(_whole(generation.name), generation.pid))
        behind = self._behind(process)
        actor = Actor(process.name, process.pid)
        if behind is None:
            return actor
        if is_tool(process.name) and (process.name in self._seen or len(self._seen) < _MOST_SEEN):
            self._seen[process.name] = (behind.pid, behind.name)
        return replace(actor, parent=behind.name, parent_pid=behind.pid)

    def _behind(self, process: _Process) -> _Process | None:
        """The nearest ancestor that is more than a wrapper; else the farthest known one."""
        found, parent = None, process.parent
        for _ in range(_MOST_ANCESTORS):
            ancestor = self._read(parent) if parent > _INIT or found is None else None
            if ancestor is None:
                return found
            found, parent = ancestor, ancestor.parent
            if not _passes_on(ancestor):
                return found
        return found

    def _guessed(self, actor: Actor) -> Actor:
        """The actor with the program that probably runs it, if there is exactly one."""
        if not is_tool(actor.name):
            return actor
        pid, name = self._seen.get(actor.name, (0, ""))
        process = self._read(pid) if pid else None
        if process is not None and process.name == name:
            return replace(actor, parent=name, parent_pid=pid, guessed=True)
        running = [
            found for service in _RUNS if _may_run(service, actor.name) and (found := self._service(service))
        ]
        if len(running) != 1:
            return actor
        return replace(actor, parent=running[0].name, parent_pid=running[0].pid, guessed=True)

    def _service(self, name: str) -> _Process | None:
        """The first process of a service of systemd."""
        for groups in self._groups:
            try:
                pids = (groups / f"system.slice/{name}.service/cgroup.procs").read_text().split()
            except OSError:
                continue
            if pids:
                return self._read(int(pids[0]))
        return None

    def _read(self, pid: int) -> _Process | None:
        directory = self._proc / str(pid)
        try:
            name = (directory / "comm").read_text(errors="replace").rstrip("\n")
            status = (directory / "status").read_text(errors="replace")
            parent = int(status.partition("\nPPid:")[2].split(None, 1)[0])
            line = (directory / "cmdline").read_text(errors="replace")
        except (OSError, ValueError, IndexError):
            return None
        words = tuple(line.split("\0"))
        base = words[0].rpartition("/")[2]
        whole = base if len(name) == _MAX_COMM_LENGTH and base.startswith(name) else name
        return _Process(pid, whole, words, parent)


def _passes_on(process: _Process) -> bool:
    """Whether it only runs commands of another program: `sudo`, `sh -c`."""
    return (
        is_tool(process.name)
        or process.name in _WRAPPERS
        or (process.name in _SHELLS and "-c" in process.words[1:3])
    )


def _may_run(service: str, tool: str) -> bool:
    return tool.startswith(_RUNS[service]) and not (service in _ONLY_SINGLY and "restore" in tool)


def _whole(name: str) -> str:
    """Restores the one important name that the kernel truncates to 15 characters."""
    return {"iptables-restor": "iptables-restore", "ip6tables-resto": "ip6tables-restore"}.get(name, name)
