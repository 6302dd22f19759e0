"""Rules that answer clients of removed frontends with a reset, as forwardings. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from vipd.dataplane.conntrack.stale import Destination
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Frontend, Masquerade


class FlowResets:
    """What the dataplane has been given of them.

    `ended` returns the TCP frontends that are gone and whose clients get a reset now. The dataplane takes
    each as a forwarding of its own, so that it is written, repaired, compared and cleaned up as all others.
    """

    def __init__(self) -> None:
        self.ended: Callable[[], Collection[Destination]] = tuple
        self._given: dict[ForwardingKey, Forwarding] = {}

    def changes(self) -> Mapping[ForwardingKey, Forwarding | None]:
        """What the dataplane is to be given now; it counts as given."""
        wanted = {key_of(place): place for place in self.ended()}
        changes: dict[ForwardingKey, Forwarding | None] = {
            key: reset_forwarding(place) for key, place in wanted.items() if key not in self._given
        }
        changes.update(dict.fromkeys(self._given.keys() - wanted.keys()))
        self._given = {key: self._given.get(key) or reset_forwarding(place) for key, place in wanted.items()}
        return changes


def key_of(place: Destination) -> ForwardingKey:
    """The key of a removed frontend. No service can have it: a name has no blank."""
    frontend = Frontend(place.address, place.port, place.protocol)
    return ForwardingKey(f"removed {frontend}", "", place.protocol, place.family)


def reset_forwarding(place: Destination) -> Forwarding:
    """What gives the clients of a removed frontend a reset."""
    return Forwarding(
        key_of(place),
        addresses=(place.address,) if place.address else (),
        port=place.port,
        endpoints=(),
        masquerade=Masquerade.HAIRPIN,
        answers_ping=False,
        served=False,
        node_port=None if place.address else place.port,
        ended=True,
    )
