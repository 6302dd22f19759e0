"""Whatever a request holds, the answer is never a fault of vipd (5xx), and the API answers on."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gzip
import json
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

import pytest
from yarl import URL

from tests.api.specs import DNS, WEB, routes
from tests.lab.examples import some
from tests.lab.inside import PATIENCE_SECONDS, Vipd, running
from tests.lab.stories import story_of

MAY_FAIL = {"connection tracking is not read"}
"""What a vipd in this process is without."""

DIGITS = "9" * 5000
WORDS = (
    *("", "0", "-1", DIGITS, "1" * 4300, "1e999", "nan", "NaN", "Infinity", "0x10", "1_0", "１２", "²"),
    *("\x00", "a\x00b", "\n", "\ud800", "\U0010ffff", "../../etc/passwd", "[", "[::1", "::1%eth0"),
    *("10.96.0.11:80/tcp", f"10.96.0.11:{DIGITS}", f"10.96.0.11@{DIGITS}", f"10.96.0.0/{DIGITS}"),
    *("10.96.0.11:８０", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "x" * 3000, "web"),
    *("web/x", "10.244.0.7", "%", "%ZZ"),
)
VALUES: tuple[Any, ...] = (
    *WORDS,
    *(None, True, 0, -1, 1.5, -0.0, 1e308, float("inf"), float("nan"), 10**4299, 2**64, [], {}, [[]]),
    *([None], [{}], {"a": None}, {"": {"": []}}, [10**400], {"type": "exec"}),
    *({"type": "exec", "command": []}, {"type": "exec", "command": None}),
    *({"type": "exec", "command": [""]}, {"type": "exec", "command": ["/bin/\x00"], "user": "\x00"}),
    *({"type": "exec", "command": ["/bin/\ud800"], "user": "\ud800"}, {"type": "https", "ca": "/\x00"}),
    *({"type": "https", "ca": "/\ud800"}, {"type": "http", "body": "(((((a{9}){9}){9}){9}){9}"}),
    *({"type": "http", "body": "\ud800"}, {"type": "http", "status": DIGITS}),
    {"type": "udp", "send": "\ud800", "expect": "\ud800"},
    {"type": "dns", "query": "a." * 200, "record": "A"},
)
DEEP = (b'{"service":' + b"[" * 200_000, b'{"service":' + b'{"a":' * 5000 + b"1" + b"}" * 5001)
RAW = (
    *DEEP,
    *(b"[" * 5000 + b"]" * 5000, b"\xff\xfe\x00", b"\x80", b"nul", b"[]", b'"x"', b"NaN"),
    *(b"{" + b'"a":1,' * 1000 + b'"b":2}', b'{"weight":' + DIGITS.encode() + b"}"),
    *(b'{"weight":1e99999}', b'{"name":"\\ud800"}', '{"a":"é"}'.encode("utf-16"), b"\x00" * 100),
)
FULL = {
    **WEB,
    "name": "full",
    "address": "10.96.0.77",
    "check": {"type": "http", "path": "/", "interval": "5s", "body": "x", "status": [200]},
    "affinity": {"by": "client-ip", "timeout": "1h"},
    "backends": [{"address": "10.244.0.9", "weight": 1, "check": "tcp", "backup": False}],
    "ports": [{"port": 80, "protocol": "tcp", "node_port": 30080, "target": 8080, "name": "http"}],
    "external_addresses": [{"address": "203.0.113.10", "allow_from": ["10.0.0.0/8"]}],
    "traffic_policy": {"external": "local"},
    "health_port": 30100,
    "slow_start": "30s",
    "fallback": "drop",
}
ORDER = {"service": "web", "backend": "10.244.0.7", "admin": "draining", "weight": 3, "reason": "x"}
ORDER |= {"for": 60, "pins": 6}
BODIES: dict[str, Any] = {
    "POST /v1/services": {"service": FULL},
    "PATCH /v1/services/TARGET": {"service": {"ports": ["80"], "check": "tcp", "name": "web"}},
    "POST /v1/services/TARGET/backends": {"backends": [{"address": "10.244.0.9", "weight": 2}]},
    "DELETE /v1/services/TARGET/backends": {"backends": ["10.244.0.7"]},
    "PATCH /v1/services/TARGET/backends/BACKEND": {"weight": 2},
    "POST /v1/rollback": {"revision": 0},
    "POST /v1/apply": {"services": [FULL], "prune": False},
    "POST /v1/overrides": ORDER,
    "DELETE /v1/overrides": {"service": "web", "backend": "10.244.0.7", "address": "", "all": False},
    "POST /v1/dataplane": {"name": "iptables"},
    "POST /v1/maintenance": {"reason": "kernel update", "for": 60},
}
BODILESS = {"DELETE /v1/services/TARGET", "POST /v1/accept-removal", "DELETE /v1/maintenance"}
BODILESS |= {"POST /v1/reload", "POST /v1/confirm"}
"""Changes that read no body."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW", "X" * 3000)
ODD = ("", "\x7f", "\udcff", "é", "[", "[::1", "::1%eth0:1", f"10.0.0.1:{DIGITS}", "x" * 8000, "a;" * 900)
CHARSETS = ("none-such", "zip", "utf-16", "utf-7", "rot13", "idna", "punycode", "hex", "\x85", "a\udcffb", "")
NAMES = ("Vipd-Session", "Host", "Content-Type", "Accept", "Accept-Encoding", "Last-Event-ID", "Range")
HEADERS: tuple[tuple[str, str], ...] = (
    *((name, value) for name in NAMES for value in ODD),
    *(("Content-Type", f"application/json; charset={charset}") for charset in CHARSETS),
    *(("Content-Encoding", coding) for coding in ("gzip", "deflate", "br", "GZip, gzip", "\udcff", "x")),
    *(("Accept-Encoding", "gzip"), ("Content-Length", DIGITS), ("Content-Length", "-1")),
    *(("Content-Length", "1, 2"), ("Content-Length", "１"), ("Transfer-Encoding", "gzip, chunked")),
    *(("Transfer-Encoding", "chunked, identity"), ("Expect", "100-continue"), ("Expect", "a miracle")),
    *(("Upgrade", "websocket"), ("Connection", "upgrade"), ("Connection", "close, keep-alive")),
    *(("If-Modified-Since", "Thu, 99 Foo 99999 99:99:99 GMT"), ("If-Range", DIGITS), ("If-Match", '"')),
    *(("Cookie", "a=\udcff; " * 50), ("X-Forwarded-For", "\udcff"), ("a b", "c"), ("\udcff", "c")),
)
PARAMETERS: tuple[str, ...] = ("from", "target", "service", "backend", "client", "state", "limit", "since")
PARAMETERS += ("after", "follow", "backends", "dry_run", "store", "fleet", "address")


def broken(value: Any) -> Iterator[Any]:
    """The value with each of its parts left out, or replaced by each of the hostile ones."""
    yield from VALUES
    if isinstance(value, dict):
        for key, part in value.items():
            yield {k: v for k, v in value.items() if k != key}
            for other in broken(part):
                yield {**value, key: other}
        yield {**value, "\ud800": 1, DIGITS: 2, "": 3}
    elif isinstance(value, list):
        for other in broken(value[0]):
            yield [other]
        yield value * 50


async def asked(vipd: Vipd, method: str, path: str, data: bytes | None = None) -> None:
    """Any answer but a fault will do."""
    url = URL(f"http://vipd{path}", encoded=True)
    async with vipd.session.request(method, url, data=data) as response:
        text = await response.text()
        if response.status >= 500 and json.loads(text)["error"]["what"] not in MAY_FAIL:
            pytest.fail(f"{method} {path[:200]} {(data or b'')[:300]!r}: {response.status} {text[:400]}")


def encoded(word: str) -> str:
    return quote(word.encode(errors="surrogatepass"), safe="")


def place(path: str, target: str = "web", backend: str = "10.244.0.7") -> str:
    return path.replace("TARGET", encoded(target)).replace("BACKEND", encoded(backend))


async def ready(vipd: Vipd) -> None:
    for spec in (DNS, WEB):
        assert (await vipd.add(spec)).status == 200


async def raw(
    vipd: Vipd, method: str, path: str, headers: Sequence[tuple[str, str]], data: bytes = b""
) -> bytes:
    """What the server answers to these very bytes, over a connection of its own."""
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    named = {name.lower() for name, _ in headers}
    lines += ["Host: vipd"] if "host" not in named else []
    framed = named & {"content-length", "transfer-encoding"}
    lines += [] if framed else [f"Content-Length: {len(data)}"]
    reader, writer = await asyncio.open_unix_connection(str(vipd.socket))
    try:
        head = "\r\n".join([*lines, "Connection: close", "", ""]).encode(errors="surrogateescape")
        writer.write(head + data)
        return await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    except ConnectionError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def faultless(answer: bytes, asked: tuple[object, ...]) -> None:
    """No answer at all will do; a fault of vipd will not, nor does an answer tell what vipd is made of."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.split()[1:2] and head.split()[1] >= b"500":
        if asked[0] == "HEAD":
            return  # it says no more; GET says why
        with contextlib.suppress(ValueError, KeyError):
            if json.loads(body)["error"]["what"] in MAY_FAIL:
                return
        pytest.fail(f"{asked!r:.300}: {answer[:400]!r}")
    assert b"aiohttp" not in head, head
    assert b"Python" not in head, head


def test_every_change_is_tried_with_broken_bodies() -> None:
    """A request that is new is one of these, or says that it reads no body."""
    changes = {f"{method} {path}" for method, path in routes() if method != "GET"}
    assert changes == BODIES.keys() | BODILESS, "a new request needs a body here"


QUERY = "?dry_run=1&target=web&from=10.0.0.1"


@story_of(running)
async def test_every_route_with_every_method(vipd: Vipd) -> None:
    await ready(vipd)
    for path in sorted({path for _, path in routes()}):
        for method in METHODS:
            for data in (b"", b"{}", b"[" * 1000):
                answer = await raw(vipd, method, place(path) + QUERY, (), data)
                faultless(answer, (method, path))
    assert (await vipd.ask("GET", "/v1/status")).status == 200


@story_of(running)
async def test_every_route_with_hostile_headers(vipd: Vipd) -> None:
    await ready(vipd)
    for method, path in routes():
        data = json.dumps(BODIES.get(f"{method} {path}", {})).encode()
        for header in some(HEADERS, (method, path)):
            faultless(await raw(vipd, method, place(path) + QUERY, [header], data), (method, path, header))
    assert (await vipd.ask("GET", "/v1/status")).status == 200


@functools.cache
def bomb() -> bytes:
    """A small body that would be a large one."""
    return gzip.compress(b"[" * 50_000_000)


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "deflate", "br", "x", "identity, gzip"])
@story_of(running)
async def test_no_body_is_decompressed(vipd: Vipd, *, coding: str) -> None:
    for method, path in routes():
        header, data = ("Content-Encoding", coding), bomb() if method != "GET" else b""
        answer = await raw(vipd, method, place(path) + QUERY, [header], data)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.split()[1] == b"415", (method, path, head)
        assert json.loads(body)["error"]["kind"] == "encoded"
    assert (await vipd.ask("GET", "/v1/status")).status == 200
    plain = await raw(vipd, "GET", "/v1/version", [("Content-Encoding", "identity")])
    assert plain.split()[1] == b"200"


@pytest.mark.slow
@story_of(running)
async def test_every_route_and_parameter_with_hostile_words(vipd: Vipd) -> None:
    await ready(vipd)
    for method, path in routes():
        assert (await vipd.ask("GET", "/v1/services/web")).status == 200, "nothing was changed so far"
        quiet = path.startswith(("/metrics", "/healthz", "/livez"))
        for word in WORDS if not quiet else ():
            for parameter in some(PARAMETERS, (method, path, word), fewer=2):
                if (parameter, word) == ("dry_run", "0"):
                    continue  # it would be done
                if len(word) < 4000 or parameter in ("limit", "after", "client", "target"):
                    end = "&dry_run=1" if method != "GET" and parameter != "dry_run" else ""
                    await asked(vipd, method, f"{place(path)}?{parameter}={encoded(word)}&target=web{end}")
            if path != place(path):
                await asked(vipd, method, place(path, target=word[:3000]) + "?dry_run=1")
                await asked(vipd, method, place(path, backend=word[:3000]) + "?dry_run=1")
    assert (await vipd.ask("GET", "/v1/status")).status == 200


@pytest.mark.parametrize("route", BODIES)
@story_of(running)
async def test_every_part_of_a_body_broken(vipd: Vipd, *, route: str) -> None:
    await ready(vipd)
    method, path = route.split()
    for body in some(list(broken(copy.deepcopy(BODIES[route]))), route, fewer=2):
        data = json.dumps(body).encode()
        await asked(vipd, method, place(path) + "?dry_run=1", data)
    assert (await vipd.ask("GET", "/v1/status")).status == 200


@story_of(running)
async def test_bodies_that_are_no_json(vipd: Vipd) -> None:
    await ready(vipd)
    for method, path in routes():
        for data in RAW if method != "GET" else ():
            await asked(vipd, method, place(path) + "?dry_run=1", data)
    assert (await vipd.ask("GET", "/v1/status")).status == 200
