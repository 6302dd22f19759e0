"""Questions to the account database: kept, bounded, and never more than a few at once."""

from __future__ import annotations

import threading

import pytest

from vipd.host import accounts
from vipd.host.accounts import MAX_LOOKUPS, CachedLookup


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
