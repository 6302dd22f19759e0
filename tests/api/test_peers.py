from __future__ import annotations

import asyncio
import grp
import json
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.serving import Api, served
from vipd.api import peers
from vipd.api.peers import Peer, Permission, bind_socket, group_id, groups_of
from vipd.host import accounts

NOBODY = 65534


@pytest.fixture
def place() -> Iterator[Path]:
    """A path for a socket, short enough to be bound."""
    with tempfile.TemporaryDirectory(prefix="vipd-sock-") as directory:
        yield Path(directory) / "run" / "vipd.sock"


def test_the_socket_has_its_mode_whatever_the_umask(place: Path) -> None:
    before = os.umask(0)
    try:
        with bind_socket(place, "no-such-group"):
            status = place.stat()
            assert stat.S_ISSOCK(status.st_mode)
            assert stat.S_IMODE(status.st_mode) == 0o660
        assert os.umask(0) == 0, "the process's own umask is put back"
    finally:
        os.umask(before)


def test_the_socket_keeps_its_owner_and_its_folders_are_made(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "group_id", lambda _: os.getegid())
    deep = place.parent / "deep" / place.name
    with bind_socket(deep, "vipd"):
        assert (deep.stat().st_uid, deep.stat().st_gid) == (os.geteuid(), os.getegid())


@pytest.mark.root
def test_the_socket_belongs_to_the_group_when_there_is_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "group_id", lambda _: NOBODY)
    with bind_socket(place, "vipd"):
        assert place.stat().st_gid == NOBODY


def test_a_socket_that_a_crash_left_is_replaced(place: Path) -> None:
    bind_socket(place, "no-such-group").close()
    assert place.exists()
    with bind_socket(place, "no-such-group"), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(place))


def test_a_socket_that_answers_is_left_alone(place: Path) -> None:
    with bind_socket(place, "no-such-group"):
        with pytest.raises(FileExistsError, match="in use"):
            bind_socket(place, "no-such-group")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(place))


def test_a_file_that_is_no_socket_is_not_removed(place: Path) -> None:
    place.parent.mkdir()
    place.write_text("precious")
    with pytest.raises(OSError, match="not a socket"):
        bind_socket(place, "no-such-group").close()
    assert place.read_text() == "precious"


def test_a_path_that_is_too_long_is_an_error_and_leaks_nothing(place: Path) -> None:
    with pytest.raises(OSError, match="too long"):
        bind_socket(place.with_name("x" * 120), "no-such-group")


def test_the_peer_is_known_from_the_kernel(place: Path) -> None:
    async def run() -> Peer:
        seen: list[Peer] = []

        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(Permission("x").peer(writer.transport))
            writer.close()

        async with await asyncio.start_unix_server(greet, sock=bind_socket(place, "no-such-group")):
            reader, writer = await asyncio.open_unix_connection(str(place))
            await reader.read()
            writer.close()
        return seen[0]

    peer = asyncio.run(run())
    assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.getuid(), os.getgid())
    assert peer.groups == tuple(os.getgroups())
    assert str(os.getpid()) in str(peer)


def test_no_connection_is_no_peer() -> None:
    with pytest.raises(PermissionError):
        Permission("x").peer(None)


def allowed(permission: Permission, peer: Peer) -> bool:
    return asyncio.run(permission.may_change(peer))


def test_who_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    permission = Permission("admins")
    stranger = Peer(1, 4_000_000, 4_000_000)
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_005)
    assert allowed(permission, Peer(1, 0, 0))
    assert allowed(permission, Peer(1, 4_000_005, 5)), "the daemon's own user"
    assert not allowed(permission, Peer(1, 1, 0)), "root's group is not root"
    assert not allowed(permission, stranger), "no such group: nobody is in it"
    monkeypatch.setattr(peers, "group_id", lambda name: 4_000_000 if name == "admins" else None)
    assert allowed(permission, stranger), "by its group"
    assert not allowed(permission, Peer(1, 4_000_000, 4_000_001))
    assert allowed(permission, Peer(1, 4_000_000, 4_000_001, (7, 4_000_000))), "by a supplementary one"


def test_an_unknown_group_or_user_has_no_number() -> None:
    assert group_id("no-such-group") is None
    assert "uid 4000000" in str(Peer(1, 4_000_000, 1))


def open_to_all(place: Path) -> None:
    for path in (place.parent.parent, place.parent):
        path.chmod(0o755)
    place.chmod(0o666)


CONNECT = """
import os, socket, sys
groups = list(map(int, filter(None, sys.argv[2].split(","))))
os.setgroups(groups); os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX) as client:
    client.connect(sys.argv[1])
    client.recv(1)
"""


@pytest.mark.root
@pytest.mark.parametrize("count", [0, 1, 3, 256, 257, 5000])
def test_all_groups_of_the_process_are_known(place: Path, count: int) -> None:
    groups = range(100_000, 100_000 + count)
    with bind_socket(place, "no-such-group") as listener:
        open_to_all(place)
        argv = [sys.executable, "-I", "-S", "-c", CONNECT, str(place), ",".join(map(str, groups))]
        with subprocess.Popen(argv) as process:
            listener.settimeout(60)
            with listener.accept()[0] as end:
                assert groups_of(end) == tuple(groups)
            assert process.wait(60) == 0


@pytest.mark.root
def test_the_process_counts_and_not_its_account(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has given up a group has given it up, and a group that it was started with counts."""
    group = grp.getgrnam("users").gr_gid
    monkeypatch.setattr(os, "getgrouplist", lambda *_: [group])  # the account is a member

    async def ask(groups: str) -> bool:
        seen: asyncio.Queue[bool] = asyncio.Queue()

        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            permission = Permission("users")
            seen.put_nowait(await permission.may_change(permission.peer(writer.transport)))
            writer.close()

        async with await asyncio.start_unix_server(greet, sock=bind_socket(place, "no-such-group")):
            open_to_all(place)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-c", CONNECT, str(place), groups
            )
            try:
                return await asyncio.wait_for(seen.get(), 60)
            finally:
                await process.wait()

    assert asyncio.run(ask(str(group)))
    assert not asyncio.run(ask(""))


def test_a_user_has_a_name_once_it_was_asked_for_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "user_names", accounts.CachedLookup({4_000_001: "anna"}.__getitem__))
    peer = Peer(1, 4_000_001, 1)
    assert peer.name == "uid 4000001"
    assert not allowed(Permission("admins"), peer)
    assert peer.name == "anna"


def test_the_hint_makes_the_group_only_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    join = "usermod -aG admins uid 4000000, then log in anew"
    monkeypatch.setattr(accounts, "groups", accounts.CachedLookup({"admins": 7}.__getitem__))
    peer = Peer(1, 4_000_000, 1)
    assert asyncio.run(Permission("admins").how_to_get_access(peer)) == join
    monkeypatch.setattr(accounts, "groups", accounts.CachedLookup(dict[str, int]().__getitem__))
    assert asyncio.run(Permission("admins").how_to_get_access(peer)) == f"groupadd --system admins; {join}"


def test_names_are_looked_up_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that hangs holds up neither others nor, for long, the one who asks."""
    monkeypatch.setattr(accounts, "LOOKUP_TIMEOUT_SECONDS", 0.3)
    free = threading.Event()
    slow: accounts.CachedLookup[str, int] = accounts.CachedLookup(lambda _: free.wait(60) and 7)
    monkeypatch.setattr(accounts, "groups", slow)

    async def ask() -> int:
        question = asyncio.ensure_future(Permission("admins").may_change(Peer(1, 4_000_000, 7)))
        turns = 0
        while not question.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert question.result() is False
        return turns

    assert asyncio.run(ask()) > 20
    free.set()


STRANGER = """
import json, os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
answers = []
for line in ("GET /v1/status", "DELETE /v1/services/web", "POST /v1/reload", "POST /v1/services?dry_run=1"):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(sys.argv[1])
        client.sendall(f"{line} HTTP/1.0\\r\\nHost: vipd\\r\\n\\r\\n".encode())
        text = b""
        while part := client.recv(65536):
            text += part
    head, _, body = text.partition(b"\\r\\n\\r\\n")
    answers.append([int(head.split()[1]), json.loads(body)])
print(json.dumps(answers))
"""


@pytest.mark.root
def test_a_peer_that_is_neither_root_nor_admin_may_read_but_not_change() -> None:
    async def story(api: Api) -> None:
        await api.add({"name": "web", "address": "10.96.0.11", "ports": [80]})
        api.root.chmod(0o755)
        api.socket.chmod(0o666)
        argv = [sys.executable, "-I", "-S", "-c", STRANGER, str(api.socket)]
        said = await asyncio.to_thread(
            subprocess.run, argv, capture_output=True, text=True, timeout=60, check=True
        )
        (read, status), *changes = json.loads(said.stdout)
        assert (read, status["state"]) == (200, "in-sync")
        assert [code for code, _ in changes] == [403, 403, 403]
        error = changes[0][1]["error"]
        assert error["kind"] == "forbidden"
        assert "usermod -aG" in error["hint"]
        assert "root" in error["why"]
        assert api.stored() == {"web"}

    served(story)


def test_every_route_that_is_not_read_is_refused_to_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the router, so that a new route is among them. Nothing is found under these names: a request
    that passes the guard has another answer."""

    async def never(_: Permission, __: Peer) -> bool:
        return False

    async def story(api: Api) -> None:
        routes = {
            (method, route.resource.canonical)
            for route in api.app.router.routes()
            if route.resource is not None
            for method in (
                {"GET", "POST", "PUT", "PATCH", "DELETE"} if route.method == "*" else {route.method}
            )
        }
        changing = {(method, path) for method, path in routes if method not in ("GET", "HEAD")}
        assert {method for method, _ in changing} >= {"POST", "PATCH", "DELETE"}
        assert len(changing) > 10, "the router is what was asked"
        answers = {
            (method, path): (await api.ask(method, re.sub("{.*?}", "none", path), {})).kind
            for method, path in sorted(changing)
        }
        assert answers == dict.fromkeys(answers, "forbidden")
        assert (await api.ask("GET", "/v1/services")).status == 200

    monkeypatch.setattr(Permission, "may_change", never)
    served(story)
