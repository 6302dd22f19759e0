"""What both dataplanes promise, asked of each over the real kernel."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dataplane.declared import backends, kube_like_services, numbered
from tests.dataplane.hosts import Host, entered
from tests.dataplane.watched_programs import failing, refusing
from tests.lab.inside import DATAPLANES, NotWrittenError
from vipd.model.service import Service

pytestmark = pytest.mark.root

ONE, OTHER, THIRD = numbered(1, "10.244.0.1"), numbered(2, "10.244.0.2"), numbered(3, "10.244.0.3@2")
BAD_BACKEND = "10.244.0.66"
BAD = numbered(2, BAD_BACKEND)
FIRST = (*kube_like_services(), ONE, OTHER)
SECOND = (kube_like_services()[0], replace(OTHER, backends=(*OTHER.backends, *THIRD.backends)), THIRD)
MANY = tuple(numbered(number, "10.244.0.1", "10.244.0.2") for number in range(10, 25))


@pytest.fixture(params=DATAPLANES)
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    with entered(str(request.param), tmp_path, netlink=False) as made:
        yield made


def check_as_cold(host: Host, services: tuple[Service, ...]) -> None:
    """All is written, and is what a cold start writes."""
    assert host.vipd.pending() == ""
    assert host.held() == host.cold(*services)


def test_nothing_is_written_before_it_is_applied(host: Host) -> None:
    before = host.held()
    host.vipd.declare(FIRST)
    planned = host.vipd.pending()
    assert planned
    assert host.vipd.pending() == planned, "a plan that is not applied changes nothing"
    assert host.held() == before
    assert host.vipd.step() == planned
    assert host.vipd.step() == ""


def test_what_somebody_else_did_is_seen_by_a_look_afresh(host: Host) -> None:
    host.vipd.become(*FIRST)
    host.do(host.equipment.foreign_changes["dispatch emptied"])
    disturbed = host.held()
    difference = host.vipd.drift()
    assert difference
    before = len(host.programs.started)
    assert host.vipd.step() == "", "a comparison leaves what is known"
    assert len(host.programs.started) == before, "nothing is read again"
    host.vipd.doubt()
    assert host.vipd.pending() == difference
    assert host.held() == disturbed
    host.vipd.step()
    assert host.vipd.drift() == ""
    check_as_cold(host, FIRST)


def test_a_failure_blames_nobody_and_is_made_good(host: Host) -> None:
    host.vipd.become(*FIRST)
    host.programs.instead = failing()
    with pytest.raises(NotWrittenError, match="Permission denied"):
        host.vipd.become(*SECOND)
    assert not host.vipd.refused()
    host.programs.instead = lambda argv, stdin: None
    host.vipd.step()
    check_as_cold(host, SECOND)


def test_who_is_refused_is_named_and_holds_back_nobody(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.vipd.become(ONE, OTHER)
    host.programs.instead = refusing(BAD_BACKEND)
    host.vipd.become(ONE, BAD, THIRD, *MANY)
    (refused,) = host.vipd.refused().items()
    assert refused[0] == BAD.name
    assert "is refused by the test" in refused[1]
    (record,) = (record for record in caplog.records if "is quarantined" in record.getMessage())
    assert "service-quarantined" in str(vars(record)), "an event of the journal"
    assert host.vipd.pending() == ""
    assert host.held() == host.cold(ONE, OTHER, THIRD, *MANY), "it goes on as the kernel had it"
    host.vipd.become(ONE, THIRD, *MANY)
    assert not host.vipd.refused()
    check_as_cold(host, (ONE, THIRD, *MANY))


def test_a_refusal_that_does_not_last_blames_nobody(host: Host) -> None:
    refusals = [refusing(BAD_BACKEND)]
    host.programs.instead = lambda argv, stdin: (
        refusals.pop()(argv, stdin) if refusals and BAD_BACKEND in stdin else None
    )
    host.vipd.become(ONE, BAD, *MANY)
    assert not refusals
    assert not host.vipd.refused()
    host.vipd.doubt()
    check_as_cold(host, (ONE, BAD, *MANY))


def test_a_new_form_gets_a_new_chance_and_so_does_a_look_afresh(host: Host) -> None:
    host.programs.instead = refusing(BAD_BACKEND)
    host.vipd.become(ONE, BAD)
    assert host.vipd.refused()
    host.vipd.become(ONE, OTHER)
    assert not host.vipd.refused()
    check_as_cold(host, (ONE, OTHER))
    host.vipd.become(ONE, BAD)
    host.vipd.become(ONE)
    assert not host.vipd.refused()
    host.vipd.become(ONE, BAD)
    host.programs.instead = lambda argv, stdin: None
    host.vipd.doubt()
    host.vipd.step()
    assert not host.vipd.refused()
    check_as_cold(host, (ONE, BAD))


def test_a_doubt_amid_a_write_makes_the_next_plan_look(host: Host) -> None:
    host.vipd.become(*FIRST)
    host.programs.after = lambda argv: host.vipd.doubt()
    host.vipd.become(*SECOND)
    host.programs.after = lambda argv: None
    host.do(host.equipment.foreign_changes["dispatch emptied"])
    assert host.vipd.step()
    check_as_cold(host, SECOND)


def test_a_write_that_is_cancelled_is_made_good(host: Host) -> None:
    host.vipd.become(*FIRST)
    written = len(host.programs.written)

    def cancel(argv: object) -> None:
        if len(host.programs.written) > written:
            for task in asyncio.all_tasks():
                task.cancel()

    host.programs.after = cancel
    with suppress(asyncio.CancelledError):
        host.vipd.become(*SECOND)
    assert len(host.programs.written) == written + 1
    host.programs.after = lambda argv: None
    host.vipd.step()
    check_as_cold(host, SECOND)


def test_it_says_what_it_is_and_where_services_are(host: Host) -> None:
    services = (kube_like_services()[0], ONE, OTHER)
    host.vipd.become(*services)
    assert host.vipd.versions().keys() == {"ipv4", "ipv6"}
    assert all(host.vipd.versions().values())
    assert host.vipd.warnings() == ()
    held = str(host.held())
    assert {name for name in host.vipd.names() if name not in held} == set()
    host.vipd.host_changed("192.0.2.1", "2001:db8::1")
    check_as_cold(host, services)


REMOVED, REFUSED = "10.244.0.77", "10.244.0.66"
GONE = {
    "iptables": ("iptables -w -t nat -F; iptables -w -t nat -X",) * 2,
    "nftables": ("nft flush table ip vipd", "nft delete table ip vipd"),
}


def test_a_refused_service_never_gets_a_removed_backend_back(host: Host) -> None:
    """Its last rules stay; where another program has deleted them, only backends come back that it has."""
    before = numbered(2, REMOVED, "10.244.0.2")
    host.vipd.become(ONE, before)
    host.programs.instead = refusing(REFUSED)
    host.vipd.become(ONE, replace(before, backends=backends("10.244.0.2", REFUSED)))
    assert list(host.vipd.refused()) == [before.name]
    assert REMOVED in str(host.held()), "the kernel has what it had"
    for command in GONE[host.dataplane]:
        host.do(command)
    host.vipd.doubt()
    host.vipd.step()
    assert list(host.vipd.refused()) == [before.name]
    assert REMOVED not in str(host.held())
    assert "10.244.0.2" in str(host.held())
    assert "10.244.0.1" in str(host.held())
    host.programs.instead = lambda argv, stdin: None
    host.vipd.retry(before.name)
    host.vipd.step()
    assert not host.vipd.refused()
    assert REFUSED in str(host.held())
