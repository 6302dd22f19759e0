"""The last events, kept while somebody looks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from vipd.observe.events.event import EventRecord, encode
from vipd.observe.events.follower import Follower
from vipd.observe.events.recorder import Recorder

LENGTH = 60


class RecentEvents:
    """Events by what they are told as; each with the version at which it came."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, EventRecord]] = {}

    async def load(self, recorder: Recorder, version: int) -> None:
        """Begin with those that are kept on disk."""
        self._kept.clear()
        for occurrence in (await asyncio.to_thread(recorder.read))[-LENGTH:]:
            self._kept[occurrence.place] = (version, occurrence)

    async def take_in(self, follower: Follower, version: int) -> bool:
        """What a follower has heard meanwhile; whether there was anything."""
        found = False
        while not follower.over and (occurrence := await follower.next(0)) is not None:
            self._kept.pop(occurrence.place, None)
            self._kept[occurrence.place] = (version, occurrence)
            found = True
        while len(self._kept) > LENGTH:
            del self._kept[next(iter(self._kept))]
        return found

    def since(self, version: int) -> Mapping[int, str]:
        """Those that came later, as JSON, the oldest first."""
        return {p: encode(o).decode().rstrip() for p, (at, o) in self._kept.items() if at > version}
