"""How many backends take new flows, kept up as services change. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from vipd.model.forwarding import Forwarding
from vipd.model.service import Service


def ready_backends(service: Service, forwardings: Sequence[Forwarding]) -> int:
    """How many of a service's own backends take new flows."""
    serving = {e.address for f in forwardings for e in f.reachable()}
    return sum(b.weight > 0 and b.address in serving for b in service.backends)


class Readiness:
    """The numbers of all services together."""

    def __init__(self) -> None:
        self.ready = 0
        """Backends that take new flows."""
        self.declared = 0
        """All backends."""
        self._known: dict[str, tuple[int, int]] = {}

    def update(self, name: str, service: Service | None, forwardings: Sequence[Forwarding] = ()) -> None:
        """A service as it is served from now on; None: it is gone."""
        ready, declared = self._known.pop(name, (0, 0))
        self.ready -= ready
        self.declared -= declared
        if service is not None:
            ready, declared = ready_backends(service, forwardings), len(service.backends)
            self._known[name] = (ready, declared)
            self.ready += ready
            self.declared += declared
