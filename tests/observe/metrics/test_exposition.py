"""What a scrape says: each number, the form that Prometheus accepts, and nothing that is not known."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.observe.page.examples import DRAINED, UNHEALTHY, mixed
from tests.observe.page.watched import BackendStatusSource, Watched, watched
from vipd.control.announcements import AnnouncedAddress, AnnouncedKey, Announcements, Reason
from vipd.control.announcer import Announcer, Reconciled
from vipd.control.progress import Progress
from vipd.dataplane.conntrack.entries import Traffic
from vipd.dataplane.counting import BackendKey
from vipd.host.settings.settings import Settings
from vipd.host.supervisor import LoopState
from vipd.model.backend_status import BackendStatuses
from vipd.model.durations import CHECK_BOUNDS, DurationHistogram
from vipd.model.flow_limits import Limit
from vipd.model.maintenance import Maintenance
from vipd.model.service import AnnounceMethod, Backend, Protocol, Service, ServicePort
from vipd.observe.flow_stats.traffic import ConntrackTable, TrackedFlows
from vipd.observe.metrics.catalogue import METRIC_FAMILIES
from vipd.observe.metrics.event_counts import MetricCounters
from vipd.observe.metrics.exposition import render
from vipd.observe.metrics.flows import FlowReading, by_service
from vipd.observe.metrics.snapshot import MetricsSnapshot, take_snapshot

PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=str(Path(sys.executable).parent))
NO_PROMTOOL = "no promtool here; hint: bash tests/observe/metrics/prepare.sh"

TCP = Protocol.TCP

Series = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def read(text: bytes) -> Series:
    """Every sample by name and labels, as Prometheus' own library reads the text."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, frozenset(labels.items())]


def names(series: Series) -> set[str]:
    return {name for name, _ in series}


async def scraped(world: Watched, reading: FlowReading | None = None) -> Series:
    snapshot = await take_snapshot(world.reconciler, (world.source,), reading)
    checks = DurationHistogram(CHECK_BOUNDS)
    for seconds in (0.0005, 0.25):
        checks.add(seconds)
    tally = MetricCounters(
        world.reconciler, (world.source,), {"tcp": checks}, {"counting flows": LoopState(failures=3)}
    )
    tally.announcer = announcer()
    return read(render(snapshot, tally, "iptables", compressed=False))


def announced(series: Series) -> dict[str, float]:
    address = {"address": "203.0.113.10", "by": "routes"}
    return {
        **{name: value(series, f"vipd_address_{name}", **address) for name in ("announced", "kept")},
        "maintenance": value(series, "vipd_host_maintenance"),
    }


def announcer() -> Announcer:
    """One that announces an address though no backend can serve, on a host in maintenance."""
    maintenance = Maintenance("root", datetime.now(UTC))
    made = Announcer(Settings(), {}, Reconciled(Progress(), dict), lambda: maintenance)
    key = AnnouncedKey("203.0.113.10", AnnounceMethod.ROUTES)
    found = AnnouncedAddress(key, ("web",), True, Reason.LAST_HOST, datetime.now(UTC))
    made.state = Announcements({key: found})
    return made


SHOP = {"service": "shop/checkout"}


def reading_of(world: Watched, accounting: bool = True) -> FlowReading:
    """New flows to each backend of the first forwardings, and tracked ones."""
    world.flow("shop/checkout", 5, 4, 3)
    forwarding = world.reconciler.forwardings["shop/checkout"][0]
    first = forwarding.reachable()[0]
    place = BackendKey(forwarding.key, first.address, first.port)
    tracked = {place: TrackedFlows(7)}
    world.totals.add_ended({place: Traffic(1, 1000, 2, 2000)})
    table = ConntrackTable(4200, 262144, accounting)
    return FlowReading(
        datetime.now(UTC),
        world.totals,
        table,
        tracked,
        by_service(tracked),
        accounting,
        refused={"shop/checkout": {Limit.CONNECTIONS: 4}},
    )


def test_every_number_is_right_and_every_name_is_in_the_catalogue() -> None:
    async def story() -> None:
        async with watched(mixed()) as world:
            world.judges.stand("shop/checkout", "10.244.2.17:8443", DRAINED)
            world.judges.stand("shop/search", "10.244.2.18:9200", UNHEALTHY)
            await world.step()
            found = await scraped(world, reading_of(world))
            checkout = {"service": "shop/checkout", "protocol": "tcp"}
            assert (value(found, "vipd_services"), value(found, "vipd_in_sync")) == (len(mixed()), 1)
            assert announced(found) == {"announced": 1, "kept": 1, "maintenance": 1}
            assert value(found, "vipd_task_failures_total", task="counting flows") == 3
            assert value(found, "vipd_task_failing", task="counting flows") == 0
            assert value(found, "vipd_service_backends", **SHOP) == 5
            assert value(found, "vipd_service_refused_flows_total", limit="connections", **SHOP) == 4
            assert value(found, "vipd_service_ready_backends", service="shop/checkout") == 4
            assert value(found, "vipd_service_new_flows_total", service="shop/checkout") == 12
            assert value(found, "vipd_service_flows", service="shop/checkout") == 7
            for name, number in (
                ("received_packets", 1),
                ("received_bytes", 1000),
                ("sent_packets", 2),
                ("sent_bytes", 2000),
            ):
                assert value(found, f"vipd_service_{name}_total", service="shop/checkout") == number
            first = {"backend": "10.244.1.17:8443", **checkout}
            assert value(found, "vipd_backend_received_bytes_total", **first) == 1000
            assert value(found, "vipd_backend_sent_bytes_total", **first) == 2000
            assert value(found, "vipd_traffic_lost_flows_total") == 0
            assert value(found, "vipd_check_duration_seconds_count", type="tcp") == 2
            assert value(found, "vipd_check_duration_seconds_bucket", type="tcp", le="0.005") == 1
            assert value(found, "vipd_check_duration_seconds_sum", type="tcp") == 0.25 + 0.0005
            assert value(found, "vipd_backend_weight", backend="10.244.3.17:8443", **checkout) == 2
            drained = {"backend": "10.244.2.17:8443", **checkout}
            assert value(found, "vipd_backend_admin_state", **drained) == 1
            assert value(found, "vipd_backend_weight", **drained) == 0
            assert value(found, "vipd_backend_up", **drained) == 1
            assert value(found, "vipd_backend_new_flows_total", backend="10.244.1.17:8443", **checkout) == 5
            unhealthy = {"service": "shop/search", "protocol": "tcp", "backend": "10.244.2.18:9200"}
            assert value(found, "vipd_backend_up", **unhealthy) == 0
            down = {"service": "shop/cache", "protocol": "tcp", "backend": "10.244.9.9:6379"}
            assert value(found, "vipd_backend_up", **down) == 0
            assert value(found, "vipd_conntrack_max") == 262144
            known = {
                n.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for n in names(found)
            }
            of_vipd = {name for name in known if name.startswith("vipd_")}
            absent = {"vipd_store_connected", "vipd_notifications_total", "vipd_name_lookups_total"}
            assert of_vipd == set(METRIC_FAMILIES) - absent

    asyncio.run(story())


def test_what_is_not_counted_is_absent_and_not_zero() -> None:
    async def story() -> None:
        async with watched(mixed()) as world:
            assert not [
                name for name in names(await scraped(world)) if "flows" in name or "conntrack" in name
            ]
            unknown = FlowReading(
                datetime.now(UTC), world.totals, ConntrackTable(None, None, accounting=False)
            )
            found = names(await scraped(world, unknown))
            assert "vipd_service_new_flows_total" in found
            assert "vipd_service_flows" not in found
            assert "vipd_conntrack_max" not in found
            without = names(await scraped(world, reading_of(world, False)))
            assert not [name for name in without if "bytes" in name and name.startswith("vipd_")]
            assert "vipd_service_flows" in without

    asyncio.run(story())


def test_a_backend_behind_two_ports_is_one_series() -> None:
    two = Service(
        "two",
        ("10.96.0.1",),
        (ServicePort(80, TCP, "http", target=8080), ServicePort(81, TCP, "alt", target=8080)),
        (Backend("10.244.0.1", weight=3),),
    )

    async def story() -> None:
        async with watched([two]) as world:
            for forwarding in world.reconciler.forwardings["two"]:
                (endpoint,) = forwarding.reachable()
                world.totals.add({BackendKey(forwarding.key, endpoint.address, endpoint.port): 4})
            found = await scraped(world, await world.read_flows())
            where = {"service": "two", "backend": "10.244.0.1:8080", "protocol": "tcp"}
            assert value(found, "vipd_backend_new_flows_total", **where) == 8
            assert value(found, "vipd_backend_weight", **where) == 3

    asyncio.run(story())


def test_counters_do_not_fall_when_backends_go() -> None:
    async def story() -> None:
        async with watched(mixed()) as world:
            before = await scraped(world, reading_of(world))
            fewer = [s for s in mixed() if s.name != "shop/checkout"]
            (checkout,) = (s for s in mixed() if s.name == "shop/checkout")
            left = Service(checkout.name, checkout.addresses, checkout.ports, checkout.backends[1:])
            await world.declare([*fewer, left])
            after = await scraped(world, await world.read_flows())
            counted = "vipd_service_new_flows_total"
            assert value(after, counted, service="shop/checkout") == 12
            totals = {key for key in before if key[0].endswith("_total") and key in after}
            assert all(after[key] >= before[key] for key in totals)

    asyncio.run(story())


def test_any_name_can_be_a_label() -> None:
    async def story() -> None:
        async with watched([]) as world:
            snapshot = await take_snapshot(world.reconciler, (), None)
            odd = 'a "quoted" \\ back\nslash'
            snapshot.services.names.append(odd)
            snapshot.services.backends.append(1)
            snapshot.services.ready.append(1)
            text = render(snapshot, MetricCounters(world.reconciler, ()), "iptables", compressed=False)
            assert value(read(text), "vipd_service_backends", service=odd) == 1

    asyncio.run(story())


def test_compressed_is_the_same() -> None:
    async def story() -> None:
        async with watched(mixed()) as world:
            snapshot, tally = (
                await take_snapshot(world.reconciler, (), None),
                MetricCounters(world.reconciler, ()),
            )
            packed = gzip.decompress(render(snapshot, tally, "iptables", compressed=True))
            plain = render(snapshot, tally, "iptables", compressed=False)
            same = [line for line in plain.splitlines() if not line.startswith(b"process_")]
            assert [line for line in packed.splitlines() if not line.startswith(b"process_")] == same

    asyncio.run(story())


@pytest.mark.skipif(PROMTOOL is None, reason=NO_PROMTOOL)
def test_prometheus_finds_nothing_to_mend() -> None:
    async def story() -> bytes:
        async with watched(mixed()) as world:
            snapshot = await take_snapshot(world.reconciler, (world.source,), reading_of(world))
            tally = MetricCounters(world.reconciler, (), {"tcp": DurationHistogram(CHECK_BOUNDS)})
            return render(snapshot, tally, "iptables", compressed=False)

    assert PROMTOOL is not None
    text = asyncio.run(story())
    argv = [PROMTOOL, "check", "metrics"]
    done = subprocess.run(argv, input=text, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_names_tell_kind_and_unit() -> None:
    for name, family in METRIC_FAMILIES.items():
        assert name.endswith("_total") == (family.kind == "counter"), name
        assert family.meaning.endswith("."), name
        assert ("Bytes" in family.meaning) == name.removesuffix("_total").endswith("_bytes"), name


def test_the_loop_has_its_turns_while_much_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def slow(_: BackendStatusSource, __: Service) -> BackendStatuses:
        time.sleep(0.02)
        return {}

    async def story() -> MetricsSnapshot:
        async with watched(mixed()) as world:
            monkeypatch.setattr(BackendStatusSource, "backend_statuses", slow)
            counting = asyncio.create_task(count())
            await asyncio.sleep(0)
            snapshot = await take_snapshot(world.reconciler, (), None)
            counting.cancel()
            return snapshot

    assert len(asyncio.run(story()).services.names) == len(mixed())
    assert turns >= len(mixed()), "one turn after each slow service"


def test_the_library_is_loaded_when_it_is_needed() -> None:
    code = "import sys, vipd.daemon.daemon; sys.exit('prometheus_client' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
