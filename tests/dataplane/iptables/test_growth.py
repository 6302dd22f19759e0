"""What many or large services cost: linear time, little memory, and a free event loop."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest

from tests.dataplane.declared import HTTP, backends, numbered
from tests.dataplane.iptables.fake_kernel import FakeKernel
from tests.dataplane.namespace import Namespace
from tests.lab.inside import Synced, synced
from vipd.model.service import ExternalAddress, Service


def cpu_of_removal(directory: Path, number: int) -> float:
    """CPU seconds for half of so many services without backends to go, and others to come."""
    vipd = synced("iptables", FakeKernel().run, directory)
    refused = [numbered(n) for n in range(number)]
    vipd.become(*refused[: number // 2])
    vipd.declare(refused[number // 4 : number * 3 // 4])
    began = time.process_time()
    vipd.pending()
    return time.process_time() - began


def test_a_plan_of_many_refusals_is_made_in_linear_time(tmp_path: Path) -> None:
    """A quadratic one takes a hundred times as long."""
    few, many = (min(cpu_of_removal(tmp_path, number) for _ in range(3)) for number in (200, 2000))
    assert many < 30 * few


def test_a_plan_as_text_says_which_chains_come_go_and_differ(vipd: Synced) -> None:
    before = [numbered(n) for n in range(50)]
    vipd.become(*before, numbered(60, "10.244.0.1"))
    vipd.declare([*before[25:], *(numbered(n) for n in range(100, 125)), numbered(61, "10.244.0.1")])
    lines = vipd.pending().splitlines()
    refusals = [line for line in lines if line.startswith(("+ -A VIPD-SERVICES", "- -A VIPD-SERVICES"))]
    assert sum(line[0] == "-" for line in refusals if "REJECT" in line) == 25
    assert sum(line[0] == "+" for line in refusals if "REJECT" in line) == 25
    assert "# ipv4" in lines
    assert "filter VIPD-SERVICES" in lines
    of_chains = {(line.split()[1][:8], line.split()[2]) for line in lines if line.endswith(")")}
    assert of_chains == {(kind, what) for kind in ("VIPD-SVC", "VIPD-SEP") for what in ("(new)", "(removed)")}


def test_of_written_rules_no_text_is_kept(kernel: FakeKernel, vipd: Synced) -> None:
    """And of a load that is being written no more than two restores."""
    many = [numbered(n, "10.244.0.1", "10.244.0.2", "10.244.0.3") for n in range(800)]
    vipd.declare(many)
    tracemalloc.start()
    try:
        vipd.step()
        snapshot = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    own = snapshot.filter_traces([tracemalloc.Filter(True, "*/vipd/*")])
    kept = sum(each.size for each in own.statistics("filename"))
    assert kept < len(kernel.saved()) / 2


MANY = tuple(f"203.{n // 256}.{n % 256}.1" for n in range(1000))
NETWORKS = tuple(f"10.{n // 256}.{n % 256}.0/24" for n in range(1000))


def large(nodes: int, externals: int = 0, networks: int = 0) -> Service:
    return Service(
        "web",
        ("10.96.0.1",),
        (HTTP,),
        backends(*(f"10.244.{n // 250}.{n % 250 + 1}" for n in range(nodes))),
        external_addresses=tuple(
            ExternalAddress(MANY[n], allow_from=NETWORKS[:networks] or None) for n in range(externals)
        ),
    )


LARGE = {
    "backends": large(2000),
    "external addresses": large(1, 1000),
    "networks": large(1, 1, 1000),
    "both": large(60, 60),
}


@pytest.mark.root
def test_a_large_service_is_compiled_beside_the_event_loop(tmp_path: Path) -> None:
    """Its end is work, too. Of CPU time, so that a busy machine does not matter."""
    with Namespace() as namespace:
        for dataplane, names in (("iptables", ["backends"]), ("nftables", list(LARGE))):
            for name in names:

                def busy(dataplane: str = dataplane, name: str = name) -> float:
                    vipd = synced(dataplane, namespace.name, tmp_path)
                    longest, whole = vipd.busy([LARGE[name]])
                    return longest / whole

                assert min(busy() for _ in range(3)) < 0.3, (dataplane, name)
