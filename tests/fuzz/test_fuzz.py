"""A standing fuzz of the whole daemon, at once from every side that others can write to.

`VIPD_FUZZ=600 pytest tests/fuzz` goes on for ten minutes; `VIPD_FUZZ_SEED` repeats the input of a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from urllib.error import HTTPError

import pytest

from tests.docs.markdown import described_requests
from tests.faults.test_broken_declarations import InstrumentedDaemon
from tests.fleet.network import HUB, FleetLab
from tests.fuzz.hostile import Hostile
from tests.lab.daemon import UnixConnection
from tests.lab.inside import declare
from tests.lab.stored import stored

pytestmark = [pytest.mark.root, pytest.mark.slow]

SECONDS = float(os.environ.get("VIPD_FUZZ", "4"))
# Without a budget it is one of many tests, which must not fail for another reason each time.
FRESH = random.SystemRandom().randrange(1, 2**32) if "VIPD_FUZZ" in os.environ else 1
SEED = int(os.environ.get("VIPD_FUZZ_SEED", FRESH))
BATCH = 120
"""Attempts, before the daemon is seen to serve others."""
FILES = 20
"""Files that stand at once."""
SILENT = 20
"""Clients that never read, to each listener."""
STANDSTILL = 20.0
"""Nothing may hold up the event loop for longer than so many times the yardstick: 50 ms."""
MOST_MEMORY = 300 * 2**20
"""Resident, in bytes, whatever is given to it."""
PAGE, METRICS = 9101, 9102

NO_FAULT = re.compile(r"etcd did not (take it|answer)|no metrics|no events are kept|not in the kernel after")
"""What a 500 may say: that somebody else does not do its part."""
MALFORMED = re.compile(r" ERROR (Error handling request from|Unhandled exception\\n.*RequestPayloadError)")
"""What aiohttp itself logs of a request that is no HTTP, or not encoded as it says."""
RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
LOOKS = ("list", "status", "events", "overrides", ("fleet", "status"), ("list", "-o", "wide"))
LOOKS += (("list", "-o", "json"), ("list", "-o", "yaml"), "export", ("complete", "places", ""))  # type: ignore[assignment]

CHECKED = f"""\
  - name: fuzz
    address: 10.96.250.1
    ports: [{{name: web, port: 80}}, 53/udp]
    backends:
      - {{address: {HUB}, check: {{type: http, port: 8000, body: "a+b"}}}}
      - {{address: 10.77.0.253, check: {{type: tcp, port: 8000}}}}
"""


class Fuzz:
    """One run: attempts of every kind, and what must hold all the while."""

    def __init__(self, lab: FleetLab, daemon: InstrumentedDaemon, hostile: Hostile) -> None:
        self._lab, self._daemon, self._hostile = lab, daemon, hostile
        self._silent: list[socket.socket] = []
        self._reads = 0
        self.counts: Counter[str] = Counter()
        self.memory = 0
        self._kinds = {self.file: 2, self.request: 6, self.etcd: 3, self.silent: 1}

    def batch(self) -> None:
        """Some attempts, then a change that must be applied nevertheless."""
        kinds = self._hostile.random.choices(list(self._kinds), list(self._kinds.values()), k=BATCH)
        for kind in kinds:
            kind()
            self.counts[kind.__name__] += 1
        self.others_are_served()
        self.read_with_vipctl()

    def file(self) -> None:
        """A file of declarations."""
        number = self._hostile.random.randrange(FILES)
        new = self._daemon.services_dir / f".{number}.new"
        new.write_bytes(self._hostile.file(100 + number))
        new.rename(self._daemon.services_dir / f"{number}.{'json' if number % 2 else 'yaml'}")

    def request(self) -> None:
        """A request of the API."""
        asked = self._hostile.request()
        connection = UnixConnection(self._daemon.socket)
        try:
            connection.putrequest(
                asked.method, asked.path, skip_host=any(n == "Host" for n, _ in asked.headers)
            )
            for name, value in asked.headers:
                connection.putheader(name, value.encode("latin-1"))
            connection.putheader("Content-Length", str(len(asked.body)))
            connection.putheader("Connection", "close")
            connection.endheaders(asked.body)
            answer = connection.getresponse()
            said = answer.read().decode(errors="replace")
            status = answer.status
        finally:
            connection.close()
        self.counts[f"request: {status // 100}xx"] += 1
        assert status < 500 or NO_FAULT.search(said), (asked, status, said[:2000])
        assert "please report it" not in said, (asked, said[:2000])

    def etcd(self) -> None:
        """A key of etcd, or the end of one."""
        key, value = self._hostile.key()
        # etcd itself takes no empty key.
        with contextlib.suppress(HTTPError), self._lab.hub.entered():
            if self._hostile.random.random() < 0.1:
                self._lab.etcd.post("/v3/kv/deleterange", {"key": _base64(key)})
            else:
                self._lab.etcd.post("/v3/kv/put", {"key": _base64(key), "value": _base64(value)})

    def silent(self) -> None:
        """A client of a TCP listener, or of the API, that asks and never reads."""
        port = self._hostile.random.choice((PAGE, METRICS, 0))
        asked = self._hostile.random.choice(
            (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /metrics HTTP/1.1\r\n", b"")
        )
        with contextlib.suppress(OSError), self._lab.hosts[0].entered():
            if port:
                made = socket.create_connection(("127.0.0.1", port), timeout=1.0)
            else:
                made = socket.socket(socket.AF_UNIX)
                made.settimeout(1.0)
                made.connect(str(self._daemon.socket))
            self._silent.append(made)
            made.sendall(asked * 50)
        for each in self._silent[: max(0, len(self._silent) - 3 * SILENT)]:
            each.close()
            self._silent.remove(each)

    def others_are_served(self) -> None:
        """Another service is added, is in the kernel, and is removed."""
        spec = {"name": "others", "address": "10.97.255.1", "ports": ["80/tcp"], "backends": ["10.244.0.1"]}
        status, said = self._daemon.post("/v1/services?store=file", {"service": spec})
        assert (status, said.get("applied")) == (200, True), said
        self._daemon.vipctl("--store", "file", "remove", "others")
        declared = declare(stored(self._daemon.state_dir))
        assert declared.problems == ()
        owners = {view["name"]: view["owner"] for view in self._daemon.get("services")["services"]}
        assert {name for name, owner in owners.items() if owner == "cli"} == {
            service.name for service in declared.services
        }
        self.memory = max(self.memory, _resident(self._daemon))
        assert self.memory <= MOST_MEMORY, self._daemon.memory()

    def read_with_vipctl(self) -> None:
        """A read-only verb of vipctl prints only printable text."""
        words = LOOKS[self._reads % len(LOOKS)]
        self._reads += 1
        ended = self._daemon.vipctl(*((words,) if isinstance(words, str) else words), check=False)
        for said in (ended.stdout, ended.stderr):
            assert all(character.isprintable() or character in "\n\t" for character in said), (words, said)
            assert "please report it" not in said, said
        self.counts["vipctl"] += 1

    def end(self) -> None:
        """What can be said only at the end."""
        for each in self._silent:
            each.close()
        for record in self._daemon.log.splitlines():
            assert record.isprintable(), record
            assert RECORD.match(record), record
        assert "please report it" not in self._daemon.log
        faults = [record for record in self._daemon.log.splitlines() if "Traceback" in record]
        assert [record for record in faults if not MALFORMED.search(record)] == []


def _base64(data: bytes) -> str:
    from base64 import b64encode

    return b64encode(data).decode()


def _resident(daemon: InstrumentedDaemon) -> int:
    return next(int(line.split()[1]) * 1024 for line in daemon.memory() if line.startswith("VmRSS"))


def every_route() -> list[str]:
    """Every request of the API that is described."""
    found = {
        f"{method} {re.sub('[A-Z]+', lambda m: f'{{{m[0].lower()}}}', path)}"
        for method, path in described_requests()
    }
    return sorted(found)


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetLab]:
    with FleetLab(tmp_path_factory.mktemp("fuzz"), 1) as made:
        yield made


@pytest.mark.timeout(SECONDS * 3 + 300)
def test_nothing_that_others_write_brings_it_down(lab: FleetLab, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = Hostile(SEED, every_route())
    settings = {
        "node_name": "h1",
        "etcd": {"endpoints": list(lab.etcd.urls), "timeout": "20s"},
        "log_level": "info",
        "status_page": f"127.0.0.1:{PAGE}",
        "metrics_address": f"127.0.0.1:{METRICS}",
    }
    with capsys.disabled():
        print(f"\nVIPD_FUZZ_SEED={SEED} VIPD_FUZZ={SECONDS:g}")
    with InstrumentedDaemon(lab.hosts[0], CHECKED, **settings) as daemon:
        fuzz = Fuzz(lab, daemon, hostile)
        standstills: list[str] = []
        try:
            daemon.standstills()
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                fuzz.batch()
                standstills += daemon.standstills()
            fuzz.end()
        finally:
            longest = max(map(_share, standstills), default=0.0)
            report = {
                **fuzz.counts,
                "memory": f"{fuzz.memory >> 20} MiB",
                "standstill": f"{longest * 2.5:.0f} ms",
            }
            with capsys.disabled():
                print(json.dumps(report, indent=1))
        assert [line for line in standstills if _share(line) > STANDSTILL] == []


def _share(line: str) -> float:
    took, yardstick, _ = line.split(maxsplit=2)
    return float(took) / float(yardstick)
