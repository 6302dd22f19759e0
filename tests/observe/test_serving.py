"""What status, page, healthz and metrics say of the services, beside what the kernel holds."""

from __future__ import annotations

import json

from tests.lab.inside import Vipd, running
from tests.observe.asking import names, value
from tests.observe.watching import QUICK, block, free_address, get, listening, scrape, state, until_state

DEAD, ALIVE = "10.244.0.5", "10.244.0.6"
CHECK = f"check: {QUICK}"
ON_HOST = [block(f"s{n:02}", n, f"'{DEAD}:{8000 + n}'", ALIVE, more=CHECK) for n in range(1, 11)]
TWELVE = [*ON_HOST, block("s11", 11, ALIVE, more=CHECK), block("s12", 12, ALIVE, more=CHECK)]
"""Ten of them have a backend on a host that will die; each at another port."""


async def screen(vipd: Vipd) -> list[str]:
    return (await vipd.vipctl("status")).stdout.splitlines()


def test_a_dead_host_is_one_line_with_its_services_and_the_kernel_is_in_sync() -> None:
    async def story(vipd: Vipd) -> None:
        status = await vipd.until_status(lambda status: status["serving"]["state"] == "ok")
        assert status["serving"] == {
            "state": "ok",
            "message": "",
            "services": {"ok": 12, "unchecked": 0, "degraded": 0, "no-backends": 0, "quarantined": 0},
            "unhealthy": [],
            "unhealthy_addresses": 0,
            "others": [],
        }
        vipd.backends[DEAD] = "connection refused"
        status = await vipd.until_status(
            lambda status: (status["serving"]["services"]["degraded"], status["state"]) == (10, "in-sync")
        )
        serving = status["serving"]
        assert (serving["state"], serving["message"]) == ("degraded", "10 degraded of 12 services")
        (host,) = serving["unhealthy"]
        assert (host["address"], host["services"]) == (DEAD, 10)
        assert sorted(host["names"]) == [f"s{number:02}" for number in range(1, 11)]
        assert serving["others"] == []
        assert len([line for line in await screen(vipd) if DEAD in line]) == 1
        await until_state(vipd, lambda document: document["daemon"]["serving"] == serving)
        del vipd.backends[DEAD]
        await vipd.until_status(lambda status: status["serving"]["state"] == "ok")

    running(story, lambda vipd: vipd.declare(*TWELVE), status_page=free_address())


def test_what_nobody_asked_is_unchecked_and_no_fault() -> None:
    async def story(vipd: Vipd) -> None:
        status = await vipd.status()
        assert (status["backends"], status["ready"], status["unchecked"]) == (22, 22, 22)
        assert status["serving"]["state"] == "unchecked"
        assert status["serving"]["message"] == "12 unchecked of 12 services"
        text = await screen(vipd)
        assert "Backends     22 of 22 ready, 22 unchecked" in text
        assert not [line for line in text if "healthy" in line or " ok" in line]
        services = (await state(vipd))["services"]
        endpoints = [e for s in services for f in s["forwardings"] for e in f["endpoints"]]
        assert {endpoint["health"] for endpoint in endpoints} == {"unchecked"}
        assert {service["state"] for service in services} == {"unchecked"}
        series = await scrape(vipd)
        assert "vipd_backend_up" not in names(series), "nothing is known of any"
        assert value(series, "vipd_services_by_state", state="unchecked") == 12
        first = {"service": "s11", "backend": f"{ALIVE}:80", "protocol": "tcp"}
        assert value(series, "vipd_backend_health", health="unchecked", **first) == 1

    unchecked = [text.replace(f", {CHECK}", "") for text in TWELVE]
    running(story, lambda vipd: vipd.declare(*unchecked), status_page=free_address())


def test_what_is_no_matter_of_a_check_is_told_by_its_services() -> None:
    declared = [
        block("s01", 1, f"{{address: {DEAD}, state: down}}", ALIVE),
        block("s02", 2, "10.244.0.7", more=CHECK),
        block("s03", 3),
        block("s04", 4, "10.244.0.8"),
        block("s05", 5, ALIVE),
    ]

    async def story(vipd: Vipd) -> None:
        vipd.backends["10.244.0.7"] = "connection refused"
        drain = {"service": "s04", "backend": "10.244.0.8", "admin": "draining"}
        assert (await vipd.ask("POST", "/v1/overrides", drain)).status == 200
        status = await vipd.until_status(lambda status: status["serving"]["services"]["no-backends"] == 3)
        serving = status["serving"]
        assert serving["services"] == {
            "ok": 0, "unchecked": 1, "degraded": 1, "no-backends": 3, "quarantined": 0
        }  # fmt: skip
        assert [host["names"] for host in serving["unhealthy"]] == [["s02"]]
        assert serving["others"] == [
            {"state": "degraded", "services": 1, "names": ["s01"]},
            {"state": "no-backends", "services": 2, "names": ["s03", "s04"]},
        ]
        vipd.kernel.refuses = lambda forwarding: "no module" if forwarding.key.service == "new" else ""
        vipd.declare(*declared[:1], block("new", 9, ALIVE))
        await vipd.reload()
        serving = (await vipd.status())["serving"]
        assert (serving["services"]["quarantined"], serving["unhealthy"]) == (1, [])

    running(story, lambda vipd: vipd.declare(*declared))


def test_names_and_addresses_are_bounded() -> None:
    """Twenty addresses, and ten services of each."""
    many = [block(f"s{n:02}", n, DEAD, f"10.245.0.{n}", more=CHECK) for n in range(1, 40)]

    async def story(vipd: Vipd) -> None:
        serving = (await vipd.until_status(lambda s: s["serving"]["unhealthy_addresses"] == 40))["serving"]
        assert len(serving["unhealthy"]) == 20
        first, *others = serving["unhealthy"]
        assert (first["address"], first["services"], len(first["names"])) == (DEAD, 39, 10)
        assert {other["services"] for other in others} == {1}
        (line,) = [line for line in await screen(vipd) if DEAD in line]
        assert " and 29 more)" in line

    def prepare(vipd: Vipd) -> None:
        vipd.declare(*many)
        vipd.backends |= dict.fromkeys([DEAD, *(f"10.245.0.{n}" for n in range(1, 40))], "refused")

    running(story, prepare)


def test_healthz_says_both_and_keeps_its_status() -> None:
    declared = [block("s01", 1, DEAD, more=CHECK), block("s02", 2, ALIVE)]

    async def story(vipd: Vipd) -> None:
        vipd.backends[DEAD] = "connection refused"
        await vipd.until_status(
            lambda status: status["serving"]["services"]["no-backends"] and status["state"] == "in-sync"
        )
        answer = await get(f"{await listening(vipd, 'health_address')}healthz")
        document = json.loads(answer.text)
        assert (answer.status, document["state"]) == (200, "in-sync")
        assert document["serving"] == {
            "state": "degraded",
            "message": "1 without backends, 1 unchecked of 2 services",
            "services": {"ok": 0, "unchecked": 1, "degraded": 0, "no-backends": 1, "quarantined": 0},
        }

    running(story, lambda vipd: vipd.declare(*declared), health_address=free_address())
