"""Hostile input by a seeded random source: declarations, requests, values of etcd."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import yaml

from tests.api.test_hostile_requests import BODIES, DEEP, PARAMETERS, RAW, WORDS
from tests.api.test_text_round_trip import WORDS as TEXTS
from tests.faults.broken_declarations import GARBAGE, checks, declaration

ODD = (*GARBAGE, *WORDS, *TEXTS)
HEADERS = (
    (
        "Content-Type",
        ("application/json", "text/plain; charset=utf-16", "x/y; charset=\x80", "multipart/form-data"),
    ),
    ("Content-Encoding", ("gzip", "deflate", "br", "\x80", "identity")),
    ("Vipd-Session", ("192.0.2.1:22", "x", "\x9b31m", "[::1]:22")),
    ("Host", ("vipd", "", "evil.example", "[::", "a b")),
    ("Accept-Encoding", ("gzip", "*;q=x")),
    ("Expect", ("100-continue", "200-ok")),
    ("If-None-Match", ("*", '"x"')),
    ("X-" + "y" * 50, ("z" * 5000,)),
    ("Upgrade", ("websocket", "h2c")),
)
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE")


@dataclass(frozen=True)
class Request:
    """One request of the API."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Hostile:
    """Makes such input, the same for the same seed."""

    def __init__(self, seed: int, routes: list[str]) -> None:
        self.random = random.Random(seed)
        self._routes = routes

    def word(self) -> Any:
        """What no one expects."""
        if self.random.random() < 0.3:
            return "".join(
                chr(self.random.choice(_CODES)(self.random)) for _ in range(self.random.randrange(12))
            )
        return self.random.choice(ODD)

    def service(self, number: int) -> dict[str, Any]:
        """A declaration of a service with some of its parts broken; sometimes a sound one."""
        made: dict[str, Any] = {**declaration(number), "check": self.random.choice(checks(number))}
        made["check"].setdefault("port", 53)
        for _ in range(self.random.choice((0, 1, 1, 1, 2, 3))):
            self._break(made)
        return made

    def file(self, number: int) -> bytes:
        """The content of a file of declarations."""
        document: Any = {"apiVersion": "vipd/v1", "services": [self.service(number)]}
        if self.random.random() < 0.1:
            self._break(document)
        if self.random.random() < 0.5:
            text = json.dumps(document, ensure_ascii=self.random.random() < 0.5)
        else:
            text = yaml.safe_dump(document, allow_unicode=self.random.random() < 0.5)
        return self._damaged(text.encode(errors="surrogatepass"))

    def request(self) -> Request:
        """A request for any route."""
        route = self.random.choice(self._routes)
        method, path = route.split()
        if self.random.random() < 0.05:
            method = self.random.choice(METHODS)
        for part in ("TARGET", "BACKEND"):
            path = path.replace(part, self._quoted(self.random.choice(("fuzz", "10.244.0.7", self.word()))))
        names = [name for name in PARAMETERS if name != "follow"]
        chosen = self.random.sample(names, self.random.choice((0, 0, 1, 2)))
        query = "&".join(f"{name}={self._quoted(self.random.choice((0, 1, self.word())))}" for name in chosen)
        headers = [(name, self.random.choice(values)) for name, values in self.random.sample(HEADERS, 2)]
        body = b"" if method in ("GET", "HEAD") else self._body(route)
        chosen_headers = headers[: self.random.choice((0, 0, 1, 2))]
        return Request(method, f"{path}?{query}" if query else path, tuple(chosen_headers), body)

    def key(self) -> tuple[bytes, bytes]:
        """A key below the prefix of etcd, and its value."""
        number = self.random.randrange(40)
        name = self.random.choice((f"all-{number}", f"all-{number}", str(self.word())[:200]))
        kind = self.random.choice(("services", "services", "backends", "overrides", "hosts"))
        if kind == "services":
            value: Any = {**self.service(number), "name": f"all-{number}"}
        elif kind == "backends":
            name = f"{name}/{self.random.choice(('10.250.0.7:80', self.word()))}"
            value = {"weight": self.word(), "check": self.random.choice(checks(number))}
        else:
            name = f"services/{name}/10.250.0.1" if kind == "overrides" else name
            value = {"service": name, "backend": "10.250.0.1", "by": self.word(), "reason": self.word()}
            value |= {"at": "2026-01-01T00:00:00Z", "admin": self.random.choice(("draining", self.word()))}
            value |= {"version": self.word(), "revision": self.word()} if kind == "hosts" else {}
        text = json.dumps(value, ensure_ascii=self.random.random() < 0.5)
        key = f"/vipd/v1/{kind}/{name}".encode(errors="surrogatepass")
        value_bytes = (
            self.random.choice(DEEP) if self.random.random() < 0.02 else text.encode(errors="surrogatepass")
        )
        return self._damaged(key, 0.1), self._damaged(value_bytes)

    def _body(self, route: str) -> bytes:
        if self.random.random() < 0.1:
            return self.random.choice(RAW)
        body = copy.deepcopy(BODIES.get(route, {}))
        if "service" in body and isinstance(body["service"], dict):
            body["service"] = {
                **self.service(self.random.randrange(40)),
                "name": f"fuzz-{self.random.randrange(9)}",
            }
        if "services" in body:
            body["services"] = [self.service(self.random.randrange(40)) for _ in range(3)]
        if "name" in body:
            body["name"] = self.word()  # of a dataplane: switching is tested elsewhere
        for _ in range(self.random.choice((0, 1, 1, 2))):
            self._break(body)
        text = json.dumps(body, ensure_ascii=self.random.random() < 0.7)
        return self._damaged(text.encode(errors="surrogatepass"), 0.05)

    def _break(self, value: Any) -> None:
        """Put something else in the place of one of its parts, or leave it out."""
        paths = list(_paths(value))
        if not paths:
            return
        holder, key = self.random.choice(paths)
        if self.random.random() < 0.15:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(self.word())

    def _damaged(self, data: bytes, share: float = 0.15) -> bytes:
        """Some of them with bytes turned over, doubled or cut off."""
        if self.random.random() >= share or not data:
            return data
        made = bytearray(data)
        for _ in range(self.random.randrange(1, 4)):
            at = self.random.randrange(len(made) or 1)
            what = self.random.randrange(4)
            if what == 0:
                made[at : at + 1] = bytes([self.random.randrange(256)])
            elif what == 1:
                del made[at:]
            elif what == 2:
                made[at:at] = made[at : at + 50] * 3
            else:
                made[at:at] = str(self.word()).encode(errors="surrogatepass")[:200]
        return bytes(made)

    def _quoted(self, word: object) -> str:
        return quote(str(word).encode(errors="surrogatepass")[:3000], safe="")


def _paths(value: Any) -> Any:
    """Where its parts stand, each as the container and the key or index in it."""
    items = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    for key, item in items:
        yield value, key
        yield from _paths(item)


_CODES = (
    lambda source: source.randrange(0x20),
    lambda source: source.randrange(0x7F, 0xA0),
    lambda source: source.choice((0x202E, 0x2066, 0x2028, 0xFEFF, 0xFFFE, 0xD800, 0xDFFF, 0x1F600, 0xE0001)),
    lambda source: source.randrange(0x110000),
    lambda source: source.randrange(0x20, 0x7F),
)
