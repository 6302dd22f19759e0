"""Questions to the account database: kept, bounded, and never more than a few at once."""

from __future__ import annotations

import threading

import pytest

from vipd.host import accounts
from vipd.host.accounts import MAX_CACHED, MAX_LOOKUPS, CachedLookup


def test_an_answer_is_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(name: str) -> int:
        asked.append(name)
        if name == "nobody-of-that-name":
            raise KeyError(name)
        return len(asked)

    lookup: CachedLookup[str, int] = CachedLookup(ask)
    assert lookup.cached("a") is None
    assert (lookup.get("a"), lookup.get("a")) == (1, 1)
    assert lookup.cached("a") == 1
    for _ in range(2):
        with pytest.raises(KeyError):
            lookup.get("nobody-of-that-name")
    assert asked == ["a", "nobody-of-that-name"]
    monkeypatch.setattr(accounts, "CACHE_SECONDS", -1.0)
    assert lookup.get("a") == 3


def test_what_hangs_takes_no_more_than_its_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "LOOKUP_TIMEOUT_SECONDS", 0.05)
    free, running = threading.Event(), threading.active_count()
    lookup: CachedLookup[int, bool] = CachedLookup(lambda _: free.wait(60))
    for number in range(MAX_LOOKUPS * 3):
        with pytest.raises(TimeoutError, match="does not answer"):
            lookup.get(number)
    assert threading.active_count() - running <= MAX_LOOKUPS
    free.set()


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "", "x" * 100_000, "\n", ":"])
def test_no_name_does_worse_than_being_unknown(name: str) -> None:
    for lookup in (accounts.users, accounts.groups):
        with pytest.raises((KeyError, OSError)):
            lookup.get(name)


def test_so_much_is_kept_and_no_more() -> None:
    lookup: CachedLookup[int, int] = CachedLookup(lambda number: number)
    for number in range(MAX_CACHED + 10):
        lookup.get(number)
    assert lookup.cached(MAX_CACHED + 9) == MAX_CACHED + 9
    assert lookup.cached(0) is None
