"""Clients of the API's socket that hold connections, send half of a request, or take no answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.api.specs import WEB
from tests.lab.inside import Vipd, running
from tests.lab.stories import story_of
from tests.model.samples import block, many_declared

NOBODY, SOMEBODY = 65534, 65533
ALL, OF_ONE, OF_ROOT = 256, 64, 64
"""Connections that all users, one user and root may have."""
GET = b"GET /v1/version HTTP/1.1\r\nHost: vipd\r\n\r\n"
FOLLOW = b"GET /v1/events?follow=1 HTTP/1.1\r\nHost: vipd\r\n\r\n"
"""It is answered for as long as its client likes."""
DIFF = b"GET /v1/diff HTTP/1.1\r\nHost: vipd\r\n\r\n"
"""It is answered once no write is under way."""


@contextlib.contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """The kernel tells the other end who connects: by the effective user."""
    if uid:
        os.seteuid(uid)
    try:
        yield
    finally:
        if uid:
            os.seteuid(0)


def connect(vipd: Vipd, sent: bytes = b"", uid: int = 0) -> socket.socket:
    """A connection of a user."""
    made = socket.socket(socket.AF_UNIX)
    made.setblocking(False)
    with acting_as(uid):
        made.connect(str(vipd.socket))
    if sent:
        made.send(sent)
    return made


@contextlib.asynccontextmanager
async def held(vipd: Vipd, count: int, sent: bytes = b"", uid: int = 0) -> AsyncIterator[list[socket.socket]]:
    """So many connections of a user, made one after the other."""
    vipd.root.chmod(0o755)
    vipd.socket.chmod(0o666)
    made: list[socket.socket] = []
    try:
        for _ in range(count):
            made.append(connect(vipd, sent, uid))
            await asyncio.sleep(0.01)
        yield made
    finally:
        for each in made:
            each.close()


@contextlib.asynccontextmanager
async def writing(vipd: Vipd) -> AsyncIterator[None]:
    """A write is under way."""
    vipd.kernel.gate.clear()
    vipd.kernel.writing.clear()
    vipd.declare(block("10.96.0.10", "dns", "10.244.0.5"))
    await vipd.kernel.writing.wait()
    try:
        yield
    finally:
        vipd.kernel.gate.set()


async def received(connection: socket.socket) -> bytes:
    """What comes until the other end closes."""
    loop, text = asyncio.get_running_loop(), b""
    with contextlib.suppress(ConnectionError):
        while piece := await loop.sock_recv(connection, 1 << 20):
            text += piece
    return text


async def asked(vipd: Vipd, uid: int = 0, request: bytes = GET) -> int:
    """The status of a good request of a user; 0: no answer."""
    with connect(vipd, uid=uid) as connection:
        with contextlib.suppress(ConnectionError):
            ended = request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
            await asyncio.get_running_loop().sock_sendall(connection, ended)
        answer = await received(connection)
    return int(answer.split()[1]) if answer else 0


def has_ended(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 20):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.root
@pytest.mark.parametrize("sent", [b"", GET[:30], GET, DIFF], ids=["silent", "half a head", "kept", "in work"])
@story_of(running)
async def test_what_one_user_holds_keeps_neither_root_nor_others_out(vipd: Vipd, *, sent: bytes) -> None:
    async with writing(vipd), held(vipd, 2 * OF_ONE, sent, NOBODY) as connections:
        assert [await asked(vipd, uid) for uid in (0, SOMEBODY)] == [200, 200]
        assert sum(not has_ended(each) for each in connections) <= OF_ONE
        assert await asked(vipd, NOBODY) == (503 if sent == DIFF else 200)


@pytest.mark.root
@story_of(running)
async def test_root_gets_in_though_many_users_hold_all_there_is(vipd: Vipd) -> None:
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(writing(vipd))
        for user in range(ALL // OF_ONE):
            await stack.enter_async_context(held(vipd, OF_ONE, DIFF, SOMEBODY - user))
        assert await asked(vipd, NOBODY) == 503
        assert [await asked(vipd) for _ in range(20)] == [200] * 20


@story_of(running, simulated=True)
async def test_idle_and_half_sent_requests_are_ended(vipd: Vipd) -> None:
    body = b"POST /v1/services HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx"
    sent = {"silent": b"", "half a head": GET[:30], "half a body": body, "idle after an answer": GET}
    connections = {name: connect(vipd, some) for name, some in sent.items()}
    await asyncio.sleep(10)
    assert not any(map(has_ended, connections.values()))
    await asyncio.sleep(80)
    assert [name for name, each in connections.items() if not has_ended(each)] == []
    for each in connections.values():
        each.close()


def test_answers_that_nobody_takes_are_given_up() -> None:
    async def story(vipd: Vipd) -> None:
        async with held(vipd, OF_ROOT - 1, b"GET /v1/export HTTP/1.1\r\nHost: x\r\n\r\n") as connections:
            for each in connections:  # it has begun
                assert await asyncio.get_running_loop().sock_recv(each, 1)
            await asyncio.sleep(90)
            assert await asked(vipd) == 200
            assert all(map(has_ended, connections))

    def large(vipd: Vipd) -> None:
        (vipd.services_dir / "many.yaml").write_text(many_declared(2000))

    running(story, large, simulated=True)


@story_of(running, simulated=True)
async def test_a_stream_that_is_read_goes_on_beyond_every_limit(vipd: Vipd) -> None:
    with connect(vipd, FOLLOW) as reading:
        await asyncio.sleep(600)
        assert not has_ended(reading)
        await vipd.add(WEB)
        event = await asyncio.get_running_loop().sock_recv(reading, 1 << 16)
        assert b'"web"' in event


@story_of(running, simulated=True)
async def test_an_answer_that_vipd_works_on_is_waited_for(vipd: Vipd) -> None:
    vipd.kernel.gate.clear()
    adding = asyncio.create_task(vipd.add(WEB))
    await asyncio.sleep(29)
    vipd.kernel.gate.set()
    assert (await adding).body["applied"] is True


@story_of(running)
async def test_vipctl_says_what_why_and_what_to_do(vipd: Vipd) -> None:
    await vipd.session.close()
    async with writing(vipd), held(vipd, OF_ROOT, DIFF):
        done = await vipd.vipctl("status")
        with connect(vipd) as connection:
            answer = json.loads((await received(connection)).partition(b"\r\n\r\n")[2])
    assert done.code == 4
    what = f"vipd takes no more connections of uid {os.geteuid()}"
    why = f"{OF_ROOT} of that user are open, and vipd works on each of them"
    hint = "ss -xp shows whose they are: end some of them, or try again later"
    assert done.stderr == f"vipctl: {what}: {why}; hint: {hint}\n"
    assert answer["apiVersion"] == "vipd/v1"
    assert (answer["error"]["what"], answer["error"]["why"]) == (what, why)
