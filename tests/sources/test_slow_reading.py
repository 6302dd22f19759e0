"""A file takes long to read: what serves is kept meanwhile, and nobody's change waits."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tests.model.samples import HEAD, block
from tests.sources.services_directory import GOOD, OTHER, ServicesDirectory
from vipd.control.catalog import merge
from vipd.declaration.native import parse_declaration
from vipd.declaration.problems import Declaration
from vipd.sources import files

WAIT_SECONDS = 60.0


def service_text(number: int) -> str:
    return HEAD + _block(number)


def _block(number: int) -> str:
    return block(f"10.97.{number >> 8}.{number & 255}", f"s{number}", "10.244.0.5")


MANY = 2500
PLENTY = HEAD + "".join(map(_block, range(MANY)))


class Slow:
    """A parser that is busy with one file until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.begun, self.end = threading.Event(), threading.Event()
        parse, self._name = parse_declaration, name

        def parsed(text: bytes, path: str, written_by: str) -> Declaration:
            if path.endswith(self._name):
                self.begun.set()
                assert self.end.wait(WAIT_SECONDS)
            return parse(text, path, written_by=written_by)

        monkeypatch.setattr(files, "parse_declaration", parsed)


def test_what_serves_is_kept_while_a_file_takes_long_to_read(
    services_dir: ServicesDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    services_dir.write("a.yaml", GOOD)
    services_dir.source.scan()
    merged = merge(services_dir.source.units())
    slow = Slow(monkeypatch, "b.yaml")
    services_dir.write("b.yaml", OTHER)
    scanning = threading.Thread(target=services_dir.source.scan)
    keeping = threading.Thread(target=services_dir.source.save_accepted, args=(merged.chosen,))
    scanning.start()
    try:
        assert slow.begun.wait(WAIT_SECONDS)
        keeping.start()
        keeping.join(WAIT_SECONDS / 6)
        waited = keeping.is_alive()
    finally:
        slow.end.set()
        scanning.join()
        keeping.join()
    assert not waited, "keeping what serves waited for the reading of another file"
    assert [path.name.endswith("a.yaml") for path in services_dir.kept.iterdir()] == [True]
    assert services_dir.source.units().keys() == {
        f"file:{services_dir.directory / name}" for name in ("a.yaml", "b.yaml")
    }
    assert services_dir.step() == {"dns", "web"}


def test_a_large_file_delays_the_change_of_no_other(services_dir: ServicesDirectory) -> None:
    """A scan that must not take long leaves it, and takes what has been parsed of it later."""
    services_dir.write("large.yaml", PLENTY)
    services_dir.write("a.yaml", GOOD)
    source = services_dir.source
    assert source.scan(whole=False)
    assert services_dir.step(scan=False) == {"dns"}
    (author,) = source.postponed
    services_dir.write("b.yaml", OTHER)
    assert source.scan(whole=False)
    assert services_dir.step(scan=False) == {"dns", "web"}
    source.read_postponed(author)
    assert source.postponed == []
    assert source.scan(whole=False)
    assert len(services_dir.step(scan=False)) == 2 + MANY
    assert not source.scan(whole=False)


def test_a_large_file_that_changes_all_the_time_serves_as_it_was_when_it_was_read(
    services_dir: ServicesDirectory,
) -> None:
    source = services_dir.source
    for number in range(3):
        services_dir.write("large.yaml", f"{PLENTY}# {number}\n")
        source.scan(whole=False)
        services_dir.write("large.yaml", f"{PLENTY}# meanwhile\n")
        (author,) = source.postponed
        source.read_postponed(author)
        source.scan(whole=False)
        assert len(services_dir.step(scan=False)) == MANY
        assert source.postponed == [author]
    (services_dir.directory / "large.yaml").unlink()
    assert source.scan(whole=False)
    assert source.postponed == []


def test_many_files_of_one_author_delay_no_other(services_dir: ServicesDirectory) -> None:
    for number in range(150):
        path = services_dir.write(f"a{number:03}.yaml", service_text(number))
        os.chown(path, 1234, -1)
    services_dir.write("z.yaml", OTHER)
    source = services_dir.source
    source.scan(whole=False)
    assert "web" in services_dir.step(scan=False)
    assert source.postponed == ["user 1234"]
    source.read_postponed("user 1234")
    source.scan(whole=False)
    assert len(services_dir.step(scan=False)) == 151


def test_files_that_lose_services_while_they_are_written_delay_nobody(
    services_dir: ServicesDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"a{number}.yaml" for number in range(8)]
    for number, name in enumerate(names):
        services_dir.write(name, service_text(number))
    source = services_dir.source
    source.scan()
    assert len(services_dir.step(scan=False)) == 8
    monkeypatch.setattr(time, "sleep", None)  # nothing waits
    for name in names:
        (services_dir.directory / name).write_text("apiVersion: vipd/v1\nservices: []\n")
    services_dir.write("b.yaml", OTHER)
    source.scan(whole=False)
    assert len(services_dir.step(scan=False)) == 9
    assert source.unsettled
    monkeypatch.setattr(files, "SETTLE_SECONDS", 0.0)  # they rest
    source.scan(whole=False)
    assert services_dir.step(scan=False) == {"web"}
    assert not source.unsettled
