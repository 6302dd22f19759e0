"""How shared chains lead to many addresses: however the tree came about, it is the one that its addresses
have."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.dataplane.declared import backends
from tests.dataplane.iptables.fake_kernel import FakeKernel
from tests.lab.examples import examples
from tests.lab.inside import synced
from vipd.model.service import Protocol, Service, ServicePort

# Near each other, far from each other, and at the ends of groups.
ADDRESSES = st.tuples(st.sampled_from([10, 192]), st.sampled_from([0, 96, 111]), st.integers(0, 20)).map(
    lambda parts: f"{parts[0]}.{parts[1]}.{parts[2] // 7}.{parts[2] * 12 + 1}"
)
# More ports than stand inline, so that each address is worth a group.
PORTS = tuple(ServicePort(number, Protocol.TCP, name=f"p{number}") for number in range(1, 7))


def at(address: str, ports: tuple[ServicePort, ...] = PORTS) -> Service:
    return Service(f"test/{address}", (address,), ports, backends("10.244.0.1"))


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(ADDRESSES, st.booleans()), max_size=40))
@example([(f"10.96.0.{n}", True) for n in range(1, 40)] + [("10.111.0.1", True), ("10.111.0.1", False)])
def test_it_depends_on_its_addresses_alone(history: list[tuple[str, bool]]) -> None:
    grown, cold, held = FakeKernel(), FakeKernel(), dict[str, Service]()
    with tempfile.TemporaryDirectory() as directory:
        vipd = synced("iptables", grown.run, Path(directory), dispatch="grouped")
        for address, comes in history:
            if comes:
                held[address] = at(address)
            else:
                held.pop(address, None)
            vipd.become(*held.values())
        synced("iptables", cold.run, Path(directory), dispatch="grouped").become(*held.values())
    empty = r"(?m)^(\*.*|:\S+ ACCEPT .*|COMMIT)\n"
    if held:
        assert grown.saved() == cold.saved()
    else:  # the kernel keeps the tables that were written to
        assert re.sub(empty, "", grown.saved()) == cold.saved() == ""


def test_a_tree_has_its_rules_in_the_order_of_addresses(tmp_path: Path) -> None:
    kernel, near, far = FakeKernel(), ("10.96.0.1", "10.96.0.2", "10.111.0.1"), "192.0.2.1"
    vipd = synced("iptables", kernel.run, tmp_path, dispatch="grouped")
    vipd.become(*map(at, (far, *near)))
    nat = kernel.chains("nat")
    one, other, *rest = nat["VIPD-SERVICES"]
    assert one.startswith("-d 10.96.0.0/12 -j VIPD-")
    assert other.startswith(f"-d {far}/32 -j VIPD-")
    assert not any(f" -d {address}/32" in rule for address in (far, *near) for rule in rest)
    groups = [nat[rule.rpartition(" ")[2]] for rule in (one, other)]
    placed = [list(dict.fromkeys(re.findall(r"-d (\S+)/32", " ".join(group)))) for group in groups]
    assert placed == [[*near], [far]]


def test_many_addresses_are_grouped_and_few_are_not_again(tmp_path: Path) -> None:
    kernel, many = FakeKernel(), [at(f"10.96.{n // 200}.{n % 200 + 1}", PORTS[:1]) for n in range(500)]
    vipd = synced("iptables", kernel.run, tmp_path)

    def at_the_top() -> int:
        return sum("test/" in rule for rule in kernel.chains("nat")["VIPD-SERVICES"])

    vipd.become(*many[:50])
    assert at_the_top() == 50
    vipd.become(*many)
    assert at_the_top() == 0
    vipd.become(*many[:50])
    assert at_the_top() == 50
