"""Backends by DNS name in vipctl: what is sent, and what is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Vipctl
from tests.cli.documents import DNS, changed, one
from tests.cli.fake_daemon import FakeDaemon


@pytest.mark.parametrize(
    ("words", "backends"),
    [
        (["dns:web.internal"], [{"dns": "web.internal"}]),
        (["dns:Web.Internal.:8080@3"], [{"dns": "web.internal", "port": 8080, "weight": 3}]),
        (["srv:_http._tcp.web.internal", "10.0.0.1"], [{"srv": "_http._tcp.web.internal"}, "10.0.0.1"]),
        (["{dns: web.internal, zone: east}"], [{"dns": "web.internal", "zone": "east"}]),
        (["--backup", "dns:spare.internal:80"], [{"dns": "spare.internal", "port": 80, "backup": True}]),
    ],
)
def test_add_sends_names(vipctl: Vipctl, daemon: FakeDaemon, words: list[str], backends: list[Any]) -> None:
    daemon.answer("POST /v1/services", changed(("created", "10.96.0.10:80/tcp")))
    assert vipctl("add", "10.96.0.10:80", *words).code == 0
    assert daemon.last.body["service"]["backends"] == backends


def test_a_name_without_its_prefix_is_refused_with_what_to_type(vipctl: Vipctl) -> None:
    ended = vipctl("add", "10.96.0.10:80", "web.internal:8080")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.endswith("hint: for the addresses that DNS has for it write dns:web.internal:8080\n")


def test_names_are_removed_and_set_by_what_they_are_called(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("DELETE /v1/services/web/backends", changed(("changed", "web")))
    vipctl("remove-backend", "web", "dns:web.internal:80", "srv:_x._tcp.a.b")
    assert daemon.last.body == {"backends": ["dns:web.internal:80", "srv:_x._tcp.a.b"]}
    daemon.answer("PATCH /v1/services/web/backends/dns%3Aweb.internal%3A80", changed(("changed", "web")))
    vipctl("set", "web/dns:web.internal:80", "--weight", "5")
    assert daemon.last.body == {"weight": 5}


def test_a_name_gets_the_port_of_the_others_and_srv_none(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    listed = [{"dns": "web.internal", "port": 8080}, {"srv": "_x._tcp.a.b"}]
    view = {**DNS, "name": "web", "spec": {**DNS["spec"], "backends": listed}}
    daemon.answer("GET /v1/services/web", one(view))
    daemon.answer("POST /v1/services/web/backends", changed(("changed", "web")))
    vipctl("add-backend", "web", "dns:other.internal", "srv:_y._tcp.a.b")
    assert daemon.last.body == {"backends": [{"port": 8080, "dns": "other.internal"}, {"srv": "_y._tcp.a.b"}]}


def test_describe_shows_each_name_and_what_is_wrong_with_it(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    good = {
        "backend": "dns:web.internal:80",
        "fallback": False,
        "addresses": ["10.0.0.1", "10.0.0.2"],
        "held": ["10.0.0.2"],
        "left_out": 3,
        "answered": "2000-01-01T00:00:00Z",
        "ttl": 60.0,
        "next_seconds": 41.0,
        "fault": "",
    }
    bad = {
        **good,
        "backend": "srv:x",
        "fallback": True,
        "addresses": [],
        "held": [],
        "left_out": 0,
        "answered": None,
    }
    bad |= {"fault": "the name does not exist (NXDOMAIN)"}
    spec = {**DNS["spec"], "fallback": {"backends": ["10.0.0.9", {"dns": "x", "port": 1}, {"srv": "x"}]}}
    # The server of the contract looks up no names; tests/packets/test_names.py reads this view of a real one.
    daemon.answer_unlike_the_api("GET /v1/services/dns", one({**DNS, "spec": spec, "names": [good, bad]}))
    told = vipctl("describe", "dns").out
    assert "Names         dns:web.internal:80: 2 addresses, answered " in told
    assert "asked again in 41s" in told
    assert "not in the last answer, serving on: 10.0.0.2" in told
    assert "3 more are left out: dns_max_addresses" in told
    assert "srv:x, of the fallback: 0 addresses, asked again in 41s\n" in told
    assert "Fallback      10.0.0.9,dns:x:1,srv:x\n" in told
    assert "the name does not exist (NXDOMAIN)" in told


def test_render_says_that_it_looks_up_no_name(vipctl: Vipctl, tmp_path: Path) -> None:
    path = tmp_path / "web.yaml"
    path.write_text(
        "apiVersion: vipd/v1\nservices: [{address: 10.96.0.1, ports: 80/tcp, backends: [dns:a.internal]}]\n"
    )
    ended = vipctl("render", str(path), "--set", "host_addresses=[192.0.2.1]")
    assert (ended.code, ended.err) == (
        0,
        "vipctl: backends by name are left out: the daemon looks names up\n",
    )
    assert "10.96.0.1:80/tcp has no endpoints" in ended.out
