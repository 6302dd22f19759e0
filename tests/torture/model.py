"""What declarations, files and orders mean, in a few lines that share nothing with vipd. Pure."""

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
class Meant:
    """A service as it is declared."""

    name: str
    address: str
    weights: tuple[tuple[str, int], ...] = ()
    """By a backend's address."""
    resets: bool = False
    affinity: bool = False
    round_robin: bool = False
    drops: bool = False
    """New flows meet silence while nobody serves."""

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

    def with_weight(self, address: str, weight: int | None) -> Meant:
        """With a backend of this weight; None: without it."""
        left = [(a, w) for a, w in self.weights if a != address]
        return replace(self, weights=(*left, *([] if weight is None else [(address, weight)])))


@dataclass
class File:
    """A file of `services_dir`."""

    on_disk: tuple[Meant, ...] | None = None
    """None: there is none."""
    broken: bool = False
    """What is on disk is no declaration."""
    accepted: tuple[Meant, ...] = ()

    def read(self) -> None:
        """vipd has read it: one that is broken counts as it was."""
        if not self.broken:
            self.accepted = self.on_disk or ()


@dataclass
class Model:
    """All that was declared and ordered."""

    store: dict[str, Meant] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)
    resting: set[tuple[str, str]] = field(default_factory=set)
    """Backends that an order keeps from new flows, by service and address."""
    reset_frontends: set[str] = field(default_factory=set)
    """Addresses of removed services whose clients get a reset: rules may name these for ten minutes."""

    def services(self) -> dict[str, Meant]:
        """All that count, by name."""
        found = dict(self.store)
        for file in self.files.values():
            found.update({meant.name: meant for meant in file.accepted})
        return found

    def read_files(self) -> None:
        """vipd has read all files."""
        for file in self.files.values():
            file.read()

    def serving(self, meant: Meant) -> set[str]:
        """The names of the backends that new flows to a service may reach."""
        return {
            BACKENDS[meant.family][address]
            for address, weight in meant.weights
            if weight and (meant.name, address) not in self.resting
        }
