from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.sources.room import BAD, GOOD, OTHER, Room, link_swap
from vipd.cli.inputs import read_inputs
from vipd.sources.declaration_files import Signature
from vipd.sources.files import FileSource


def test_declarations_are_read_by_suffix_and_hidden_names_are_not(room: Room) -> None:
    room.write("a.yaml", GOOD)
    room.write("b.yml", OTHER)
    room.write("c.json", '{"apiVersion": "vipd/v1", "services": [{"address": "10.96.0.12", "ports": [1]}]}')
    for ignored in (".a.yaml", "a.yaml~", "a.yaml.bak", "#a.yaml#", "a.txt", ".a.yaml.swp", "4913", "yaml"):
        room.write(ignored, BAD)
    assert room.step() == {"dns", "web", "10.96.0.12:1/tcp"}
    assert room.problems() == ""


def test_a_directory_that_is_named_like_a_file_is_a_problem_as_vipctl_check_has_it(room: Room) -> None:
    room.write("a.yaml", GOOD)
    (room.directory / "d.yaml").mkdir()
    assert room.step() == {"dns"}
    assert "d.yaml: is a directory, and is not read" in room.problems()
    assert room.problems() == "\n".join(map(str, read_inputs([str(room.directory)]).problems))


@pytest.mark.parametrize(
    "name",
    [
        "x" * 240 + ".yaml",
        "\u4e16" * 80 + ".yaml",
        "\u4e16\u754c.yaml",
        "new\nline\x1b[2J.yaml",
        os.fsdecode(b"bytes-\xff\xfe.yaml"),
        os.fsdecode(b"\xff" * 240 + b".yaml"),
        "back\\slash %2F.yaml",
    ],
)
def test_whatever_name_a_file_has_its_copy_outlives_a_restart(room: Room, name: str) -> None:
    room.write("other.yaml", OTHER)
    room.write(name, GOOD)
    assert room.step() == {"dns", "web"}
    assert room.source.faults() == ()
    room.write(name, BAD)
    room.restart()
    assert room.step() == {"dns", "web"}
    problems = room.problems().splitlines()
    assert len(problems) == 2
    assert all(map(str.isprintable, problems))
    assert all(map(str.isprintable, room.source.units()))
    for each in room.directory.iterdir():
        each.unlink()
    room.restart()
    assert room.step() == set()
    assert list(room.kept.iterdir()) == []


def test_two_names_that_look_alike_are_two_files(room: Room) -> None:
    room.write(os.fsdecode(b"a\xff.yaml"), GOOD)
    room.write("a\\udcff.yaml", OTHER)
    assert room.step() == {"dns", "web"}
    room.restart()
    assert room.step() == {"dns", "web"}


def test_a_copy_that_an_earlier_version_wrote_is_read(room: Room) -> None:
    room.kept.mkdir(parents=True)
    path = room.write("\u4e16.yaml", BAD)
    (room.kept / quote(str(path), safe="")).write_text(GOOD)
    room.restart()
    assert room.step() == {"dns"}


def test_scan_tells_whether_anything_is_different(room: Room) -> None:
    assert not room.source.scan()
    path = room.write("a.yaml", GOOD)
    assert room.source.scan()
    path.touch()
    assert not room.source.scan()
    path.unlink()
    assert room.source.scan()


def test_a_file_that_is_the_same_is_not_parsed_again(room: Room) -> None:
    room.write("a.yaml", GOOD)
    room.write("b.yaml", OTHER)
    room.step()
    before = {name: unit.candidate for name, unit in room.source.units().items()}
    room.write("b.yaml", OTHER.replace("10.244.0.6", "10.244.0.7"))
    room.step()
    after = {name: unit.candidate for name, unit in room.source.units().items()}
    assert [after[name] is before[name] for name in sorted(before)] == [True, False]


@pytest.mark.parametrize(("age", "seen"), [(0, True), (3600, False)])
def test_two_saves_of_one_moment_are_both_seen(
    room: Room, monkeypatch: pytest.MonkeyPatch, age: int, seen: bool
) -> None:
    """The clock of a file system ticks slowly: the second may have the time and size of the first."""
    moment = time.time_ns() - age * 10**9
    monkeypatch.setattr("vipd.sources.files.FRESH_NANOSECONDS", 600 * 10**9)
    monkeypatch.setattr("vipd.sources.files.signature_of", lambda _: Signature(1, 1, 1, moment, moment))
    room.write("a.yaml", OTHER)
    room.source.scan()
    room.write("a.yaml", OTHER.replace("10.244.0.6", "10.244.0.7"))
    assert room.source.scan() is seen, "files that have rested are not read each time"


@pytest.mark.parametrize("bad", [BAD, "\tnot yaml: [", b"\xff\xfe not text", b"apiVersion: vipd/v1\n\x00"])
def test_a_bad_file_keeps_its_last_good_version_also_over_a_restart(room: Room, bad: str | bytes) -> None:
    room.write("a.yaml", GOOD)
    room.step()
    room.write("a.yaml", bad)
    assert room.step() == {"dns"}
    assert "a.yaml" in room.problems()
    room.restart()
    assert room.step() == {"dns"}
    assert "a.yaml" in room.problems()
    room.write("a.yaml", OTHER)
    assert room.step() == {"web"}
    assert room.problems() == ""


def test_a_file_that_was_never_good_serves_nothing(room: Room) -> None:
    room.write("a.yaml", BAD)
    assert room.step() == set()
    assert "a.yaml:3" in room.problems()


def test_a_file_that_cannot_be_read_keeps_its_last_good_version(room: Room) -> None:
    # Modes mean nothing to root, who runs these tests; a link to itself cannot be read by anybody.
    path = room.directory / "a.yaml"
    room.write("a.yaml", GOOD)
    room.step()
    path.unlink()
    path.symlink_to("a.yaml")
    assert room.step() == {"dns"}
    assert "Too many levels" in room.problems()
    path.unlink()
    room.write("a.yaml", GOOD)
    assert room.step() == {"dns"}
    assert room.problems() == ""


def test_a_dangling_link_keeps_the_last_good_version(room: Room) -> None:
    room.write("a.yaml", GOOD)
    room.step()
    (room.directory / "a.yaml").unlink()
    (room.directory / "a.yaml").symlink_to("nowhere")
    assert room.step() == {"dns"}
    assert "cannot be read" in room.problems()


def test_a_file_that_could_not_be_read_and_is_then_empty_has_no_problem_left(room: Room) -> None:
    room.write("a.yaml", b"\xff")
    room.step()
    assert room.problems()
    room.write("a.yaml", b"")
    room.step()
    assert room.problems() == ""


def test_a_deleted_file_is_gone_now_and_after_a_restart(room: Room) -> None:
    room.write("a.yaml", GOOD)
    room.write("b.yaml", OTHER)
    room.step()
    (room.directory / "a.yaml").unlink()
    assert room.step() == {"web"}
    assert len(list(room.kept.iterdir())) == 1
    room.restart()
    assert room.step() == {"web"}


def test_a_file_deleted_while_the_daemon_was_down_is_gone(room: Room) -> None:
    room.write("a.yaml", GOOD)
    room.step()
    (room.directory / "a.yaml").unlink()
    room.restart()
    assert room.step() == set()
    assert list(room.kept.iterdir()) == []


def test_a_directory_that_cannot_be_read_says_what_of_it_is_used(room: Room) -> None:
    told: list[str] = []
    for known in (False, True):
        if known:
            room.write("a.yaml", GOOD)
            room.step()
        shutil.rmtree(room.directory)
        room.directory.symlink_to(room.directory)
        assert room.step() == ({"dns"} if known else set())
        told += room.source.faults()
        room.directory.unlink()
        room.directory.mkdir()
    assert [text.rpartition("; ")[2] for text in told] == [
        "no good version of a file is known",
        "the last good versions are used",
    ]


def test_a_removed_directory_leaves_the_last_good_versions_serving(room: Room) -> None:
    room.write("a.yaml", GOOD)
    room.step()
    shutil.rmtree(room.directory)
    assert room.step() == {"dns"}
    assert str(room.directory) in room.source.faults()[0]
    room.restart()
    assert room.step() == {"dns"}
    assert "cannot be read" in room.source.faults()[0]
    room.directory.mkdir()
    room.write("a.yaml", OTHER)
    assert room.step() == {"web"}
    assert room.source.faults() == ()


def test_a_directory_that_never_was_is_told_with_a_hint(tmp_path: Path) -> None:
    source = FileSource(tmp_path / "none", tmp_path / "kept")
    assert not source.scan()
    assert "create it" in source.faults()[0]


def test_a_copy_that_cannot_be_kept_is_told_until_it_is(room: Room) -> None:
    room.kept.parent.mkdir()
    room.kept.write_text("in the way")
    room.restart()
    room.write("a.yaml", GOOD)
    assert room.step() == {"dns"}
    assert "cannot keep a copy" in room.source.faults()[0]
    room.step()
    assert room.source.faults(), "a later scan must not hide that there is no copy"


def test_the_incumbent_stays_the_incumbent_over_a_restart(room: Room) -> None:
    room.write("z.yaml", GOOD)
    room.step()
    room.write("a.yaml", GOOD.replace("dns", "thief"))
    assert room.step() == {"dns"}
    room.restart()
    assert room.step() == {"dns"}
    assert "z.yaml:3" in room.problems()


def test_a_damaged_copy_is_of_no_use_and_no_hindrance(room: Room) -> None:
    room.write("a.yaml", GOOD)
    room.step()
    (copy,) = room.kept.iterdir()
    copy.write_bytes(b"\xff")
    (room.kept / ".half.new").write_text("x")
    room.restart()
    assert room.step() == {"dns"}


def test_of_a_copy_of_a_later_version_serves_what_is_understood(room: Room) -> None:
    path = room.write("a.yaml", GOOD)
    room.step()
    (copy,) = room.kept.iterdir()
    later = GOOD + "  - {name: other, address: 10.96.0.77, ports: 80, later_key: 1}\n"
    copy.write_text(later)
    path.write_text(later)
    room.restart()
    for _ in range(2):
        assert room.step() == {"dns"}
        assert "later_key" in room.problems()
        assert copy.read_text() == later, "the later version may come back"
    path.write_text(later.replace("later_key: 1", "respond_to_ping: false"))
    assert room.step() == {"dns", "other"}
    assert room.problems() == ""


def test_a_file_behind_a_swapped_link_is_read_anew(room: Room) -> None:
    link_swap(room, "v1", GOOD)
    (room.directory / "a.yaml").symlink_to("..data/a.yaml")
    assert room.step() == {"dns"}
    link_swap(room, "v2", OTHER)
    assert room.step() == {"web"}
