"""Live flows lower the shares of busy backends, and a backend with its maximum of flows gets no more."""

from __future__ import annotations

import asyncio

from tests.lab.inside import Vipd, running
from vipd.model.forwarding import ForwardingKey

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"
LEAST = f"balance: least-connections, backends: [{A}, {B}, {C}]"
LIMITED = f"backends: [{{address: {A}, max_connections: 100}}, {B}, {C}]"


def web(keys: str) -> str:
    return f"  - {{name: web, address: 10.96.0.10, ports: [80, 443], {keys}}}\n"


def flows(vipd: Vipd, **numbers: int) -> None:
    """The live flows of each backend, at its port 80: `a=5`."""
    vipd.kernel.live_flows = {("web", f"10.0.0.{'abc'.index(n) + 1}:80"): k for n, k in numbers.items()}


def shares(vipd: Vipd) -> dict[str, float]:
    """The share of new flows of each backend, in the rules of port 80."""
    rules = vipd.kernel.serving()["web 10.96.0.10:80/tcp"]
    return {place.removesuffix(":80"): weight / sum(rules.values()) for place, weight in rules.items()}


def reason(service: dict[str, object], address: str) -> str:
    forwarding = service["forwardings"][0]  # type: ignore[index]
    (found,) = [e["reason"] for e in forwarding["endpoints"] if e["address"] == address]
    return str(found)


def balanced(story: object, keys: str = LEAST, **settings: object) -> None:
    running(story, lambda vipd: vipd.declare(web(keys)), simulated=True, **settings)  # type: ignore[arg-type]


def test_the_flows_of_all_ports_lower_a_share_and_the_reason_says_so() -> None:
    async def story(vipd: Vipd) -> None:
        flows(vipd, a=400, b=100)
        vipd.kernel.live_flows |= {("web", f"{A}:443"): 400, ("web", f"{C}:443"): 100}
        await asyncio.sleep(15)
        found = shares(vipd)
        assert 0 < found[A] < 0.05
        assert found[B] == found[C]
        service = await vipd.service("web")
        assert "of its weight, for its live flows" in reason(service, A)
        (shown,) = [e["weight"] for e in service["forwardings"][0]["endpoints"] if e["address"] == A]
        assert shown == 1, "as declared"

    balanced(story)


def test_weights_are_respected_and_what_balances_is_not_written_again() -> None:
    async def story(vipd: Vipd) -> None:
        flows(vipd, a=300, b=100)
        writes = len(vipd.kernel.writes)
        await asyncio.sleep(15)
        assert shares(vipd) == {A: 0.75, B: 0.25}
        assert len(vipd.kernel.writes) == writes

    weighted = f"[{{address: {A}, weight: 3}}, {B}, {{address: {C}, weight: 0}}]"
    balanced(story, f"balance: least-connections, backends: {weighted}")


def test_a_constant_load_is_written_a_few_times_and_then_not_again() -> None:
    async def story(vipd: Vipd) -> None:
        flows(vipd, a=300, b=100, c=100)
        before = len(vipd.kernel.writes)
        await asyncio.sleep(60)
        written = len(vipd.kernel.writes)
        assert 0 < written - before < 10
        await asyncio.sleep(20)
        assert len(vipd.kernel.writes) == written

    balanced(story)


def test_no_reading_comes_before_the_rules_of_the_one_before_are_written() -> None:
    async def story(vipd: Vipd) -> None:
        vipd.kernel.gate.clear()
        vipd.kernel.writing.clear()
        flows(vipd, a=800)
        await vipd.kernel.writing.wait()
        readings = vipd.kernel.flow_readings
        await asyncio.sleep(20)
        assert vipd.kernel.flow_readings == readings
        vipd.kernel.gate.set()
        await asyncio.sleep(20)
        assert vipd.kernel.flow_readings > readings

    balanced(story)


def test_a_table_that_takes_long_to_read_is_read_seldom() -> None:
    def readings(seconds: float, keys: str) -> int:
        async def story(vipd: Vipd) -> int:
            vipd.kernel.reading_seconds = seconds
            await asyncio.sleep(60)
            before = vipd.kernel.flow_readings
            await asyncio.sleep(60)
            return vipd.kernel.flow_readings - before

        return running(story, lambda vipd: vipd.declare(web(keys)), simulated=True)

    assert 59 <= readings(0.0, LEAST) <= 61
    assert 5 <= readings(0.5, LEAST) <= 7, "10 s apart: a twentieth of the time"
    assert readings(0.0, f"backends: [{A}]") == 0, "no service needs them"


def test_a_draining_backend_takes_no_part() -> None:
    async def story(vipd: Vipd) -> None:
        order = {"service": "web", "backend": A, "admin": "draining"}
        await vipd.ask("POST", "/v1/overrides", order)
        flows(vipd, a=5000, b=100, c=100)
        writes = len(vipd.kernel.writes)
        await asyncio.sleep(10)
        assert shares(vipd) == {B: 0.5, C: 0.5}
        assert len(vipd.kernel.writes) == writes

    balanced(story)


def test_a_service_that_balances_otherwise_again_has_its_weights_back() -> None:
    async def story(vipd: Vipd) -> None:
        flows(vipd, a=800)
        await asyncio.sleep(10)
        assert shares(vipd)[A] < 0.1
        vipd.declare(web(LEAST.replace("least-connections", "random")))
        await vipd.reload()
        await asyncio.sleep(2)
        assert shares(vipd) == dict.fromkeys((A, B, C), 1 / 3)

    balanced(story)


def lines(vipd: Vipd) -> list[str]:
    return [r.getMessage() for r in vipd.journal if "gets no new flows" in r.getMessage()]


def test_a_backend_with_its_maximum_of_flows_gets_none_until_a_twentieth_has_ended() -> None:
    async def story(vipd: Vipd) -> None:
        async def serving(https: int = 0, **numbers: int) -> set[str]:
            flows(vipd, **numbers)
            vipd.kernel.live_flows["web", f"{A}:443"] = https
            await asyncio.sleep(2.5)
            return set(shares(vipd))

        assert await serving(a=50, https=49, b=5000) == {A, B, C}
        assert await serving(a=50, https=50) == {B, C}
        first = next(f for f in vipd.kernel.rules.values() if f.port == 80)
        assert first.without_new_flows[0].address == A, "its flows go on"
        assert reason(await vipd.service("web"), A) == "full: it has its 100 connections"
        assert await serving(a=96) == {B, C}
        assert await serving(a=95) == {A, B, C}
        assert await serving(a=100) == {B, C}
        assert lines(vipd) == [f"web: {A} has its 100 connections, and gets no new flows"], "once in a while"
        vipd.declare(web(f"backends: [{A}, {B}, {C}]"))
        await vipd.reload()
        await asyncio.sleep(2)
        assert set(shares(vipd)) == {A, B, C}, "it has no maximum any more"

    balanced(story, LIMITED)


def test_only_backends_that_have_just_become_full_are_logged() -> None:
    async def story(vipd: Vipd) -> None:
        flows(vipd, a=1)
        await asyncio.sleep(601)
        flows(vipd, a=1, b=1, c=1)
        await asyncio.sleep(2)
        first, second = lines(vipd)
        assert first == f"web: {A} has its 1 connection, and gets no new flows"
        assert A not in second
        events = (await vipd.ask("GET", "/v1/events")).body["events"]
        full = [each for each in events if each.get("cause") == "max_connections"]
        assert [each["backends"] for each in full] == [[A], [B, C]]
        assert full[1]["reason"] == f"{B} has its 1 connection, {C} has its 1 connection"

    most = ", ".join(f"{{address: {address}, max_connections: 1}}" for address in (A, B, C))
    balanced(story, f"backends: [{most}]")


def test_a_burst_goes_little_above_a_maximum_and_rules_are_written_once_or_twice_a_second() -> None:
    """120 flows in a second to a backend that takes 20. Then single flows end and begin all the time."""

    async def story(vipd: Vipd) -> None:
        def have(number: int) -> None:
            flows(vipd, a=number)
            (vipd.root / "tracked").write_text(str(1000 + number))

        have(0)
        await asyncio.sleep(5)
        kernel, most = vipd.kernel, 0
        writes = len(kernel.writes)
        for _ in range(120):
            if A in shares(vipd):
                most += 1
                have(most)
            await asyncio.sleep(1 / 120)
        assert 20 <= most <= 20 + 13
        readings = kernel.flow_readings
        for number in range(100):
            have(19 if number % 2 else 20)
            await asyncio.sleep(0.1)
        assert kernel.flow_readings - readings <= 60
        readings = kernel.flow_readings
        have(3)
        await asyncio.sleep(10)
        assert kernel.flow_readings - readings <= 12, "while little comes the table is read once a second"
        assert len(kernel.writes) - writes <= 24

    balanced(story, f"backends: [{{address: {A}, max_connections: 20}}, {B}]")


def test_while_all_are_full_flows_are_refused_and_the_address_stays_announced() -> None:
    async def story(vipd: Vipd) -> None:
        flows(vipd, a=1, b=2)
        await asyncio.sleep(3)
        key = next(key for key in vipd.kernel.rules if key.port_name == "80")
        rules = vipd.kernel.rules[ForwardingKey(*key)]
        assert (rules.endpoints, rules.has_endpoints) == ((), False), "nor does an unhealthy one serve"
        assert vipd.announced == {"203.0.113.10"}
        service = await vipd.service("web")
        assert (service["status"]["state"], service["status"]["message"].rpartition("; ")[2]) == (
            "no-backends",
            "1 unhealthy, 2 full",
        )
        assert service["announced"][0]["announced"]

    check = "check: {type: tcp, start: unhealthy}"
    for fallback in ("reject", "keep"):
        full = f"[{{address: {A}, max_connections: 1}}, {{address: {B}, max_connections: 2}}"
        keys = f"external_addresses: [203.0.113.10], announce: routes, fallback: {fallback}, "

        def prepare(vipd: Vipd, keys: str = f"{keys}backends: {full}, {{address: {C}, {check}}}]") -> None:
            vipd.backends[C] = "dead"
            vipd.declare(web(keys))

        running(story, prepare, simulated=True, announce_addresses=["203.0.113.0/24"])


def test_backups_serve_while_the_others_are_full() -> None:
    async def story(vipd: Vipd) -> None:
        flows(vipd, a=1)
        await asyncio.sleep(3)
        assert shares(vipd) == {B: 1.0}

    limited = f"{{address: {A}, max_connections: 1}}"
    balanced(story, f"backends: [{limited}, {{address: {B}, backup: true, max_connections: 7}}]")
