"""Who serves, given what checks found and what an operator ordered."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from vipd.control.backend_status_tracker import BackendStatusTracker
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.host.observer import Observers
from vipd.model.backend_status import AdminState, BackendStatus, BackendStatuses
from vipd.model.check import Check, TcpProbe
from vipd.model.check_target import check_targets
from vipd.model.forwarding import Endpoint, Forwarding
from vipd.model.override import OverrideTarget
from vipd.model.service import (
    Affinity,
    Backend,
    BackendState,
    Family,
    Masquerade,
    Protocol,
    Service,
    ServicePort,
)

POLICY = SelectionPolicy(dict.fromkeys(Family, Masquerade.FORWARDED))
A, B, C = Backend("10.0.0.1"), Backend("10.0.0.2"), Backend("10.0.0.3", backup=True)
WEB = Service("web", ("10.96.0.10",), (ServicePort(80, Protocol.TCP),), (A, B, C))
SICK, DRAINED, OUT = (
    BackendStatus(healthy=False),
    BackendStatus(admin=AdminState.DRAINING),
    BackendStatus(admin=AdminState.DISABLED),
)


def chosen(service: Service = WEB, **backend_statuses: BackendStatus) -> Forwarding:
    """The one forwarding; standings by the last letter of the backend: `a=SICK`."""
    named = {f"10.0.0.{'abc'.index(letter) + 1}": standing for letter, standing in backend_statuses.items()}
    (forwarding,) = select_backends(service, POLICY, named)
    return forwarding


def hosts(endpoints: tuple[Endpoint, ...]) -> str:
    return "".join("abc"[int(e.address[-1]) - 1] for e in endpoints)


def test_who_is_unhealthy_leaves_and_its_flows_end() -> None:
    forwarding = chosen(a=SICK)
    assert (
        hosts(forwarding.endpoints),
        hosts(forwarding.unavailable),
        hosts(forwarding.without_new_flows),
    ) == ("b", "a", "c")


def test_who_drains_takes_no_new_flow_and_keeps_those_it_has() -> None:
    forwarding = chosen(a=DRAINED)
    assert (hosts(forwarding.endpoints), hosts(forwarding.without_new_flows), forwarding.unavailable) == (
        "b",
        "ac",
        (),
    )


def test_services_are_dirty_after_events_about_their_backends() -> None:
    """As the daemon wires it: the tracker learns of results and overrides from the observers alone."""
    checked = replace(WEB, check=Check(TcpProbe()))
    observers, tracker = Observers(), BackendStatusTracker()
    observers.add(tracker)
    tracker.follow({"web": checked})
    tracker.take_dirty()
    observers.health_changed(frozenset(check_targets(checked).values()))
    assert tracker.take_dirty() == {"web"}
    observers.overrides_changed(frozenset({OverrideTarget("web", "10.0.0.1")}))
    assert tracker.take_dirty() == {"web"}


def test_who_is_disabled_counts_as_removed() -> None:
    assert hosts(chosen(a=OUT).unavailable) == "a"


def test_backups_serve_while_no_other_can() -> None:
    assert hosts(chosen(a=SICK, b=DRAINED).endpoints) == "c"
    assert hosts(chosen(a=SICK).endpoints) == "b"
    leaving = replace(WEB, backends=(replace(A, state=BackendState.DRAIN), C))
    assert hosts(chosen(leaving).endpoints) == "c"
    assert hosts(chosen(leaving, c=SICK).endpoints) == "a"


def test_all_unhealthy_serve_if_the_service_says_so() -> None:
    assert chosen(a=SICK, b=SICK, c=SICK).endpoints == ()
    kept = replace(WEB, keeps_unhealthy=True)
    assert hosts(chosen(kept, a=SICK, b=SICK, c=SICK).endpoints) == "ab"
    assert chosen(kept, a=SICK, b=SICK, c=SICK).unavailable == ()
    assert hosts(chosen(kept, a=SICK, b=OUT, c=SICK).endpoints) == "a", "orders hold even then"
    assert hosts(chosen(kept, a=SICK).endpoints) == "b"


def test_the_fallback_serves_when_all_are_unhealthy() -> None:
    spare = replace(WEB, fallback=(Backend("10.0.0.9"),))
    assert [e.address for e in chosen(spare, a=SICK, b=SICK, c=SICK).endpoints] == ["10.0.0.9"]


def test_a_weight_that_was_ordered_or_said_wins() -> None:
    forwarding = chosen(a=BackendStatus(weight=3), b=BackendStatus(weight=0))
    assert forwarding.endpoints == (Endpoint("10.0.0.1", 80, 3),)
    assert hosts(forwarding.without_new_flows) == "bc"


def test_pins_are_kept_while_draining_and_only_with_affinity() -> None:
    pinned = replace(DRAINED, keeps_affinity=True)
    assert chosen(a=pinned).affinity_only == ()
    sticky = replace(WEB, affinity=Affinity())
    assert hosts(chosen(sticky, a=pinned).affinity_only) == "a"
    assert chosen(sticky, a=DRAINED).affinity_only == ()
    assert chosen(sticky, a=replace(pinned, healthy=False)).affinity_only == ()


STANDINGS = st.builds(
    BackendStatus,
    healthy=st.booleans(),
    admin=st.sampled_from(AdminState),
    weight=st.none() | st.integers(0, 3),
    keeps_affinity=st.booleans(),
)


@given(st.dictionaries(st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"]), STANDINGS), st.booleans())
def test_every_backend_is_in_one_place_and_none_serves_against_an_order(
    backend_statuses: BackendStatuses, keeps: bool
) -> None:
    (forwarding,) = select_backends(replace(WEB, keeps_unhealthy=keeps), POLICY, backend_statuses)
    places = [*forwarding.endpoints, *forwarding.without_new_flows, *forwarding.unavailable]
    assert sorted(e.address for e in places) == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    for endpoint in forwarding.endpoints:
        standing = backend_statuses.get(endpoint.address, BackendStatus())
        assert standing.admin is AdminState.ACTIVE
        assert endpoint.weight > 0
        assert standing.healthy or keeps
