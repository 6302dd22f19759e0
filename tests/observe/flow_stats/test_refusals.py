"""Totals of refused flows, over rules that are written anew, and when they are reported."""

from __future__ import annotations

import json

from vipd.dataplane.counting import RefusedKey
from vipd.model.flow_limits import Limit
from vipd.model.forwarding import ForwardingKey
from vipd.model.service import Family, Protocol
from vipd.observe.flow_stats.refusals import REPORT_EVERY_SECONDS, Refusals


def place(service: str, limit: Limit = Limit.CONNECTIONS, family: Family = Family.IPV4) -> RefusedKey:
    return RefusedKey(ForwardingKey(service, "", Protocol.TCP, family), limit)


def test_the_forwardings_of_a_service_are_added_up() -> None:
    refusals = Refusals()
    refusals.add(
        {place("web"): 2, place("web", family=Family.IPV6): 3, place("web", Limit.NEW_PER_CLIENT): 1}
    )
    assert refusals.services() == {"web": {Limit.CONNECTIONS: 5, Limit.NEW_PER_CLIENT: 1}}


def test_totals_go_on_in_the_next_run() -> None:
    before, refusals = Refusals(), Refusals()
    before.add({place("web"): 5, place("dns"): 0})
    refusals.restore(json.loads(json.dumps(before.to_json())))
    refusals.restore([{"nonsense": 1}, {"web": {"connections": -1, "other": 3}}])
    assert refusals.services() == {}, "no service is known yet"
    refusals.add({place("web"): 2})
    assert refusals.services() == {"web": {Limit.CONNECTIONS: 7}}


def test_a_service_without_limits_is_forgotten() -> None:
    refusals = Refusals()
    refusals.add({place("web"): 5, place("dns"): 0})
    refusals.add({place("dns"): 0})
    refusals.expire()
    assert refusals.services() == {"dns": {Limit.CONNECTIONS: 0}}
    assert refusals.take_report(0.0) == {}


def test_a_service_is_reported_at_once_and_then_seldom() -> None:
    refusals = Refusals()
    refusals.add({place("web"): 5})
    assert refusals.take_report(100.0) == {"web": {Limit.CONNECTIONS: 5}}
    for number in range(6, 10):
        refusals.add({place("web"): 1})
        assert refusals.take_report(100.0 + number) == {}
    assert refusals.take_report(100.0 + REPORT_EVERY_SECONDS) == {"web": {Limit.CONNECTIONS: 4}}
    assert refusals.take_report(101.0 + 2 * REPORT_EVERY_SECONDS) == {}
