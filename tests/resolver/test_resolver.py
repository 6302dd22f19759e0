"""Which names are looked up, for whom, and what an answer or a fault of one changes; in simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.lab.inside import Vipd, running

SECONDS = 40
"""In which a name is asked again: its answers are good for 30 s."""


def service(name: str, *names: str, address: str = "10.96.0.1") -> str:
    backends = ", ".join(f"dns:{each}" for each in names)
    return f"  - {{name: {name}, address: ['{address}'], ports: 80, backends: [{backends}]}}\n"


def serving(vipd: Vipd, name: str) -> set[str]:
    return {
        backend for at, shares in vipd.kernel.serving().items() if at.split()[0] == name for backend in shares
    }


async def names_of(vipd: Vipd, name: str) -> dict[str, Any]:
    """What is known of the first name of a service."""
    return dict((await vipd.service(name))["names"][0])


def test_a_name_serves_follows_its_answers_and_is_forgotten_with_its_last_service() -> None:
    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(1)
        assert serving(vipd, "a") == serving(vipd, "b") == {"10.0.0.1:80"}
        vipd.names["dns:web.internal"] = ["10.0.0.1", "10.0.0.2"]
        await asyncio.sleep(SECONDS)
        assert serving(vipd, "a") == {"10.0.0.1:80", "10.0.0.2:80"}
        vipd.names["dns:web.internal"] = "no answer"
        await asyncio.sleep(SECONDS)
        assert serving(vipd, "a") == {"10.0.0.1:80", "10.0.0.2:80"}, "the last good answer serves"
        assert (await names_of(vipd, "a"))["fault"] == "no answer"
        await asyncio.sleep(400)
        vipd.names["dns:web.internal"] = ["10.0.0.2"]
        await asyncio.sleep(400)
        assert serving(vipd, "a") == {"10.0.0.2:80"}
        vipd.declare(service("b", "web.internal", address="10.96.0.2"))
        await vipd.reload()
        assert serving(vipd, "b") == {"10.0.0.2:80"}
        vipd.declare(service("c", "other.internal"))
        await vipd.reload()
        assert (await vipd.status())["names"]["names"] == 1
        vipd.declare()
        await vipd.reload()
        assert (await vipd.status()).get("names") is None

    def prepare(vipd: Vipd) -> None:
        vipd.names["dns:web.internal"] = ["10.0.0.1"]
        vipd.declare(service("a", "web.internal"), service("b", "web.internal", address="10.96.0.2"))

    running(story, prepare, simulated=True)


def test_a_service_of_another_family_has_the_name_looked_up_for_both() -> None:
    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(1)
        assert serving(vipd, "a") == {"10.0.0.1:80"}
        vipd.declare(
            service("a", "web.internal"),
            service("b", "web.internal", address="fd00:96::1"),
            name="services.yaml",
        )
        await vipd.reload()
        await asyncio.sleep(1)
        assert (serving(vipd, "a"), serving(vipd, "b")) == ({"10.0.0.1:80"}, {"[fd00::1]:80"})

    def prepare(vipd: Vipd) -> None:
        vipd.names["dns:web.internal"] = ["10.0.0.1", "fd00::1"]
        vipd.declare(service("a", "web.internal"))

    running(story, prepare, simulated=True)


class Raising(Sequence[str]):
    """An answer that nobody thought of."""

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError("a fault of the library")

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("a fault of the library")


def test_an_unexpected_exception_is_a_fault_of_one_name_which_is_asked_again() -> None:
    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(1)
        assert serving(vipd, "a") == {"10.0.0.1:80"}
        assert "a fault of the library" in str(await vipd.status())
        vipd.names["dns:broken.internal"] = ["10.0.0.2"]
        await asyncio.sleep(400)
        assert serving(vipd, "a") == {"10.0.0.1:80", "10.0.0.2:80"}
        assert (await vipd.status())["names"]["faults"] == []

    def prepare(vipd: Vipd) -> None:
        vipd.names |= {"dns:web.internal": ["10.0.0.1"], "dns:broken.internal": Raising()}
        vipd.declare(service("a", "broken.internal", "web.internal"))

    running(story, prepare, simulated=True)


def test_beyond_the_limit_names_wait_until_others_leave() -> None:
    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(1)
        assert [bool(serving(vipd, name)) for name in "abc"] == [True, True, False]
        assert "1 names are not looked up, because there are too many" in str(
            (await vipd.status())["warnings"]
        )
        assert "dns_max_names" in (await names_of(vipd, "c"))["fault"]
        vipd.declare(*declared[1:])
        await vipd.reload()
        await asyncio.sleep(1)
        assert [bool(serving(vipd, name)) for name in "bc"] == [True, True]
        assert "too many" not in str((await vipd.status())["warnings"])

    declared = [service(name, f"{name}.internal", address=f"10.96.0.{n}") for n, name in enumerate("abc")]

    def prepare(vipd: Vipd) -> None:
        vipd.names |= {f"dns:{name}.internal": ["10.0.0.1"] for name in "abc"}
        vipd.declare(*declared)

    running(story, prepare, simulated=True, dns_max_names=2)


def test_an_author_of_too_many_names_displaces_none_of_anothers() -> None:
    greedy = [f"g{n}.internal" for n in range(30)]

    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(1)
        assert (await vipd.status())["names"]["names"] == 20
        vipd.declare(service("a", "a.internal", address="10.96.0.2"), name="a.yaml")
        await vipd.reload()
        await asyncio.sleep(1)
        assert serving(vipd, "a") == {"10.0.0.1:80"}
        assert (await vipd.status())["names"]["names"] == 20
        assert "11 names are not looked up" in str((await vipd.status())["warnings"])
        # A name of several authors is in the share of the one with the fewest.
        known = {view["backend"] for view in (await vipd.service("g"))["names"] if not view["fault"]}
        waiting = next(name for name in greedy if f"dns:{name}" not in known)
        vipd.declare(service("b", waiting, "b.internal", address="10.96.0.3"), name="b.yaml")
        await vipd.reload()
        await asyncio.sleep(1)
        assert [view["fault"] for view in (await vipd.service("b"))["names"]] == ["", ""]

    def prepare(vipd: Vipd) -> None:
        vipd.names |= {f"dns:{name}": ["10.0.0.1"] for name in (*greedy, "a.internal", "b.internal")}
        vipd.declare(service("g", *greedy), name="g.yaml")

    running(story, prepare, simulated=True, dns_max_names=20)


def test_after_a_restart_the_last_answers_serve_before_any_lookup_and_names_of_nobody_are_gone() -> None:
    async def first(vipd: Vipd) -> None:
        await asyncio.sleep(5)
        vipd.declare(service("a", "a.internal"))
        await vipd.reload()
        await asyncio.sleep(5)

    async def second(vipd: Vipd) -> None:
        assert serving(vipd, "a") == {"10.0.0.1:80", "10.0.0.2:80"}
        vipd.declare(service("a", "a.internal"), service("b", "b.internal", address="10.96.0.2"))
        await vipd.reload()
        await asyncio.sleep(5)
        assert serving(vipd, "a") == {"10.0.0.1:80", "10.0.0.2:80"}
        assert serving(vipd, "b") == set(), "its answer left with its last service"
        assert (await names_of(vipd, "a"))["answered"]

    def prepare(vipd: Vipd) -> None:
        vipd.names |= {"dns:a.internal": ["10.0.0.2", "10.0.0.1"], "dns:b.internal": ["10.0.0.3"]}
        vipd.declare(service("a", "a.internal"), service("b", "b.internal", address="10.96.0.2"))

    with TemporaryDirectory(prefix="vipd-") as directory:
        running(first, prepare, Path(directory), simulated=True)
        running(second, root=Path(directory), simulated=True)
