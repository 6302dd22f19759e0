"""What status, page, healthz and metrics say of the services, beside what the kernel holds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from tests.observe.health_ports.asking import ask, free_port, running, until
from tests.observe.metrics.test_exposition import names, scraped, value
from tests.observe.page.examples import DRAINED, HEALTHY, TCP, UNHEALTHY
from tests.observe.page.watched import Watched, watched
from vipd.api.healthz import healthz_listener
from vipd.cli.output import Screen
from vipd.cli.status import _lines
from vipd.model.service import Backend, BackendState, Service, ServicePort
from vipd.observe.listeners import ListenAddress
from vipd.observe.views import ADDRESSES_SHOWN, NAMES_SHOWN, status_view

DEAD, ALIVE = "10.244.0.5", "10.244.0.6"
ABOUT = {"version": "", "pid": 1, "started": "2026-01-01T00:00:00Z", "settings": {}, "warnings": ()}


def service(number: int, *backends: Backend) -> Service:
    return Service(f"s{number:02}", (f"10.96.0.{number}",), (ServicePort(80, TCP),), backends)


def twelve() -> list[Service]:
    """Ten of them have a backend on a host that will die; each at another port."""
    on_host = [service(n, Backend(DEAD, 8000 + n), Backend(ALIVE)) for n in range(1, 11)]
    return [*on_host, service(11, Backend(ALIVE)), service(12, Backend(ALIVE))]


def status_of(world: Watched) -> dict[str, Any]:
    view: dict[str, Any] = json.loads(
        json.dumps(status_view(world.reconciler, world.dataplane, [world.source], ABOUT))
    )
    return view


def text_of(status: dict[str, Any]) -> list[str]:
    return list(_lines(status, Screen(None, colour=False)))


def told(services: Iterable[Service], story: Callable[[Watched], Awaitable[None]]) -> None:
    """Run a story over these services."""

    async def run() -> None:
        async with watched(list(services)) as world:
            await story(world)

    asyncio.run(asyncio.wait_for(run(), 200))


async def check_all(world: Watched) -> None:
    """Each backend passes a check."""
    for declared in world.reconciler.services.values():
        for backend in declared.backends:
            world.judges.stand(declared.name, str(backend), HEALTHY)
    await world.step()


def test_a_dead_host_is_one_line_with_its_services_and_the_kernel_is_in_sync() -> None:
    async def story(world: Watched) -> None:
        await check_all(world)
        assert status_of(world)["serving"] == {
            "state": "ok",
            "message": "",
            "services": {"ok": 12, "unchecked": 0, "degraded": 0, "no-backends": 0, "quarantined": 0},
            "unhealthy": [],
            "unhealthy_addresses": 0,
            "others": [],
        }
        for number in range(1, 11):
            world.judges.stand(f"s{number:02}", f"{DEAD}:{8000 + number}", UNHEALTHY)
        await world.step()
        status = status_of(world)
        assert status["state"] == "in-sync"
        serving = status["serving"]
        assert (serving["state"], serving["message"]) == ("degraded", "10 degraded of 12 services")
        (host,) = serving["unhealthy"]
        assert (host["address"], host["services"]) == (DEAD, 10)
        assert sorted(host["names"]) == [f"s{number:02}" for number in range(1, 11)]
        assert serving["others"] == []
        assert len([line for line in text_of(status) if DEAD in line]) == 1
        assert (await world.state())["daemon"]["serving"] == serving
        for number in range(1, 11):
            world.judges.stand(f"s{number:02}", f"{DEAD}:{8000 + number}", HEALTHY)
        await world.step()
        assert status_of(world)["serving"]["state"] == "ok"

    told(twelve(), story)


def test_what_nobody_asked_is_unchecked_and_no_fault() -> None:
    async def story(world: Watched) -> None:
        status = status_of(world)
        assert (status["backends"], status["ready"], status["unchecked"]) == (22, 22, 22)
        assert status["serving"]["state"] == "unchecked"
        assert status["serving"]["message"] == "12 unchecked of 12 services"
        assert "Backends     22 of 22 ready, 22 unchecked" in text_of(status)
        state = await world.state()
        endpoints = [e for s in state["services"] for f in s["forwardings"] for e in f["endpoints"]]
        assert {endpoint["health"] for endpoint in endpoints} == {"unchecked"}
        assert {s["state"] for s in state["services"]} == {"unchecked"}
        assert not [line for line in text_of(status) if "healthy" in line or " ok" in line]
        found = await scraped(world)
        assert "vipd_backend_up" not in names(found), "nothing is known of any"
        assert value(found, "vipd_services_by_state", state="unchecked") == 12
        first = {"service": "s11", "backend": f"{ALIVE}:80", "protocol": "tcp"}
        assert value(found, "vipd_backend_health", health="unchecked", **first) == 1

    told(twelve(), story)


def test_what_is_no_matter_of_a_check_is_told_by_its_services() -> None:
    down = service(1, Backend(DEAD, state=BackendState.DOWN), Backend(ALIVE))

    async def story(world: Watched) -> None:
        world.judges.stand("s02", ALIVE, UNHEALTHY)
        world.judges.stand("s04", ALIVE, DRAINED)
        await world.step()
        serving = status_of(world)["serving"]
        assert serving["services"] == {
            "ok": 0, "unchecked": 0, "degraded": 1, "no-backends": 3, "quarantined": 0
        }  # fmt: skip
        assert [each["names"] for each in serving["unhealthy"]] == [["s02"]]
        assert serving["others"] == [
            {"state": "degraded", "services": 1, "names": ["s01"]},
            {"state": "no-backends", "services": 2, "names": ["s03", "s04"]},
        ]
        world.reconciler.progress.quarantined = {"s03": "no module"}
        serving = status_of(world)["serving"]
        assert serving["services"] | {"no-backends": 2, "quarantined": 1} == serving["services"]
        await world.declare([down])
        assert status_of(world)["serving"]["unhealthy"] == []

    told([down, service(2, Backend(ALIVE)), service(3), service(4, Backend(ALIVE))], story)


def test_names_and_addresses_are_bounded() -> None:
    many = [service(n, Backend(DEAD), Backend(f"10.245.0.{n}")) for n in range(1, ADDRESSES_SHOWN + 20)]

    async def story(world: Watched) -> None:
        for declared in many:
            for backend in declared.backends:
                world.judges.stand(declared.name, str(backend), UNHEALTHY)
        await world.step()
        serving = status_of(world)["serving"]
        assert (len(serving["unhealthy"]), serving["unhealthy_addresses"]) == (ADDRESSES_SHOWN, len(many) + 1)
        first, *others = serving["unhealthy"]
        assert (first["address"], first["services"], len(first["names"])) == (DEAD, len(many), NAMES_SHOWN)
        assert {other["services"] for other in others} == {1}
        (line,) = [line for line in text_of(status_of(world)) if DEAD in line]
        assert f" and {len(many) - NAMES_SHOWN} more)" in line

    told(many, story)


def test_healthz_says_both_and_keeps_its_status() -> None:
    async def story(world: Watched) -> None:
        world.judges.stand("s11", ALIVE, UNHEALTHY)
        await world.step()
        place = ListenAddress("127.0.0.1", free_port())
        listeners = healthz_listener(world.reconciler, place)
        async with running(listeners):
            await until(lambda: listeners.open, "open")
            answer = await ask(place, "/healthz")
        document = json.loads(answer.body)
        assert (answer.status, document["state"]) == (200, "in-sync")
        assert document["serving"] == {
            "state": "degraded",
            "message": "1 without backends, 11 unchecked of 12 services",
            "services": {"ok": 0, "unchecked": 11, "degraded": 0, "no-backends": 1, "quarantined": 0},
        }

    told(twelve(), story)
