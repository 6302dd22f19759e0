"""Services for requests to the API, what their answers come to, and every request that there is."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.lab.inside import Answer, Vipd
from tests.lab.stored import stored as on_disk

DNS: dict[str, object] = {
    "name": "kube-system/kube-dns",
    "address": ["10.96.0.10", "fd00:0:10::10"],
    "ports": ["53/udp"],
    "backends": ["10.244.0.5", {"address": "10.244.0.6", "weight": 2}, "fd01::5"],
}
WEB: dict[str, object] = {
    "name": "web",
    "address": "10.96.0.11",
    "ports": ["80/tcp"],
    "backends": ["10.244.0.7"],
}
PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def actions(answer: Answer) -> dict[str, str]:
    """What a change did, by name."""
    assert answer.status == 200, answer.body
    return {result["name"]: result["action"] for result in answer.body["results"]}


def stored(vipd: Vipd) -> set[str]:
    """The services that are on disk, which a restarted vipd would read."""
    return {spec["name"] for spec in json.loads(on_disk(vipd.state_dir))["services"]}


def routes() -> list[tuple[str, str]]:
    """Method and path of every request, such as `/v1/services/TARGET`: docs/api.md has all, which
    tests/docs/test_reference.py sees to."""
    rows = re.findall(r"^\| `([A-Z]+) (/[^?` ]+)", PAGE.read_text(), re.MULTILINE)
    assert len(rows) > 30
    return rows


_AS_USER = """
import json, os, socket, sys
path, uid, gid, groups, requests = json.load(sys.stdin)
os.setgroups(groups); os.setgid(gid); os.setuid(uid)
answers = []
for method, what, body in requests:
    data = b"" if body is None else json.dumps(body).encode()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        head = f"{method} {what} HTTP/1.0\\r\\nHost: vipd\\r\\nContent-Length: {len(data)}\\r\\n\\r\\n"
        client.sendall(head.encode() + data)
        text = b""
        while part := client.recv(65536):
            text += part
    head, _, body = text.partition(b"\\r\\n\\r\\n")
    answers.append([int(head.split()[1]), json.loads(body)])
print(json.dumps(answers))
"""
NOBODY = 65534


async def asked_as(
    vipd: Vipd,
    *requests: tuple[str, str, Any],
    uid: int = NOBODY,
    gid: int = NOBODY,
    groups: Sequence[int] = (),
) -> list[Answer]:
    """Requests of a process of a user, to whom the socket is open. Needs root."""
    vipd.root.chmod(0o755)
    vipd.socket.chmod(0o666)
    asked = json.dumps([str(vipd.socket), uid, gid, list(groups), requests])
    argv = [sys.executable, "-I", "-S", "-c", _AS_USER]
    done = await asyncio.to_thread(
        subprocess.run, argv, input=asked, capture_output=True, text=True, check=True
    )
    return [Answer(status, body) for status, body in json.loads(done.stdout)]
