"""Random operations on a daemon; each updates the model as well."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import yaml

from tests.faults.dataplanes import EQUIPMENTS, Equipment
from tests.faults.equipment import GONE
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.torture.model import BACKENDS, SERVED_PORT, DeclaredService, File, Model, place

STORED = tuple(f"s{n}" for n in range(6))
FILES = tuple(f"f{n}" for n in range(4))
BROKEN = (
    "services: [ {",
    "\x00\x01",
    "apiVersion: vipd/v1\nservices: 7\n",
    "apiVersion: vipd/v1\nservices:\n- {}\n",
)
LONGEST_STOP = 1.5
LONGEST_CHANGE = 0.05
"""Seconds for which a change goes on before a kill meets it."""


class Torture:
    """One daemon and the operations on it. Each operation updates the model."""

    def __init__(self, lab: Lab, daemon: Daemon, equipment: Equipment, seed: int) -> None:
        self.lab, self.daemon, self.equipment = lab, daemon, equipment
        self.random, self.model = random.Random(seed), Model(files={name: File() for name in FILES})
        self.done = Counter[str]()
        self._weighted: dict[Callable[[], None], int] = {
            self.store: 30,
            self.save: 14,
            self.break_file: 5,
            self.override: 14,
            self.remove_held: 4,
            self.change_rules: 4,
            self.stop_for_a_moment: 3,
            self.kill: 3,
            self.kill_amid_change: 4,
            self.restart: 2,
            self.change_files_while_stopped: 3,
            self.switch: 2,
        }

    def one(self) -> str:
        """Do one operation; its name."""
        (chosen,) = self.random.choices(list(self._weighted), list(self._weighted.values()))
        chosen()
        self.done[chosen.__name__] += 1
        return chosen.__name__

    def ask(self, method: str, path: str, body: object = None, *, may_fail: bool = False) -> Any:
        """Send a request to the API; returns its answer."""
        status, answer = self.daemon.ask(method, path, body)
        assert status == 200 or may_fail, f"{method} {path} {body}: {status} {answer}"
        return answer

    # What declares

    def store(self) -> None:
        """Change a service of the store."""
        method, path, body, after = self._change(self.random.choice(STORED))
        self.ask(method, path, body)
        self._stored(path, after)

    def _stored(self, path: str, after: DeclaredService | None) -> None:
        name = path.split("/")[1] if after is None else after.name
        before = self.model.store.pop(name, None)
        if after is not None:
            self.model.store[name] = after
            self.model.reset_frontends.discard(after.address)
        elif before is not None and before.resets:
            self.model.reset_frontends.add(before.address)

    def _change(self, name: str) -> tuple[str, str, Any, DeclaredService | None]:
        """A change of a service: request, and what it is then."""
        now = self.model.store.get(name)
        if now is None:
            made = self._made(name)
            return "POST", "services", {"service": made.spec()}, made
        have = dict(now.weights)
        missing = [a for a in BACKENDS[now.family] if a not in have]
        kind = self.random.choice(("remove", "weight", "add", "shorten", "set"))
        path = f"services/{name}"
        if kind == "weight" and have:
            address, weight = self.random.choice(list(have)), self.random.choice((0, 1, 2, 3))
            path += f"/backends/{place(address)}"
            weights = tuple((a, weight if a == address else w) for a, w in now.weights)
            return "PATCH", path, {"weight": weight}, replace(now, weights=weights)
        if kind == "add" and missing:
            added = self.random.choice(missing)
            body: Any = {"backends": [{"address": added, "port": SERVED_PORT}]}
            return "POST", f"{path}/backends", body, now.with_weight(added, 1)
        if kind == "shorten" and have:
            gone = self.random.choice(list(have))
            return "DELETE", f"{path}/backends", {"backends": [place(gone)]}, now.with_weight(gone, None)
        if kind == "remove":
            return "DELETE", path, None, None
        after = self._made(name)
        return "PATCH", path, {"service": {k: v for k, v in after.spec().items() if k != "name"}}, after

    def _made(self, name: str) -> DeclaredService:
        number = (STORED + FILES).index(name.rstrip("ab")) * 3 + (name[-1] == "b")
        family = 6 if number % 3 == 1 or number % 4 == 3 else 4
        address = f"10.96.9.{number}" if family == 4 else f"fd00:96:9::{number:x}"
        known = list(BACKENDS[family])
        chosen = self.random.sample(known, self.random.randrange(len(known) + 1))
        return DeclaredService(
            name,
            address,
            tuple((backend, self.random.choice((0, 1, 1, 2, 3))) for backend in chosen),
            *(self.random.random() < share for share in (0.5, 0.15, 0.2, 0.2)),
        )

    def save(self) -> None:
        """Save a file with some services, or remove it; vipd notices, or the test reloads."""
        self._write(self.random.choice(FILES), broken=False)
        if self.random.random() < 0.5:
            self.ask("POST", "reload", may_fail=True)
        else:
            self.daemon.wait_until(self._differs, [])

    def break_file(self) -> None:
        """Save a file that is no declaration: what it was goes on."""
        self._write(self.random.choice(FILES), broken=True)
        self.ask("POST", "reload", may_fail=True)

    def _write(self, name: str, *, broken: bool, read: bool = True) -> None:
        path, file = self.daemon.services_dir / f"{name}.yaml", self.model.files[name]
        gone = self.random.random() < 0.25 and not broken
        before = {service.name: service for service in file.accepted}
        file.broken = broken
        if broken:
            file.on_disk = ()
            self._replace(path.name, self.random.choice(BROKEN))
        elif gone:
            file.on_disk = None
            path.unlink(missing_ok=True)
        else:
            file.on_disk = tuple(self._made(f"{name}{x}") for x in "ab" if self.random.random() < 0.6)
            specs = [service.spec() for service in file.on_disk]
            self._replace(path.name, yaml.safe_dump({"apiVersion": "vipd/v1", "services": specs}))
        if read:
            file.read()
        after = {service.name: service for service in file.on_disk or ()} if not broken else before
        for each in after.values():
            self.model.reset_frontends.discard(each.address)
        for each in before.values():
            if each.name not in after and each.resets:
                self.model.reset_frontends.add(each.address)

    def _replace(self, name: str, text: str) -> None:
        new = self.daemon.services_dir / f".{name}.new"
        new.write_text(text)
        new.rename(self.daemon.services_dir / name)

    def _differs(self) -> list[str]:
        """The services that the daemon has otherwise than they are declared."""
        try:
            found = {s["name"]: s for s in self.ask("GET", "export")["services"]}
        except OSError:
            return ["the daemon does not answer"]
        wanted = self.model.services()
        return sorted(
            name
            for name in found.keys() | wanted.keys()
            if (backends_of(found[name]) if name in found else None)
            != (dict(wanted[name].weights) if name in wanted else None)
        )

    def override(self) -> None:
        """Drain or disable a backend of some service, or clear such an override."""
        services = [service for service in self.model.services().values() if service.weights]
        if self.model.out_of_rotation and (not services or self.random.random() < 0.45):
            name, address = self.random.choice(sorted(self.model.out_of_rotation))
            body = {"service": name, "backend": place(address)}
            if name in self.model.services():
                self.ask("DELETE", "overrides", body)
                self.model.out_of_rotation.discard((name, address))
            return
        if services:
            service = self.random.choice(services)
            address = self.random.choice(service.weights)[0]
            admin = self.random.choice(("draining", "disabled"))
            self.ask(
                "POST", "overrides", {"service": service.name, "backend": place(address), "admin": admin}
            )
            self.model.out_of_rotation.add((service.name, address))

    def remove_held(self) -> None:
        """Remove a service while a client holds a connection: a reset ends it where the service wants that,
        else it goes on."""
        held = [m for m in self.model.store.values() if self.model.serving(m)]
        if not held:
            return
        service = self.random.choice(held)
        with self.lab.client.open(service.address, 80) as flow:
            if not flow.connected:
                return  # somebody disturbed the rules; what is served is compared elsewhere
            before = flow.try_ask(10)
            assert not isinstance(before, str), f"{service}: {before}"
            self.ask("DELETE", f"services/{service.name}")
            self._stored(f"services/{service.name}", None)
            if not service.resets:
                assert flow.try_ask(10) == before, f"{service}: a flow did not survive"
                return
            self.daemon.wait_until(lambda: isinstance(ended := flow.try_ask(10), str) and ended, "ECONNRESET")
        self.done["resets seen"] += 1

    # What hurts

    def change_rules(self) -> None:
        """Another process changes the rules."""
        kind_of_change = self.random.choice(sorted(self.equipment.foreign_changes))
        self.lab.host.run("bash", "-c", self.equipment.foreign_changes[kind_of_change], check=False)

    def stop_for_a_moment(self) -> None:
        """Stop the process by SIGSTOP; rules or files change before SIGCONT."""
        pid = int(self.daemon.status()["pid"])
        os.kill(pid, signal.SIGSTOP)
        try:
            if self.random.random() < 0.5:
                self.change_rules()
            if self.random.random() < 0.5:
                self._write(self.random.choice(FILES), broken=False)
            time.sleep(self.random.uniform(0, LONGEST_STOP))
        finally:
            os.kill(pid, signal.SIGCONT)
        self.daemon.wait_until(self._differs, [])

    def kill(self) -> None:
        """A crash."""
        self.daemon.kill()
        self.daemon.start()
        self.done["kills"] += 1

    def kill_amid_change(self) -> None:
        """A crash during a change: afterwards the change is stored wholly or not at all."""
        method, path, body, after = self._change(self.random.choice(STORED))
        answered: list[int] = []

        def change() -> None:
            with contextlib.suppress(*GONE):
                answered.append(self.daemon.ask(method, path, body)[0])

        changing = threading.Thread(target=change)
        changing.start()
        time.sleep(self.random.uniform(0, LONGEST_CHANGE))
        self.daemon.kill()
        changing.join(60)
        self.daemon.start()
        self.done["kills"] += 1
        name = path.split("/")[1] if after is None else after.name
        found = {s["name"]: s for s in self.ask("GET", "export")["services"]}.get(name)
        before = self.model.store.get(name)
        allowed = [after] if answered else [after, before]
        have = None if found is None else declared_values(found)
        was = next((m for m in allowed if have == (None if m is None else declared_values(m.spec()))), name)
        assert was != name, f"{name} is {found}; it should be one of {allowed}"
        if was is not before:
            self._stored(path, after)

    def restart(self) -> None:
        """An orderly restart."""
        self.daemon.stop()
        self.daemon.start()

    def change_files_while_stopped(self) -> None:
        """Files are saved, removed and broken while vipd is not running."""
        self.daemon.kill()
        self.done["kills"] += 1
        for name in self.random.sample(FILES, self.random.randrange(1, len(FILES))):
            self._write(name, broken=self.random.random() < 0.2, read=False)
        if self.random.random() < 0.3:
            self.change_rules()
        self.daemon.start()
        self.model.read_files()

    def switch(self) -> None:
        """Switch to the other dataplane, which stays."""
        other = next(e for e in EQUIPMENTS if e.dataplane != self.equipment.dataplane)
        self.ask("POST", "dataplane", {"name": str(other.dataplane)})
        self.equipment = other


def backends_of(spec: dict[str, Any]) -> dict[str, int]:
    """Weights by address, as an exported service has them."""
    return {b["address"]: b.get("weight", 1) for b in spec.get("backends", ())}


def declared_values(spec: dict[str, Any]) -> tuple[object, ...]:
    """The values of a service that operations change."""
    return (
        spec["address"],
        tuple(backends_of(spec).items()),
        spec.get("on_remove", "keep"),
        spec.get("balance", "random"),
        spec.get("fallback", "reject"),
        isinstance(spec.get("affinity"), dict),
    )
