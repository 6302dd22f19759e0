from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.api.serving import Api, served
from tests.model.samples import declared, service
from tests.observe.page.examples import web
from vipd.control.selection import HostIdentity, SelectionPolicy, select_backends
from vipd.control.service_status import RefusedUnit
from vipd.declaration.unit import Unit
from vipd.model.formatting import time_text
from vipd.model.service import Backend, Family, Masquerade, TrafficDistribution, TrafficPolicy
from vipd.observe.endpoint_views import waiting_by_address
from vipd.observe.views import NOTES_SHOWN, PANICS_SHOWN

BASE: dict[str, object] = {"name": "dns", "address": "10.96.0.10", "ports": ["53/udp"]}


def view_of(spec: dict[str, object]) -> dict[str, Any]:
    """The ServiceView of a service that was added."""
    views: list[dict[str, Any]] = []

    async def story(api: Api) -> None:
        assert (await api.add({**BASE, **spec})).status == 200
        views.append((await api.ask("GET", "/v1/services/dns")).body["service"])

    served(story)
    return views[0]


def test_times_are_rfc_3339_in_utc() -> None:
    assert time_text(datetime(2026, 1, 2, 3, 4, 5, 999, tzinfo=UTC)) == "2026-01-02T03:04:05Z"
    assert time_text(None) is None


def test_a_service_shows_who_owns_it_and_how_flows_are_shared() -> None:
    view = view_of({"backends": ["10.244.0.5", {"address": "10.244.2.21", "weight": 2}]})
    assert (view["name"], view["owner"], view["origin"]["source"]) == ("dns", "cli", "cli")
    unchecked = {"state": "unchecked", "message": "2 unchecked", "unchecked": 2}
    assert view["status"] == unchecked | {"ready": 2, "backends": 2, "ignored": []}
    (forwarding,) = view["forwardings"]
    assert forwarding["frontends"] == ["10.96.0.10:53/udp"]
    assert (forwarding["protocol"], forwarding["family"]) == ("udp", "ipv4")
    assert forwarding["masquerade"] == "forwarded"
    assert forwarding["affinity_seconds"] is None
    assert forwarding["chain"] == "SVC-dns"
    first, second = forwarding["endpoints"]
    assert first["endpoint"] == "10.244.0.5:53"
    assert first["share"] == pytest.approx(1 / 3, abs=1e-4)
    assert second["share"] == pytest.approx(2 / 3, abs=1e-4)
    assert (second["weight"], second["ready"], second["reason"]) == (2, True, "")
    assert second["chain"] == "SEP-10.244.2.21:53"


def test_the_owner_of_a_files_service_is_the_file() -> None:
    async def story(api: Api) -> None:
        (view,) = (await api.ask("GET", "/v1/services")).body["services"]
        path = str(api.services_dir / "a.yaml")
        assert view["owner"] == f"file:{path}"
        assert view["origin"] == {"source": "file", "path": path, "line": 3}

    served(story, lambda api: api.declare("a.yaml", "  - {address: 10.96.0.10, ports: [53]}\n"))


def test_a_backend_of_weight_zero_is_not_ready_and_says_why() -> None:
    view = view_of({"backends": ["10.244.0.5", {"address": "10.244.0.6", "weight": 0}]})
    assert (view["status"]["ready"], view["status"]["backends"]) == (1, 2)
    ready = {e["address"]: (e["ready"], e["reason"], e["share"]) for e in view["forwardings"][0]["endpoints"]}
    assert ready == {"10.244.0.5": (True, "", 1.0), "10.244.0.6": (False, "weight 0", 0.0)}


def test_services_without_a_healthy_backend_are_told_and_not_each_of_a_great_many() -> None:
    def spec(number: int, fallback: str) -> dict[str, object]:
        check = {"type": "tcp", "start": "unhealthy"}
        place = {"name": f"s{number}", "address": f"10.96.1.{number}", "ports": ["80/tcp"]}
        return {**place, "backends": ["10.244.0.5"], "check": check, "fallback": fallback}

    async def story(api: Api) -> None:
        specs = [spec(number, "keep" if number else "reject") for number in range(PANICS_SHOWN + 3)]
        assert (await api.ask("POST", "/v1/apply", {"services": specs[:2]})).status == 200
        (warning,) = (await api.ask("GET", "/v1/status")).body["warnings"]
        assert warning.startswith("service s1: no backend is healthy, so that all of them serve")
        assert (await api.ask("POST", "/v1/apply", {"services": specs})).status == 200
        (warning,) = (await api.ask("GET", "/v1/status")).body["warnings"]
        named = ", ".join(f"s{number}" for number in range(1, PANICS_SHOWN + 1))
        assert warning.startswith(f"services {named} and 2 more: no backend is healthy, so that all of them")

    served(story)


def test_a_service_whose_backends_all_have_weight_zero_says_that() -> None:
    view = view_of({"backends": [{"address": "10.244.0.6", "weight": 0}]})
    assert view["status"]["state"] == "no-backends"
    assert view["forwardings"][0]["endpoints"][0]["reason"] == "weight 0"


def test_a_service_without_backends_says_which_flows_are_refused() -> None:
    view = view_of({})
    assert view["status"]["state"] == "no-backends"
    assert "10.96.0.10:53/udp" in view["status"]["message"]
    assert view["forwardings"][0]["endpoints"] == []


def test_a_fallback_at_rest_is_not_said_to_have_weight_zero() -> None:
    view = view_of({"backends": ["10.244.0.5"], "fallback": {"backends": ["10.244.9.9"]}})
    (spare,) = [e for e in view["forwardings"][0]["endpoints"] if e["address"] == "10.244.9.9"]
    assert not spare["ready"]
    assert spare["weight"] == 1
    assert spare["reason"] == "fallback, waiting"


def test_a_backup_at_rest_is_said_to_wait() -> None:
    view = view_of({"backends": ["10.244.0.5", {"address": "10.244.0.6", "backup": True}]})
    reasons = {e["address"]: e["reason"] for e in view["forwardings"][0]["endpoints"]}
    assert reasons == {"10.244.0.5": "", "10.244.0.6": "backup, waiting"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "for another zone: east"),
        (
            {"traffic_distribution": TrafficDistribution.PREFER_SAME_NODE},
            "others are nearer, prefer-same-node",
        ),
        ({"internal_policy": TrafficPolicy.LOCAL}, "on another host, traffic policy local"),
    ],
    ids=["zone", "node", "local"],
)
def test_a_backend_that_the_traffic_policy_leaves_out_says_that(
    changes: dict[str, Any], expected: str
) -> None:
    near = Backend("10.244.0.5", zones=("west",), node="here")
    made = replace(
        service("dns", "10.96.0.10"),
        backends=(near, Backend("10.244.0.6", zones=("east",), node="there")),
        **changes,
    )
    host = HostIdentity(node_name="here", zone="west")
    (forwarding,) = select_backends(made, SelectionPolicy(dict.fromkeys(Family, Masquerade.ALWAYS), host))
    assert [each.address for each in forwarding.without_new_flows] == ["10.244.0.6"]
    assert waiting_by_address(made, forwarding)["10.244.0.6", 53] == expected


def test_a_draining_backend_says_that_it_was_declared() -> None:
    draining = {"address": "10.244.0.6", "state": "drain"}
    (forwarding,) = view_of({"backends": ["10.244.0.5", draining]})["forwardings"]
    assert [each["reason"] for each in forwarding["endpoints"]] == ["", "declared drain"]


def test_a_serving_fallback_does_not_count_as_a_ready_backend() -> None:
    spec: dict[str, object] = {
        "backends": [{"address": "10.244.0.5", "weight": 0}],
        "fallback": {"backends": ["10.244.9.9"]},
    }
    view = view_of(spec)
    assert (view["status"]["state"], view["status"]["ready"]) == ("ok", 0)
    spare = next(e for e in view["forwardings"][0]["endpoints"] if e["address"] == "10.244.9.9")
    assert spare["ready"]


def blocks(*names: str) -> str:
    return "".join(
        f"  - {{name: {name}, address: 10.96.{n}.10, ports: [53], backends: [10.244.0.5]}}\n"
        for n, name in enumerate(names)
    )


def headless(number: int) -> str:
    spec = "{clusterIP: None, ports: [{port: 80}]}"
    return f"apiVersion: v1\nkind: Service\nmetadata: {{name: s{number}}}\nspec: {spec}\n"


def test_the_status_has_what_declarations_leave_out() -> None:
    async def story(api: Api) -> None:
        for number, expected in ((1, 1), (NOTES_SHOWN, NOTES_SHOWN), (NOTES_SHOWN + 2, NOTES_SHOWN + 1)):
            file = api.services_dir / "k.yaml"
            file.write_text("---\n".join(map(headless, range(number))))
            await api.ask("POST", "/v1/reload")
            files, store = (await api.ask("GET", "/v1/status")).body["sources"]
            assert (len(files["notes"]), store["notes"], files["problems"]) == (expected, [], [])
            assert files["notes"][0].startswith(f"{file}:1: note: ")
            assert "headless" in files["notes"][0]
        assert files["notes"][-1].startswith("and 2 more notes; hint: ")

    served(story)


def test_each_problem_says_what_of_its_unit_serves() -> None:
    async def story(api: Api) -> None:
        async def refused() -> dict[str, str]:
            await api.ask("POST", "/v1/reload")
            sources = (await api.ask("GET", "/v1/status")).body["sources"]
            found = [unit for source in sources for unit in source["refused"]]
            assert [p for unit in found for p in unit["problems"]] == [
                p for source in sources for p in source["problems"]
            ]
            return {unit["unit"].rpartition("/")[2]: unit["serves"] for unit in found}

        assert await refused() == {}
        api.declare("a.yaml", blocks("a", "b") + "  - {address: 10.96.0.300}\n")
        api.declare("b.yaml", "  - {address: 10.96.0.300}\n")
        assert await refused() == {
            "a.yaml": "the last good version of the file serves on",
            "b.yaml": "nothing of the file serves",
        }

    served(story, lambda api: api.declare("a.yaml", blocks("a", "b")))


@pytest.mark.parametrize(
    ("serving", "words"),
    [
        (0, "nothing of the file serves"),
        (2, "2 of 3 services of the file serve"),
        (3, "the last good version of the file serves on"),
    ],
)
def test_what_serves_of_a_unit_whose_accepted_version_is_cut_down(serving: int, words: str) -> None:
    whole = declared(web(1), web(2), web(3))
    assert RefusedUnit("file:/a.yaml", Unit(whole, whole), serving).serves == words
    assert RefusedUnit("etcd:/x", Unit(whole, whole), 0).serves == "nothing of the key serves"
    assert RefusedUnit("cli", Unit(whole, whole), 0).serves == "nothing of the store serves"
