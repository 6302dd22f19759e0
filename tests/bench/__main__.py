"""How long the things take that a user waits for. Prints medians of several rounds, with the spread.

    sudo .venv/bin/python -m tests.bench [--services 10000]

Runs in network namespaces of its own. Figures move between machines and hours: compare within one run only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench.declarations import many_services
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab, Wiring
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.plan import Installed, make_plan
from vipd.dataplane.iptables.render import render
from vipd.dataplane.iptables.ruleset import Ruleset
from vipd.dataplane.switching import DATAPLANES
from vipd.declaration.native import parse_declaration
from vipd.model import Family, Forwarding, Service
from vipd.selection import SelectionPolicy, choose
from vipd.settings import load_settings

ROUNDS = 7
FLOWS = 3_000
LOAD_SECONDS = 600.0
VIPCTL = Path(sys.executable).with_name("vipctl")


def main() -> None:
    """Run every measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--services", type=int, default=10_000, help="services in the large declaration")
    parser.add_argument(
        "--monolithic", type=int, default=1_000, help="services for the comparison with one single restore"
    )
    arguments = parser.parse_args()
    services = arguments.services
    print(f"{'what':<58} {'median':>9} {'min':>9} {'max':>9}")
    _measure_compile(services)
    with Lab(Wiring(backends=2)) as lab:
        lab.serve_everywhere(8080)
        with Daemon(lab.host) as daemon:
            _measure_commands(lab, daemon)
    for size in dict.fromkeys((arguments.monolithic, services)):
        for dataplane in DATAPLANES:
            with Lab(Wiring(backends=2)) as lab:
                _measure_full_load(lab, size, dataplane)
    with Lab(Wiring(backends=1)) as lab:
        _measure_monolithic(lab, arguments.monolithic)


def _measure_compile(count: int) -> None:
    text, size = many_services(count), f"{count} services x 5"
    policy = SelectionPolicy.of(load_settings(), ())
    _report(f"parse {size}", 3, lambda: parse_declaration(text, "bench.yaml"))
    services = parse_declaration(text, "bench.yaml").services
    _report(f"choose and compile {size}", 3, lambda: _compiled(services, policy))
    ruleset = _compiled(services, policy)
    _report(f"plan {size} from nothing", 3, lambda: _planned(ruleset))


def _compiled(services: tuple[Service, ...], policy: SelectionPolicy) -> Ruleset:
    ruleset = Ruleset(RuleOptions(Family.IPV4))
    for forwarding in _forwardings(services, policy):
        ruleset.update(forwarding.key, forwarding)
    return ruleset


def _forwardings(services: tuple[Service, ...], policy: SelectionPolicy) -> list[Forwarding]:
    return [forwarding for service in services for forwarding in choose(service, policy)]


def _planned(ruleset: Ruleset) -> None:
    make_plan(ruleset.whole(()), Installed(), ruleset.options.names)


def _measure_commands(lab: Lab, daemon: Daemon) -> None:
    environment = {"VIPD_SOCKET": str(daemon.socket), "PATH": "/usr/bin:/bin"}
    listing = [str(VIPCTL), "list"]
    _report(
        "vipctl list, whole process",
        ROUNDS,
        lambda: subprocess.run(listing, env=environment, capture_output=True, check=True),
    )
    numbers = iter(range(1, 200))

    def add_and_connect() -> None:
        vip = f"10.96.9.{next(numbers)}"
        daemon.vipctl("add", f"{vip}:80/tcp", *(f"{b.ipv4}:8080" for b in lab.backends))
        lab.client.send(vip, 80).all_answered()

    _report("vipctl add to the end of the first connection", ROUNDS, add_and_connect)


def _measure_full_load(lab: Lab, count: int, dataplane: str) -> None:
    """From a cold start on a file to `in-sync`, then one changed backend, and connections beside all that."""
    text, size = many_services(count), f"{count} x 5 by {dataplane}"
    lab.serve_everywhere(8080)
    _connect(f"connect and answer, directly, before {size}", lab, lab.backends[0].ipv4)
    daemon = Daemon(lab.host, dataplane=dataplane)
    daemon.write(text.partition("services:\n")[2])
    began = time.perf_counter()
    daemon.start(LOAD_SECONDS)
    try:
        _print(f"vipd start to in sync, {size}", [time.perf_counter() - began])
        resident = next(line.split()[1] for line in daemon.memory() if line.startswith("VmRSS"))
        print(f"{f'memory of vipd with {size}':<58} {int(resident) / 1024:>7.0f} MiB")
        daemon.vipctl("add", "10.250.0.1:80/tcp", *(f"{backend.ipv4}:8080" for backend in lab.backends))
        weights, changed = iter(range(2, 100)), f"{lab.backends[0].ipv4}:8080"
        _report(
            f"one backend changed by vipctl among {size}",
            ROUNDS,
            lambda: daemon.vipctl("set", f"10.250.0.1:80/tcp/{changed}", "--weight", str(next(weights))),
        )
        _connect(f"connect and answer, by a VIP among {size}", lab, "10.250.0.1", 80)
    finally:
        daemon.stop()


def _connect(what: str, lab: Lab, address: str, port: int = 8080) -> None:
    """One connection after the other, by a client in Python: compare with the direct ones of the same run."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        lab.client.send(address, port, count=FLOWS).all_answered()
        seconds.append((time.perf_counter() - began) / FLOWS)
    _print(what, seconds)


def _measure_monolithic(lab: Lab, count: int) -> None:
    """The same rules in one iptables-restore, as kube-proxy writes them. Grows with the square of `count`."""
    services = parse_declaration(many_services(count), "bench.yaml").services
    forwardings = _forwardings(services, SelectionPolicy.of(load_settings(), ()))
    text = render(forwardings, RuleOptions(Family.IPV4))
    for variant in ("nft", "legacy"):
        began = time.perf_counter()
        lab.host.run(f"iptables-{variant}-restore", "--noflush", text=text, timeout=LOAD_SECONDS)
        what = f"one iptables-{variant}-restore of the rules of {count} services x 5"
        _print(what, [time.perf_counter() - began])


def _report(what: str, rounds: int, action: Callable[[], object]) -> None:
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    _print(what, seconds)


def _print(what: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    median = ordered[len(ordered) // 2]
    print(f"{what:<58} {median:>8.4f}s {ordered[0]:>8.4f}s {ordered[-1]:>8.4f}s", flush=True)


if __name__ == "__main__":
    main()
