"""Services' requirements on this host besides rules, updated as forwardings change. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family


class HostRequirements:
    """All forwardings as this host has to be fit for them."""

    def __init__(self, forwardings: Iterable[Forwarding] = ()) -> None:
        self._families: Counter[Family] = Counter()
        self._vip_backends: dict[str, dict[ForwardingKey, str]] = {}
        """For each VIP the forwardings that it belongs to, each with the address of one of its backends."""
        self._known: dict[ForwardingKey, Forwarding] = {}
        self._pinned: dict[ForwardingKey, Forwarding] = {}
        self._health_ports: set[ForwardingKey] = set()
        self.vips: dict[str, str] = {}
        """Every VIP with the address of a backend that it leads to, empty when there is none. The mapping
        follows later updates."""
        self.announced: dict[str, set[ForwardingKey]] = {}
        """Each VIP that is announced beyond this host, with the forwardings that ask for it."""
        self.update({forwarding.key: forwarding for forwarding in forwardings})

    def update(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> set[str]:
        """Add new forwardings, and remove those that are None; returns the VIPs that are new, gone, lead to
        another backend, or are announced or not unlike before."""
        touched, asked = dict[str, str | None](), dict[str, bool]()
        for key, forwarding in changes.items():
            if (before := self._known.pop(key, None)) is not None:
                self._remove(before, touched)
                if before.announcement:
                    self._ask(before, asked, asks=False)
            if forwarding is not None:
                self._add(forwarding, touched)
                if forwarding.announcement:
                    self._ask(forwarding, asked, asks=True)
        moved = {vip for vip, backend in touched.items() if self._update_vip(vip) != backend}
        return moved | {vip for vip, was in asked.items() if (vip in self.announced) is not was}

    @property
    def families(self) -> Collection[Family]:
        """Those that any service has."""
        return self._families.keys()

    def announcing(self) -> dict[ForwardingKey, Forwarding]:
        """The forwardings that ask for an announcement."""
        return {key: self._known[key] for keys in self.announced.values() for key in keys}

    @property
    def with_affinity(self) -> Collection[Forwarding]:
        """Those with affinity."""
        return self._pinned.values()

    @property
    def health_ports(self) -> bool:
        """Whether any service has a health port."""
        return bool(self._health_ports)

    def _add(self, forwarding: Forwarding, touched: dict[str, str | None]) -> None:
        key = forwarding.key
        self._known[key] = forwarding
        self._families[key.family] += 1
        if forwarding.affinity_timeout is not None:
            self._pinned[key] = forwarding
        if forwarding.health_port:
            self._health_ports.add(key)
        backends = forwarding.endpoints or forwarding.local_endpoints
        for vip in _vips(forwarding):
            touched.setdefault(vip, self.vips.get(vip))
            self._vip_backends.setdefault(vip, {})[key] = backends[0].address if backends else ""

    def _remove(self, forwarding: Forwarding, touched: dict[str, str | None]) -> None:
        key = forwarding.key
        self._families[key.family] -= 1
        if not self._families[key.family]:
            del self._families[key.family]
        self._pinned.pop(key, None)
        self._health_ports.discard(key)
        for vip in _vips(forwarding):
            touched.setdefault(vip, self.vips.get(vip))
            self._vip_backends[vip].pop(key, None)

    def _ask(self, forwarding: Forwarding, asked: dict[str, bool], *, asks: bool) -> None:
        """A forwarding asks to announce its VIPs, or does no longer. `asked`: whether any did before."""
        for vip in forwarding.announced_addresses():
            asked.setdefault(vip, vip in self.announced)
            asking = self.announced.setdefault(vip, set())
            if asks:
                asking.add(forwarding.key)
            else:
                asking.discard(forwarding.key)
            if not asking:
                del self.announced[vip]

    def _update_vip(self, vip: str) -> str | None:
        """The backend that a VIP now leads to; None: it is gone."""
        leading = self._vip_backends[vip]
        if not leading:
            del self._vip_backends[vip]
            self.vips.pop(vip, None)
            return None
        # In an order independent of the sequence of changes.
        self.vips[vip] = next((leading[key] for key in sorted(leading) if leading[key]), "")
        return self.vips[vip]


def _vips(forwarding: Forwarding) -> Iterable[str]:
    return (*forwarding.addresses, *(each.address for each in forwarding.external_addresses))
