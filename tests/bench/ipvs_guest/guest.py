"""Runs inside the guest: the path of packets and the change of one backend, with IPVS and with vipd, in turn.

Prints each row as one line, `VIPD measured` and JSON, after each round; the last line is `VIPD done`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from tests.bench.comparators import IPVS as IPVSADM
from tests.bench.path.arrangements import DIRECT, SUBJECTS, TRACKED, TRACKING_RULE, Subject, arrange
from tests.bench.path.measuring import Measuring
from tests.bench.path.probes import Length, Probes
from tests.bench.path.programs import Programs
from tests.bench.path.rules import load_ipvs
from tests.bench.programming import Collected, outcome_of
from tests.bench.record import Measurement
from tests.bench.trials.trial import Trial
from tests.lab.node import Node

GROUP = "ipvs"
SERVICES = 1_000
ROUNDS = 3
LENGTH = Length(rounds=ROUNDS, seconds=0.3, kept_rounds=ROUNDS, new_flows=16_000)
LIMIT = 300.0
TABLE_BITS = 16
"""IPVS finds a flow in a table of 2^16 lines, as connection tracking here; by default it has 2^12."""


def _ipvs(host: Node, services: int, directory: Path) -> None:
    load_ipvs(host, services)


def _ipvs_tracked(host: Node, services: int, directory: Path) -> None:
    host.run("nft", "-f", "-", text=TRACKING_RULE)
    load_ipvs(host, services)
    host.run("sysctl", "-qw", "net.ipv4.vs.conntrack=1")


IPVS = Subject("IPVS", _ipvs, ipvs=True)
OURS = tuple(each for each in SUBJECTS if each.name in ("vipd nftables", "vipd iptables grouped (nft)"))
OTHERS = (TRACKED, *OURS, IPVS, Subject("IPVS, tracked", _ipvs_tracked, ipvs=True))
PROGRAMMED = {
    "vipd nftables": "vipd nftables",
    "vipd iptables-nft": "vipd iptables grouped (nft)",
    IPVSADM: IPVS.name,
}
"""Subjects of the programming of the kernel, and their names here."""


def rows() -> Iterator[Measurement]:
    with contextlib.ExitStack() as stack:
        programs = Programs(Path("/usr/sbin"))
        direct = arrange(DIRECT, None, programs, stack)
        others = [arrange(each, SERVICES if each.scales else None, programs, stack) for each in OTHERS]
        measuring = Measuring(direct, others, Probes(programs, LENGTH))
        measuring.warm_up()
        collected = {name: Collected(name, SERVICES, LIMIT) for name in PROGRAMMED}
        for number in range(1, ROUNDS + 1):
            print(f"VIPD info round {number} of {ROUNDS}", flush=True)
            measuring.round(with_kept=True)
            yield from measuring.measurements()
            for name, each in collected.items():
                each.take(outcome_of(Trial(name, SERVICES, limit=LIMIT)))
                for row in each.measurements():
                    yield replace(row, subject=PROGRAMMED[name])


def main() -> None:
    """Load the modules that namespaces cannot ask for, and measure."""
    subprocess.run(["modprobe", "nf_conntrack"], check=True, timeout=60)
    subprocess.run(["modprobe", "ip_vs", f"conn_tab_bits={TABLE_BITS}"], check=True, timeout=60)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=60)
    kernel = f"Linux {os.uname().release}"
    for row in rows():
        view = asdict(replace(row, group=GROUP, note="; ".join(filter(None, (kernel, row.note)))))
        print(f"VIPD measured {json.dumps(view)}", flush=True)
    print("VIPD done all rounds", flush=True)


if __name__ == "__main__":
    main()
