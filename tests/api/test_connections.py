"""Clients of the API's socket that hold connections, send half of a request, or take no answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from tests.host.connections.clients import has_ended
from tests.observe.health_ports.asking import until
from vipd.api.peers import bind_socket
from vipd.api.socket_server import LIMITS, serving
from vipd.cli.connection import Daemon
from vipd.cli.errors import UNREACHABLE, CliError
from vipd.host.connections.connections import Connections
from vipd.host.connections.limits import ConnectionLimits
from vipd.observe.api_client import Client, DaemonError

PATIENCE_SECONDS = 60.0
AN_HOUR = 3600.0
NOBODY, SOMEBODY = 65534, 65533
LARGE = "x" * (4 * 1024 * 1024)
GENEROUS = ConnectionLimits(100, 100, AN_HOUR, AN_HOUR, AN_HOUR, privileged=100)
SOON = 0.3
GET = b"GET /short HTTP/1.1\r\nHost: vipd\r\n\r\n"


class ServedApp:
    """A served application: /short, /large, /working (until `done`), /lines (for ever), /body."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connections: Connections
        self.done = asyncio.Event()
        self.in_work = 0
        """Requests that /working has."""
        self.app = web.Application()
        self.app.add_routes(
            [web.get(f"/{name}", getattr(self, name)) for name in ("short", "large", "working")]
        )
        self.app.add_routes([web.get("/lines", self.lines), web.post("/body", self.body)])

    async def short(self, _: web.Request) -> web.Response:
        return web.json_response({"short": True})

    async def large(self, _: web.Request) -> web.Response:
        return web.json_response({"large": LARGE})

    async def working(self, _: web.Request) -> web.Response:
        self.in_work += 1
        await self.done.wait()
        return web.json_response({"worked": True})

    async def body(self, request: web.Request) -> web.Response:
        return web.json_response({"bytes": len(await request.read())})

    async def lines(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"{}\n")
                await asyncio.sleep(SOON / 10)
        return response

    def connect(self, sent: bytes = b"", uid: int = 0) -> socket.socket:
        """A connection of a user."""
        made = socket.socket(socket.AF_UNIX)
        made.setblocking(False)
        with acting_as(uid):
            made.connect(str(self.path))
        if sent:
            made.send(sent)
        return made


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


Story = Callable[[ServedApp], Awaitable[None]]


def open_to_all(path: Path) -> socket.socket:
    """A listening socket to which every user may connect."""
    path.parent.chmod(0o755)
    listener = bind_socket(path, "no-such-group")
    path.chmod(0o666)
    return listener


def run_story(story: Story, limits: ConnectionLimits = GENEROUS) -> None:
    async def run(root: Path) -> None:
        served, listener = ServedApp(root / "sock"), open_to_all(root / "sock")
        async with serving(served.app, listener, limits) as served.connections:
            await story(served)
            served.done.set()

    with tempfile.TemporaryDirectory(prefix="vipd-api-") as directory:
        asyncio.run(asyncio.wait_for(run(Path(directory)), 2 * PATIENCE_SECONDS))


@contextlib.asynccontextmanager
async def held(
    served: ServedApp, count: int, sent: bytes = b"", uid: int = 0
) -> AsyncIterator[list[socket.socket]]:
    """So many connections of a user, made one after the other."""
    made: list[socket.socket] = []
    try:
        for _ in range(count):
            made.append(served.connect(sent, uid))
            await asyncio.sleep(0.003)
        yield made
    finally:
        for each in made:
            each.close()


async def asked(served: ServedApp, uid: int = 0, request: bytes = GET) -> int:
    """The status of a good request of a user; 0: no answer."""
    connection = served.connect(uid=uid)
    loop, got = asyncio.get_running_loop(), b""
    try:
        await loop.sock_sendall(connection, request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        while piece := await asyncio.wait_for(loop.sock_recv(connection, 1 << 20), PATIENCE_SECONDS):
            got += piece
    except ConnectionError:
        pass
    finally:
        connection.close()
    return int(got.split()[1]) if got else 0


@pytest.mark.root
@pytest.mark.parametrize(
    "sent", [b"", b"GET /short HTTP/1.1\r\n", GET], ids=["silent", "half a head", "kept"]
)
def test_what_one_user_holds_keeps_neither_root_nor_others_out(sent: bytes) -> None:
    async def story(served: ServedApp) -> None:
        async with held(served, 30, sent, NOBODY):
            await until(lambda: len(served.connections) == 5, "no more than one user may have")
            for uid in (0, SOMEBODY, NOBODY):
                assert await asked(served, uid) == 200

    run_story(story, GENEROUS._replace(connections=8, per_client=5))


@pytest.mark.root
def test_root_gets_in_though_many_users_hold_all_there_is() -> None:
    async def story(served: ServedApp) -> None:
        async def until_in_work(requests: int) -> None:
            await until(lambda: served.in_work == requests, "no more than all may have")

        async with contextlib.AsyncExitStack() as stack:
            for made in range(30):  # one after the other: the next would end one whose request has not begun
                await stack.enter_async_context(
                    held(served, 1, b"GET /working HTTP/1.1\r\nHost: x\r\n\r\n", SOMEBODY - made // 3)
                )
                await until_in_work(min(made + 1, 8))
            assert await asked(served, NOBODY) == 503
            for _ in range(20):
                assert await asked(served) == 200

    run_story(story, GENEROUS._replace(connections=8, per_client=5, privileged=2))


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /short HTTP/1.1\r\nHost",
        b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx",
        GET,
    ],
    ids=["silent", "half a head", "half a body", "idle after an answer"],
)
def test_idle_and_half_sent_requests_are_ended(sent: bytes) -> None:
    async def story(served: ServedApp) -> None:
        async with held(served, 20, sent) as connections:
            await until(lambda: all(map(has_ended, connections)), "all ended")
            await until(lambda: not len(served.connections), "none counted")

    run_story(story, GENEROUS._replace(head_seconds=SOON, body_seconds=SOON))


def test_answers_that_nobody_takes_are_given_up() -> None:
    async def story(served: ServedApp) -> None:
        async with held(served, 10, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n") as connections:
            for each in connections:  # it has begun
                assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(each, 1), 60)
            await until(lambda: not len(served.connections), "all given up")

    run_story(story, GENEROUS._replace(send_seconds=SOON))


def test_a_stream_that_is_read_goes_on_beyond_every_limit_and_one_that_is_not_is_cut_off() -> None:
    async def story(served: ServedApp) -> None:
        follow = b"GET /lines HTTP/1.1\r\nHost: x\r\n\r\n"
        reading, sent = served.connect(follow), 0
        loop = asyncio.get_running_loop()
        for _ in range(60):  # six times as long as any limit
            sent += len(await asyncio.wait_for(loop.sock_recv(reading, 1 << 16), PATIENCE_SECONDS))
        assert sent > 60
        reading.close()
        await until(lambda: not len(served.connections), "gone")

    run_story(story, GENEROUS._replace(head_seconds=SOON, body_seconds=SOON, send_seconds=SOON))


def test_an_answer_that_vipd_works_on_is_waited_for() -> None:
    async def story(served: ServedApp) -> None:
        task = asyncio.create_task(asked(served, request=b"GET /working HTTP/1.1\r\nHost: x\r\n\r\n"))
        await asyncio.sleep(4 * SOON)
        served.done.set()
        assert await task == 200

    run_story(story, GENEROUS._replace(head_seconds=SOON, body_seconds=SOON, send_seconds=SOON))


@pytest.mark.root
def test_vipctl_says_what_why_and_what_to_do() -> None:
    async def story(served: ServedApp) -> None:
        async with held(served, 3, b"GET /working HTTP/1.1\r\nHost: x\r\n\r\n"):
            # Not before: of connections whose request is still to come, one would give way.
            await until(lambda: served.in_work == 3, "all taken")
            with pytest.raises(DaemonError) as refused:
                await asyncio.to_thread(Client(str(served.path)).get, "/short")
            assert (refused.value.status, refused.value.kind) == (503, "busy")
            with pytest.raises(CliError) as told:
                await asyncio.to_thread(
                    Daemon(Client(str(served.path))).change, "POST", "apply", body={"a": LARGE}
                )
        assert told.value.code == UNREACHABLE
        assert str(told.value) == (
            "vipd takes no more connections: 3 of root's are open, and vipd works on each of them;"
            " hint: ss -xp shows whose they are: end some of them, or try again later"
        )

    run_story(story, GENEROUS._replace(privileged=3))


@pytest.mark.root
def test_a_user_is_told_of_its_own_connections() -> None:
    async def story(served: ServedApp) -> None:
        async with held(served, 3, b"GET /working HTTP/1.1\r\nHost: x\r\n\r\n", NOBODY):
            # Not before: of connections whose request is still to come, one would give way.
            await until(lambda: served.in_work == 3, "all taken")
            with served.connect(uid=NOBODY) as connection:
                answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 1 << 16), 60)
        body = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert body["apiVersion"] == "vipd/v1"
        assert body["error"]["what"] == f"vipd takes no more connections of uid {NOBODY}"
        assert "3 of that user are open" in body["error"]["why"]

    run_story(story, GENEROUS._replace(per_client=3))


def test_programs_are_run_and_files_read_while_clients_hold_all_that_they_can() -> None:
    """With few descriptors: what clients may take of them is less than there is."""
    with tempfile.TemporaryDirectory(prefix="vipd-api-") as directory:
        path = Path(directory) / "sock"
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SMALL), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        clients: list[socket.socket] = []
        try:
            assert child.stdin
            assert child.stdout
            port = int(child.stdout.readline())
            for _ in range(150):
                clients += [
                    connected(socket.AF_UNIX, str(path)),
                    connected(socket.AF_INET, ("127.0.0.1", port)),
                ]
            out, _ = child.communicate("go\n", timeout=PATIENCE_SECONDS)
        finally:
            for client in clients:
                client.close()
            if child.poll() is None:
                child.kill()
            child.communicate()
        assert out.split() == ["0"] * 20


def connected(family: int, place: object) -> socket.socket:
    made = socket.socket(family)
    made.settimeout(PATIENCE_SECONDS)
    with contextlib.suppress(ConnectionError):
        made.connect(place)  # type: ignore[arg-type]  # of that family
    return made


SMALL = """
    import asyncio, resource, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    from pathlib import Path
    from aiohttp import web
    from tests.observe.health_ports.asking import free_port, running, until
    from vipd.api.peers import bind_socket
    from vipd.api.socket_server import serving
    from vipd.observe.listeners import ListenAddress, Listeners
    from vipd.host.process import run

    async def hello(_):
        return web.Response(text="hello")

    async def main():
        place = ListenAddress("127.0.0.1", free_port())
        listeners = Listeners(hello)
        listener = bind_socket(Path(sys.argv[1]), "no-such-group")
        async with serving(web.Application(), listener), running(listeners):
            listeners.set_addresses({place: "x"})
            await until(lambda: listeners.open, "open")
            print(place.port, flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            many = await asyncio.gather(*(run(["true"]) for _ in range(2)))
            for _ in range(9):
                many += await asyncio.gather(*(run(["true"]) for _ in range(2)))
            print(*(each.exit_code for each in many))

    asyncio.run(main())
"""


def test_the_limits_are_such_that_500_connections_of_a_reader_do_not_stay() -> None:
    assert LIMITS.per_client < LIMITS.connections < 500
    assert max(LIMITS.head_seconds, LIMITS.body_seconds, LIMITS.send_seconds) < 90
