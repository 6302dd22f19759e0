"""How long until a change is in the kernel, and how long a loss lasts: seen by connections of a client."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.extent import Extent
from tests.bench.prober import Seen
from tests.bench.progress import say
from tests.bench.record import Measurement
from tests.bench.whole_daemon import SUBJECTS
from tests.lab.daemon import Daemon
from tests.lab.flow import Process, finish, read_line
from tests.lab.topology import Lab, Wiring
from tests.model.samples import many_declared
from tests.sources.etcd.members import Cluster, Member, install

GROUP = "control"
PATIENCE = 30.0
QUIET = 0.5
KEPT_VIP = "10.100.0.1"
CHECK = "{type: tcp, interval: 1s, timeout: 500ms, fall: 2, rise: 1}"
FLUSHES = {
    "vipd iptables-nft": ("iptables-nft", "-t", "nat", "-F"),
    "vipd nftables": ("nft", "delete", "table", "ip", "vipd"),
}

REFUSING = """table ip refusing {
    chain forward {
        type filter hook forward priority 10; policy accept;
        ip daddr 10.96.0.0/12 meta l4proto tcp reject with tcp reset
    }
}
"""
"""What no rule has translated is refused at once, where the client would else wait."""


class Prober:
    def __init__(self, process: Process) -> None:
        self._process = process

    @contextmanager
    def probing(self, address: str, quiet: float = 0.0) -> Iterator[list[Seen]]:
        """Probe while and after the work within is done; what was seen is in the list in the end."""
        seen: list[Seen] = []
        assert self._process.stdin is not None
        self._process.stdin.write(f"{address} 80 {quiet} {PATIENCE}\n")
        self._process.stdin.flush()
        assert read_line(self._process) == "PROBING"
        yield seen
        seen.append(Seen(**json.loads(read_line(self._process, PATIENCE + 5))))


@dataclass(frozen=True)
class Victim:
    vip: str
    """Of the service that it is one of three backends of."""
    server: Process


@dataclass
class Scene:
    subject: str
    lab: Lab
    daemon: Daemon
    etcd: Cluster
    prober: Prober
    victims: Iterator[Victim]
    """Backends that are still to die. None dies twice: a backend that comes and goes is held down."""
    vips: Iterator[str] = field(default_factory=lambda: (f"10.100.1.{n}" for n in range(1, 250)))
    """Addresses that nothing has used yet."""

    def backends(self) -> list[str]:
        return [f"{backend.ipv4}:8080" for backend in self.lab.backends[1:]]


Timed = Callable[[Scene], float]


def measure(extent: Extent) -> Iterator[Measurement]:
    """Every way of a change, by both dataplanes in turn; a row comes again, longer, after each round."""
    install()
    values: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        scenes = [stack.enter_context(scene(name, settings, extent)) for name, settings in SUBJECTS]
        for number in range(1, extent.control_rounds + 1):
            say(f"control, round {number} of {extent.control_rounds}")
            for what, (timed, note) in WAYS.items():
                for each in scenes:
                    taken = values.setdefault((what, each.subject), [])
                    taken.append(1000 * timed(each))
                    services = extent.control_services
                    yield Measurement(GROUP, what, each.subject, services, "ms", tuple(taken), note)


@contextmanager
def scene(subject: str, settings: Mapping[str, Any], extent: Extent) -> Iterator[Scene]:
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vipd-bench-")))
        lab = stack.enter_context(Lab(Wiring(backends=3)))
        lab.host.run("nft", "-f", "-", text=REFUSING)
        for backend in lab.backends[1:]:
            backend.serve(tcp=[8080])
        etcd = Cluster([Member(root, "m0", (2379, 2380))])  # in a namespace of its own
        stack.callback(etcd.stop)
        with lab.host.entered():
            etcd.start()
        daemon = Daemon(lab.host, etcd={"endpoints": list(etcd.urls)}, log_level="warning", **settings)
        daemon.write(many_declared(extent.control_services).partition("services:\n")[2])
        stack.enter_context(daemon)
        prober = lab.client.start(sys.executable, "-m", "tests.bench.prober")
        victims = _victims(lab, daemon, extent.control_rounds)
        yield Scene(subject, lab, daemon, etcd, Prober(prober), iter(victims))


def added_by_vipctl(scene: Scene) -> float:
    """From the start of `vipctl add` to the first connection that is answered."""
    return _answered(scene, lambda vip: scene.daemon.vipctl("add", f"{vip}:80/tcp", *scene.backends()))


def saved_in_a_file(scene: Scene) -> float:
    """From the rename of a file with a new service to the first connection that is answered."""
    return _answered(scene, lambda vip: scene.daemon.write(_service(vip, scene.backends()), "one.yaml"))


def put_into_etcd(scene: Scene) -> float:
    """From the begin of the put of a new service to the first connection that is answered."""
    value = f"ports: 80\nbackends: [{', '.join(scene.backends())}]\n"
    with scene.lab.host.entered():
        return _answered(
            scene,
            lambda vip: scene.etcd.put(
                f"/vipd/v1/services/{vip.replace('.', '-')}", f"address: {vip}\n{value}"
            ),
        )


def flushed(scene: Scene) -> float:
    """From the first connection that fails, somebody having removed the rules, until none does any more.

    Each time for the first time: who removes them again and again is answered with ever longer pauses.
    """
    scene.daemon.stop()
    scene.daemon.start()
    with scene.prober.probing(KEPT_VIP, QUIET) as seen:
        scene.lab.host.run(*FLUSHES[scene.subject])
    first, recovered = seen[0].first_failure, seen[0].recovered
    assert first is not None, "no connection failed"
    assert recovered is not None, f"connections still failed after {PATIENCE} s"
    return recovered - first


def died(scene: Scene) -> float:
    """From the death of one of three backends to the last connection that is refused by it."""
    victim = next(scene.victims)
    with scene.prober.probing(victim.vip, QUIET) as seen:
        began = time.monotonic()
        victim.server.kill()
        finish(victim.server)
    last = seen[0].last_failure
    assert last is not None, "no connection was refused"
    return last - began


WAYS: dict[str, tuple[Timed, str]] = {
    "vipctl add until the first answer": (added_by_vipctl, "the start of vipctl itself included"),
    "file saved until the first answer": (saved_in_a_file, ""),
    "etcd put until the first answer": (put_into_etcd, ""),
    "rules removed by somebody, connections failed for": (flushed, "for the first time"),
    "backend died until the last refused connection": (died, "checked every 1 s, out after 2 failures"),
}


def _service(vip: str, backends: list[str], more: str = "") -> str:
    return f"  - {{address: {vip}, ports: 80, backends: [{', '.join(backends)}]{more}}}\n"


def _victims(lab: Lab, daemon: Daemon, number: int) -> list[Victim]:
    """Services with a checked backend each that can die, and one without; in the kernel when this returns."""
    first, *others = lab.backends
    survivors = [f"{backend.ipv4}:8080" for backend in others]
    victims, declared = [], _service(KEPT_VIP, survivors)
    for each in range(1, number + 1):
        victims.append(Victim(f"10.100.2.{each}", first.serve(tcp=[9000 + each])))
        backends = [f"{first.ipv4}:{9000 + each}", *survivors]
        declared += _service(victims[-1].vip, backends, f", check: {CHECK}")
    daemon.declare(declared, "checked.yaml")
    return victims


def _answered(scene: Scene, serve: Callable[[str], object]) -> float:
    """Seconds until a virtual IP that nothing has used yet answers, once it is served."""
    vip = next(scene.vips)
    with scene.prober.probing(vip) as seen:
        began = time.monotonic()
        serve(vip)
    first = seen[0].first_success
    assert first is not None, f"no connection was answered within {PATIENCE} s"
    return first - began
