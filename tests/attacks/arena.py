"""Where attacks take place: a real daemon in a lab, a bystander whose changes and failures are timed until
packets show them, and attackers who are other users, files, folders of etcd, backends and clients.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self

from tests.attacks import foe, neighbour
from tests.attacks.foe import Requests
from tests.attacks.measuring import Figures, Measurement, greeting, refused
from tests.lab.daemon import Daemon
from tests.lab.flow import Process, finish, read_line
from tests.lab.node import Node
from tests.lab.topology import Lab
from tests.lab.waiting import wait_until
from tests.sources.etcd.members import Cluster, Member, install

HEALTH_PORT, METRICS_PORT, PAGE_PORT, ETCD_PORT = 10256, 10257, 10258, 2379
READERS, ADMINS = 65534, 1
"""Groups: who may read, and who may change services."""
READER, ADMIN, BYSTANDER = 65534, 2, 1
"""Users: an attacker who may read, an attacker who may change services, and the bystander who may, too."""
VIP = "10.96.200."
CHECKED = {"tcp check": "10.96.201.", "http check": "10.96.202.", "program": "10.96.203."}
INTERVAL = 1.0
_CHECK = f"interval: {INTERVAL:g}s, timeout: 500ms, rise: 1, fall: 1, jitter: 0%"


class Arena:
    """A context manager: on entry the daemon runs and the bystander's services serve; on exit all ends."""

    def __init__(self, lab: Lab, root: Path, dataplane: str, with_etcd: bool) -> None:
        self.lab, self.root, self.with_etcd = lab, root, with_etcd
        self.client, self.host = lab.client, lab.host
        self.good, self.bad, self.servers = lab.backends
        """The bystander's backend, the hostile one, and the machine of etcd and of the name server."""
        self._stack, self.attack = contextlib.ExitStack(), contextlib.ExitStack()
        self._number = 9000
        self._numbers, self._requesting = threading.Lock(), threading.Lock()
        # Not the test's own directory: users other than root must reach it.
        self._scratch = tempfile.TemporaryDirectory(prefix="vipd-foe-")
        self.scratch_directory = Path(self._scratch.name)
        self.alive, self._named = (self.scratch_directory / name for name in ("alive", "address"))
        settings: dict[str, Any] = {
            "dataplane": dataplane,
            "socket_group": "nogroup",
            "admin_group": "daemon",
            "health_address": f"0.0.0.0:{HEALTH_PORT}",
            "metrics_address": METRICS_PORT,
            "status_page": PAGE_PORT,
            "dns_servers": [f"{self.servers.ipv4}:{foe.NAME_PORT}"],
            "dns_min_ttl": "1s",
            "dns_hold": "0s",
            "log_level": "info",
        }
        self.etcd: Cluster | None = None
        if with_etcd:
            install()
            member = Member(root, "m0", (ETCD_PORT, ETCD_PORT + 1))
            member.url = f"http://{self.servers.ipv4}:{ETCD_PORT}"
            self.etcd = Cluster([member])
            settings["etcd"] = {"endpoints": [member.url], "timeout": "5s"}
        self.daemon = Daemon(self.host, "", **settings)
        self.daemon.directory.chmod(0o755)
        self.scratch_directory.chmod(0o755)

    def __enter__(self) -> Self:
        try:
            for number in range(neighbour.BACKENDS):
                Path(f"{self.alive}-{number}").touch()
            self._named.write_text(self.good.ipv4)
            self._backend = self._start(self.good, neighbour, "backend", "good")
            self._start(self.bad, neighbour, "backend", "bad")
            self._start(self.bad, foe, "backend")
            self._start(self.servers, foe, "names", str(self._named))
            if self.etcd:
                with self.servers.entered():
                    self.etcd.start()
                self._stack.callback(self.etcd.stop)
            self._pace = self._start(self.host, neighbour, "pace")
            self._write_checked()
            self._write_port("by file", 8999)
            self._stack.enter_context(self.daemon)
            admin = [str(self.daemon.socket), str(BYSTANDER), str(READERS), str(ADMINS)]
            self._admin = self._start(self.host, neighbour, "admin", *admin)
            spec = {"name": "by-api", "address": f"{VIP}2", "ports": [{"port": 8999, "target": 8080}]}
            answer = self.request("POST", "/v1/services", {"service": {**spec, "backends": [self.good.ipv4]}})
            assert answer[0] == 200, answer
            if self.etcd:
                self._write_port("by etcd", 8999)
            self.wait_served()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.attack.close()
        self._stack.close()
        self._scratch.cleanup()

    # The bystander

    def wait_served(self) -> None:
        places = {f"{start}{n}": 80 for start in CHECKED.values() for n in range(neighbour.BACKENDS)}
        places |= {f"{VIP}14": 80} | {f"{VIP}{n}": 8999 for n in (1, 2, *((3,) if self.etcd else ()))}
        with self.client.entered():
            for vip, port in places.items():
                self.wait_for(partial(greeting, vip, port), f"{vip} does not answer")

    def _write_checked(self) -> None:
        text = f"- {{name: calm-14, address: {VIP}14, ports: '80:8080', backends: ['dns:calm.internal']}}\n"
        for n in range(neighbour.BACKENDS):
            checks = (
                f"type: tcp, port: {neighbour.TCP_PORTS[n]}",
                f"type: http, port: {neighbour.HTTP_PORTS[n]}",
                f"type: exec, command: [/usr/bin/test, -e, {self.alive}-{n}]",
            )
            for start, check in zip(CHECKED.values(), checks, strict=True):
                text += f"- {{name: calm-{start}{n}, address: {start}{n}, ports: '80:8080', "
                text += f"backends: [{self.good.ipv4}], check: {{{check}, {_CHECK}}}}}\n"
        self._write_file("calm-checked.yaml", text)

    def _write_file(self, name: str, services: str) -> None:
        new = self.daemon.services_dir / f".{name}.new"
        new.write_text(f"apiVersion: vipd/v1\nservices:\n{services}")
        os.chown(new, BYSTANDER, READERS)
        new.rename(self.daemon.services_dir / name)

    def _write_port(self, way: str, port: int) -> None:
        """Have the bystander's service of a source answer on another port of its virtual IP."""
        if way == "by file":
            service = (
                f"{{name: by-file, address: {VIP}1, ports: '{port}:8080', backends: [{self.good.ipv4}]}}"
            )
            self._write_file("calm.yaml", f"- {service}\n")
        elif way == "by etcd":
            value = f"{{address: {VIP}3, ports: '{port}:8080', backends: [{self.good.ipv4}]}}"
            self.put_keys({"services/calm/web": value})
        else:
            body = {"service": {"ports": [{"port": port, "target": 8080}]}}
            status, answer = self.request("PATCH", "/v1/services/by-api", body)
            assert status in (200, 0, 503), answer

    def request(self, method: str, target: str, body: object) -> tuple[int, str]:
        """The bystander's request to the API, who is an administrator but not root."""
        with self._requesting:
            stdin = self._admin.stdin
            assert stdin is not None
            stdin.write(json.dumps([method, target, body]) + "\n")
            stdin.flush()
            status, answer = json.loads(read_line(self._admin) or '[0, "no answer"]')
        return int(status), str(answer)

    def ways(self) -> Mapping[str, Callable[[], Callable[[], bool]]]:
        """By its name a change or failure of the bystander: making it returns whether packets show it."""

        def change(way: str, last: int) -> Callable[[], bool]:
            with self._numbers:
                self._number += 1
                port = self._number
            writing = threading.Thread(target=self._write_port, args=(way, port), daemon=True)
            writing.start()  # the API answers once it is applied: packets are asked meanwhile
            return lambda: not writing.is_alive() and bool(greeting(f"{VIP}{last}", port))

        def fail(what: str, numbers: Iterator[int]) -> Callable[[], bool]:
            number = next(numbers)
            vip = f"{CHECKED[what]}{number}"
            self._switch(what, number, alive=False)

            def seen() -> bool:
                if failed := refused(vip, 80):
                    self._switch(what, number, alive=True)
                return failed

            return seen

        def rename() -> Callable[[], bool]:
            before = self._named.read_text().strip()
            after, name = (self.bad, "bad") if before == self.good.ipv4 else (self.good, "good")
            new = self._named.with_suffix(".new")
            new.write_text(after.ipv4)
            new.rename(self._named)
            return lambda: greeting(f"{VIP}14", 80) == name

        places = {"by file": 1, "by API": 2} | ({"by etcd": 3} if self.etcd else {})
        changes = {way: partial(change, way, last) for way, last in places.items()}
        backends = range(neighbour.BACKENDS)
        failures = {what: partial(fail, what, itertools.cycle(backends)) for what in CHECKED}
        return {**changes, **failures, "name": rename}

    def _switch(self, what: str, number: int, alive: bool) -> None:
        """Have one of the bystander's backends fail, or succeed again, as a type of check sees it."""
        if what == "program":
            file = Path(f"{self.alive}-{number}")
            if alive:
                file.touch()
            else:
                file.unlink()
            return
        ports = neighbour.TCP_PORTS if what == "tcp check" else neighbour.HTTP_PORTS
        with self._numbers:
            assert self._backend.stdin
            self._backend.stdin.write(f"{'open' if alive else 'close'} {ports[number]}\n")
            self._backend.stdin.flush()
            assert read_line(self._backend) == "DONE"

    def measure(self, seconds: float, begin: Callable[[], None] = lambda: None) -> Figures:
        """What the bystander sees from when `begin` is called until so many seconds after it returned, and
        until its last change and failure is seen."""
        pid = self.daemon.status()["pid"]
        return Measurement(self.client, self.host, self.ways(), pid, self._pace).run(seconds, begin)

    # The attackers

    def _start(self, node: Node, program: object, *words: str) -> Process:
        process = node.start(sys.executable, str(program.__file__), *words)  # type: ignore[attr-defined]
        said = read_line(process)
        assert said == "READY", f"{words} did not start: {said!r}"
        return process

    def foe(self, node: Node, *words: str) -> None:
        """Run one of the attackers' programs until the attack ends."""
        process = self._start(node, foe, *words)
        self.attack.callback(finish, process)

    def requests(self, node: Node, wanted: Requests) -> None:
        """Clients that ask until the attack ends."""
        self.foe(node, "requests", json.dumps(asdict(wanted)))

    def local_user(self, port: int, request: str, connections: int, **options: Any) -> None:
        """Somebody on this host who has no rights asks a port of its loopback."""
        to = f"127.0.0.1:{port}"
        self.requests(self.host, Requests(to, request, connections, uid=65534, gids=(65534,), **options))

    def reader(self, path: str, rest: str = "Connection: close\n\n", **options: Any) -> None:
        """A user who may read asks the API for this by many connections."""
        self._user(READER, (READERS,), f"GET {path} HTTP/1.1\nHost: vipd\n{rest}", **options)

    def admin(self, method: str, path: str, body: bytes, **options: Any) -> None:
        file = self.scratch(body)
        head = f"{method} {path} HTTP/1.1\nHost: vipd\nConnection: close\nContent-Type: application/json\n"
        self._user(ADMIN, (READERS, ADMINS), head, body=str(file), **options)

    def _user(self, uid: int, gids: tuple[int, ...], request: str, **options: Any) -> None:
        self.requests(self.host, Requests(str(self.daemon.socket), request, uid=uid, gids=gids, **options))

    def scratch(self, content: bytes) -> Path:
        with tempfile.NamedTemporaryFile(dir=self.scratch_directory, delete=False) as file:
            file.write(content)
        return Path(file.name)

    def file(self, services: str, name: str = "greedy.yaml") -> None:
        """Declare services in a file of the attacker's; they are gone when the attack ends."""
        self.text(f"apiVersion: vipd/v1\nservices:\n{services}", name)

    def text(self, text: str, name: str = "greedy.yaml") -> None:
        place = self.daemon.services_dir / name
        new = place.with_name(f".{name}.new")
        new.write_text(text)
        os.chown(new, ADMIN, READERS)
        new.rename(place)
        self.attack.callback(place.unlink, missing_ok=True)

    def rewritten(self, per_second: int, *texts: str) -> None:
        """A file of the attacker's that changes all the time, from one of these services to the next."""
        place = self.daemon.services_dir / "greedy.yaml"
        files = [str(self.scratch(f"apiVersion: vipd/v1\nservices:\n{text}".encode())) for text in texts]
        self.foe(self.host, "rewrite", str(place), str(per_second), *files)
        self.attack.callback(place.unlink, missing_ok=True)

    def load(self, number: int) -> None:
        """Services of the attacker's that serve before the attack begins, for what grows with them."""
        self.file(
            "".join(
                f"- {{name: load-{n}, address: 10.103.{n >> 8}.{n & 255}, ports: 80, "
                f"backends: [{self.bad.ipv4}]}}\n"
                for n in range(number)
            ),
            "greedy-load.yaml",
        )
        self.wait_for(lambda: self.daemon.endpoints(f"load-{number - 1}"))

    def another_service(self, last: int, backend: str, more: str = "") -> None:
        """Declare one more service of the bystander; it is gone when the attack ends."""
        service = f"name: calm-{last}, address: {VIP}{last}, ports: '80:8080', backends: ['{backend}']{more}"
        self.another_file(service)

    def another_file(self, service: str) -> None:
        self._write_file("calm-new.yaml", f"- {{{service}}}\n")
        self.attack.callback((self.daemon.services_dir / "calm-new.yaml").unlink, missing_ok=True)

    def wait_for_greeting(self, last: int, port: int = 80) -> None:
        with self.client.entered():
            self.wait_for(partial(greeting, f"{VIP}{last}", port), f"{VIP}{last} does not answer")

    def wait_for_health_port(self, port: int) -> None:
        self.wait_for(lambda: self.health_port_answers(port), f"health port {port} does not answer")

    def health_port_answers(self, port: int) -> bool:
        """Whether a health port answers the bystander's client in a second, with any status."""
        with self.client.entered():
            connection = http.client.HTTPConnection(self.host.ipv4, port, timeout=1)
            try:
                connection.request("GET", "/")
                return bool(connection.getresponse().status)
            except (OSError, http.client.HTTPException):
                return False
            finally:
                connection.close()

    def wait_for(self, condition: Callable[[], object], what: str = "nothing happens") -> None:
        """Return once it is true; AssertionError with `what` and the problems of the status otherwise."""
        wait_until(condition, lambda: f"{what}: {self.problems()[:300]}")

    def remove_stored(self) -> None:
        """Remove what an attacker has stored, as root; the bystander's service stays."""
        stored = [s for s in self.daemon.get("export")["services"] if s["name"] == "by-api"]
        assert self.daemon.ask("POST", "apply", {"services": stored, "prune": True})[0] == 200

    def put_keys(self, values: Mapping[str, str]) -> None:
        assert self.etcd
        with self.servers.entered():
            self.etcd.put_all({f"/vipd/v1/{key}": value for key, value in values.items()})

    def put_all(self, values: Mapping[str, str], at_once: int = 100) -> None:
        """Write keys of the attacker's; they are gone when the attack ends."""
        assert self.etcd
        for folder in {key.partition("/")[0] for key in values}:
            self.attack.callback(self.delete, f"{folder}/greedy*")
        pairs = list(values.items())
        for at in range(0, len(pairs), at_once):
            self.put_keys(dict(pairs[at : at + at_once]))

    def delete(self, key: str) -> None:
        assert self.etcd
        with self.servers.entered():
            self.etcd.delete(f"/vipd/v1/{key}")

    def run_beside(self, work: Callable[[threading.Event], None]) -> None:
        end = threading.Event()
        thread = threading.Thread(target=work, args=(end,), daemon=True)
        thread.start()
        self.attack.callback(thread.join, 60)
        self.attack.callback(end.set)

    def problems(self) -> str:
        return "\n".join(p for source in self.daemon.status()["sources"] for p in source["problems"])


def costly_certificate(directory: Path) -> tuple[str, str]:
    """A certificate and its key, of an RSA that costs who verifies a signature much."""
    key, certificate = directory / "costly.key", directory / "costly.crt"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:8192", "-nodes", "-subj", "/CN=foe", "-days", "2"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return str(certificate), str(key)
