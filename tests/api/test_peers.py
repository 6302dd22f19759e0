from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.serving import Api, served
from vipd.api import peers
from vipd.api.peers import Peer, Permission, bind_socket, group_id

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
    assert str(os.getpid()) in str(peer)


def test_no_connection_is_no_peer() -> None:
    with pytest.raises(PermissionError):
        Permission("x").peer(None)


def test_who_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    permission = Permission("admins")
    stranger = Peer(1, 4_000_000, 4_000_000)
    assert permission.may_change(Peer(1, 0, 0))
    assert permission.may_change(Peer(1, os.geteuid(), 5))
    assert not permission.may_change(stranger), "no such group: nobody is in it"
    monkeypatch.setattr(peers, "group_id", lambda name: 4_000_000 if name == "admins" else None)
    assert permission.may_change(stranger), "by primary group"
    assert not permission.may_change(Peer(1, 4_000_000, 4_000_001))
    monkeypatch.setattr(peers, "_groups_of", lambda _: [7, 4_000_000])
    assert permission.may_change(Peer(1, 4_000_000, 4_000_001)), "by membership"


def test_an_unknown_group_or_user_has_no_number() -> None:
    assert group_id("no-such-group") is None
    assert "uid 4000000" in str(Peer(1, 4_000_000, 1))


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
