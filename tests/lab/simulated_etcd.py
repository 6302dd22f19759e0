"""An etcd in simulated time: the answers of its gateway as vipd asks for them, given by a session that stands
in the place of aiohttp's. `test_simulated_etcd.py` compares it with the real one."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Generator
from typing import Any

Json = dict[str, Any]

_NOT_FOUND = (404, {"error": "etcdserver: requested lease not found", "code": 5})
_DENIED = (403, {"error": "etcdserver: permission denied", "code": 7})


class SimulatedEtcd:
    """One member, alone. Its clock is the event loop's."""

    def __init__(self) -> None:
        self.revision = 1
        self.away = False
        """Connections are refused while it is set."""
        self.seconds = 0.0
        """How long each answer takes."""
        self.denies = False
        """Its user may neither read nor write any more; watches that are open stay so."""
        self.deaf = False
        """Its watches miss what is written while it is set."""
        self.kvs: dict[bytes, Json] = {}
        self._leases: dict[str, tuple[int, float]] = {}
        """Seconds that each is granted for, and when it ends."""
        self._numbers = iter(range(7000, 10**9))
        self._watches: list[tuple[Json, Body]] = []

    def post(self, url: str, data: bytes, timeout: Any = None, **_: object) -> Response:
        """What aiohttp's session would come back with."""
        if self.away:
            return Response(0, Body(), self.seconds, timeout)
        self._expire()
        path, asked = "/" + url.split("/", 3)[3], json.loads(data)
        if path == "/v3/watch" and not self.denies:
            return self._watch(asked["create_request"])
        answers = getattr(self, "_" + path.removeprefix("/v3/").replace("/", "_"))
        status, answer = _DENIED if self.denies else answers(asked)
        return Response(status, Body(json.dumps(answer).encode(), ended=True), self.seconds, timeout)

    async def close(self) -> None:
        """It holds nothing."""

    def put(self, key: str, value: str, lease: str = "") -> None:
        name = key.encode()
        self.revision += 1
        before = self.kvs.get(name, {})
        kv = {
            "key": _encoded(name),
            "value": _encoded(value.encode()),
            "mod_revision": str(self.revision),
            "create_revision": before.get("create_revision", str(self.revision)),
        }
        self.kvs[name] = {**kv, **({"lease": lease} if lease else {})}
        self._send_event(name, {"kv": self.kvs[name]})

    def delete(self, key: str) -> None:
        self._delete(key.encode())

    def _header(self) -> Json:
        return {"cluster_id": "11", "member_id": "12", "revision": str(self.revision)}

    def _delete(self, name: bytes) -> None:
        self.revision += 1
        del self.kvs[name]
        self._send_event(
            name, {"type": "DELETE", "kv": {"key": _encoded(name), "mod_revision": str(self.revision)}}
        )

    def _send_event(self, name: bytes, event: Json) -> None:
        for asked, body in self._watches if not self.deaf else ():
            if _holds(asked, name):
                body.give({"result": {"header": self._header(), "events": [event]}})

    def _watch(self, asked: Json) -> Response:
        body = Body()
        self._watches = [*self._watches[-50:], (asked, body)]
        body.give({"result": {"header": self._header(), "created": True}})
        start = int(asked["start_revision"])
        missed = [kv for name, kv in self.kvs.items() if _holds(asked, name)]
        for kv in sorted(missed, key=lambda kv: int(kv["mod_revision"])):
            if int(kv["mod_revision"]) >= start:
                body.give({"result": {"header": self._header(), "events": [{"kv": kv}]}})
        return Response(200, body)

    def _kv_range(self, asked: Json) -> tuple[int, Json]:
        return 200, {"header": self._header(), **self._found(asked)}

    def _found(self, asked: Json) -> Json:
        names = sorted(name for name in self.kvs if _holds(asked, name))
        least, limit = int(asked.get("min_mod_revision", 0)), int(asked.get("limit", 0))
        kvs = [self.kvs[name] for name in names if int(self.kvs[name]["mod_revision"]) >= least]
        if asked.get("sort_target") == "MOD":
            kvs.sort(key=lambda kv: -int(kv["mod_revision"]))
        if asked.get("keys_only"):
            kvs = [{name: field for name, field in kv.items() if name != "value"} for kv in kvs]
        more = bool(limit) and len(kvs) > limit
        found = {"kvs": kvs[:limit] if limit else kvs, "more": more, "count": str(len(names))}
        return {name: value for name, value in found.items() if value not in ([], False, "0")}

    def _kv_txn(self, asked: Json) -> tuple[int, Json]:
        for condition in asked.get("compare", ()):
            revision = self.kvs.get(b64decode(condition["key"]), {}).get("mod_revision", "0")
            if revision != str(condition.get("mod_revision", 0)):
                return 200, {"header": self._header(), "responses": []}
        responses = []
        for operation in asked["success"]:
            if wanted := operation.get("request_range"):
                responses.append({"response_range": self._found(wanted)})
            elif put := operation.get("request_put"):
                self._kv_put(put)
                responses.append({"response_put": {}})
            else:
                for name in [n for n in self.kvs if _holds(operation["request_delete_range"], n)]:
                    self._delete(name)
                responses.append({"response_delete_range": {}})
        return 200, {"header": self._header(), "succeeded": True, "responses": responses}

    def _kv_put(self, asked: Json) -> tuple[int, Json]:
        if (lease := asked.get("lease", "")) and lease not in self._leases:
            return _NOT_FOUND
        self.put(b64decode(asked["key"]).decode(), b64decode(asked["value"]).decode(), lease)
        return 200, {"header": self._header()}

    def _lease_grant(self, asked: Json) -> tuple[int, Json]:
        lease, seconds = str(next(self._numbers)), int(asked["TTL"])
        self._leases[lease] = (seconds, _now() + seconds)
        return 200, {"header": self._header(), "ID": lease, "TTL": str(seconds)}

    def _lease_keepalive(self, asked: Json) -> tuple[int, Json]:
        lease = asked["ID"]
        result = {"header": self._header(), "ID": lease}
        if lease in self._leases:
            seconds = self._leases[lease][0]
            self._leases[lease] = (seconds, _now() + seconds)
            result["TTL"] = str(seconds)
        return 200, {"result": result}

    def _lease_revoke(self, asked: Json) -> tuple[int, Json]:
        if asked["ID"] not in self._leases:
            return _NOT_FOUND
        self._end(asked["ID"])
        return 200, {"header": self._header()}

    def _expire(self) -> None:
        for lease, (_, end) in list(self._leases.items()):
            if _now() >= end:
                self._end(lease)

    def _end(self, lease: str) -> None:
        del self._leases[lease]
        for name in [name for name, kv in self.kvs.items() if kv.get("lease") == lease]:
            self._delete(name)


class Body:
    def __init__(self, text: bytes = b"", *, ended: bool = False) -> None:
        self._pieces = deque([text] if text else [])
        self._ended, self._more = ended, asyncio.Event()

    def give(self, line: Json) -> None:
        self._pieces.append(json.dumps(line).encode() + b"\n")
        self._more.set()

    async def readany(self) -> bytes:
        while not self._pieces and not self._ended:
            self._more.clear()
            await self._more.wait()
        return self._pieces.popleft() if self._pieces else b""


class Response:
    """To be awaited, or entered, as aiohttp's are."""

    connection = None

    def __init__(self, status: int, content: Body, seconds: float = 0.0, timeout: Any = None) -> None:
        """It comes after some seconds, or not in time. Status 0: the connection is refused then."""
        self.status, self.content, self._seconds = status, content, seconds
        self._limit = (timeout and timeout.total) or seconds

    def __await__(self) -> Generator[Any, None, Response]:
        yield from asyncio.sleep(0).__await__()
        return (yield from self.__aenter__().__await__())

    async def __aenter__(self) -> Response:
        if self._seconds:
            await asyncio.sleep(min(self._seconds, self._limit))
        if self._seconds > self._limit:
            raise TimeoutError
        if not self.status:
            raise ConnectionRefusedError(111, "Connection refused")
        return self

    async def __aexit__(self, *_: object) -> None:
        """It holds nothing."""


def _now() -> float:
    return asyncio.get_running_loop().time()


def _encoded(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def _holds(asked: Json, name: bytes) -> bool:
    start, end = b64decode(asked["key"]), b64decode(asked.get("range_end", ""))
    return start <= name < end if end else name == start
