"""A file takes long to read: what serves is kept meanwhile, and nobody's change waits."""

from __future__ import annotations

import threading

import pytest

from tests.sources.services_directory import GOOD, OTHER, ServicesDirectory
from vipd.control.catalog import merge
from vipd.declaration.native import parse_declaration
from vipd.declaration.problems import Declaration
from vipd.sources import files

WAIT_SECONDS = 60.0


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
