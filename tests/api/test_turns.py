from __future__ import annotations

from contextlib import ExitStack

import pytest

from vipd.api import turns
from vipd.api.turns import Turns
from vipd.operations import RefusedError


def take(found: Turns, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, uid: int) -> bool:
    """Whether a request of a user gets a turn."""
    monkeypatch.setattr(turns, "_uid_of", lambda _: uid)
    try:
        stack.enter_context(found.taken(None, "too many", "wait"))  # type: ignore[arg-type]  # not looked at
    except RefusedError:
        return False
    return True


def test_no_user_has_all_turns_and_root_is_never_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Turns(4)
    with ExitStack() as stack:
        assert [take(found, stack, monkeypatch, 1001) for _ in range(3)] == [True, True, False]
        assert [take(found, stack, monkeypatch, 1002) for _ in range(3)] == [True, True, False]
        assert not take(found, stack, monkeypatch, 1003), "all are taken"
        assert [take(found, stack, monkeypatch, 0) for _ in range(5)] == [True] * 4 + [False]
    with ExitStack() as stack:
        assert take(found, stack, monkeypatch, 1003), "all were given back"
