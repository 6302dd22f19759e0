"""Files in the directory of declarations: what is too large, too many or not what it seems."""

from __future__ import annotations

import os

import pytest

from tests.lab.inside import Vipd, declare, running
from tests.model.samples import HEAD
from vipd.model import limits

SECRET = "nobody-may-see-this"


def good(number: int) -> str:
    return f"{HEAD}- {{name: s{number}, address: 10.96.0.{number}, ports: [80], backends: [10.244.0.5]}}\n"


async def read(vipd: Vipd) -> tuple[set[str], str]:
    """The services that serve after the files were read again, and what is wrong with files."""
    answer = await vipd.reload()
    problems = answer.body["error"]["problems"] if answer.status == 422 else []
    return vipd.kernel.names(), "\n".join(problems)


def test_a_sparse_file_is_not_read() -> None:
    """One of 20 GB ended the daemon at each start."""

    async def story(vipd: Vipd) -> None:
        with (vipd.services_dir / "sparse.yaml").open("r+b") as file:
            file.truncate(20 * 2**30)
        names, problems = await read(vipd)
        assert names == {"s1", "s2"}, "the last good version serves on"
        assert "sparse.yaml: cannot be read: is larger than 64 MiB" in problems

    def prepare(vipd: Vipd) -> None:
        (vipd.services_dir / "good.yaml").write_text(good(1))
        (vipd.services_dir / "sparse.yaml").write_text(good(2))

    running(story, prepare)


def test_a_file_at_the_limit_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FILE_BYTES", 1000)

    async def story(vipd: Vipd) -> None:
        for number, more in ((1, 0), (2, 1)):
            text = good(number) + "#" * (999 + more - len(good(number))) + "\n"
            (vipd.services_dir / f"{number}.yaml").write_text(text)
        names, problems = await read(vipd)
        assert names == {"s1"}
        assert "2.yaml: cannot be read: is larger than 1000 bytes" in problems

    running(story)


def test_what_is_no_file_holds_up_nothing() -> None:
    async def story(vipd: Vipd) -> None:
        place = vipd.services_dir
        (place / "good.yaml").write_text(good(1))
        os.mkfifo(place / "fifo.yaml")
        os.mknod(place / "socket.yaml", 0o140600)
        (place / "device.yaml").symlink_to("/dev/zero")
        for leads in ("loop.yaml", "nowhere", "/", "."):
            name = leads if leads == "loop.yaml" else f"to{leads.replace('/', '-')}.yaml"
            (place / name).symlink_to(leads)
        names, problems = await read(vipd)
        assert names == {"s1"}
        for name in ("fifo", "socket", "device"):
            assert f"{name}.yaml: cannot be read: is not a regular file" in problems
        assert problems.count("cannot be read") + problems.count("is a directory") == 7, problems

    running(story)


def test_of_too_many_files_those_that_serve_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FILES", 3)

    async def story(vipd: Vipd) -> None:
        for number in (1, 2):
            (vipd.services_dir / f"{number}.yaml").write_text(good(number))
        names, _ = await read(vipd)
        assert names == {"s7", "s8", "s9"}
        status = await vipd.status()
        assert "2 files are not read, such as 1.yaml: 3 are the most; hint: " in str(status)

    def prepare(vipd: Vipd) -> None:
        for number in (7, 8, 9):
            (vipd.services_dir / f"{number}.yaml").write_text(good(number))

    running(story, prepare)


def test_all_files_together_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DIRECTORY_BYTES", 2 * len(good(1)))

    async def story(vipd: Vipd) -> None:
        (vipd.services_dir / "1.yaml").write_text(good(1))
        names, problems = await read(vipd)
        assert names == {"s8", "s9"}
        assert "1.yaml: cannot be read: with the files before it there are more than" in problems

    def prepare(vipd: Vipd) -> None:
        for number in (8, 9):
            (vipd.services_dir / f"{number}.yaml").write_text(good(number))

    running(story, prepare)


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


def test_nothing_is_repeated_of_what_is_no_declaration() -> None:
    for kind, text in FOREIGN.items():
        found = declare(text)
        assert not found.ok, kind
        assert SECRET[:12] not in str(found.problems), kind
    assert "*nobody" in str(declare("apiVersion: vipd/v1\nservices: []\nnames: *nobody\n").problems)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
OWNERS = {(0, 0): True, (0, 1001): True, (1001, 1001): True, (1001, 0): False, (1001, 1002): False}
"""Of a link, and of the file that it leads to: whether it is followed."""


@needs_root
@pytest.mark.parametrize("way", ["direct", "through a directory", "a chain that begins with root's"])
def test_a_link_is_followed_for_its_owner_alone(way: str) -> None:
    async def story(vipd: Vipd) -> None:
        elsewhere = vipd.root / "elsewhere"
        elsewhere.mkdir()
        expected = set()
        for number, ((link_owner, file_owner), followed) in enumerate(OWNERS.items(), 1):
            target, link = elsewhere / f"{number}.yaml", vipd.services_dir / f"{number}.yaml"
            target.write_text(good(number))
            os.chown(target, file_owner, -1)
            if way == "direct":
                made = link
                link.symlink_to(target)
            elif way == "through a directory":
                made = vipd.root / f"directory{number}"
                made.symlink_to("elsewhere")
                link.symlink_to(made / target.name)
            else:
                made = vipd.root / f"second{number}"
                made.symlink_to(target)
                link.symlink_to(f"../{made.name}")
            os.lchown(made, link_owner, -1)
            expected |= {f"s{number}"} if followed else set()
        names, problems = await read(vipd)
        assert names == expected
        for file_owner in (0, 1002):
            assert f"a symbolic link of user 1001 to a file of user {file_owner}; let the link" in problems

    running(story)


@needs_root
def test_a_link_that_is_exchanged_serves_its_last_good_version() -> None:
    async def story(vipd: Vipd) -> None:
        target, link = vipd.root / "target.yaml", vipd.services_dir / "a.yaml"
        target.write_text(good(1))
        for leads, owner in (("../target.yaml", 1001), ("../secret", 0)):
            (vipd.root / "secret").write_text(SECRET)
            link.unlink(missing_ok=True)
            link.symlink_to(leads)
            os.lchown(link, 1001, -1)
            os.chown(link, owner, -1)
            names, problems = await read(vipd)
            assert names == {"s1"}
            assert SECRET not in problems
        assert "a symbolic link of user 1001" in problems

    running(story)


def test_links_of_configuration_management_work() -> None:
    """Kubernetes' way of exchanging many files at once, and that of stow."""

    def prepare(vipd: Vipd) -> None:
        place = vipd.root / "services"
        for number, version in enumerate(("..2026_01", "..2026_02"), 1):
            (place / version).mkdir(parents=True)
            (place / version / "a.yaml").write_text(good(number))
        (place / "..data").symlink_to("..2026_01")
        (place / "a.yaml").symlink_to("..data/a.yaml")
        stowed = vipd.root / "stow" / "vipd" / "services"
        stowed.mkdir(parents=True)
        (stowed / "b.yaml").write_text(good(9))
        (place / "b.yaml").symlink_to("../stow/vipd/services/b.yaml")
        vipd.services_dir.rmdir()
        vipd.services_dir.symlink_to("services")

    async def story(vipd: Vipd) -> None:
        assert vipd.kernel.names() == {"s1", "s9"}
        place = vipd.root / "services"
        (place / "..data_tmp").symlink_to("..2026_02")
        (place / "..data_tmp").rename(place / "..data")
        assert await read(vipd) == ({"s2", "s9"}, "")

    running(story, prepare)
