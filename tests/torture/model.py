"""A model of declarations, files and overrides that shares no code with vipd. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

SERVED_PORT = 8080
BACKENDS = {
    4: {f"10.244.0.{10 + n}": f"b{n}" for n in (1, 2, 3)},
    6: {f"fd00:244::{10 + n}": f"b{n}" for n in (1, 2, 3)},
}
"""The lab's backends by address, and by what name each answers."""


def place(address: str) -> str:
    """A backend as a declaration has it."""
    return f"[{address}]:{SERVED_PORT}" if ":" in address else f"{address}:{SERVED_PORT}"


@dataclass(frozen=True)
class DeclaredService:
    """A service as it is declared."""

    name: str
    address: str
    weights: tuple[tuple[str, int], ...] = ()
    """By a backend's address."""
    resets: bool = False
    affinity: bool = False
    round_robin: bool = False
    drops: bool = False
    """New flows are dropped while no backend serves."""

    @property
    def family(self) -> int:
        """4 or 6."""
        return 6 if ":" in self.address else 4

    def spec(self) -> dict[str, Any]:
        """The declaration."""
        return {
            "name": self.name,
            "address": self.address,
            "ports": ["80/tcp", "80/udp"],
            "backends": [{"address": a, "port": SERVED_PORT, "weight": w} for a, w in self.weights],
            "affinity": {"by": "client-ip", "timeout": "1m"} if self.affinity else "none",
            "on_remove": "reset" if self.resets else "keep",
            "balance": "round-robin" if self.round_robin else "random",
            "fallback": "drop" if self.drops else "reject",
        }

    def with_weight(self, address: str, weight: int | None) -> DeclaredService:
        """With a backend of this weight; None: without it."""
        left = [(a, w) for a, w in self.weights if a != address]
        return replace(self, weights=(*left, *([] if weight is None else [(address, weight)])))


@dataclass
class File:
    """A file of `services_dir`."""

    on_disk: tuple[DeclaredService, ...] | None = None
    """None: there is none."""
    broken: bool = False
    """What is on disk is no declaration."""
    accepted: tuple[DeclaredService, ...] = ()

    def read(self) -> None:
        """vipd has read the file; a broken one keeps its last accepted services."""
        if not self.broken:
            self.accepted = self.on_disk or ()


@dataclass
class Model:
    """The declared services and the overrides in force."""

    store: dict[str, DeclaredService] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)
    out_of_rotation: set[tuple[str, str]] = field(default_factory=set)
    """Backends that an override keeps from new flows, by service and address."""
    reset_frontends: set[str] = field(default_factory=set)
    """Addresses of removed services whose clients get a reset: rules may name these for ten minutes."""

    def services(self) -> dict[str, DeclaredService]:
        """All services in force, by name."""
        found = dict(self.store)
        for file in self.files.values():
            found.update({service.name: service for service in file.accepted})
        return found

    def read_files(self) -> None:
        """vipd has read all files."""
        for file in self.files.values():
            file.read()

    def serving(self, service: DeclaredService) -> set[str]:
        """The names of the backends that new flows to a service may reach."""
        return {
            BACKENDS[service.family][address]
            for address, weight in service.weights
            if weight and (service.name, address) not in self.out_of_rotation
        }
