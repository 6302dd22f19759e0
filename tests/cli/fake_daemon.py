"""A fake of the daemon's API, for answers that a real one gives only in rare states; `test_answers.py` holds
its documents to the real API's.

It serves with the standard library's own HTTP server, so that the client's hand-written HTTP meets another's.
"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

Json = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What the fake was asked, with the path as it came, still percent-encoded."""

    method: str
    path: str
    query: str
    body: Any
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class FakeDaemon:
    """Answers by `METHOD /path`, percent-decoded; else not found. `requests` records what came."""

    socket: Path
    answers: dict[str, tuple[int, Json | None]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    chunked: bool = False

    def answer(self, request: str, document: Json, status: int = 200) -> None:
        """Answer so from now on."""
        self.answers[request] = (status, {"apiVersion": "vipd/v1"} | document)

    def refuse(self, request: str, status: int, kind: str, what: str, **more: Any) -> None:
        error = {"kind": kind, "what": what, "why": "", "hint": "", "problems": []} | more
        self.answer(request, {"error": error}, status)

    @property
    def last(self) -> Request:
        return self.requests[-1]

    def handle(self, request: Request) -> tuple[int, Json | None]:
        self.requests.append(request)
        found = self.answers.get(f"{request.method} {unquote(request.path)}")
        if found is not None:
            return found
        what = f"no service {unquote(request.path).removeprefix('/v1/services/')}"
        error = {"kind": "not-found", "what": what, "why": "", "hint": "vipctl list shows them"}
        return 404, {"apiVersion": "vipd/v1", "error": error | {"problems": []}}


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    fake: FakeDaemon


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _answer(self) -> None:
        url = urlsplit(self.path)
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(content) if content else None
        status, document = self.server.fake.handle(
            Request(self.command, url.path, url.query, body, dict(self.headers))
        )
        payload = json.dumps(document).encode()
        self.send_response(status)
        if not self.server.fake.chunked:
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for start in range(0, len(payload), 100):
            part = payload[start : start + 100]
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815  the library's names

    def log_message(self, format: str, *args: object) -> None:
        del format, args

    def address_string(self) -> str:
        return "unix"


@contextmanager
def fake_daemon(socket: Path, fake: FakeDaemon | None = None) -> Iterator[FakeDaemon]:
    """A fake, perhaps of another kind, that listens at `socket` until the block ends."""
    with _Server(str(socket), _Handler) as server:
        server.fake = fake or FakeDaemon(socket)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="fake vipd")
        thread.start()
        try:
            yield server.fake
        finally:
            server.shutdown()
            thread.join()
