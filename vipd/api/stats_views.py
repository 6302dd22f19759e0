"""Numbers and tracked flows as JSON values. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

from vipd.api.messages import Json
from vipd.dataplane.conntrack.entries import Entry
from vipd.dataplane.counting import Place
from vipd.model import Forwarding, Frontend, Protocol, socket_text
from vipd.observe.counters.ledger import Ledger
from vipd.observe.counters.traffic import Flow, Sum, Sums

TRAFFIC = ("packets_in", "bytes_in", "packets_out", "bytes_out")

TCP_STATES = (
    "NONE",
    "SYN_SENT",
    "SYN_RECV",
    "ESTABLISHED",
    "FIN_WAIT",
    "CLOSE_WAIT",
    "LAST_ACK",
    "TIME_WAIT",
    "CLOSE",
    "SYN_SENT2",
)
"""By the kernel's number, in the kernel's words (enum tcp_conntrack)."""


class Totals:
    """What connection tracking says of each service. Unknown numbers are None."""

    def __init__(self, backends: Mapping[Place, Sum] | None, accounting: bool) -> None:
        self._backends, self._accounting = backends, accounting
        self._places: dict[str, list[Place]] = {}
        for place in backends or ():
            self._places.setdefault(place.key.service, []).append(place)

    def places_of(self, service: str) -> list[Place]:
        """The backends that have flows of a service."""
        return self._places.get(service, [])

    def of_backend(self, place: Place) -> Json:
        """One backend's flows and traffic."""
        return self._told([place])

    def of_service(self, service: str) -> Json:
        """A service's flows and traffic."""
        return self._told(self.places_of(service))

    def _told(self, places: Sequence[Place]) -> Json:
        if self._backends is None:
            return dict.fromkeys(("flows", *TRAFFIC))
        sums = [self._backends[place] for place in places if place in self._backends]
        traffic: Json = dict.fromkeys(TRAFFIC)
        if self._accounting:
            traffic = {name: sum(getattr(each, name) for each in sums) for name in TRAFFIC}
        return {"flows": sum(each.flows for each in sums), **traffic}


def totals(sums: Sums | None, accounting: bool) -> Totals:
    """From one reading; None: there is none."""
    return Totals(sums.backends if sums else None, accounting)


def service_numbers(
    name: str, forwardings: Sequence[Forwarding], ledger: Ledger, flows: Totals, *, backends: bool
) -> Json:
    """One item of `services` in the answer to `/v1/stats`."""
    told: Json = {"name": name, "new_flows": ledger.of_service(name), **flows.of_service(name)}
    if not backends:
        return told
    known = [
        Place(f.key, endpoint.address, endpoint.port)
        for f in forwardings
        for endpoint in (*f.reachable(), *f.resting, *f.down)
    ]
    gone = {*ledger.backends_of(name), *flows.places_of(name)}.difference(known)
    places = [*((place, False) for place in known), *((place, True) for place in sorted(gone))]
    told["backends"] = [
        {
            "endpoint": socket_text(place.address, place.port),
            "port_name": place.key.port_name,
            "protocol": place.key.protocol,
            "family": str(place.key.family),
            "gone": is_gone,
            "new_flows": ledger.of_backend(place),
            **flows.of_backend(place),
        }
        for place, is_gone in places
    ]
    return told


def flow_view(flow: Flow, now: float) -> Json:
    """One item of `flows` in the answer to `/v1/conntrack`; `now` in seconds since 1970."""
    entry = flow.entry
    traffic = entry.traffic
    return {
        "client": socket_text(*entry.source),
        "frontend": str(Frontend(*entry.destination, entry.protocol)),
        "backend": socket_text(*entry.reply_source),
        "protocol": entry.protocol,
        "family": str(entry.family),
        "state": state_of(entry),
        "masqueraded": entry.reply_destination[0] != entry.source[0],
        "timeout": entry.timeout,
        "age": None if entry.began is None else round(max(now - entry.began / 1e9, 0.0), 3),
        **{name: getattr(traffic, name) if traffic else None for name in TRAFFIC},
    }


def state_of(entry: Entry) -> str:
    """TCP's state; of other flows whether they were answered."""
    if entry.protocol is Protocol.TCP and entry.tcp_state < len(TCP_STATES):
        return TCP_STATES[entry.tcp_state]
    return "REPLIED" if entry.replied else "UNREPLIED"


def order_of(flow: Flow) -> tuple[object, ...]:
    """Flows are listed by backend, then by client."""
    entry = flow.entry
    ends = (entry.reply_source, entry.source, entry.destination)
    addresses = [part for address, port in ends for part in (int(ipaddress.ip_address(address)), port)]
    return (entry.family, *addresses, entry.protocol)
