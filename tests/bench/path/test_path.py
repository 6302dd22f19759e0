"""The benchmark's parts work: every kind of path answers, and the load generator counts what it should."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.ipvs_rules import changed_service
from tests.bench.path.arrangements import DIRECT, SUBJECTS, Arrangement, Subject, arrange, delivered
from tests.bench.path.probes import Length, Probes
from tests.bench.path.programs import PORTS, Programs
from tests.bench.path.rules import BACKENDS, declaration, vip
from tests.lab.inside import declare
from vipd.model.service import Backend

SERVICES = 10
FLOODS = 4
"""All of one must arrive: the machine's queue for packets is shared with others, who may fill it for once."""
NFTABLES = next(subject for subject in SUBJECTS if subject.name == "vipd nftables")
NEEDS_GCC = pytest.mark.skipif(
    not shutil.which("gcc"), reason="gcc is not installed; tests/bench/path/prepare.sh does"
)


def test_first_and_last_service_lead_to_the_real_backend_and_the_others_to_none() -> None:
    services = declare(declaration(SERVICES), "bench.yaml").services
    real = [service.addresses[0] for service in services if service.backends[0].address in BACKENDS]
    assert real == [vip(0), vip(SERVICES - 1)]
    assert len({address for service in services for address in service.addresses}) == SERVICES


def test_ipvs_gets_the_new_backend_before_the_old_one_goes() -> None:
    before, *_ = declare(declaration(1)).services
    after = replace(before, backends=(Backend("10.244.0.99"), *before.backends[1:]))
    lines = changed_service(before, after).splitlines()
    ports = [f"-{port.protocol[0]} {vip(0)}:{port.port}" for port in before.ports]
    added = [f"-a {end} -r 10.244.0.99:{end.rpartition(':')[2]} -m" for end in ports]
    removed = [f"-d {end} -r {BACKENDS[0]}:{end.rpartition(':')[2]}" for end in ports]
    assert lines == [*added, *removed]


@pytest.fixture(scope="module")
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as held:
        yield held


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(Path(tmp_path_factory.mktemp("programs")))


@pytest.mark.root
@NEEDS_GCC
@pytest.mark.parametrize("subject", [DIRECT, NFTABLES], ids=lambda subject: subject.name)
def test_every_kind_of_load_comes_through(
    subject: Subject, programs: Programs, stack: contextlib.ExitStack
) -> None:
    at = arrange(subject, SERVICES if subject.scales else None, programs, stack)
    probes = Probes(programs, Length(rounds=1, seconds=0.3, kept_rounds=1, new_flows=1_600))
    for address in at.targets.values():
        rate, cpu = probes.connections(at, address)
        assert rate > 0
        assert cpu > 0
    _flood_is_counted(at, programs)
    client = at.lab.client
    assert programs.load(client, "request", at.target, PORTS.echo, 0.3).failed == 0
    assert programs.load(client, "datagram", at.target, PORTS.udp_echo, 0.3).done > 0


def _flood_is_counted(at: Arrangement, programs: Programs) -> None:
    for _ in range(FLOODS):
        before = delivered(at)
        sent = programs.flood(
            at.lab.client, at.target, PORTS.udp_sink, 640, ("10.10.0.2", "10.10.0.3"), 320
        ).done
        assert sent == 640
        arrived = delivered(at) - before
        if arrived >= sent:
            break
    assert arrived >= sent
    if at.subject.install:
        flows = at.lab.host.run("conntrack", "-L", "-p", "udp").stdout.count(f"dport={PORTS.udp_sink}")
        # Each flow has a line with a port in both directions.
        assert flows >= sent
