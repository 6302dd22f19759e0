"""Keys and values that vipd writes are those that it reads, and orders end by this host's clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.lab.recording_observer import RecordingObserver
from tests.model.samples import service
from vipd.daemon import wiring
from vipd.declaration.native import parse_declaration
from vipd.declaration.syntax import parse_backend
from vipd.host.process import ProgramResult
from vipd.host.settings.settings import load_settings
from vipd.model.backend_status import AdminState, BackendStatuses
from vipd.model.override import Override, OverrideTarget, to_json
from vipd.model.service import Service
from vipd.sources.etcd.fleet_keys import (
    UnwritableError,
    keys_of_targets,
    override_key,
    override_value,
    read_overrides,
    registration,
    service_value,
)
from vipd.sources.etcd.fleet_overrides import FleetOverrides
from vipd.sources.etcd.heartbeat import read_report
from vipd.sources.etcd.values import Layout, read_registration, read_service_value

LAYOUT = Layout("/vipd/v1/")
NOW = datetime(2026, 1, 1, tzinfo=UTC)
DRAIN = Override(
    OverrideTarget("shop/web", "[fd00::1]:80"), "root on h1", NOW, AdminState.DRAINING, reason="kernel"
)
RICH = """apiVersion: vipd/v1
services:
  - name: shop/web
    address: [10.96.0.10, "fd00:96::10"]
    ports: [{name: http, port: 80, target: 8080}, 443/tcp]
    backends: [10.244.0.5, {address: 10.244.2.21, weight: 2}, "fd00:244::5"]
    affinity: {by: client-ip, timeout: 3h}
    check: {type: http, path: /healthz, interval: 2s}
    fallback: {backends: [10.244.9.9]}
"""


def rich() -> Service:
    return parse_declaration(RICH, "file.yaml").services[0]


def test_a_service_comes_back_as_it_was_written() -> None:
    value = service_value(LAYOUT, rich())
    found = read_service_value("/vipd/v1/services/shop/web", "shop/web", value)
    assert found.services == (rich(),)
    assert "name: shop" not in value


@pytest.mark.parametrize("name", ["10.96.0.10:53/udp", "a/b/c"])
def test_a_service_needs_a_name_that_a_key_can_have(name: str) -> None:
    with pytest.raises(UnwritableError):
        service_value(LAYOUT, replace(rich(), name=name))


def test_a_registration_is_read_as_it_was_written() -> None:
    for text in ("10.244.0.5", "[fd00::5]:53@7", "10.244.0.5:80@0"):
        backend = parse_backend(text)
        key, value = registration(LAYOUT, "shop/web", backend)
        assert read_registration(key, key.removeprefix(LAYOUT.backends), value) == ("shop/web", backend)
    with pytest.raises(UnwritableError):
        registration(LAYOUT, "", parse_backend("10.244.0.5"))


def test_a_registration_names_no_file_of_this_host() -> None:
    key, rest = f"{LAYOUT.backends}shop/10.0.0.1:443", "shop/10.0.0.1:443"
    assert isinstance(read_registration(key, rest, "check: https"), tuple)
    refused = read_registration(key, rest, "check: {type: https, ca: /etc/shadow}")
    assert not isinstance(refused, tuple)
    assert "ca names a file of this host" in str(refused.problems[0])


def test_orders_are_read_by_their_value_and_found_by_what_they_are_about() -> None:
    key = override_key(LAYOUT, DRAIN.target).removeprefix(LAYOUT.overrides)
    values = {
        key: override_value(DRAIN),
        "by/hand": override_value(DRAIN),
        "broken": "{",
        "odd": json.dumps({"x": 1}),
    }
    orders, faults = read_overrides(values)
    assert orders == DRAIN.parts()
    assert [fault.partition(" in etcd")[0] for fault in faults] == ["order broken", "order odd"]
    assert keys_of_targets(LAYOUT, values, {DRAIN.target}) == [
        f"{LAYOUT.overrides}{k}" for k in ("by/hand", key)
    ]


def test_an_order_ends_by_this_hosts_clock_though_its_key_is_still_there() -> None:
    now, values = NOW, {"x": override_value(replace(DRAIN, until=NOW + timedelta(seconds=5)))}
    observer = RecordingObserver()
    orders = FleetOverrides(lambda: values, lambda: now, observer)
    orders.refresh()
    assert set(orders.overrides) == set(DRAIN.parts())
    assert orders.next_expiry() == NOW + timedelta(seconds=5)
    orders.refresh()
    assert observer.overrides == [{DRAIN.target}], "nothing is different the second time"
    now = NOW + timedelta(seconds=5)
    orders.expire_due()
    assert orders.overrides == {}
    assert orders.next_expiry() is None
    assert observer.overrides == [{DRAIN.target}] * 2
    values = {}
    orders.refresh()
    assert observer.overrides == [{DRAIN.target}] * 2


def test_a_single_step_obeys_an_order_that_etcd_has_just_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vipd --once` runs no loop that ends overrides."""

    async def no_programs(argv: Sequence[str], stdin: str) -> ProgramResult:
        raise FileNotFoundError(argv[0])

    monkeypatch.setattr(wiring, "rule_programs", lambda *_: no_programs)
    etcd, directory = {"endpoints": ["http://127.0.0.1:1"]}, str(tmp_path)
    settings = load_settings(
        flags={"etcd": etcd, "state_dir": directory, "services_dir": directory, "dataplane": "iptables"}
    )

    async def story() -> BackendStatuses:
        parts = await wiring.wire(settings)
        web = service("shop/web", "10.96.0.10", "", 1, "10.244.0.5")
        parts.status_tracker.follow({web.name: web})
        order = replace(DRAIN, target=OverrideTarget(web.name, "10.244.0.5"))
        assert parts.fleet is not None
        parts.fleet.overrides._values = lambda: {"x": override_value(order)}
        parts.fleet.overrides.refresh()
        assert parts.status_tracker.take_dirty() == {web.name}
        await parts.fleet.close()
        return parts.status_tracker.backend_statuses(web)

    assert [status.admin for status in asyncio.run(story()).values()] == [AdminState.DRAINING]


def test_a_malformed_order_is_left_out_alone_and_its_texts_can_be_printed() -> None:
    bad = {
        "a": "[" * 50_000,
        "b\udcff": "null",
        "c": '{"backend": []}',
        "d": '{"backend": "10.0.0.1", "at": "0001-01-01T00:00:00+23:59", "admin": {}}',
    }
    evil = to_json(replace(DRAIN, reason="\x1b[2J\n\u202e", by="x" * 5000))
    bad["f"] = json.dumps({**evil, "reason": "\ud800"})
    orders, faults = read_overrides({**bad, "e": json.dumps(evil)})
    ((key, order),) = orders.items()
    assert key.target == DRAIN.target
    assert order.reason == r"\x1b[2J\n\u202e"
    assert len(order.by) == 1000
    assert len(faults) == 5
    assert all(fault.isprintable() for fault in faults)
    _, many = read_overrides({str(number): "x" for number in range(1000)})
    assert len(many) == 11
    assert "990 more" in many[-1]


@pytest.mark.parametrize("reason", ["\x1b[2J", "x" * 1001, "\ud800"])
def test_an_order_that_would_read_back_as_another_is_not_written(reason: str) -> None:
    with pytest.raises(UnwritableError):
        override_value(replace(DRAIN, reason=reason))


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 50_000,
        b'{"revision": "x"}',
        b'{"version": "\\u001b"}',
        b'{"services": []}',
    ],
)
def test_a_malformed_report_of_a_host_is_a_fault_of_that_host(value: bytes) -> None:
    found, fault = read_report(value)
    assert found == {"version": "", "revision": 0, "services": 0, "problems": 0}
    assert "cannot be read" in fault
    good = b'{"version": "0.1.0", "revision": 7, "services": 2, "problems": 1, "later": 1}'
    assert read_report(good) == ({"version": "0.1.0", "revision": 7, "services": 2, "problems": 1}, "")
