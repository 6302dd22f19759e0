"""A service's state is the same in the API, in `vipctl list` and on the status page."""

from __future__ import annotations

import asyncio

import pytest

from tests.observe.page.examples import DRAINED, HEALTHY, UNHEALTHY, mixed
from tests.observe.page.watched import watched
from vipd.cli.list import _row
from vipd.cli.output import Cell
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.control.service_status import service_status
from vipd.model.backend_status import BackendStatus, BackendStatuses
from vipd.model.service import Backend, Family, Masquerade, Protocol, Service, ServicePort
from vipd.observe.page.views import service_view as page_view
from vipd.observe.views import service_view as api_view

SIXES = "[fd00:96::1]:80/tcp, [fd00:96::1]:443/tcp"
PORTS = (ServicePort(80, Protocol.TCP), ServicePort(443, Protocol.TCP))
FOUR, SIX = Backend("10.244.0.5"), Backend("fd00:244::5")
UNKNOWN = BackendStatus(health="unknown")
DUAL = Service("dual", ("10.96.1.1", "fd00:96::1"), PORTS, (FOUR, Backend("10.244.0.6"), SIX))


def test_the_api_the_list_and_the_page_say_the_same() -> None:
    async def story() -> None:
        half = Service("half", DUAL.addresses, PORTS, (FOUR,))
        async with watched([*mixed(), DUAL, half]) as world:
            world.judges.stand("shop/checkout", "10.244.2.17:8443", DRAINED)
            world.judges.stand("shop/search", "10.244.2.18:9200", UNHEALTHY)
            world.judges.stand("dual", "fd00:244::5", UNHEALTHY)
            await world.step()
            world.reconciler.progress.quarantined = {"shop/cache": "no module"}
            said = {}
            for service in world.reconciler.services.values():
                forwardings = world.reconciler.forwardings[service.name]
                backend_statuses = world.reconciler.backend_statuses(service)
                quarantine = world.reconciler.progress.quarantined.get(service.name)
                page = page_view(service, forwardings, backend_statuses, world.dataplane, quarantine)
                api = api_view(service, world.reconciler, world.dataplane)
                status = api["status"]
                assert isinstance(status, dict)
                shown = {name: page[name] for name in ("state", "message", "ready", "backends", "unchecked")}
                assert {**shown, "ignored": []} == status, service.name
                cell = _row(api, wide=False)[-1]
                assert isinstance(cell, Cell)
                assert page["state"] in ("unchecked", cell.text.partition(",")[0])
                said[service.name] = cell.text
            assert said["shop/checkout"] == "1 draining, 4 unchecked"
            assert said["shop/search"] == "degraded, 1 unhealthy, 3 unchecked"
            assert said["dual"] == "degraded, IPv6 without backends"
            assert said["half"] == "degraded, IPv6 without backends"
            assert said["mail/smtp"] == "no-backends"
            assert said["shop/cache"] == "quarantined"

    asyncio.run(story())


@pytest.mark.parametrize(
    ("backend_statuses", "state", "message"),
    [
        ({}, "unchecked", "3 unchecked"),
        (
            {"fd00:244::5": UNHEALTHY},
            "degraded",
            f"IPv6 without backends; new flows to {SIXES} are refused; 1 unhealthy, 2 unchecked",
        ),
        ({"10.244.0.5": UNHEALTHY}, "degraded", "1 unhealthy, 2 unchecked"),
        ({"10.244.0.5": DRAINED}, "unchecked", "1 draining, 2 unchecked"),
        (
            {"10.244.0.5": HEALTHY, "10.244.0.6": HEALTHY, "fd00:244::5": UNKNOWN},
            "unchecked",
            "1 not checked yet",
        ),
        ({"10.244.0.5": HEALTHY, "10.244.0.6": DRAINED, "fd00:244::5": HEALTHY}, "ok", "1 draining"),
    ],
)
def test_the_words_of_a_service_in_two_families(
    backend_statuses: BackendStatuses, state: str, message: str
) -> None:
    forwardings = select_backends(
        DUAL, SelectionPolicy(dict.fromkeys(Family, Masquerade.FORWARDED)), backend_statuses
    )
    assert service_status(DUAL, forwardings, backend_statuses) == (state, message)


def test_a_key_of_etcd_is_shown_by_its_whole_name() -> None:
    view = {
        "name": "shop/web",
        "owner": "etcd:/vipd/v1/services/shop/web",
        "forwardings": [],
        "status": {"state": "ok", "message": "", "ready": 1, "backends": 1, "unchecked": 0},
    }
    assert "etcd:shop/web" in _row(view, wide=False)
    assert view["owner"] in _row(view, wide=True)
    assert "shop.yaml" in _row({**view, "owner": "file:/etc/vipd/services.d/shop.yaml"}, wide=False)
