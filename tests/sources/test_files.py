from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.model.samples import HEAD, block
from tests.sources.services_directory import BAD, GOOD, OTHER, ServicesDirectory, link_swap
from vipd.cli.inputs import read_inputs
from vipd.sources.declaration_files import Signature
from vipd.sources.files import FileSource


def test_declarations_are_read_by_suffix_and_hidden_names_are_not(services_dir: ServicesDirectory) -> None:
    services_dir.write("a.yaml", GOOD)
    services_dir.write("b.yml", OTHER)
    services_dir.write(
        "c.json", '{"apiVersion": "vipd/v1", "services": [{"address": "10.96.0.12", "ports": [1]}]}'
    )
    for ignored in (".a.yaml", "a.yaml~", "a.yaml.bak", "#a.yaml#", "a.txt", ".a.yaml.swp", "4913", "yaml"):
        services_dir.write(ignored, BAD)
    assert services_dir.step() == {"dns", "web", "10.96.0.12:1/tcp"}
    assert services_dir.problems() == ""


def test_a_directory_that_is_named_like_a_file_is_a_problem_as_vipctl_check_has_it(
    services_dir: ServicesDirectory,
) -> None:
    services_dir.write("a.yaml", GOOD)
    (services_dir.directory / "d.yaml").mkdir()
    assert services_dir.step() == {"dns"}
    assert "d.yaml: is a directory, and is not read" in services_dir.problems()
    assert services_dir.problems() == "\n".join(map(str, read_inputs([str(services_dir.directory)]).problems))


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
def test_whatever_name_a_file_has_its_copy_outlives_a_restart(
    services_dir: ServicesDirectory, name: str
) -> None:
    services_dir.write("other.yaml", OTHER)
    services_dir.write(name, GOOD)
    assert services_dir.step() == {"dns", "web"}
    assert services_dir.source.faults() == ()
    services_dir.write(name, BAD)
    services_dir.restart()
    assert services_dir.step() == {"dns", "web"}
    problems = services_dir.problems().splitlines()
    assert len(problems) == 2
    assert all(map(str.isprintable, problems))
    assert all(map(str.isprintable, services_dir.source.units()))
    for each in services_dir.directory.iterdir():
        each.unlink()
    services_dir.restart()
    assert services_dir.step() == {"dns", "web"}, "files that vanish together are held"
    assert len(services_dir.source.accept_removal()) == 2
    services_dir.restart()
    assert services_dir.step() == set()
    assert list(services_dir.kept.iterdir()) == []


def test_two_names_that_look_alike_are_two_files(services_dir: ServicesDirectory) -> None:
    services_dir.write(os.fsdecode(b"a\xff.yaml"), GOOD)
    services_dir.write("a\\udcff.yaml", OTHER)
    assert services_dir.step() == {"dns", "web"}
    services_dir.restart()
    assert services_dir.step() == {"dns", "web"}


def test_a_copy_that_an_earlier_version_wrote_is_read(services_dir: ServicesDirectory) -> None:
    services_dir.kept.mkdir(parents=True)
    path = services_dir.write("\u4e16.yaml", BAD)
    (services_dir.kept / quote(str(path), safe="")).write_text(GOOD)
    services_dir.restart()
    assert services_dir.step() == {"dns"}


def test_scan_tells_whether_anything_is_different(services_dir: ServicesDirectory) -> None:
    assert not services_dir.source.scan()
    path = services_dir.write("a.yaml", GOOD)
    assert services_dir.source.scan()
    path.touch()
    assert not services_dir.source.scan()
    path.unlink()
    assert services_dir.source.scan()


def test_a_file_that_is_the_same_is_not_parsed_again(services_dir: ServicesDirectory) -> None:
    services_dir.write("a.yaml", GOOD)
    services_dir.write("b.yaml", OTHER)
    services_dir.step()
    before = {name: unit.candidate for name, unit in services_dir.source.units().items()}
    services_dir.write("b.yaml", OTHER.replace("10.244.0.6", "10.244.0.7"))
    services_dir.step()
    after = {name: unit.candidate for name, unit in services_dir.source.units().items()}
    assert [after[name] is before[name] for name in sorted(before)] == [True, False]


@pytest.mark.parametrize(("age", "seen"), [(0, True), (3600, False)])
def test_two_saves_of_one_moment_are_both_seen(
    services_dir: ServicesDirectory, monkeypatch: pytest.MonkeyPatch, age: int, seen: bool
) -> None:
    """The clock of a file system ticks slowly: the second may have the time and size of the first."""
    moment = time.time_ns() - age * 10**9
    monkeypatch.setattr("vipd.sources.files.FRESH_NANOSECONDS", 600 * 10**9)
    monkeypatch.setattr("vipd.sources.files.signature_of", lambda _: Signature(1, 1, 1, moment, moment))
    services_dir.write("a.yaml", OTHER)
    services_dir.source.scan()
    services_dir.write("a.yaml", OTHER.replace("10.244.0.6", "10.244.0.7"))
    assert services_dir.source.scan() is seen, "files that have rested are not read each time"


@pytest.mark.parametrize("bad", [BAD, "\tnot yaml: [", b"\xff\xfe not text", b"apiVersion: vipd/v1\n\x00"])
def test_a_bad_file_keeps_its_last_good_version_also_over_a_restart(
    services_dir: ServicesDirectory, bad: str | bytes
) -> None:
    services_dir.write("a.yaml", GOOD)
    services_dir.step()
    services_dir.write("a.yaml", bad)
    assert services_dir.step() == {"dns"}
    assert "a.yaml" in services_dir.problems()
    services_dir.restart()
    assert services_dir.step() == {"dns"}
    assert "a.yaml" in services_dir.problems()
    services_dir.write("a.yaml", OTHER)
    assert services_dir.step() == {"web"}
    assert services_dir.problems() == ""


def test_a_file_that_was_never_good_serves_nothing(services_dir: ServicesDirectory) -> None:
    services_dir.write("a.yaml", BAD)
    assert services_dir.step() == set()
    assert "a.yaml:3" in services_dir.problems()


def test_a_file_that_cannot_be_read_keeps_its_last_good_version(services_dir: ServicesDirectory) -> None:
    # Modes mean nothing to root, who runs these tests; a link to itself cannot be read by anybody.
    path = services_dir.directory / "a.yaml"
    services_dir.write("a.yaml", GOOD)
    services_dir.step()
    path.unlink()
    path.symlink_to("a.yaml")
    assert services_dir.step() == {"dns"}
    assert "Too many levels" in services_dir.problems()
    path.unlink()
    services_dir.write("a.yaml", GOOD)
    assert services_dir.step() == {"dns"}
    assert services_dir.problems() == ""


def test_a_dangling_link_keeps_the_last_good_version(services_dir: ServicesDirectory) -> None:
    services_dir.write("a.yaml", GOOD)
    services_dir.step()
    (services_dir.directory / "a.yaml").unlink()
    (services_dir.directory / "a.yaml").symlink_to("nowhere")
    assert services_dir.step() == {"dns"}
    assert "cannot be read" in services_dir.problems()


def test_a_file_that_could_not_be_read_and_is_then_empty_has_no_problem_left(
    services_dir: ServicesDirectory,
) -> None:
    services_dir.write("a.yaml", b"\xff")
    services_dir.step()
    assert services_dir.problems()
    services_dir.write("a.yaml", b"")
    services_dir.step()
    assert services_dir.problems() == ""


def test_a_deleted_file_is_gone_now_and_after_a_restart(services_dir: ServicesDirectory) -> None:
    services_dir.write("a.yaml", GOOD)
    services_dir.write("b.yaml", OTHER)
    services_dir.step()
    (services_dir.directory / "a.yaml").unlink()
    assert services_dir.step() == {"web"}
    assert len(list(services_dir.kept.iterdir())) == 1
    services_dir.restart()
    assert services_dir.step() == {"web"}


def test_a_file_deleted_while_the_daemon_was_down_is_gone(services_dir: ServicesDirectory) -> None:
    services_dir.write("a.yaml", GOOD)
    services_dir.step()
    (services_dir.directory / "a.yaml").unlink()
    services_dir.restart()
    assert services_dir.step() == set()
    assert list(services_dir.kept.iterdir()) == []


def test_a_directory_that_cannot_be_read_says_what_of_it_is_used(services_dir: ServicesDirectory) -> None:
    told: list[str] = []
    for known in (False, True):
        if known:
            services_dir.write("a.yaml", GOOD)
            services_dir.step()
        shutil.rmtree(services_dir.directory)
        services_dir.directory.symlink_to(services_dir.directory)
        assert services_dir.step() == ({"dns"} if known else set())
        told += services_dir.source.faults()
        services_dir.directory.unlink()
        services_dir.directory.mkdir()
    assert [text.rpartition("; ")[2] for text in told] == [
        "no good version of a file is known",
        "the last good versions are used",
    ]


def test_a_removed_directory_leaves_the_last_good_versions_serving(services_dir: ServicesDirectory) -> None:
    services_dir.write("a.yaml", GOOD)
    services_dir.step()
    shutil.rmtree(services_dir.directory)
    assert services_dir.step() == {"dns"}
    for _ in range(2):
        missing, held = services_dir.source.faults()
        assert missing == f"{services_dir.directory}: there is no such directory; hint: create it"
        assert "1 file is gone, and its services go on serving" in held
        services_dir.restart()
        assert services_dir.step() == {"dns"}
    services_dir.directory.mkdir()
    services_dir.write("a.yaml", OTHER)
    assert services_dir.step() == {"web"}
    assert services_dir.source.faults() == ()


def test_a_directory_that_never_was_is_told_with_a_hint(tmp_path: Path) -> None:
    source = FileSource(tmp_path / "none", tmp_path / "kept")
    assert not source.scan()
    assert "create it" in source.faults()[0]


def test_a_copy_that_cannot_be_kept_is_told_until_it_is(services_dir: ServicesDirectory) -> None:
    services_dir.kept.parent.mkdir()
    services_dir.kept.write_text("in the way")
    services_dir.restart()
    services_dir.write("a.yaml", GOOD)
    assert services_dir.step() == {"dns"}
    assert "cannot keep a copy" in services_dir.source.faults()[0]
    services_dir.step()
    assert services_dir.source.faults(), "a later scan must not hide that there is no copy"


def test_the_incumbent_stays_the_incumbent_over_a_restart(services_dir: ServicesDirectory) -> None:
    services_dir.write("z.yaml", GOOD)
    services_dir.step()
    services_dir.write("a.yaml", GOOD.replace("dns", "thief"))
    assert services_dir.step() == {"dns"}
    services_dir.restart()
    assert services_dir.step() == {"dns"}
    assert "z.yaml:3" in services_dir.problems()


def test_a_damaged_copy_is_of_no_use_and_no_hindrance(services_dir: ServicesDirectory) -> None:
    services_dir.write("a.yaml", GOOD)
    services_dir.step()
    (copy,) = services_dir.kept.iterdir()
    copy.write_bytes(b"\xff")
    (services_dir.kept / ".half.new").write_text("x")
    services_dir.restart()
    assert services_dir.step() == {"dns"}


def test_of_a_copy_of_a_later_version_serves_what_is_understood(services_dir: ServicesDirectory) -> None:
    path = services_dir.write("a.yaml", GOOD)
    services_dir.step()
    (copy,) = services_dir.kept.iterdir()
    later = GOOD + "  - {name: other, address: 10.96.0.77, ports: 80, later_key: 1}\n"
    copy.write_text(later)
    path.write_text(later)
    services_dir.restart()
    for _ in range(2):
        assert services_dir.step() == {"dns"}
        assert "later_key" in services_dir.problems()
        assert copy.read_text() == later, "the later version may come back"
    path.write_text(later.replace("later_key: 1", "respond_to_ping: false"))
    assert services_dir.step() == {"dns", "other"}
    assert services_dir.problems() == ""


def test_a_file_behind_a_swapped_link_is_read_anew(services_dir: ServicesDirectory) -> None:
    link_swap(services_dir, "v1", GOOD)
    (services_dir.directory / "a.yaml").symlink_to("..data/a.yaml")
    assert services_dir.step() == {"dns"}
    link_swap(services_dir, "v2", OTHER)
    assert services_dir.step() == {"web"}


@pytest.mark.root
def test_the_files_of_a_user_are_one_authors_also_after_a_restart(services_dir: ServicesDirectory) -> None:
    """However many files a user has; of root's each is an author's of its own."""
    for number, (name, user) in enumerate({"a": 1234, "b": 1234, "c": 0, "d": 0}.items()):
        path = services_dir.write(f"{name}.yaml", HEAD + block(f"10.96.0.{number}", name, "10.244.0.5"))
        os.chown(path, user, -1)
    for _ in range(2):
        services_dir.step()
        units = sorted(services_dir.source.units().items())
        authors = [unit.candidate.services[0].origin.author for _, unit in units]
        assert authors == ["user 1234", "user 1234", units[2][0], units[3][0]]
        services_dir.restart()
