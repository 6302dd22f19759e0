from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tests.control.reconciling import IsolatedReconciler, looping
from tests.dataplane.fake_dataplane import FakeSurroundings, broken_tool
from tests.model.samples import declared
from tests.observe.health_ports.asking import (
    PATIENCE_SECONDS,
    Reply,
    ask,
    free_port,
    refused,
    running,
    taken,
    until,
)
from vipd.control.reconciler import Reconciler
from vipd.control.selection import HostIdentity, SelectionPolicy, select_backends
from vipd.model.service import (
    Backend,
    BackendState,
    Family,
    Masquerade,
    Protocol,
    Service,
    ServicePort,
    TrafficPolicy,
)
from vipd.observe.health_ports import HealthPort, HealthPorts, wanted_health_ports
from vipd.observe.listeners import ListenAddress

HOST = HostIdentity(frozenset({"10.0.0.1", "10.0.0.2", "fd00::1"}))
POLICY = SelectionPolicy(dict.fromkeys(Family, Masquerade.FORWARDED), HOST)
WEB = Service(
    "shop/web",
    ("10.96.0.10",),
    (ServicePort(80, Protocol.TCP, "http"), ServicePort(443, Protocol.TCP, "https")),
    (Backend("10.0.0.1"), Backend("10.0.0.2"), Backend("10.9.9.9")),
    external_policy=TrafficPolicy.LOCAL,
    health_port=32100,
)


def count(service: Service) -> int:
    """The ready local backends that the service's health port would tell."""
    return wanted_health_ports(select_backends(service, POLICY))[32100].ready_local


def test_distinct_addresses_on_this_host_count() -> None:
    assert count(WEB) == 2, "each once, although it serves two ports; the one elsewhere does not count"
    assert count(replace(WEB, backends=(Backend("10.0.0.1", 80), Backend("10.0.0.1", 81)))) == 1
    assert count(replace(WEB, backends=(Backend("10.9.9.9"),))) == 0
    assert count(replace(WEB, backends=())) == 0


@pytest.mark.parametrize(
    "unready", [{"state": BackendState.DRAIN}, {"state": BackendState.DOWN}, {"weight": 0}]
)
def test_what_is_not_ready_does_not_count_even_as_a_last_resort(unready: dict[str, object]) -> None:
    leaving = replace(Backend("10.0.0.1"), **unready)  # type: ignore[arg-type]  # as each case says
    assert count(replace(WEB, backends=(leaving, Backend("10.0.0.2")))) == 1
    alone = replace(WEB, backends=(leaving,), internal_policy=TrafficPolicy.LOCAL)
    assert count(alone) == 0


def test_a_local_backend_counts_under_every_policy() -> None:
    assert count(replace(WEB, external_policy=TrafficPolicy.CLUSTER)) == 2


def test_both_families_count() -> None:
    both = replace(WEB, addresses=("10.96.0.10", "fd00:96::10"), backends=(*WEB.backends, Backend("fd00::1")))
    assert count(both) == 3


def test_a_fallback_counts_while_it_serves() -> None:
    assert count(replace(WEB, backends=(Backend("10.0.0.1"),), fallback=(Backend("10.0.0.2"),))) == 1
    assert count(replace(WEB, backends=(), fallback=(Backend("10.0.0.2"),))) == 1
    assert count(replace(WEB, backends=(Backend("10.9.9.9"),), fallback=(Backend("10.0.0.2"),))) == 0


def test_services_without_a_health_port_have_none_and_look_as_before() -> None:
    plain = select_backends(replace(WEB, health_port=None), POLICY)
    assert wanted_health_ports(plain) == {}
    assert all(forwarding.ready_local == () for forwarding in plain)


def test_each_port_has_its_service() -> None:
    other = replace(WEB, name="dns", addresses=("10.96.0.11",), health_port=32101)
    found = wanted_health_ports([*select_backends(WEB, POLICY), *select_backends(other, POLICY)])
    assert found == {32100: HealthPort("shop/web", 2), 32101: HealthPort("dns", 2)}


@pytest.mark.parametrize(
    ("service", "namespace", "name"),
    [
        ("shop/web", "shop", "web"),
        ("web", "", "web"),
        ("a/b/c", "a", "b/c"),
        ("10.96.0.10:80/tcp", "", "10.96.0.10:80/tcp"),
        ("[fd00::10]:80/tcp", "", "[fd00::10]:80/tcp"),
    ],
)
def test_the_body_is_kube_proxys(service: str, namespace: str, name: str) -> None:
    assert HealthPort(service, 3).body(True) == {
        "service": {"namespace": namespace, "name": name},
        "localEndpoints": 3,
        "serviceProxyHealthy": True,
    }


class HostWithAddresses(FakeSurroundings):
    """This host is HOST."""

    async def policy(self) -> SelectionPolicy:
        return POLICY


class ServedHealthPorts:
    """Health ports on 127.0.0.1 over a reconciler whose host has two of the backends."""

    def __init__(self) -> None:
        self.isolated = IsolatedReconciler()
        self.isolated.reconciler = Reconciler(
            (self.isolated.source,), self.isolated.dataplane, HostWithAddresses(), lambda: datetime.now(UTC)
        )
        self.named: dict[Family, tuple[str, ...] | None] = {Family.IPV4: ("127.0.0.1",), Family.IPV6: ()}
        self.port, self.other_port = free_port(), free_port()
        self.service = replace(WEB, health_port=self.port)
        self.ports = HealthPorts(self.isolated.reconciler, self._node_addresses)
        self.isolated.reconciler.observers.add(self.ports)

    async def declare(self, *services: Service) -> bool:
        """Have these services; returns whether the step worked."""
        self.isolated.source.candidate = declared(*services)
        done = await self.isolated.reconciler.wait_synced(
            self.isolated.reconciler.request_sync(), PATIENCE_SECONDS
        )
        await until(self.opened, "every port is open, or known to be taken")
        return done

    def opened(self) -> bool:
        """Whether the ports are as the last step wants them, as far as they can be had."""
        listeners = self.ports.listeners
        wanted = listeners._wanted.keys()
        return listeners.open <= wanted and len(listeners.open) + len(listeners.warnings) == len(wanted)

    async def get(self, path: str = "/", method: str = "GET", address: str = "127.0.0.1") -> Reply:
        """Ask at the service's health port."""
        return await ask(ListenAddress(address, self.port), path, method)

    def _node_addresses(self, family: Family, host: frozenset[str]) -> tuple[str, ...] | None:
        assert host == HOST.addresses
        return self.named[family]


def run_story(story: Callable[[ServedHealthPorts], Awaitable[None]]) -> None:
    """Run a story beside health ports and a reconciler at work."""

    async def run() -> None:
        served = ServedHealthPorts()
        async with looping(served.isolated), running(served.ports.listeners):
            await story(served)

    asyncio.run(asyncio.wait_for(run(), 200))


def test_200_while_a_local_backend_is_ready_and_503_after() -> None:
    async def story(served: ServedHealthPorts) -> None:
        assert await served.declare(served.service)
        reply = await served.get()
        assert reply.status == 200
        assert reply.json == {
            "service": {"namespace": "shop", "name": "web"},
            "localEndpoints": 2,
            "serviceProxyHealthy": True,
        }
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["x-load-balancing-endpoint-weight"] == "2"
        draining = Backend("10.0.0.1", state=BackendState.DRAIN)
        assert await served.declare(replace(served.service, backends=(draining,)))
        reply = await served.get()
        assert (reply.status, reply.json["localEndpoints"]) == (503, 0)
        assert reply.headers["x-load-balancing-endpoint-weight"] == "0"

    run_story(story)


def test_every_path_by_get_and_head_and_nothing_else() -> None:
    async def story(served: ServedHealthPorts) -> None:
        await served.declare(served.service)
        assert [(await served.get(path)).status for path in ("/healthz", "/a/b?c=d")] == [200, 200]
        head = await served.get("/", "HEAD")
        assert (head.status, head.body) == (200, b"")
        assert head.headers["x-load-balancing-endpoint-weight"] == "2"
        assert (await served.get("/", "DELETE")).status == 405

    run_story(story)


def test_503_while_vipd_fails_and_200_when_it_works_again() -> None:
    async def story(served: ServedHealthPorts) -> None:
        await served.declare(served.service)
        served.isolated.dataplane.failures = [broken_tool() for _ in range(1000)]
        new = replace(served.service, name="new", health_port=None, addresses=("10.96.0.99",))
        assert not await served.declare(served.service, new)
        reply = await served.get()
        assert (reply.status, reply.json["serviceProxyHealthy"]) == (503, False)
        assert reply.json["localEndpoints"] == 2
        served.isolated.dataplane.failures.clear()
        await served.isolated.fulfilled(served.isolated.reconciler.request_sync())
        assert (await served.get()).status == 200

    run_story(story)


def test_503_for_a_quarantined_service_alone() -> None:
    async def story(served: ServedHealthPorts) -> None:
        other = replace(served.service, name="dns", addresses=("10.96.0.11",), health_port=served.other_port)
        await served.declare(served.service, other)
        served.isolated.reconciler.progress.quarantined = {"shop/web": "no such match"}
        reply = await served.get()
        assert (reply.status, reply.json["serviceProxyHealthy"]) == (503, False)
        assert (await ask(ListenAddress("127.0.0.1", served.other_port))).status == 200

    run_story(story)


def test_ports_follow_the_services() -> None:
    async def story(served: ServedHealthPorts) -> None:
        await served.declare(served.service)
        assert (await served.get()).status == 200
        await served.declare(replace(served.service, health_port=served.other_port))
        assert await refused(ListenAddress("127.0.0.1", served.port))
        assert (await ask(ListenAddress("127.0.0.1", served.other_port))).status == 200
        await served.declare()
        assert await refused(ListenAddress("127.0.0.1", served.other_port))

    run_story(story)


def test_all_addresses_of_both_families_unless_some_are_named() -> None:
    async def story(served: ServedHealthPorts) -> None:
        served.named = {Family.IPV4: None, Family.IPV6: None}
        await served.declare(served.service)
        assert (await served.get()).status == 200
        assert (await served.get(address="127.0.0.2")).status == 200
        assert (await served.get(address="::1")).status == 200
        served.named = {Family.IPV4: ("127.0.0.2",), Family.IPV6: ()}
        await served.declare(served.service)
        assert await refused(ListenAddress("127.0.0.1", served.port))
        assert await refused(ListenAddress("::1", served.port))
        assert (await served.get(address="127.0.0.2")).status == 200

    run_story(story)


def test_a_busy_health_port_stops_nothing() -> None:
    async def story(served: ServedHealthPorts) -> None:
        with closing(taken(ListenAddress("127.0.0.1", served.port))):
            assert await served.declare(served.service)
            (warning,) = served.ports.listeners.warnings
            assert "the health port of shop/web" in warning
            assert served.isolated.names() == {"shop/web"}

    run_story(story)


def test_a_link_local_address_is_left_out() -> None:
    async def story(served: ServedHealthPorts) -> None:
        served.named[Family.IPV6] = ("::1", "fe80::1")
        await served.declare(served.service)
        assert {place.address for place in served.ports.listeners.open} == {"127.0.0.1", "::1"}
        assert served.ports.listeners.warnings == ()

    run_story(story)
