from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.model.samples import service
from vipd.api import user_quota
from vipd.api.stats_routes import MAX_LISTINGS, StatsRoutes
from vipd.api.user_quota import UserTurns
from vipd.control.shared_run import SharedAnswers
from vipd.declaration.operations import RefusedError


def test_no_user_has_all_readings_of_connection_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads the whole table; those of one user do not keep out others."""

    async def story() -> None:
        end = asyncio.Event()

        async def flows(*_: object) -> list[object]:
            await end.wait()
            return []

        reconciler = SimpleNamespace(services={"dns": service("dns", "10.96.0.10")}, forwardings={})
        numbers = SimpleNamespace(table=SimpleNamespace(flows=flows))
        routes = StatsRoutes(cast("Any", reconciler), cast("Any", numbers), SharedAnswers(object))
        monkeypatch.setattr(user_quota, "_uid_of", lambda request: request.uid)

        def asked(uid: int) -> asyncio.Task[object]:
            request = SimpleNamespace(query={"target": "dns"}, uid=uid)
            return asyncio.create_task(cast("Any", routes.conntrack(cast("Any", request))))

        greedy = [asked(1001) for _ in range(MAX_LISTINGS)]
        others = [asked(1002) for _ in range(MAX_LISTINGS // 2)]
        late, root = asked(1003), [asked(0) for _ in range(MAX_LISTINGS + 1)]
        await asyncio.sleep(0)
        assert [task.done() for task in greedy].count(True) == MAX_LISTINGS // 2
        assert [task.done() for task in (*others, late)] == [False] * len(others) + [True], "all are taken"
        assert [task.done() for task in root] == [False] * MAX_LISTINGS + [True]
        end.set()
        found = await asyncio.gather(*greedy, *others, late, *root, return_exceptions=True)
        refused = [each for each in found if isinstance(each, RefusedError)]
        assert len(refused) == MAX_LISTINGS // 2 + 2
        assert "too many requests for tracked flows at once" in str(refused[0])
        assert not isinstance(await asked(1001), Exception), "all were given back"

    asyncio.run(story())


def test_turns_go_round_among_users_one_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_quota, "_uid_of", lambda uid: uid)

    async def story(limit: int) -> list[tuple[int, int]]:
        """The users that worked, and how many did at a time."""
        turns, working, seen = UserTurns(limit), list[int](), list[tuple[int, int]]()

        async def work(uid: int) -> None:
            async with turns.turn(cast("Any", uid)):
                assert uid not in working, "one at a time of each user"
                working.append(uid)
                seen.append((uid, len(working)))
                await asyncio.sleep(0)
                working.remove(uid)

        users = [1, 1, 1, 1, 2, 2, 3]
        await asyncio.gather(*map(work, users))
        assert sorted(uid for uid, _ in seen) == users
        return seen

    assert [uid for uid, _ in asyncio.run(story(1))] == [1, 2, 3, 1, 2, 1, 1]
    assert max(number for _, number in asyncio.run(story(2))) == 2


def test_who_hangs_up_while_he_waits_has_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_quota, "_uid_of", lambda uid: uid)

    async def story() -> None:
        turns, end = UserTurns(), asyncio.Event()

        async def work(uid: int) -> int:
            async with turns.turn(cast("Any", uid)):
                await end.wait()
                return uid

        first, gone, granted, last = [asyncio.create_task(work(uid)) for uid in (1, 2, 3, 1)]
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        first.cancel()  # its turn goes to 3, who hangs up in the same moment
        await asyncio.sleep(0)
        granted.cancel()
        end.set()
        assert await last == 1
        assert [task.cancelled() for task in (first, gone, granted)] == [True] * 3

    asyncio.run(asyncio.wait_for(story(), 60))
