from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.model.samples import service
from vipd.api import user_quota
from vipd.api.stats_routes import MAX_LISTINGS, StatsRoutes
from vipd.api.user_quota import UserQuota
from vipd.declaration.operations import RefusedError


def take(found: UserQuota, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, uid: int) -> bool:
    """Whether a request of a user gets a turn."""
    monkeypatch.setattr(user_quota, "_uid_of", lambda _: uid)
    try:
        stack.enter_context(found.acquire(None, "too many", "wait"))  # type: ignore[arg-type]  # not looked at
    except RefusedError:
        return False
    return True


def test_no_user_has_all_turns_and_root_is_never_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = UserQuota(4)
    with ExitStack() as stack:
        assert [take(found, stack, monkeypatch, 1001) for _ in range(3)] == [True, True, False]
        assert [take(found, stack, monkeypatch, 1002) for _ in range(3)] == [True, True, False]
        assert not take(found, stack, monkeypatch, 1003), "all are taken"
        assert [take(found, stack, monkeypatch, 0) for _ in range(5)] == [True] * 4 + [False]
    with ExitStack() as stack:
        assert take(found, stack, monkeypatch, 1003), "all were given back"


def test_no_user_has_all_readings_of_connection_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads the whole table; those of one user do not keep out others."""

    async def story() -> None:
        end = asyncio.Event()

        async def flows(*_: object) -> list[object]:
            await end.wait()
            return []

        reconciler = SimpleNamespace(services={"dns": service("dns", "10.96.0.10")}, forwardings={})
        numbers = SimpleNamespace(table=SimpleNamespace(flows=flows))
        routes = StatsRoutes(cast("Any", reconciler), cast("Any", numbers))
        monkeypatch.setattr(user_quota, "_uid_of", lambda request: request.uid)

        def asked(uid: int) -> asyncio.Task[object]:
            request = SimpleNamespace(query={"target": "dns"}, uid=uid)
            return asyncio.create_task(cast("Any", routes.conntrack(cast("Any", request))))

        greedy = [asked(1001) for _ in range(MAX_LISTINGS)]
        other, root = asked(1002), asked(0)
        await asyncio.sleep(0)
        assert [task.done() for task in greedy].count(True) == MAX_LISTINGS // 2
        assert not other.done()
        assert not root.done()
        end.set()
        found = await asyncio.gather(*greedy, other, root, return_exceptions=True)
        refused = [each for each in found if isinstance(each, RefusedError)]
        assert len(refused) == MAX_LISTINGS // 2
        assert "too many requests for tracked flows at once" in str(refused[0])
        assert not isinstance(await asked(1001), Exception), "all were given back"

    asyncio.run(story())
