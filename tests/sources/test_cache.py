"""The cache of the state directory: what is put is written soon, and what changed alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.lab.waiting import wait_until
from vipd.sources.cache import Bucket, Cache


class Owner:
    """Something that keeps texts."""

    def __init__(self, cache: Cache, name: str = "etcd") -> None:
        self.known: dict[str, str] = {}
        self.bucket: Bucket[str] = cache.bucket(name, str.upper, lambda: self.known)

    def put(self, changes: Mapping[str, str | None]) -> None:
        for key, value in changes.items():
            if value is None:
                del self.known[key]
            else:
                self.known[key] = value
        self.bucket.put(changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.db"


def kept(path: Path, name: str = "etcd") -> dict[str, object]:
    """What the next run finds."""
    return dict(Owner(Cache(path), name).bucket.load())


def test_of_each_key_the_newest_is_kept(path: Path) -> None:
    assert kept(path) == {}
    cache = Cache(path)
    owner, other = Owner(cache), Owner(cache, "accepted")
    owner.put({"a": "one", "b": "two", "\udcff\0": "odd"})
    owner.put({"a": "new", "b": None})
    other.put({"a": "other"})
    cache.close()
    assert kept(path) == {"a": "NEW", "\udcff\0": "ODD"}
    assert kept(path, "accepted") == {"a": "OTHER"}


def test_what_is_put_is_written_soon_and_much_at_once(path: Path) -> None:
    cache = Cache(path)
    owner, states = Owner(cache), set[bytes]()
    for number in range(200):
        owner.put({f"k{number}": "x"})
        time.sleep(0.001)
        states.add(path.read_bytes()[24:28] if path.exists() else b"")  # the counter of transactions
    wait_until(lambda: len(kept(path)) == 200, "written")
    assert len(states) < 30, "the disk is left alone most of the time"
    cache.close()


def test_one_of_many_keys_writes_little(path: Path) -> None:
    cache = Cache(path)
    owner = Owner(cache)
    owner.put({f"/vipd/v1/services/{n}": "x" * 300 for n in range(20_000)})
    owner.bucket.write()

    def written() -> int:
        lines = Path("/proc/thread-self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["wchar"])

    before = written()
    owner.put({"/vipd/v1/services/17": "y"})
    owner.bucket.write()
    assert written() - before < 60_000
    cache.close()


@pytest.mark.parametrize("damage", [b"", b"garbage", b"\0" * 8192], ids=["empty", "garbage", "zeros"])
def test_a_damaged_file_is_made_anew_with_all_that_is_known(
    path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(path)
    owner = Owner(cache)
    owner.put({"a": "one", "b": "two"})
    owner.bucket.write()
    path.write_bytes(damage)
    owner.put({"a": None})
    owner.bucket.write()
    assert kept(path) == {"b": "TWO"}
    assert not cache.fault
    if damage:
        assert path.with_name("cache.db.unreadable").read_bytes() == damage
        assert "it is damaged" in caplog.text
    cache.close()


def test_an_entry_that_cannot_be_encoded_is_left_out_alone(path: Path) -> None:
    cache = Cache(path)
    bucket: Bucket[int] = cache.bucket("total", lambda number: str(1 // number), dict)
    bucket.put({"a": 1, "b": 0})
    cache.close()
    assert dict(Cache(path).bucket("total", str, dict).load()) == {"a": "1"}


def test_a_tool_that_only_looks_leaves_a_damaged_file(path: Path) -> None:
    path.write_bytes(b"garbage" * 1000)
    cache = Cache(path, repair=False)
    assert Owner(cache).bucket.load() == {}
    assert cache.fault
    assert [each.name for each in path.parent.iterdir()] == ["cache.db"]
