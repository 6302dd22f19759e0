"""`GET /v1/explain` beside a whole vipd: its own services, wrong questions, many and large ones."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from urllib.parse import quote

import pytest

from tests.lab.inside import Vipd, running

DNS = {
    "name": "kube-system/kube-dns",
    "address": "10.96.0.10",
    "ports": ["53/udp"],
    "backends": ["10.244.0.5", {"address": "10.244.0.6", "weight": 2}],
}
QUESTION = "/v1/explain?from=10.10.0.9&target=10.96.0.10%3A53%2Fudp"


def test_it_answers_of_the_daemon_s_own_services() -> None:
    async def story(vipd: Vipd) -> None:
        await vipd.add(DNS)
        found = (await vipd.ask("GET", QUESTION)).body["explanation"]
        assert found["service_port"] == "kube-system/kube-dns"
        assert {b["endpoint"]: (b["share"], b["health"]) for b in found["backends"]} == {
            "10.244.0.5:53": (0.333333, "unchecked"),
            "10.244.0.6:53": (0.666667, "unchecked"),
        }
        named = await vipd.ask("GET", "/v1/explain?from=local&target=kube-system%2Fkube-dns")
        assert named.body["explanation"]["packet"]["arriving"] == "local"

    running(story)


def test_what_cannot_be_answered() -> None:
    statuses = {
        "from=local&target=nope": 404,
        "from=local&target=10.96.0.99": 400,
        "from=fd00%3A%3A1&target=10.96.0.10%3A53": 400,
        "target=dns": 400,
        "from=local": 400,
    }
    hostile = (
        "\0",
        "\x1b[2J",
        "../../etc",
        "%",
        "a" * 5000,
        "\u202e",
        "1.2.3.4:99999999999",
        "[",
        "'\"; drop",
    )

    async def story(vipd: Vipd) -> None:
        await vipd.add(DNS)
        assert {q: (await vipd.ask("GET", f"/v1/explain?{q}")).status for q in statuses} == statuses
        for word in (quote(word, safe="") for word in hostile):
            for query in (f"from={word}&target=10.96.0.10%3A53%2Fudp", f"from=local&target={word}"):
                assert (await vipd.ask("GET", f"/v1/explain?{query}")).status in (400, 404, 414), query[:200]

    running(story)


def many(vipd: Vipd) -> None:
    """4,000 services, and one of so many backends that explaining it takes a second."""
    blocks = [
        f"  - {{name: s{n}, address: 10.96.{n // 250}.{n % 250 + 1}, ports: 80, "
        f"backends: [10.244.{n // 250}.{n % 250 + 1}]}}\n"
        for n in range(4_000)
    ]
    backends = ", ".join(f"10.245.{n // 250}.{n % 250 + 1}" for n in range(1_000))
    vipd.declare(*blocks, f"  - {{name: large, address: 10.97.255.1, ports: 80, backends: [{backends}]}}\n")


@pytest.mark.slow
def test_the_loop_goes_on_while_a_large_table_is_explained() -> None:
    """However long it takes, the loop misses but a part of it; before, all of it."""

    async def story(vipd: Vipd) -> None:
        for target in ("large", "10.96.3.3%3A81"):
            began = last = time.perf_counter()
            asked = asyncio.ensure_future(vipd.ask("GET", f"/v1/explain?from=10.10.0.9&target={target}"))
            longest = 0.0
            while not asked.done():
                await asyncio.sleep(0)
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
            assert (await asked).status == 200
            if target == "large":
                took = time.perf_counter() - began
                assert longest < took / 3, f"{longest:.3f} s of {took:.3f} s"

    running(story, many)


def test_many_questions_wait_for_their_turn() -> None:
    backends = [f"10.244.{n // 250}.{n % 250 + 1}" for n in range(40)]

    async def story(vipd: Vipd) -> None:
        await vipd.add(DNS | {"backends": backends})
        asked = [asyncio.ensure_future(vipd.ask("GET", QUESTION)) for _ in range(50)]
        assert (await vipd.ask("GET", "/v1/version")).status == 200
        answers = Counter((answer.status, answer.kind) for answer in await asyncio.gather(*asked))
        assert answers == {(200, ""): 50}

    running(story)


def test_the_daemon_imports_no_simulator_before_the_first_question() -> None:
    code = "import sys, vipd.__main__; print([name for name in sys.modules if 'simulator' in name])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
