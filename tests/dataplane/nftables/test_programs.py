"""nft that is missing or fails, and looking at a table without touching what is known of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.dataplane.declared import numbered
from tests.dataplane.namespace import Namespace
from tests.dataplane.nftables.programmed import Inside, Programmed, only_nft
from vipd.dataplane.base import ApplyError
from vipd.host.process import ProgramResult
from vipd.host.systemd.fields import ATTRIBUTE

pytestmark = pytest.mark.root

ONE, TWO = numbered(1, "10.244.0.1"), numbered(2, "10.244.0.2")
NEW_CHAIN = numbered(3, "10.244.0.1", "10.244.0.3")


class Tools:
    """nft in a namespace, unless it is not there or refuses."""

    def __init__(self, inside: Inside) -> None:
        self.inside = inside
        self.error: Exception | None = None
        self.refused = ""
        self.ran = 0

    async def run(self, argv: Sequence[str], stdin: str) -> ProgramResult:
        """Run it, or fail."""
        self.ran += 1
        if self.error:
            raise self.error
        if self.refused and self.refused in stdin:
            return ProgramResult(1, "", "Error: refused by the test")
        return await self.inside.run(argv, stdin)


@pytest.fixture
def tools() -> Iterator[Tools]:
    """In a namespace without rules."""
    with Namespace() as namespace:
        yield Tools(Inside(namespace.name))


def test_nft_that_is_missing_at_the_start_is_found_when_it_is_there(tools: Tools, tmp_path: Path) -> None:
    tools.error = FileNotFoundError(2, "nft")
    programmed = Programmed(tools.inside, tmp_path, tools.run)
    assert not programmed.step(), "nothing is wanted"
    for _ in range(2):
        with pytest.raises(ApplyError, match=r"nft cannot be run: there is no such program; hint: apt"):
            programmed.become(ONE)
    assert "no such program" in programmed.dataplane.versions()["ipv4"]
    tools.error = None
    assert programmed.step()
    assert "10.244.0.1" in programmed.tables()
    assert programmed.dataplane.versions()["ipv4"].startswith("nftables v")
    tools.error = PermissionError(13, "Permission denied")
    with pytest.raises(ApplyError, match=r"nft cannot be run: Permission denied; hint: .*chmod"):
        programmed.become(NEW_CHAIN)
    tools.error = None
    programmed.step()
    assert "10.244.0.3" in programmed.tables()


def test_a_quarantine_is_an_event(tools: Tools, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    programmed = Programmed(tools.inside, tmp_path, tools.run, sockets=only_nft(tools.inside))
    tools.refused = "10.244.0.2"
    with caplog.at_level(logging.ERROR):
        programmed.become(ONE, TWO)
    (told,) = [record for record in caplog.records if "is quarantined" in record.getMessage()]
    assert getattr(told, ATTRIBUTE)["VIPD_EVENT"] == ("service-quarantined",)
    assert getattr(told, ATTRIBUTE)["VIPD_SERVICE"] == (TWO.name,)


def test_a_difference_leaves_everything_known(tools: Tools, tmp_path: Path) -> None:
    programmed = Programmed(tools.inside, tmp_path, tools.run)
    programmed.become(ONE)

    async def difference_text() -> str:
        return str(await programmed.dataplane.difference(await programmed.dataplane.survey()))

    assert asyncio.run(difference_text()) == ""
    tools.inside.nft("flush", "map", "ip", "vipd", "frontends")
    assert "10.96.0.2" in asyncio.run(difference_text())
    before = tools.ran
    assert not programmed.step(), "what a step knows is not touched"
    assert tools.ran == before
    programmed.dataplane.invalidate_all()
    assert programmed.step()
    assert asyncio.run(difference_text()) == ""
