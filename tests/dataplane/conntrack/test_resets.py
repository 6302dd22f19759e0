"""Which removed frontends have their clients reset, how long, and what the dataplane is given for that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.dataplane.conntrack.forwardings import forwarding
from tests.dataplane.conntrack.test_scheduler import Bench
from vipd.control.programming import FlowResets
from vipd.dataplane.conntrack import scheduler as keeping
from vipd.dataplane.conntrack.checkpoint import Checkpoint
from vipd.dataplane.conntrack.scheduler import RESET_SECONDS
from vipd.dataplane.conntrack.stale import Destination
from vipd.model.forwarding import Forwarding
from vipd.model.service import Family, Protocol

B1 = ("10.244.0.1", 8080)
WEB = Destination(Family.IPV4, Protocol.TCP, "10.96.0.20", 80)
OTHER = forwarding("10.96.0.99", 9, B1)


def ending(number: int = 20, **more: object) -> Forwarding:
    made = forwarding(f"10.96.0.{number}", 80, B1, protocol=Protocol.TCP)
    return replace(made, ends_flows=True, **more)  # type: ignore[arg-type]


def removed(bench: Bench, service: Forwarding) -> None:
    bench.become(service)
    bench.clean()
    bench.become(service.key)
    bench.clean()


def test_only_tcp_of_a_service_that_wants_it() -> None:
    bench = Bench()
    for service in (forwarding("10.96.0.1", 53, B1), forwarding("10.96.0.2", 80, B1, protocol=Protocol.TCP)):
        removed(bench, service)
    assert bench.keeper.resets() == ()
    removed(bench, ending(node_port=30080))
    assert set(bench.keeper.resets()) == {WEB, WEB._replace(address="", port=30080)}


def test_whoever_has_the_frontend_then_ends_it() -> None:
    bench = Bench()
    removed(bench, ending())
    bench.become(forwarding("10.96.0.20", 80, B1, protocol=Protocol.TCP, name="new"))
    assert bench.keeper.resets() == ()


def test_it_lasts_for_a_while() -> None:
    bench = Bench()
    removed(bench, ending())
    bench.now += RESET_SECONDS - 1
    bench.clean()
    assert bench.keeper.resets() == (WEB,)
    bench.now += 2
    bench.clean()
    assert bench.keeper.resets() == ()


@pytest.mark.parametrize(
    ("passed", "left"), [(100, (WEB,)), (RESET_SECONDS + 1, ()), (-5000, ())], ids=["soon", "late", "reboot"]
)
def test_the_next_process_goes_on_with_what_is_left_of_it(
    tmp_path: Path, passed: float, left: tuple[Destination, ...]
) -> None:
    first = Bench(checkpoint=Checkpoint(tmp_path))
    first.now += 10_000
    removed(first, ending())
    first.become(OTHER)
    first.clean()
    second = Bench(checkpoint=Checkpoint(tmp_path))
    second.now = first.now + passed
    second.become(OTHER)
    second.clean()
    assert second.keeper.resets() == left


def test_a_service_removed_while_vipd_was_away_has_its_clients_reset(tmp_path: Path) -> None:
    first = Bench(checkpoint=Checkpoint(tmp_path))
    first.become(ending(), OTHER)
    first.clean()
    second = Bench(checkpoint=Checkpoint(tmp_path))
    second.become(OTHER)
    second.clean()
    assert second.keeper.resets() == (WEB,)


def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "MAX_RESETS", 3)
    bench = Bench()
    for number in range(20, 30):
        removed(bench, ending(number))
    assert [place.address for place in bench.keeper.resets()] == [f"10.96.0.{n}" for n in (27, 28, 29)]


def test_the_dataplane_is_given_what_is_new_and_what_is_over() -> None:
    places = [WEB]
    resets = FlowResets(lambda: places)
    (given,) = resets.changes().values()
    assert given is not None
    assert (given.frontend_removed, given.addresses, given.port, given.endpoints) == (
        True,
        ("10.96.0.20",),
        80,
        (),
    )
    assert resets.changes() == {}
    places.clear()
    assert resets.changes() == {given.key: None}
    assert resets.changes() == {}
