"""Files in the directory of declarations: what is too large, too many or not what it seems."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.instrumented import yardstick
from tests.sources.services_directory import ServicesDirectory
from vipd.declaration.native import parse_declaration
from vipd.model import limits
from vipd.sources.files import FileSource

GOOD = """\
apiVersion: vipd/v1
services:
- {name: %s, address: 10.96.0.%d, ports: [80], backends: [10.244.0.5]}
"""


HEAD = "apiVersion: vipd/v1\nservices:\n"


def good(number: int) -> str:
    return GOOD % (f"s{number}", number)


@pytest.fixture
def source(tmp_path: Path) -> FileSource:
    (tmp_path / "services").mkdir()
    return FileSource(tmp_path / "services", tmp_path / "kept")


def serving(source: FileSource) -> dict[str, tuple[str, ...]]:
    """Accept what can be; the services of each file, and its problem instead."""
    source.scan()
    units = source.units()
    source.save_accepted({name: unit.candidate for name, unit in units.items() if unit.candidate.ok})
    return {
        Path(name).name: tuple(s.name for s in unit.candidate.services) or (str(unit.candidate.problems[0]),)
        for name, unit in units.items()
    }


def test_a_sparse_file_is_not_read(source: FileSource, tmp_path: Path) -> None:
    """One of 20 GB ended the daemon at each start."""
    place = tmp_path / "services"
    (place / "good.yaml").write_text(good(1))
    (place / "sparse.yaml").write_text(good(2))
    assert serving(source) == {"good.yaml": ("s1",), "sparse.yaml": ("s2",)}
    with (place / "sparse.yaml").open("r+b") as file:
        file.truncate(20 * 2**30)
    assert "is larger than 64 MiB" in serving(source)["sparse.yaml"][0]
    unit = source.units()[f"file:{place / 'sparse.yaml'}"]
    assert [s.name for s in unit.accepted.services] == ["s2"], "the last good version serves on"


@pytest.mark.parametrize("more", [0, 1])
def test_a_file_at_the_limit_is_read(
    source: FileSource, tmp_path: Path, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FILE_BYTES", 1000)
    text = good(1) + "#" * (999 + more - len(good(1))) + "\n"
    (tmp_path / "services" / "a.yaml").write_text(text)
    (found,) = serving(source)["a.yaml"]
    assert found == "s1" if not more else "larger than 1000 bytes" in found


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
def test_what_is_no_file_holds_up_nothing(source: FileSource, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "services"
    (place / "good.yaml").write_text(good(1))
    if kind == "fifo":
        os.mkfifo(place / "odd.yaml")
    elif kind == "socket":
        os.mknod(place / "odd.yaml", 0o140600)
    else:
        (place / "odd.yaml").symlink_to("/dev/zero")
    found = serving(source)
    assert found["good.yaml"] == ("s1",)
    assert "is not a regular file" in found["odd.yaml"][0]


def test_of_too_many_files_those_that_serve_are_read(
    source: FileSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FILES", 3)
    place = tmp_path / "services"
    for number in (7, 8, 9):
        (place / f"{number}.yaml").write_text(good(number))
    assert len(serving(source)) == 3
    assert source.faults() == ()
    for number in (1, 2):
        (place / f"{number}.yaml").write_text(good(number))
    assert sorted(serving(source)) == ["7.yaml", "8.yaml", "9.yaml"]
    (fault,) = source.faults()
    assert "2 files are not read, such as 1.yaml: 3 are the most; hint: " in fault


def test_all_files_together_are_limited(
    source: FileSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "services"
    for number in (8, 9):
        (place / f"{number}.yaml").write_text(good(number))
    monkeypatch.setattr(limits, "DIRECTORY_BYTES", 2 * len(good(1)))
    assert len(serving(source)) == 2
    (place / "1.yaml").write_text(good(1))
    found = serving(source)
    assert "with the files before it there are more than" in found.pop("1.yaml")[0]
    assert found == {"8.yaml": ("s8",), "9.yaml": ("s9",)}


SECRET = "nobody-may-see-this"
FOREIGN = {
    "a token": SECRET,
    "a line of shadow": f"root:$y${SECRET}:19000:0:99999:7:::\ndaemon:*:19000:0:99999:7:::\n",
    "a key": f"-----BEGIN {SECRET}-----\nabc\n",
    "an alias": f"a: *{SECRET}\n",
    "a tag": f"a: !{SECRET} b\n",
    "a key twice": f"{SECRET}: 1\n{SECRET}: 2\n",
    "a mapping": f"password: {SECRET}\n{SECRET}: 1\n",
    "another program's": f"services:\n- {{name: x, {SECRET}: y, address: {SECRET}}}\n",
    "a version": f"apiVersion: 'the {SECRET}'\n",
    "a list": f"- {SECRET}\n",
    "ini": f"[main]\npassword = {SECRET}: [\n",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_nothing_is_repeated_of_what_is_no_declaration(kind: str) -> None:
    found = parse_declaration(FOREIGN[kind], "a.yaml")
    assert not found.ok
    assert not any(SECRET[:12] in str(problem) for problem in found.problems)


def test_a_declaration_with_a_fault_is_quoted() -> None:
    found = parse_declaration("apiVersion: vipd/v1\nservices: []\nnames: *nobody\n", "a.yaml")
    assert "*nobody" in str(found.problems)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "target.yaml"
    path.parent.mkdir()
    path.write_text(good(1))
    return path


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@needs_root
@pytest.mark.parametrize(
    ("owners", "followed"),
    [((0, 0), True), ((0, 1001), True), ((1001, 1001), True), ((1001, 0), False), ((1001, 1002), False)],
)
@pytest.mark.parametrize("way", ["direct", "through a directory", "a chain that begins with root's"])
def test_a_link_is_followed_for_its_owner_alone(
    source: FileSource,
    tmp_path: Path,
    target: Path,
    way: str,
    owners: tuple[int, int],
    followed: bool,
) -> None:
    link, (link_owner, file_owner) = tmp_path / "services" / "a.yaml", owners
    os.chown(target, file_owner, -1)
    if way == "direct":
        made = link
        link.symlink_to(target)
    elif way == "through a directory":
        made = tmp_path / "directory"
        made.symlink_to("elsewhere")
        link.symlink_to(made / "target.yaml")
    else:
        made = tmp_path / "second"
        made.symlink_to(target)
        link.symlink_to("../second")
    os.lchown(made, link_owner, -1)
    (found,) = serving(source)["a.yaml"]
    if followed:
        assert found == "s1"
    else:
        assert f"a symbolic link of user {link_owner} to a file of user {file_owner}; let the link" in found


@needs_root
def test_a_link_that_is_exchanged_serves_its_last_good_version(
    source: FileSource, tmp_path: Path, target: Path
) -> None:
    link = tmp_path / "services" / "a.yaml"
    link.symlink_to(target)
    os.chown(target, 1001, -1)
    os.lchown(link, 1001, -1)
    assert serving(source) == {"a.yaml": ("s1",)}
    (tmp_path / "secret").write_text(SECRET)
    link.unlink()
    link.symlink_to("../secret")
    os.lchown(link, 1001, -1)
    (found,) = serving(source)["a.yaml"]
    assert SECRET not in found
    (unit,) = source.units().values()
    assert [s.name for s in unit.accepted.services] == ["s1"]


def test_links_of_configuration_management_work(tmp_path: Path) -> None:
    """Kubernetes' way of exchanging many files at once, and that of stow."""
    place = tmp_path / "services"
    for number, version in enumerate(("..2026_01", "..2026_02"), 1):
        (place / version).mkdir(parents=True)
        (place / version / "a.yaml").write_text(good(number))
    (place / "..data").symlink_to("..2026_01")
    (place / "a.yaml").symlink_to("..data/a.yaml")
    stowed = tmp_path / "stow" / "vipd" / "services"
    stowed.mkdir(parents=True)
    (stowed / "b.yaml").write_text(good(9))
    (place / "b.yaml").symlink_to("../stow/vipd/services/b.yaml")
    (tmp_path / "linked").symlink_to("services")
    source = FileSource(tmp_path / "linked", tmp_path / "kept")
    assert serving(source) == {"a.yaml": ("s1",), "b.yaml": ("s9",)}
    (place / "..data_tmp").symlink_to("..2026_02")
    (place / "..data_tmp").rename(place / "..data")
    assert serving(source)["a.yaml"] == ("s2",)


@pytest.mark.parametrize("leads", ["a.yaml", "nowhere", "/", "."])
def test_links_to_nothing_that_can_be_read(source: FileSource, tmp_path: Path, leads: str) -> None:
    (tmp_path / "services" / "a.yaml").symlink_to(leads)
    (found,) = serving(source)["a.yaml"]
    assert "cannot be read" in found or "is a directory" in found


SERVICE = HEAD + "- name: a\n  address: 10.96.0.1\n  ports: [80]\n"
HUGE: dict[str, Callable[[int], str]] = {
    "one text": lambda size: HEAD + "- name: '" + "x" * size + "'\n",
    "comments": lambda size: "#" * size,
    "comments between": lambda size: HEAD + ("#\n" * 1_000_000 + "- a\n") * (size // 2_100_000),
    "spaces": lambda size: "apiVersion: vipd/v1\n" + " " * size + "x",
    "values": lambda size: "- a\n" * (size // 16),
    "signs": lambda size: "apiVersion: vipd/v1\nservices: [\n" + "\N{SNOWMAN},\n" * (size // 40),
    "wide": lambda size: (
        HEAD + "- '\U0001f600'\n" + ("#" + "x" * 1_000_000 + "\n- a\n") * (size // 1_100_000)
    ),
    "no break": lambda size: "apiVersion: vipd/v1\nservices: [" + "a," * (size // 32),
    "a long list": lambda size: SERVICE + "  backends: [" + "1," * (size // 2 - 100) + "]\n",
    "keys": lambda size: "".join(f"key{number}: 1\n" for number in range(size // 16)),
    "keys in a service": lambda size: SERVICE + "".join(f"  k{number}: 1\n" for number in range(size // 16)),
    "no service": lambda size: HEAD + "- {}\n" * (size // 200),
}
STANDSTILL = 20.0
"""Yardsticks: 50 ms on a machine that does nothing else."""


@pytest.mark.nightly(each_time="keys")
@pytest.mark.parametrize("kind", HUGE)
def test_the_loop_goes_on_while_a_file_at_the_limit_is_read(
    services_dir: ServicesDirectory, kind: str
) -> None:
    """In a thread everything between two breaths of Python holds up the loop."""
    services_dir.write("a.yaml", HUGE[kind](limits.FILE_BYTES - 100))

    async def standstill() -> float:
        longest = 0.0
        reading = asyncio.create_task(asyncio.to_thread(services_dir.source.scan))
        while not reading.done():
            began = time.perf_counter()
            used = time.process_time()
            await asyncio.sleep(0.001)
            # Of a machine with other work only what this process used itself counts.
            longest = max(longest, min(time.perf_counter() - began, time.process_time() - used))
        await reading
        return longest

    # Some 10 ms are usual: other threads wait for their turn 5 ms at least. What the file does it does
    # each time; what the kernel does, which lets the reading thread run and the loop wait, comes and goes.
    most = STANDSTILL * max(yardstick(), yardstick())
    assert any(asyncio.run(standstill()) < most for _ in range(3))
