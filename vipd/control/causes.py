"""Who asked for changes of services that the reconciler has not taken up yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MOST_NAMED = 3
"""More who changed the same service between two steps are not named."""


class Causes:
    """Notes made where a change comes in, for the line that is written when it takes effect."""

    def __init__(self) -> None:
        self._noted: dict[str, tuple[str, ...]] = {}

    def note(self, services: Iterable[str], cause: str) -> None:
        """These services are about to change because of this: `user root (pid 812)`, `etcd revision 17`."""
        for name in services:
            known = self._noted.get(name, ())
            if cause not in known and len(known) < MOST_NAMED:
                self._noted[name] = (*known, cause)

    def take(self) -> Mapping[str, str]:
        """The cause of each change noted since the last time, by service."""
        noted, self._noted = self._noted, {}
        return {name: ", ".join(causes) for name, causes in noted.items()}
