"""A dataplane over the real kernel, in a namespace of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.dataplane.namespace import Namespace
from tests.dataplane.watched_programs import WatchedPrograms
from tests.faults.dataplanes import IPTABLES, NFTABLES
from tests.lab.inside import synced
from tests.lab.node import Node
from vipd.model.service import Service

Held = Mapping[str, Sequence[str]]
"""What a kernel holds, by chain, map or set; empty ones are left out."""

EQUIPMENTS = {"iptables": IPTABLES, "nftables": NFTABLES}


class Host:
    """A host of one dataplane. Not before `entered`."""

    def __init__(self, dataplane: str, namespace: Namespace, directory: Path, netlink: bool) -> None:
        self.dataplane, self.namespace, self._directory = dataplane, namespace, directory
        self.node = Node(namespace.name, "kernel", "", "")
        self.equipment = EQUIPMENTS[dataplane]
        self.programs = WatchedPrograms()
        self.vipd = synced(dataplane, namespace.name, directory, through=self.programs, netlink=netlink)

    def held(self) -> Held:
        """What the kernel holds."""
        return {name: rules for name, rules in self.equipment.rules_of(self.node).items() if rules}

    def do(self, command: str) -> None:
        """Somebody else runs this in a shell."""
        self.node.run("bash", "-c", command)

    def cold(self, *services: Service) -> Held:
        """What a first vipd with these services writes on a fresh host."""
        if (self.dataplane, services) not in _COLD:
            with entered(self.dataplane, self._directory / "cold") as fresh:
                fresh.vipd.become(*services)
                _COLD[self.dataplane, services] = fresh.held()
        return _COLD[self.dataplane, services]


_COLD: dict[tuple[str, tuple[Service, ...]], Held] = {}


@contextmanager
def entered(dataplane: str, directory: Path, *, netlink: bool = True) -> Iterator[Host]:
    """A host, as long as it is entered. Without `netlink` programs write everything."""
    with Namespace() as namespace:
        yield Host(dataplane, namespace, directory, netlink)
