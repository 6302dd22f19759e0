"""What `/metrics` says: each number, the form that Prometheus accepts, and nothing that is not known."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, rows
from tests.faults.instrumented import standstills
from tests.lab.inside import Vipd, running
from tests.model.samples import HEAD, many_declared
from tests.observe.asking import Series, names, value
from tests.observe.watching import QUICK, block, scrape, until_scrape
from vipd.model.durations import WRITE_BOUNDS, DurationHistogram

PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=str(Path(sys.executable).parent))
NO_PROMTOOL = "no promtool here; hint: bash tests/observe/metrics/prepare.sh"

CHECKOUT = block(
    "shop/checkout", 1, *(f"{{address: 10.244.{n}.17, weight: {1 + (n == 3)}}}" for n in range(1, 6))
)
SEARCH = block("shop/search", 2, "10.244.1.18", "10.244.2.18", more=f"check: {QUICK}")
CACHE = block("shop/cache", 3, "10.244.4.40", "{address: 10.244.9.9, state: down}")
ANNOUNCED = block("edge", 4, "10.244.4.41", more="announce: {by: routes, addresses: all}").replace(
    "10.96.0.4", "203.0.113.10"
)
NAMED = block("named", 5, "'dns:gone.internal'", "'dns:there.internal'", "10.244.4.42")
ALL = (CHECKOUT, SEARCH, CACHE, ANNOUNCED, NAMED)


def backend(service: str, address: str) -> dict[str, str]:
    return {"service": service, "backend": f"{address}:80", "protocol": "tcp"}


def documented() -> dict[str, tuple[str, set[str]]]:
    """Kind and labels of each metric, as the page has them."""
    return {
        name: (kind, set(re.findall(r"`(\w+)`", labels)))
        for cell, kind, labels, *_ in rows(ROOT / "docs" / "operations.md", "Metrics")
        for name in re.findall(r"`(vipd_\w+)`", cell)
    }


def families(text: str) -> dict[str, tuple[str, str]]:
    """Kind and meaning of each metric of vipd, as a scrape has them."""
    kinds = dict(re.findall(r"(?m)^# TYPE (vipd_\w+) (\w+)$", text))
    return {n: (kinds[n], meaning) for n, meaning in re.findall(r"(?m)^# HELP (vipd_\w+) (.*)$", text)}


async def text_of(vipd: Vipd) -> bytes:
    async with vipd.session.get("http://vipd/metrics") as reply:
        return await reply.read()


def prepared(vipd: Vipd) -> None:
    """What is wrong: a backend, a name."""
    vipd.settings["announce_addresses"] = ["203.0.113.0/24"]
    vipd.declare(*ALL)
    vipd.backends["10.244.2.18"] = "connection refused"
    vipd.names["dns:there.internal"] = ["10.244.4.43"]


async def counted(vipd: Vipd, service: str, flows: dict[str, int], total: int) -> Series:
    """What is scraped once new flows to backends of a service are counted."""
    vipd.kernel.new_flows = {(service, address): number for address, number in flows.items()}
    return await until_scrape(
        vipd, lambda series: value(series, "vipd_service_new_flows_total", service=service) == total
    )


FLOWS = {"10.244.1.17:80": 5, "10.244.2.17:80": 4, "10.244.3.17:80": 3}


def test_every_number_is_right() -> None:
    async def story(vipd: Vipd) -> None:
        order = {"service": "shop/checkout", "backend": "10.244.2.17", "admin": "draining"}
        assert (await vipd.ask("POST", "/v1/overrides", order)).status == 200
        await vipd.until_status(
            lambda status: status["serving"]["unhealthy"] and status["state"] == "in-sync"
        )
        series = await counted(vipd, "shop/checkout", FLOWS, 12)
        wanted: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {
            (name, tuple(labels.items())): number
            for name, labels, number in (
                ("vipd_services", {}, 5),
                ("vipd_in_sync", {}, 1),
                ("vipd_healthy", {}, 1),
                ("vipd_services_by_state", {"state": "degraded"}, 2),
                ("vipd_address_announced", {"address": "203.0.113.10", "by": "routes"}, 1),
                ("vipd_address_kept", {"address": "203.0.113.10", "by": "routes"}, 0),
                ("vipd_host_maintenance", {}, 0),
                ("vipd_task_failing", {"task": "counting flows"}, 0),
                ("vipd_task_failures_total", {"task": "counting flows"}, 0),
                ("vipd_names", {}, 2),
                ("vipd_names_failing", {}, 1),
                ("vipd_service_backends", {"service": "shop/checkout"}, 5),
                ("vipd_service_ready_backends", {"service": "shop/checkout"}, 4),
                ("vipd_service_new_flows_total", {"service": "shop/checkout"}, 12),
                ("vipd_backend_new_flows_total", backend("shop/checkout", "10.244.1.17"), 5),
                ("vipd_backend_weight", backend("shop/checkout", "10.244.3.17"), 2),
                ("vipd_backend_weight", backend("shop/checkout", "10.244.2.17"), 0),
                ("vipd_backend_admin_state", backend("shop/checkout", "10.244.2.17"), 1),
                ("vipd_backend_admin_state", backend("shop/checkout", "10.244.1.17"), 0),
                ("vipd_backend_up", backend("shop/search", "10.244.1.18"), 1),
                ("vipd_backend_up", backend("shop/search", "10.244.2.18"), 0),
                ("vipd_backend_up", backend("shop/cache", "10.244.9.9"), 0),
                ("vipd_source_problems", {"source": "files"}, 0),
                ("vipd_events_total", {"event": "override-given"}, 1),
                ("vipd_events_total", {"event": "rules-repaired"}, 0),
            )
        }
        seen = {(n, labels): series.get((n, frozenset(labels))) for n, labels in wanted}
        assert {key: number for key, number in seen.items() if number != wanted[key]} == {}
        up = ("vipd_backend_up", frozenset(backend("shop/checkout", "10.244.1.17").items()))
        assert up not in series, "nobody has checked it"
        count = value(series, "vipd_check_duration_seconds_count", type="tcp")
        assert count >= 2
        assert value(series, "vipd_check_duration_seconds_bucket", type="tcp", le="+Inf") == count
        assert (await vipd.ask("POST", "/v1/maintenance", {"reason": "x"})).status == 200
        assert value(await scrape(vipd), "vipd_host_maintenance") == 1

    running(story, prepared)


def test_each_metric_is_in_the_table_of_the_page_with_its_kind_and_labels() -> None:
    async def story(vipd: Vipd) -> None:
        text = (await text_of(vipd)).decode()
        series = await scrape(vipd)
        wanted, shown = documented(), families(text)
        not_here = {
            *("vipd_store_connected", "vipd_notifications_total"),
            *(name for name in wanted if "_bytes" in name or "_packets" in name),
            *(
                "vipd_traffic_lost_flows_total",
                "vipd_service_flows",
                "vipd_backend_flows",
                "vipd_service_refused_flows_total",
            ),
        }
        "Without etcd, notify, the counting of traffic, and limits."
        assert {name: kind for name, (kind, _) in shown.items()} | {
            name: wanted[name][0] for name in not_here
        } == {name: kind for name, (kind, _) in wanted.items()}
        for name, labels in series:
            family = re.sub(r"_(bucket|count|sum)$", "", name) if name not in wanted else name
            if name.startswith("vipd_"):
                assert {label for label, _ in labels} - {"le"} == wanted[family][1], name
        for name, (kind, meaning) in shown.items():
            assert name.endswith("_total") == (kind == "counter"), name
            assert meaning.endswith("."), name

    running(story, prepared)


def test_bytes_in_a_name_are_bytes_in_the_meaning() -> None:
    for cell, _, _, meaning in rows(ROOT / "docs" / "operations.md", "Metrics"):
        name = cell.strip("`")
        assert ("Bytes" in meaning) == name.removesuffix("_total").endswith("_bytes"), name


def test_a_backend_behind_two_ports_is_one_series() -> None:
    ports = "{port: 80, target: 8080, name: http}, {port: 81, target: 8080, name: alt}"
    two = block("two", 1, "{address: 10.244.0.1, weight: 3}", ports=ports)

    async def story(vipd: Vipd) -> None:
        series = await counted(vipd, "two", {"10.244.0.1:8080": 4}, 8)  # of each port
        labels = {"service": "two", "backend": "10.244.0.1:8080", "protocol": "tcp"}
        assert value(series, "vipd_backend_new_flows_total", **labels) == 8
        assert value(series, "vipd_backend_weight", **labels) == 3

    running(story, lambda vipd: vipd.declare(two))


def test_counters_do_not_fall_when_backends_go_or_vipd_starts_again(tmp_path: Path) -> None:
    def counters(series: Series) -> dict[object, float]:
        return {key: number for key, number in series.items() if key[0].endswith("flows_total")}

    async def first(vipd: Vipd) -> Series:
        before = await counted(vipd, "shop/checkout", FLOWS, 12)
        vipd.declare(CHECKOUT.replace("{address: 10.244.1.17, weight: 1}, ", ""), *ALL[1:])
        await vipd.reload()
        after = await scrape(vipd)
        assert value(after, "vipd_service_new_flows_total", service="shop/checkout") == 12
        assert all(counters(after).get(key, number) >= number for key, number in counters(before).items())
        return after

    async def second(vipd: Vipd) -> Series:
        return await scrape(vipd)

    after = running(first, prepared, tmp_path)
    assert counters(running(second, root=tmp_path, announce_addresses=["203.0.113.0/24"])) == counters(after)


def test_any_path_can_be_a_label() -> None:
    async def story(vipd: Vipd) -> None:
        odd = vipd.services_dir / 'a "quoted" back\\slash.yaml'
        odd.write_text(HEAD + block("a/b", 1, "10.244.0.1"))
        await vipd.reload()
        assert value(await scrape(vipd), "vipd_service_backends", service="a/b") == 1

    running(story)


@pytest.mark.skipif(PROMTOOL is None, reason=NO_PROMTOOL)
def test_prometheus_finds_nothing_to_mend() -> None:
    text = running(text_of, prepared)
    argv = [str(PROMTOOL), "check", "metrics"]
    done = subprocess.run(argv, input=text, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_durations_are_counted_up_to_each_bound() -> None:
    durations = DurationHistogram(WRITE_BOUNDS)
    for seconds in (0.005, 0.01, 0.3, 99.0):
        durations.add(seconds)
    counts = dict(durations.cumulative())
    assert list(counts) == [*map(str, WRITE_BOUNDS), "+Inf"]
    assert [counts[bound] for bound in ("0.01", "0.25", "0.5", "60.0", "+Inf")] == [2, 2, 3, 3, 4]
    assert durations.total == 0.005 + 0.01 + 0.3 + 99.0


def test_only_writes_have_a_duration_and_only_good_steps_are_a_success() -> None:
    async def story(vipd: Vipd) -> None:
        async def seen() -> tuple[float, float]:
            series = await scrape(vipd)
            assert value(series, "vipd_apply_duration_seconds_bucket", le="+Inf") == value(
                series, "vipd_apply_duration_seconds_count"
            )
            return (
                value(series, "vipd_apply_duration_seconds_count"),
                value(series, "vipd_config_last_success_timestamp_seconds"),
            )

        writes, success = await seen()
        assert success > 0
        await asyncio.sleep(1)
        await vipd.reload()
        count, later = await seen()
        assert (count, later > success) == (writes, True), "nothing was written"
        vipd.declare(CHECKOUT, CACHE)
        await asyncio.sleep(1)
        await vipd.reload()
        count, success = await seen()
        assert (count, success > later) == (writes + 1, True)
        vipd.declare(CHECKOUT, CACHE.replace("ports", "prots"), name="broken.yaml")
        await asyncio.sleep(1)
        assert (await vipd.reload()).status != 200
        assert await seen() == (writes + 1, success), "a declaration has a problem"
        (vipd.services_dir / "broken.yaml").unlink()
        vipd.kernel.failures = 9 * [("iptables-restore", "broken")]
        vipd.declare(CHECKOUT)
        await asyncio.sleep(1)
        await vipd.reload()
        assert await seen() == (writes + 1, success), "the kernel does not take it"

    running(story, lambda vipd: vipd.declare(CHECKOUT), simulated=True)


def test_what_is_not_counted_is_absent_and_not_zero() -> None:
    async def story(vipd: Vipd) -> None:
        seen = names(await scrape(vipd))
        assert "vipd_service_new_flows_total" in seen
        assert not [name for name in seen if "bytes" in name and name.startswith("vipd_")]
        assert "vipd_store_connected" not in seen

    running(story, prepared)


def test_the_library_is_loaded_when_it_is_needed() -> None:
    argv = [sys.executable, "-X", "importtime", "-m", "vipd", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "vipd.host.settings" in done.stderr
    assert "prometheus_client" not in done.stderr


def test_many_services_do_not_hold_up_the_loop() -> None:
    async def story(vipd: Vipd) -> None:
        asyncio.current_task().set_name("client")  # type: ignore[union-attr]
        with standstills("client") as seen:
            for _ in range(3):
                assert len(await text_of(vipd)) > 1_000_000
        assert seen == []

    running(story, lambda vipd: vipd.declare(many_declared(5_000).partition("services:\n")[2]))
