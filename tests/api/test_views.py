"""What the API shows of services, backends and declarations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab.inside import Vipd, running
from tests.lab.stories import story_of

PANICS_SHOWN = NOTES_SHOWN = 20


def views_of(*specs: dict[str, object], **settings: Any) -> list[dict[str, Any]]:
    """What is shown of services that were added."""

    async def story(vipd: Vipd) -> list[dict[str, Any]]:
        views = []
        for number, spec in enumerate(specs):
            base = {"name": f"s{number}", "address": f"10.96.0.{number + 10}", "ports": ["53/udp"]}
            assert (await vipd.add({**base, **spec})).status == 200
            views.append(await vipd.service(f"s{number}"))
        return views

    return running(story, **settings)


def test_a_service_shows_who_owns_it_and_how_flows_are_shared() -> None:
    (view,) = views_of({"backends": ["10.244.0.5", {"address": "10.244.2.21", "weight": 2}]})
    assert (view["name"], view["owner"], view["origin"]["source"]) == ("s0", "cli", "cli")
    unchecked = {"state": "unchecked", "message": "2 unchecked", "unchecked": 2}
    assert view["status"] == unchecked | {"ready": 2, "backends": 2, "ignored": []}
    (forwarding,) = view["forwardings"]
    assert forwarding["frontends"] == ["10.96.0.10:53/udp"]
    assert (forwarding["protocol"], forwarding["family"]) == ("udp", "ipv4")
    assert (forwarding["masquerade"], forwarding["affinity_seconds"]) == ("forwarded", None)
    assert forwarding["chain"] == "SVC-s0"
    first, second = forwarding["endpoints"]
    assert first["endpoint"] == "10.244.0.5:53"
    assert first["share"] == pytest.approx(1 / 3, abs=1e-4)
    assert second["share"] == pytest.approx(2 / 3, abs=1e-4)
    assert (second["weight"], second["ready"], second["reason"]) == (2, True, "")
    assert second["chain"] == "SEP-10.244.2.21:53"


@story_of(running, lambda vipd: vipd.declare("  - {address: 10.96.0.10, ports: [53]}\n"))
async def test_the_owner_of_a_files_service_is_the_file(vipd: Vipd) -> None:
    (view,) = (await vipd.ask("GET", "/v1/services")).body["services"]
    path = str(vipd.services_dir / "services.yaml")
    assert view["owner"] == f"file:{path}"
    assert view["origin"] == {"source": "file", "path": path, "line": 3}


SPARE = {"backends": ["10.244.9.9"]}
NEAR = {"address": "10.244.0.5", "zone": "west", "node": "host-a"}
FAR = {"address": "10.244.0.6", "zone": "east", "node": "there"}


def weightless(number: int) -> dict[str, object]:
    return {"address": f"10.244.0.{number}", "weight": 0}


Spec = dict[str, object]
REASONS: dict[str, tuple[Spec, str, int, dict[str, str]]] = {
    "one of weight zero": (
        {"backends": ["10.244.0.5", weightless(6)]},
        "unchecked",
        1,
        {"10.244.0.5": "", "10.244.0.6": "weight 0"},
    ),
    "all of weight zero": ({"backends": [weightless(6)]}, "no-backends", 0, {"10.244.0.6": "weight 0"}),
    "none": ({}, "no-backends", 0, {}),
    "a fallback that rests": (
        {"backends": ["10.244.0.5"], "fallback": SPARE},
        "unchecked",
        1,
        {"10.244.0.5": "", "10.244.9.9": "fallback, waiting"},
    ),
    "a fallback that serves is no ready backend": (
        {"backends": [weightless(5)], "fallback": SPARE},
        "ok",
        0,
        {"10.244.0.5": "weight 0", "10.244.9.9": ""},
    ),
    "a backup that rests": (
        {"backends": ["10.244.0.5", {"address": "10.244.0.6", "backup": True}]},
        "unchecked",
        1,
        {"10.244.0.5": "", "10.244.0.6": "backup, waiting"},
    ),
    "one that is declared to drain": (
        {"backends": ["10.244.0.5", {"address": "10.244.0.6", "state": "drain"}]},
        "unchecked",
        1,
        {"10.244.0.5": "", "10.244.0.6": "declared drain"},
    ),
    "one for another zone": (
        {"backends": [NEAR, FAR]},
        "unchecked",
        1,
        {"10.244.0.5": "", "10.244.0.6": "for another zone: east"},
    ),
    "one on another node": (
        {"backends": [NEAR, FAR], "traffic_distribution": "prefer-same-node"},
        "unchecked",
        1,
        {"10.244.0.5": "", "10.244.0.6": "others are nearer, prefer-same-node"},
    ),
    "one on another host": (
        {"backends": [NEAR, FAR], "traffic_policy": {"internal": "local"}},
        "unchecked",
        1,
        {"10.244.0.5": "", "10.244.0.6": "on another host, traffic policy local"},
    ),
}
"""Services, with their state, the number of ready backends, and why each of them gets no flows."""


def test_each_backend_says_why_it_gets_no_flows() -> None:
    views = views_of(*(spec for spec, *_ in REASONS.values()), zone="west")
    shown = {}
    for name, view in zip(REASONS, views, strict=True):
        endpoints = view["forwardings"][0]["endpoints"]
        reasons = {each["address"]: each["reason"] for each in endpoints}
        shown[name] = (view["status"]["state"], view["status"]["ready"], reasons)
        for each in endpoints:
            assert each["ready"] == (not each["reason"]) == (each["share"] > 0), name
    assert shown == {name: tuple(row) for name, (_, *row) in REASONS.items()}
    assert "10.96.0.12:53/udp" in views[2]["status"]["message"], "the flows that are refused"


def test_services_without_a_healthy_backend_are_told_and_not_each_of_a_great_many() -> None:
    def spec(number: int) -> dict[str, object]:
        place = {"name": f"s{number}", "address": f"10.96.1.{number}", "ports": ["80/tcp"]}
        check = {"type": "tcp", "start": "unhealthy"}
        fallback = "keep" if number else "reject"
        return {**place, "backends": ["10.244.0.5"], "check": check, "fallback": fallback}

    def unwell(vipd: Vipd) -> None:
        vipd.backends["10.244.0.5"] = "connection refused"

    async def story(vipd: Vipd) -> None:
        specs = [spec(number) for number in range(PANICS_SHOWN + 3)]
        named = ", ".join(f"s{number}" for number in range(1, PANICS_SHOWN + 1))
        for number, start in ((2, "service s1"), (len(specs), f"services {named} and 2 more")):
            assert (await vipd.ask("POST", "/v1/apply", {"services": specs[:number]})).status == 200
            (warning,) = (await vipd.status())["warnings"]
            assert warning.startswith(f"{start}: no backend is healthy, so that all of them")

    running(story, unwell)


def blocks(*numbers: int) -> str:
    return "".join(
        f"  - {{name: s{n}, address: 10.96.{n}.10, ports: [53], backends: [10.244.0.5]}}\n" for n in numbers
    )


def headless(number: int) -> str:
    spec = "{clusterIP: None, ports: [{port: 80}]}"
    return f"apiVersion: v1\nkind: Service\nmetadata: {{name: s{number}}}\nspec: {spec}\n"


@story_of(running)
async def test_the_status_has_what_declarations_leave_out(vipd: Vipd) -> None:
    for number, expected in ((1, 1), (NOTES_SHOWN, NOTES_SHOWN), (NOTES_SHOWN + 2, NOTES_SHOWN + 1)):
        file = vipd.services_dir / "k.yaml"
        file.write_text("---\n".join(map(headless, range(number))))
        await vipd.reload()
        files, store = (await vipd.status())["sources"]
        assert (len(files["notes"]), store["notes"], files["problems"]) == (expected, [], [])
        assert files["notes"][0].startswith(f"{file}:1: note: ")
        assert "headless" in files["notes"][0]
    assert files["notes"][-1].startswith("and 2 more notes; hint: ")


async def refused(vipd: Vipd) -> dict[str, str]:
    """What serves of each file that is refused."""
    await vipd.reload()
    sources = (await vipd.status())["sources"]
    units = [unit for source in sources for unit in source["refused"]]
    problems = [problem for unit in units for problem in unit["problems"]]
    assert problems == [problem for source in sources for problem in source["problems"]]
    return {unit["unit"].rpartition("/")[2]: unit["serves"] for unit in units}


def test_each_problem_says_what_of_its_file_serves(tmp_path: Path) -> None:
    bad = "  - {address: 10.96.0.300}\n"

    def prepare(vipd: Vipd) -> None:
        vipd.declare(blocks(1, 2), name="a.yaml")
        vipd.declare(blocks(3, 4, 5), name="c.yaml")

    async def story(vipd: Vipd) -> None:
        assert await refused(vipd) == {}
        vipd.declare(blocks(1, 2) + bad, name="a.yaml")
        vipd.declare(bad, name="b.yaml")
        assert await refused(vipd) == {
            "a.yaml": "the last good version of the file serves on",
            "b.yaml": "nothing of the file serves",
        }

    async def narrowed(vipd: Vipd) -> None:
        assert await refused(vipd) == {
            "a.yaml": "nothing of the file serves",
            "b.yaml": "nothing of the file serves",
            "c.yaml": "2 of 3 services of the file serve",
        }
        assert vipd.kernel.names() == {"s4", "s5"}

    running(story, prepare, root=tmp_path)
    running(narrowed, root=tmp_path, allowed_addresses=["10.96.4.0/23"])
