"""Rules as text: the ladder of probabilities, and names of chains. Limits of flows are in `one_of_each`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dataplane.declared import HTTP, backends, numbered
from tests.dataplane.iptables.fake_kernel import FakeKernel
from tests.dataplane.watched_programs import WatchedPrograms, refusing
from tests.lab.inside import Synced, compiled, synced
from vipd.model.flow_limits import FlowLimits
from vipd.model.service import (
    MAX_WEIGHT,
    Affinity,
    Backend,
    ExternalAddress,
    Protocol,
    Service,
    ServicePort,
    TrafficPolicy,
)

ROUNDING = 0.5e-10
"""Of one probability, written with ten decimals."""
STORING = 0.5 / 2**31
"""Of one probability, as xt_statistic keeps it."""


def ladder(weights: list[int]) -> tuple[list[str], list[str]]:
    """The SVC chain of a service with backends of these weights, and the address of each rule's target."""
    nodes = tuple(Backend(f"10.0.{i // 256}.{i % 256}", 80, weight) for i, weight in enumerate(weights))
    text = compiled([Service("s", ("10.96.0.1",), (HTTP,), nodes)])
    targets = dict(re.findall(r"-A (VIPD-SEP-\S+) .*--to-destination (\S+):80", text))
    ladder = re.findall(r"-A VIPD-SVC-\S+ (.*-j VIPD-SEP-\S+)", text)
    return ladder, [targets[rule.rpartition(" -j ")[2]] for rule in ladder]


def probabilities(rules: list[str]) -> list[str]:
    return [step[1] for rule in rules if (step := re.search(r"--probability (\S+)", rule))]


def shares(steps: list[float]) -> list[float]:
    """The part of new flows that each rule takes, when every earlier one let it pass."""
    left, taken = 1.0, []
    for step in [*steps, 1.0]:
        taken.append(left * step)
        left *= 1 - step
    return taken


@given(st.lists(st.integers(0, 3) | st.integers(1, MAX_WEIGHT), min_size=1, max_size=200))
def test_each_backend_has_one_step_by_its_weight_and_the_last_is_certain(weights: list[int]) -> None:
    """A share is a product of n factors within 0..1, so its error is at most the sum of theirs."""
    rules, targets = ladder(weights)
    nodes = {f"10.0.{i // 256}.{i % 256}": weight for i, weight in enumerate(weights) if weight}
    assert sorted(targets) == sorted(nodes)
    assert ["statistic" in rule for rule in rules] == [True] * (len(rules) - 1) + [False] * bool(rules)
    written = [float(p) for p in probabilities(rules)]
    assert all(0 < p < 1 for p in written)
    stored = [round(p * 2**31) / 2**31 for p in written]
    for steps, error in ((written, ROUNDING), (stored, ROUNDING + STORING)):
        for share, target in zip(shares(steps), targets, strict=False):
            assert abs(share - nodes[target] / sum(weights)) <= len(weights) * error + 1e-12


def test_equal_weights_read_as_kube_proxy_writes_them() -> None:
    for number in (1, 2, 3, 7, 10, 100):
        for weight in (1, 3, MAX_WEIGHT):
            rules, _ = ladder([weight] * number)
            assert probabilities(rules) == [f"{1 / (number - i):0.10f}" for i in range(number - 1)]


LIMITS = FlowLimits(
    new_per_client=3,
    client_burst=100,
    connections_per_client=2,
    new_per_second=3000,
    burst=4000,
    connections=9,
    client_ipv6_prefix=56,
)


@pytest.mark.parametrize("able", [True, False])
def test_a_kernel_that_cannot_limit_gets_no_rule_for_it(able: bool, tmp_path: Path) -> None:
    """Neither the chain nor jumps to it."""
    kernel, programs = FakeKernel(), WatchedPrograms()
    if not able:
        programs.instead = refusing("connlimit")
    vipd = synced("iptables", kernel.run, tmp_path, through=programs)
    vipd.become(replace(numbered(1, "10.244.0.1"), limits=LIMITS))
    text = kernel.saved()
    assert (":VIPD-LIM-" in text, "-j VIPD-LIM-" in text, "connlimit" in text) == (able,) * 3
    assert bool(vipd.warnings()) is not able
    assert not vipd.refused()


def test_every_name_fits_with_a_prefix_of_seven(tmp_path: Path) -> None:
    """28 characters: XT_EXTENSION_MAXNAMELEN, less its end."""
    everything = Service(
        "s" * 60,
        ("10.96.0.1",),
        (ServicePort(80, Protocol.TCP, "http", node_port=30080),),
        backends("10.244.0.1", "10.244.0.2"),
        affinity=Affinity(60),
        limits=LIMITS,
        allow_from=("10.0.0.0/8",),
        external_addresses=(ExternalAddress("192.0.2.1", allow_from=("198.51.100.0/24",)),),
        external_policy=TrafficPolicy.LOCAL,
        health_port=30099,
    )
    kernel = FakeKernel()
    vipd = synced("iptables", kernel.run, tmp_path, own=["10.244.0.1"], chain_prefix="ABCDEFG")
    vipd.become(everything, numbered(1))
    names = [name for table in ("nat", "filter") for name in kernel.chains(table) if "ABCDEFG-" in name]
    assert max(map(len, names)) == 28
    assert {name.split("-")[1] for name in names} >= {"SVC", "SEP", "EXT", "LIM", "SVL"}


HASH = "AAAAAAAAAAAAAAAA"
OF_OTHERS = {
    "nat": (
        "KUBE-PROXY-CANARY",
        "KUBE-KUBELET-CANARY",
        "VIPD-SERVICES",
        "XKUBE-SERVICES",
        "KUBE-SERVICES-X",
        f"KUBE-SVC-{HASH}A",
        "KUBE-SVC-lowercaseletters",
        "KUBE-SVC-0189AAAAAAAAAAAA",
        "KUBE-FORWARD",
    ),
    "filter": (f"KUBE-SVC-{HASH}", "KUBE-POSTROUTING"),
    "mangle": ("KUBE-SERVICES",),
}


def test_own_chains_are_known_by_name_and_table(tmp_path: Path) -> None:
    kernel = FakeKernel()
    for table, names in OF_OTHERS.items():
        kernel.restore("\n".join((f"*{table}", *(f":{name} - [0:0]" for name in names), "COMMIT", "")))
    kernel.restore(f"*nat\n:KUBE-SVC-{HASH} - [0:0]\n:KUBE-FW-{HASH} - [0:0]\nCOMMIT\n")
    vipd = synced("iptables", kernel.run, tmp_path, chain_prefix="KUBE", force_chain_prefix=True)
    vipd.become(numbered(1, "10.244.0.1"))
    vipd.become()
    for table, names in OF_OTHERS.items():
        assert {name for name in kernel.chains(table) if "-" in name} == set(names)


SPEAKING_OF_A_JUMP = (
    '-j LOG --log-prefix "before -j VIPD-SERVICES "',
    "-j LOG --log-prefix -j",
    '-m comment --comment "-j VIPD-SERVICES" -j ACCEPT',
    '-m comment --comment "say \\"-j VIPD-SERVICES\\"" -j ACCEPT',
    '-m string --string "GET -j VIPD-SERVICES" --algo bm',
    "-j NFLOG --nflog-prefix -j",
)


def test_a_rule_of_others_that_speaks_of_a_jump_is_left_alone(kernel: FakeKernel, vipd: Synced) -> None:
    added = [f"-A PREROUTING {rule}" for rule in SPEAKING_OF_A_JUMP]
    kernel.restore("\n".join(("*nat", *added, "COMMIT", "")))
    vipd.become(numbered(1, "10.244.0.1"))
    jump, *rest = kernel.chains("nat")["PREROUTING"]
    assert tuple(rest) == SPEAKING_OF_A_JUMP
    kernel.restore(f"*nat\n-A PREROUTING {jump}\nCOMMIT\n")
    vipd.doubt()
    vipd.step()
    assert tuple(kernel.chains("nat")["PREROUTING"]) == (jump, *SPEAKING_OF_A_JUMP)
    vipd.become()
    assert tuple(kernel.chains("nat")["PREROUTING"]) == SPEAKING_OF_A_JUMP
