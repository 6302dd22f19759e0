"""The files of services.d: which are read, and what serves when one is bad, unreadable or gone."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.model.samples import HEAD, block
from tests.sources.host import BAD, GOOD, OTHER, Host, QuickHost, chown


def test_declarations_are_read_by_suffix_and_hidden_names_are_not(host: Host) -> None:
    host.put("a.yaml", GOOD)
    host.put("b.yml", OTHER)
    host.put("c.json", '{"apiVersion": "vipd/v1", "services": [{"address": "10.96.0.12", "ports": [1]}]}')
    for ignored in (".a.yaml", "a.yaml~", "a.yaml.bak", "#a.yaml#", "a.txt", ".a.yaml.swp", "4913", "yaml"):
        host.put(ignored, BAD)
    host.put("empty.yaml", b"")
    assert host.step() == {"dns", "web", "10.96.0.12:1/tcp"}
    assert host.problems() == []


def test_a_directory_that_is_named_like_a_file_is_a_problem_as_vipctl_check_has_it(host: Host) -> None:
    host.put("a.yaml", GOOD)
    (host.services_dir / "d.yaml").mkdir()
    assert host.step() == {"dns"}
    (problem,) = host.problems()
    assert "d.yaml: is a directory, and is not read" in problem
    assert problem in host.vipctl("check", str(host.services_dir), check=False).stderr


NAMES = (
    "x" * 240 + ".yaml",
    "\u4e16" * 80 + ".yaml",
    "\u4e16\u754c.yaml",
    "new\nline\x1b[2J.yaml",
    os.fsdecode(b"bytes-\xff\xfe.yaml"),
    os.fsdecode(b"\xff" * 240 + b".yaml"),
    "back\\slash %2F.yaml",
    os.fsdecode(b"a\xff.yaml"),
    "a\\udcff.yaml",  # which looks like the one before it
)


def test_whatever_name_a_file_has_its_last_good_version_outlives_a_restart(host: Host) -> None:
    for number, name in enumerate(NAMES):
        host.put(name, HEAD + block(f"10.96.0.{number}", f"s{number}", "10.244.0.5"))
    every = {f"s{number}" for number in range(len(NAMES))}
    assert host.step() == every
    assert host.problems() == []
    for name in NAMES:
        host.put(name, BAD)
    host.restart()
    assert host.step() == every
    problems = host.problems()
    assert len(problems) == 2 * len(NAMES)
    assert all(map(str.isprintable, problems))
    host.remove()
    assert host.step() == every, "files that vanish together are held"
    assert len(host.accept_removal()["files"]) == len(NAMES)
    host.restart()
    assert host.step() == set()


def test_saves_in_quick_succession_are_all_seen(host: Host) -> None:
    """The clock of a file system ticks slowly: the second save may have the time and size of the first."""
    path = host.put("a.yaml", GOOD)
    for number in range(10, 25):
        path.write_text(GOOD.replace("10.244.0.5", f"10.244.0.{number}"))
        host.step()
        assert host.backends() == {"dns": [f"10.244.0.{number}"]}


def test_a_bad_file_keeps_its_last_good_version_also_over_a_restart(host: Host) -> None:
    host.put("a.yaml", GOOD)
    assert host.step() == {"dns"}
    for bad in (BAD, "\tnot yaml: [", b"\xff\xfe not text", b"apiVersion: vipd/v1\n\x00"):
        host.put("a.yaml", bad)
        assert host.step() == {"dns"}
        assert "a.yaml" in str(host.problems())
    host.crash()
    assert host.names() == {"dns"}
    assert "a.yaml" in str(host.problems())
    host.put("a.yaml", OTHER)
    assert host.step() == {"web"}
    assert host.problems() == []


@pytest.mark.parametrize(
    ("target", "problem"), [("a.yaml", "Too many levels"), ("nowhere", "cannot be read")]
)
def test_a_file_that_cannot_be_read_keeps_its_last_good_version(
    host: Host, target: str, problem: str
) -> None:
    # Modes mean nothing to root; a link to itself or to nothing can be read by nobody.
    path = host.put("a.yaml", GOOD)
    host.step()
    path.unlink()
    path.symlink_to(target)
    assert host.step() == {"dns"}
    assert problem in str(host.problems())
    path.unlink()
    host.put("a.yaml", GOOD)
    assert host.step() == {"dns"}
    assert host.problems() == []


def test_a_deleted_file_is_gone_now_and_after_a_restart(host: Host) -> None:
    host.put("a.yaml", GOOD)
    host.put("b.yaml", OTHER)
    host.step()
    host.remove("a.yaml")
    assert host.step() == {"web"}
    host.restart()
    assert host.names() == {"web"}
    host.stop()
    host.remove("b.yaml")
    host.start()
    assert host.names() == set(), "also one that is deleted while vipd is down"
    assert host.problems() == []


def test_a_directory_that_cannot_be_read_says_what_of_it_is_used(host: Host) -> None:
    for serving, said in (
        (set(), "no good version of a file is known"),
        ({"dns"}, "the last good versions are used"),
    ):
        if serving:
            host.put("a.yaml", GOOD)
            host.step()
        shutil.rmtree(host.services_dir)
        host.services_dir.symlink_to(host.services_dir)
        assert host.step() == serving
        assert host.problems()[-1].endswith(f"; {said}")
        host.services_dir.unlink()
        host.services_dir.mkdir()


def test_the_files_of_a_user_share_a_limit_and_each_of_roots_has_its_own() -> None:
    """However many files a user has, also after a restart. Here an author may have two node ports."""
    with QuickHost(node_ports_per_author=2) as host:
        for number, (name, user) in enumerate({"a": 1234, "b": 1234, "c": 0, "d": 0}.items()):
            two = [f"{{port: {80 + n}, node_port: {31000 + 2 * number + n}}}" for n in range(2)]
            text = f"  - {{name: {name}, address: 10.96.1.{number}, ports: [{', '.join(two)}]}}\n"
            chown(host.put(f"{name}.yaml", HEAD + text), user)
        for _ in range(2):
            assert host.step() == {"a", "c", "d"}
            (problem,) = host.problems()
            assert "b.yaml" in problem
            host.restart()
