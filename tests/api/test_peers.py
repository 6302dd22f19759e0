"""The API's socket, and who may do what over it."""

from __future__ import annotations

import asyncio
import grp
import os
import re
import socket
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.api.specs import NOBODY, WEB, asked_as, routes, stored
from tests.lab.inside import Vipd, running
from tests.lab.stories import story_of

GROUP = "users"
"""One that every Debian has."""
ADD = ("POST", "/v1/services", {"service": WEB})


def members() -> int:
    return grp.getgrnam(GROUP).gr_gid


@pytest.mark.parametrize("mask", [0, 0o077])
def test_the_socket_has_its_mode_whatever_the_umask_and_its_folders_are_made(mask: int) -> None:
    async def story(vipd: Vipd) -> None:
        status = vipd.socket.stat()
        assert stat.S_ISSOCK(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o660
        assert (status.st_uid, status.st_gid) == (os.geteuid(), os.getegid())
        assert os.umask(mask) == mask, "the process's own umask is put back"

    def deep(vipd: Vipd) -> None:
        vipd.settings["socket"] = vipd.socket = vipd.root / "run" / "deep" / "vipd.sock"

    before = os.umask(mask)
    try:
        running(story, deep)
    finally:
        os.umask(before)


def test_a_socket_that_a_crash_left_is_replaced_and_any_other_file_is_left_alone(tmp_path: Path) -> None:
    async def story(vipd: Vipd) -> None:
        assert (await vipd.status())["state"] == "in-sync"

    def crashed(vipd: Vipd) -> None:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(vipd.socket))

    running(story, crashed)
    precious = tmp_path / "precious"
    precious.write_text("data")
    with pytest.raises(Exception, match="precious is not a socket; it is left alone"):
        running(story, socket=precious)
    assert precious.read_text() == "data"


@pytest.mark.root
def test_root_and_the_members_of_the_group_may_change_and_others_may_read() -> None:
    users: dict[str, tuple[int, int, Sequence[int], bool]] = {
        "root": (0, NOBODY, (), True),
        "root's group is not root": (1, 0, (0,), False),
        "a stranger": (4_000_000, 4_000_000, (), False),
        "by its group": (4_000_000, members(), (), True),
        "by a supplementary one": (4_000_000, 4_000_000, (7, members()), True),
        "by one of very many": (NOBODY, NOBODY, (*range(100_000, 105_000), members()), True),
        "with very many others": (NOBODY, NOBODY, range(100_000, 105_000), False),
        **{
            f"by the last of {count}": (
                NOBODY,
                NOBODY,
                (*range(100_000 - count + 1, 100_000), members()),
                True,
            )
            for count in (1, 3, 256, 257)
        },
    }

    async def story(vipd: Vipd) -> dict[str, bool]:
        assert vipd.socket.stat().st_gid == members()
        found = {}
        for name, (uid, gid, groups, _) in users.items():
            reading, changing = await asked_as(
                vipd, ("GET", "/v1/status", None), ("POST", "/v1/services?dry_run=1", ADD[2]),
                uid=uid, gid=gid, groups=groups,
            )  # fmt: skip
            assert (reading.status, reading.body["state"]) == (200, "in-sync")
            assert changing.status == 200 or changing.kind == "forbidden"
            found[name] = changing.status == 200
        return found

    assert running(story, socket_group=GROUP, admin_group=GROUP) == {
        name: may for name, (*_, may) in users.items()
    }


@pytest.mark.root
def test_the_process_counts_and_not_its_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has given up a group has given it up."""
    monkeypatch.setattr(os, "getgrouplist", lambda *_: [members()])

    async def story(vipd: Vipd) -> None:
        assert [answer.kind for answer in await asked_as(vipd, ADD)] == ["forbidden"]

    running(story, socket_group=GROUP, admin_group=GROUP)


@pytest.mark.root
def test_whoever_may_not_change_is_told_how_to_get_access() -> None:
    def hint(group: str, uid: int) -> str:
        async def story(vipd: Vipd) -> str:
            (answer,) = await asked_as(vipd, ADD, uid=uid)
            error = answer.body["error"]
            assert (error["kind"], "root" in error["why"]) == ("forbidden", True)
            assert stored(vipd) == set()
            return str(error["hint"])

        return running(story, admin_group=group)

    join = "usermod -aG {} {}, then log in anew"
    assert join.format(GROUP, "nobody") in hint(GROUP, NOBODY)
    assert "groupadd" not in hint(GROUP, NOBODY)
    missing = f"groupadd --system no-such-group; {join.format('no-such-group', 'uid 4000000')}"
    assert missing in hint("no-such-group", 4_000_000)


@pytest.mark.root
def test_a_directory_of_users_that_hangs_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    free, asked = threading.Event(), threading.Event()

    def hanging(name: str) -> object:
        asked.set()
        free.wait(60)
        raise KeyError(name)

    async def story(vipd: Vipd) -> None:
        monkeypatch.setattr(grp, "getgrnam", hanging)
        question = asyncio.create_task(asked_as(vipd, ADD))
        await vipd.until(asked.is_set)
        for _ in range(20):
            assert (await vipd.ask("GET", "/v1/status")).status == 200
        assert [answer.kind for answer in await question] == ["forbidden"]
        free.set()

    running(story, admin_group="another-group")


@pytest.mark.root
@story_of(running)
async def test_every_change_is_refused_to_a_reader(vipd: Vipd) -> None:
    """Nothing has these names: a request that passes the guard has another answer."""
    paths = [(method, re.sub("[A-Z]{3,}", "none", path)) for method, path in routes()]
    changes: list[tuple[str, str, object]] = [(method, path, {}) for method, path in paths if method != "GET"]
    assert {method for method, *_ in changes} == {"POST", "PATCH", "DELETE"}
    answers = await asked_as(vipd, *changes)
    passed = [change for change, answer in zip(changes, answers, strict=True) if answer.kind != "forbidden"]
    assert passed == []
    assert [a.status for a in await asked_as(vipd, ("GET", "/v1/services", None))] == [200]
