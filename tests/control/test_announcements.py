"""Which addresses a host announces, and why not the others."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from vipd.control.announcements import (
    AnnouncedKey,
    Announcements,
    Damping,
    Moment,
    OtherHosts,
    Reason,
    adopted,
    all_served,
    decide,
    why_unready,
)
from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.maintenance import Maintenance
from vipd.model.service import (
    Announcement,
    AnnounceMethod,
    ExternalAddress,
    Family,
    Masquerade,
    Protocol,
    TrafficPolicy,
)

ROUTES = AnnounceMethod.ROUTES
START = datetime(2026, 1, 1, tzinfo=UTC)
OUTSIDE = AnnouncedKey("203.0.113.10", ROUTES)
BACKEND = Endpoint("10.0.0.1", 80)
WORK = Maintenance("root", START, "kernel update")


def forwarding(
    *endpoints: Endpoint,
    inside: bool = False,
    external: bool = True,
    policy: TrafficPolicy = TrafficPolicy.CLUSTER,
    local: tuple[Endpoint, ...] = (),
    name: str = "web",
    port: int = 80,
) -> Forwarding:
    return Forwarding(
        ForwardingKey(name, str(port), Protocol.TCP, Family.IPV4),
        ("10.96.0.10",),
        port,
        endpoints,
        Masquerade.ALWAYS,
        local_endpoints=local,
        has_endpoints=bool(endpoints),
        external_policy=policy,
        external_addresses=(ExternalAddress(OUTSIDE.address),) if external else (),
        announcement=Announcement(ROUTES, inside),
    )


SERVED, UNSERVED = forwarding(BACKEND), forwarding()


class AnnouncingHost:
    """A host whose decisions follow each other."""

    def __init__(self, others: OtherHosts | None = None) -> None:
        self.state, self.seconds, self.others = Announcements(), 0.0, others

    def due(self) -> float | None:
        """When time alone changes a decision."""
        return self.state.due

    def at(
        self, seconds: float, *forwardings: Forwarding, maintenance: Maintenance | None = None
    ) -> tuple[bool, Reason]:
        """What it decides about the address at a time, in seconds since the start."""
        now = Moment(seconds, START + timedelta(seconds=seconds))
        self.state = decide(
            forwardings,
            self.state,
            now,
            damping=Damping(3, 10),
            maintenance=maintenance,
            others=self.others,
        )
        found = self.state.addresses[OUTSIDE]
        return found.announced, found.reason


@pytest.mark.parametrize(
    ("asking", "expected"),
    [
        (SERVED, (True, Reason.SERVED)),
        (UNSERVED, (False, Reason.NO_BACKEND)),
        (forwarding(BACKEND, policy=TrafficPolicy.LOCAL), (False, Reason.NO_LOCAL_BACKEND)),
        (forwarding(BACKEND, policy=TrafficPolicy.LOCAL, local=(BACKEND,)), (True, Reason.SERVED)),
    ],
)
def test_a_new_address_is_announced_at_once_if_a_backend_can_serve(
    asking: Forwarding, expected: tuple[bool, Reason]
) -> None:
    assert AnnouncingHost().at(0, asking) == expected


def test_only_what_is_asked_for_is_announced() -> None:
    now = Moment(0, START)

    def of(asking: Forwarding) -> frozenset[str]:
        return decide([asking], Announcements(), now, damping=Damping()).announced(ROUTES)

    assert of(forwarding(BACKEND)) == {OUTSIDE.address}
    assert of(forwarding(BACKEND, inside=True)) == {OUTSIDE.address, "10.96.0.10"}
    assert of(forwarding(BACKEND, inside=True, external=False)) == {"10.96.0.10"}


def test_one_served_port_of_any_service_is_enough() -> None:
    assert AnnouncingHost().at(0, forwarding(port=80), forwarding(BACKEND, port=443, name="other"))[0]


def test_a_short_failure_withdraws_nothing() -> None:
    host = AnnouncingHost()
    host.at(0, SERVED)
    assert host.at(1, UNSERVED) == (True, Reason.WITHDRAWING)
    assert host.due() == 4
    assert host.at(3.9, UNSERVED) == (True, Reason.WITHDRAWING)
    assert host.at(3.95, SERVED) == (True, Reason.SERVED)
    assert host.due() is None
    assert host.state.addresses[OUTSIDE].since == START


def test_a_long_failure_withdraws_it_until_a_backend_has_served_for_a_while() -> None:
    host = AnnouncingHost()
    host.at(0, SERVED)
    host.at(1, UNSERVED)
    assert host.at(4, UNSERVED) == (False, Reason.NO_BACKEND)
    assert host.at(5, SERVED) == (False, Reason.RETURNING)
    assert host.due() == 15
    assert host.at(8, UNSERVED) == (False, Reason.NO_BACKEND)
    assert host.at(9, SERVED) == (False, Reason.RETURNING)
    assert host.at(18.9, SERVED) == (False, Reason.RETURNING)
    assert host.at(19, SERVED) == (True, Reason.SERVED)


def test_maintenance_withdraws_at_once_and_ends_at_once() -> None:
    host = AnnouncingHost(OtherHosts())
    host.at(0, SERVED)
    assert host.at(1, SERVED, maintenance=WORK) == (False, Reason.MAINTENANCE)
    assert host.at(2, SERVED) == (True, Reason.SERVED)


def test_what_an_earlier_process_announced_is_not_withdrawn_at_once() -> None:
    host = AnnouncingHost()
    host.state = adopted([OUTSIDE, AnnouncedKey("203.0.113.99", ROUTES)], Moment(0, START))
    assert host.at(0, UNSERVED) == (True, Reason.WITHDRAWING)
    assert list(host.state.addresses) == [OUTSIDE], "nobody asks for the other one any more"
    assert host.at(3, UNSERVED) == (False, Reason.NO_BACKEND)


def test_without_knowledge_of_other_hosts_none_is_the_last() -> None:
    host = AnnouncingHost(others=None)
    host.at(0, SERVED)
    host.at(1, UNSERVED)
    assert host.at(9, UNSERVED) == (False, Reason.NO_BACKEND)


def test_the_last_host_keeps_the_address_until_another_one_serves_it() -> None:
    host = AnnouncingHost(OtherHosts())
    host.at(0, SERVED)
    host.at(1, UNSERVED)
    assert host.at(9, UNSERVED) == (True, Reason.LAST_HOST)
    host.others = OtherHosts(kept={OUTSIDE})
    assert host.at(10, UNSERVED) == (True, Reason.LAST_HOST), "those that failed together keep it together"
    host.others = OtherHosts(served={OUTSIDE})
    assert host.at(11, UNSERVED) == (False, Reason.NO_BACKEND)


def test_hosts_that_withdrew_it_for_each_other_take_it_back() -> None:
    host = AnnouncingHost(OtherHosts(served={OUTSIDE}))
    host.at(0, SERVED)
    host.at(1, UNSERVED)
    assert host.at(4, UNSERVED) == (False, Reason.NO_BACKEND)
    host.others = OtherHosts(kept={OUTSIDE})
    assert host.at(5, UNSERVED) == (False, Reason.NO_BACKEND)
    host.others = OtherHosts()
    assert host.at(6, UNSERVED) == (True, Reason.LAST_HOST)


def test_what_was_kept_stays_when_a_backend_is_back() -> None:
    """A day of two hosts that fail together: after they withdrew it for each other and took it back."""
    host = AnnouncingHost(OtherHosts(served={OUTSIDE}))
    host.at(0, SERVED)
    host.at(1, UNSERVED)
    host.at(4, UNSERVED)
    host.others = OtherHosts()
    assert host.at(9, UNSERVED) == (True, Reason.LAST_HOST)
    assert host.at(21, SERVED) == (True, Reason.SERVED)
    assert host.at(22, UNSERVED) == (True, Reason.WITHDRAWING)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (OtherHosts(served={OUTSIDE}), (False, Reason.RETURNING)),
        (None, (False, Reason.RETURNING)),
        (OtherHosts(), (True, Reason.SERVED)),
        (OtherHosts(kept={OUTSIDE}), (True, Reason.SERVED)),
    ],
    ids=["another serves it", "nobody knows", "nobody announces it", "another refuses its clients"],
)
def test_a_host_waits_to_return_only_while_clients_are_served_elsewhere(
    others: OtherHosts | None, expected: tuple[bool, Reason]
) -> None:
    host = AnnouncingHost(OtherHosts(served={OUTSIDE}))
    host.at(0, SERVED)
    host.at(1, UNSERVED)
    assert host.at(4, UNSERVED) == (False, Reason.NO_BACKEND)
    host.others = others
    assert host.at(5, SERVED) == expected


def test_a_host_that_never_announced_it_does_not_begin_to_as_the_last_one() -> None:
    host = AnnouncingHost(OtherHosts())
    assert host.at(0, UNSERVED) == (False, Reason.NO_BACKEND)
    assert host.at(60, UNSERVED) == (False, Reason.NO_BACKEND)


def test_whether_everything_is_served_decides_if_other_hosts_are_asked() -> None:
    assert all_served([SERVED])
    assert not all_served([UNSERVED])
    assert not all_served([forwarding(BACKEND, policy=TrafficPolicy.LOCAL)])
    assert all_served([UNSERVED, forwarding(BACKEND, port=443)]), "by another port of the same address"


@pytest.mark.parametrize(
    ("asking", "why"),
    [
        (SERVED, ""),
        (UNSERVED, "no backend can serve"),
        (
            forwarding(BACKEND, policy=TrafficPolicy.LOCAL),
            "no backend on this host can serve, and the traffic policy is local",
        ),
        (forwarding(policy=TrafficPolicy.LOCAL), "no backend can serve"),
    ],
)
def test_why_a_host_must_get_no_flows(asking: Forwarding, why: str) -> None:
    assert why_unready([asking], None) == why
    assert why_unready([asking], WORK) == "this host is in maintenance (kernel update)"


def test_the_addresses_of_one_service_are_its_own_in_order() -> None:
    now = Moment(0, START)
    asking = [
        forwarding(BACKEND, inside=True),
        forwarding(BACKEND, inside=True, external=False, name="other"),
    ]
    found = decide(asking, Announcements(), now, damping=Damping())
    assert [each.key.address for each in found.of_service("web")] == ["10.96.0.10", OUTSIDE.address]
    assert [each.key.address for each in found.of_service("other")] == ["10.96.0.10"]
    assert found.of_service("none") == ()
