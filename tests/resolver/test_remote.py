"""Lookups by a worker: what is no answer of it, and one that ends meanwhile."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from vipd.host.worker import Client
from vipd.model.service import Family, NameKind
from vipd.resolver.answers import LookupResult, NameState, Part, Question, Target
from vipd.resolver.lookup import LookupThreads, ServerOptions
from vipd.resolver.remote import LookupServer, RemoteLookup, read_result, written_result

WEB = Question(NameKind.SRV, "_http._tcp.web.internal")
TARGET = Target("10.0.0.1", 80, 1, 2, "a.internal")
FOUND = LookupResult((TARGET,), 30.0, "", {Part("b.internal", Family.IPV6): "SERVFAIL"}, 3)


class Loopback:
    """In place of a worker: its other end in this process, through JSON."""

    def __init__(self, found: LookupResult) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.cancelled: list[int] = []
        self._server = LookupServer()
        self._server._look_up = LookupThreads(lambda *asked: self.asked.append(asked) or found)  # type: ignore[func-returns-value]

    def ask(self, kind: str, request: list[Any], client: Client, seconds: float) -> int:
        self._server.start(
            json.loads(json.dumps(request)), lambda answer: client.answered(json.loads(json.dumps(answer)))
        )
        return 1

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)


def test_the_worker_is_asked_with_all_that_a_lookup_depends_on() -> None:
    known = NameState((TARGET, Target("10.0.0.2", 80)), trial={("10.0.0.2", 80): 7.0})
    options = ServerOptions((("10.0.0.53", 53), ("fd00::53", 5353)), 2.5)

    async def story() -> None:
        worker = Loopback(FOUND)
        look_up = RemoteLookup(worker)  # type: ignore[arg-type]
        assert await look_up(WEB, [Family.IPV4], options, known, 10) == FOUND
        ((question, families, asked_options, asked_known, most),) = worker.asked
        assert (question, families, asked_options, most) == (WEB, [Family.IPV4], options, 10)
        assert isinstance(asked_known, NameState)
        assert (asked_known.serving, asked_known.established) == (known.serving, known.established)

    asyncio.run(story())


def test_a_fault_of_the_library_is_one_of_this_name() -> None:
    async def story() -> None:
        look_up = RemoteLookup(Loopback(FOUND))  # type: ignore[arg-type]
        found = await look_up(WEB, [], ServerOptions(), NameState(("broken",)), 10)  # type: ignore[arg-type]
        assert (found.targets, "internal error while looking up" in found.fault) == ((), True)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("place", "garbage"),
    [
        (0, None),
        (0, [["10.0.0.1", 80, 1, 2]]),
        (0, [["nowhere", 80, 1, 2, ""]]),
        (0, [["10.0.0.1", 80, -1, 2, ""]]),
        (0, [["10.0.0.1", 80, 1, "2", ""]]),
        (0, [list(TARGET)] * 11),
        (1, None),
        (1, -1.0),
        (1, float("nan")),
        (2, None),
        (3, [["b.internal", 5, ""]]),
        (3, [["b.internal", 6]]),
        (3, 7),
        (4, "3"),
        (4, 2**40),
    ],
)
def test_what_is_no_result_is_refused(place: int, garbage: object) -> None:
    answer: list[Any] = json.loads(json.dumps(written_result(FOUND)))
    assert read_result(answer, 10) == FOUND
    answer[place] = garbage
    with pytest.raises(ValueError, match="no result of a lookup"):
        read_result(answer, 10)
