"""An exception that nobody expected is the fault of one service, and of no other.

Wherever vipd looks at a service or at what is to be written of it, that look can raise. The first run notes
from which lines it is looked at; each of them fails in another run.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import vipd
from tests.lab.examples import some
from tests.lab.inside import Vipd, running
from tests.model.samples import block
from vipd.model.forwarding import Forwarding
from vipd.model.service import Service

ROOT = f"{Path(vipd.__file__).parent}/"
OTHERS = [block(f"10.97.0.{n}", f"s{n}", "10.244.0.5") for n in range(1, 5)]
BOMB, CHANGED = (block("10.96.0.66", "bomb", backend) for backend in ("10.244.0.6", "10.244.0.7"))
NEW = block("10.96.0.11", "new", "10.244.0.8")
Place = tuple[str, int]


class UnexpectedError(Exception):
    """What nobody expects."""


class Bomb:
    """Raises where vipd looks at the service `bomb`: at one place, or nowhere while the places are noted."""

    def __init__(self, place: Place | None = None) -> None:
        self.place, self.armed = place, False
        self.places: dict[Place, None] = {}

    def looked_at(self) -> None:
        frame = sys._getframe(2)
        if not self.armed or not frame.f_code.co_filename.startswith(ROOT):
            return
        place = frame.f_code.co_filename.removeprefix(ROOT), frame.f_lineno
        self.places[place] = None
        if place == self.place:
            raise UnexpectedError("boom")

    @contextmanager
    def planted(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bomb]:
        """In the values that all parts of vipd share."""

        def service(one: Service, name: str) -> Any:
            found = object.__getattribute__(one, name)
            if name[0] != "_" and object.__getattribute__(one, "name") == "bomb":
                self.looked_at()
            return found

        def forwarding(one: Forwarding, name: str) -> Any:
            found = object.__getattribute__(one, name)
            if name[0] != "_" and object.__getattribute__(one, "key").service == "bomb":
                self.looked_at()
            return found

        with monkeypatch.context() as patch:
            patch.setattr(Service, "__getattribute__", service)
            patch.setattr(Forwarding, "__getattribute__", forwarding)
            yield self


HELD_UP, LOST = "a change of another service does not go through meanwhile", "rules of others are lost"


def lived(bomb: Bomb, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A change of the service and of another one while it is armed; then it is not. What goes wrong."""

    async def story(vipd: Vipd) -> set[str]:
        wrong = set[str]()
        with bomb.planted(monkeypatch):
            bomb.armed = True
            vipd.declare(*OTHERS, NEW, name="others.yaml")
            vipd.declare(CHANGED, name="bomb.yaml")
            await vipd.reload()
            await asyncio.sleep(5)
            wrong |= {HELD_UP} if "new" not in vipd.kernel.names() else set()
            wrong |= {LOST} if not {f"s{n}" for n in range(1, 5)} <= vipd.kernel.names() else set()
            bomb.armed = False
            await asyncio.sleep(90)
            await vipd.reload()
            await asyncio.sleep(1)
        wrong |= {"not in sync afterwards"} if (await vipd.status())["state"] != "in-sync" else set()
        if vipd.kernel.serving().get("bomb 10.96.0.66:53/udp") != {"10.244.0.7:53": 1}:
            wrong.add("the change of the service is lost")
        traces = [record for record in vipd.journal if record.exc_info or "Traceback" in record.getMessage()]
        wrong |= {"a traceback again and again"} if len(traces) > 9 else set()
        return wrong

    def prepare(vipd: Vipd) -> None:
        vipd.declare(*OTHERS, name="others.yaml")
        vipd.declare(BOMB, name="bomb.yaml")

    return running(story, prepare, simulated=True)


@pytest.mark.slow
def test_wherever_a_look_at_a_service_fails_nothing_is_lost_and_mostly_all_others_go_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = Bomb()
    assert lived(noted, monkeypatch) == set()
    assert len(noted.places) > 50
    places = some(list(noted.places), "containment", 2)
    wrong = {place: found for place in places if (found := lived(Bomb(place), monkeypatch))}
    assert {place: found for place, found in wrong.items() if found != {HELD_UP}} == {}
    assert len(wrong) < len(places) / 2, wrong


def raises(forwarding: Forwarding) -> str:
    """No reason why the kernel refuses a forwarding: the changed one raises."""
    if any(endpoint.address == "10.244.0.7" for endpoint in forwarding.endpoints):
        raise UnexpectedError("boom")
    return ""


def test_of_many_that_change_at_once_the_one_that_cannot_be_written_is_held_alone() -> None:
    async def story(vipd: Vipd) -> None:
        vipd.kernel.refuses = raises
        vipd.declare(*(block(f"10.97.0.{n}", f"s{n}", "10.244.0.9") for n in range(1, 5)), name="others.yaml")
        vipd.declare(CHANGED, name="bomb.yaml")
        await vipd.reload()
        serving = {name.split()[0]: {*backends} for name, backends in vipd.kernel.serving().items()}
        written = {f"s{n}": {"10.244.0.9:53"} for n in range(1, 5)}
        assert serving == {"bomb": {"10.244.0.6:53"}, **written}
        states = {name: (await vipd.service(name))["status"]["state"] for name in serving}
        assert [name for name, state in states.items() if state == "quarantined"] == ["bomb"]

    def prepare(vipd: Vipd) -> None:
        vipd.declare(*OTHERS, name="others.yaml")
        vipd.declare(BOMB, name="bomb.yaml")

    running(story, prepare, simulated=True)


def logged(vipd: Vipd) -> int:
    return sum("bomb is quarantined" in record.getMessage() for record in vipd.journal)


def test_a_dataplane_that_raises_for_one_service_quarantines_it_and_says_so_once() -> None:
    async def story(vipd: Vipd) -> None:
        before = vipd.kernel.serving()
        vipd.kernel.refuses = raises
        vipd.declare(CHANGED, name="bomb.yaml")
        await vipd.reload()
        assert (await vipd.status())["state"] == "degraded"
        message = (await vipd.service("bomb"))["status"]["message"]
        assert "internal error while" in message
        assert "UnexpectedError: boom; please report it" in message
        vipd.declare(*OTHERS, NEW, name="others.yaml")
        await vipd.reload()
        lines = logged(vipd)
        await asyncio.sleep(600)
        assert logged(vipd) == lines > 0
        serving = vipd.kernel.serving()
        assert serving.pop("new 10.96.0.11:53/udp")
        assert serving == before, "it keeps its last good rules"
        vipd.kernel.refuses = lambda forwarding: ""
        await asyncio.sleep(61)
        assert (await vipd.status())["state"] == "in-sync", "without help"
        assert vipd.kernel.serving()["bomb 10.96.0.66:53/udp"] == {"10.244.0.7:53": 1}

    def prepare(vipd: Vipd) -> None:
        vipd.declare(*OTHERS, name="others.yaml")
        vipd.declare(BOMB, name="bomb.yaml")

    running(story, prepare, simulated=True)
