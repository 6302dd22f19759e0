from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from tests.api.specs import WEB
from tests.lab.held_ports import hold
from tests.lab.inside import Vipd, running, vipctl
from tests.lab.stories import story_of
from tests.model.samples import block
from vipd.model.forwarding import Forwarding

WELL = (200, "in-sync", "")


async def health(vipd: Vipd, path: str = "/healthz") -> tuple[int, str, str]:
    async with vipd.session.get(f"http://vipd{path}") as response:
        body = await response.json()
    return response.status, body["state"], body["message"].partition("; hint: ")[0]


def one_service(vipd: Vipd) -> None:
    vipd.declare(block("10.96.0.10", "dns", "10.244.0.5"))


@story_of(running, one_service, simulated=True)
async def test_vipd_is_well_while_nothing_is_to_be_done(vipd: Vipd) -> None:
    assert await health(vipd) == await health(vipd, "/livez") == WELL
    await asyncio.sleep(3600)
    assert await health(vipd) == WELL
    async with vipd.session.get("http://vipd/healthz") as response:
        body = await response.json()
    assert (body["lastUpdated"], body["currentTime"]) == ("2027-01-15T00:00:00Z", "2027-01-15T01:00:00Z")


def test_a_first_write_that_hangs_shows_after_a_minute() -> None:
    def hang(vipd: Vipd) -> None:
        one_service(vipd)
        vipd.kernel.gate.clear()

    async def story(vipd: Vipd) -> None:
        assert await health(vipd) == (200, "starting", "")
        await asyncio.sleep(1)
        unwell = (503, "starting", "no rules are in the kernel since the start after 61 s")
        assert await health(vipd) == await health(vipd, "/livez") == unwell
        vipd.kernel.gate.set()
        await vipd.until_status(lambda status: status["state"] == "in-sync")
        assert await health(vipd) == WELL

    running(story, hang, simulated=True)


@story_of(running, one_service, simulated=True)
async def test_a_change_that_hangs_shows_after_a_minute_though_others_follow(vipd: Vipd) -> None:
    await asyncio.sleep(1000)
    vipd.kernel.gate.clear()
    changes = []
    for number in range(4):
        spec = {**WEB, "name": f"w{number}", "address": f"10.96.1.{number}"}
        changes.append(asyncio.create_task(vipd.add(spec)))
        await asyncio.sleep(20)
        assert await health(vipd) == (200, "pending", "") or number == 3
    assert await health(vipd) == (503, "pending", "a change is not in the kernel after 80 s")
    vipd.kernel.gate.set()
    await asyncio.gather(*changes)
    assert await health(vipd) == WELL


@story_of(running, one_service, simulated=True)
async def test_the_age_is_that_of_the_oldest_change_that_waits(vipd: Vipd) -> None:
    def hold_the_next(_: Forwarding) -> str:
        vipd.kernel.gate.clear()
        return ""

    changes = []
    vipd.kernel.gate.clear()
    for number in (1, 2):
        spec = {**WEB, "name": f"w{number}", "address": f"10.96.1.{number}"}
        changes.append(asyncio.create_task(vipd.add(spec)))
        await asyncio.sleep(40)
    vipd.kernel.refuses = hold_the_next
    vipd.kernel.gate.set()
    await vipd.until(lambda: vipd.kernel.names() == {"dns", "w1"})
    await asyncio.sleep(15)
    assert await health(vipd) == (200, "pending", ""), "95 s after the first one"
    await asyncio.sleep(15)
    assert (await health(vipd))[0] == 503
    vipd.kernel.gate.set()
    await asyncio.gather(*changes)
    assert await health(vipd) == WELL


@story_of(running, one_service, simulated=True)
async def test_a_write_that_fails_shows_at_once_and_until_one_works(vipd: Vipd) -> None:
    vipd.kernel.failures = [("iptables-restore", "it said no")] * 100
    await vipd.add(WEB)
    for _ in range(3):
        status, state, message = await health(vipd)
        assert (status, state, "it said no" in message) == (503, "failed", True)
        await asyncio.sleep(50)
    vipd.kernel.failures.clear()
    await vipd.until_status(lambda status: status["state"] == "in-sync")
    assert await health(vipd) == WELL


@story_of(running, one_service)
async def test_a_refused_service_is_named_and_no_reason_to_restart_vipd(vipd: Vipd) -> None:
    vipd.kernel.refuses = lambda forwarding: "no such match" if forwarding.key.service != "dns" else ""
    await vipd.ask("POST", "/v1/apply", {"services": [WEB, {**WEB, "name": "api", "address": "10.96.0.12"}]})
    assert await health(vipd) == (200, "degraded", "quarantined: api, web")


def test_the_tcp_address_answers_health_and_nothing_else() -> None:
    with contextlib.ExitStack() as stack:
        place = f"127.0.0.1:{hold(stack)}"

        async def story(vipd: Vipd) -> None:
            from aiohttp import ClientSession, TCPConnector

            async with ClientSession(connector=TCPConnector()) as client:

                async def asked(path: str, method: str = "GET") -> tuple[int, str, bytes]:
                    async with client.request(method, f"http://{place}{path}") as response:
                        return response.status, response.content_type, await response.read()

                assert (await asked("/livez?verbose"))[:2] == (200, "application/json")
                assert await asked("/healthz", "HEAD") == (200, "application/json", b"")
                assert (await asked("/healthz", "POST"))[0] == 405
                for path in ("/", "/v1/status", "/v1/services", "/healthz/"):
                    assert (await asked(path))[0] == 404, path

        running(story, one_service, health_address=place)


PLACES = {
    **dict.fromkeys(("127.0.0.1:10256", "0.0.0.0:80", "'[::1]:10256'", "'[FD00:0::1]:1'"), 0),
    **dict.fromkeys(("10256", "127.0.0.1", "':10256'", "localhost:10256", "'::1:10256'", "127.0.0.1:0"), 2),
    **dict.fromkeys(("1.2.3.4:5/udp", "''"), 2),
}
"""What may stand there, and the exit code of vipctl."""


def test_a_health_address_is_an_address_with_a_port(tmp_path: Path) -> None:
    codes = {}
    (tmp_path / "services.yaml").write_text("apiVersion: vipd/v1\nservices: []\n")
    for place in PLACES:
        (tmp_path / "vipd.yaml").write_text(f"health_address: {place}\n")
        settings = ["--settings", str(tmp_path / "vipd.yaml")]
        codes[place] = vipctl(["check", str(tmp_path / "services.yaml"), *settings])
    assert codes == PLACES
