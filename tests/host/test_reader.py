"""Reading this host beside the event loop: what is told of it while it goes on, and when it hangs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from vipd.host import reader as host_reader
from vipd.host.reader import HostReader
from vipd.host.settings.settings import Settings


def test_a_reading_that_has_just_begun_is_not_slow_and_one_that_hangs_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on, reading = threading.Event(), threading.Event()

    def hanging(reader: HostReader) -> None:
        reading.set()
        goes_on.wait()

    async def story() -> None:
        try:
            reader = HostReader(Settings())
            looking = asyncio.create_task(reader.read(frozenset()))
            await asyncio.to_thread(reading.wait)
            assert reader.faults() == ()
            looking.cancel()
            monkeypatch.setattr(host_reader, "READ_TIMEOUT_SECONDS", 0.01)
            reader = HostReader(Settings())
            await reader.read(frozenset())
            (fault,) = reader.faults()
            assert "takes long" in fault
        finally:
            goes_on.set()
        assert reader._reading is not None
        await reader._reading
        assert reader.faults() == ()

    monkeypatch.setattr(HostReader, "_read", hanging)
    asyncio.run(story())
