"""The tree over addresses: however it came about, it is the one that its addresses have."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from vipd.dataplane.iptables.dispatch import Dispatch
from vipd.dataplane.iptables.names import ChainId, Names
from vipd.model.forwarding import ForwardingKey
from vipd.model.service import Family, Protocol

CHAIN = ChainId("nat", "VIPD-SERVICES")
# Near each other, far from each other, and at the ends of groups.
ADDRESSES = st.tuples(st.sampled_from([10, 192]), st.sampled_from([0, 96, 111]), st.integers(0, 20)).map(
    lambda parts: f"{parts[0]}.{parts[1]}.{parts[2] // 7}.{parts[2] * 12 + 1}"
)
HISTORIES = st.lists(st.tuples(ADDRESSES, st.booleans()), max_size=60)


def tree(mode: str = "grouped") -> Dispatch:
    """One without any address."""
    return Dispatch(Names("VIPD"), CHAIN, Family.IPV4, mode)


def put(dispatch: Dispatch, address: str, rules: tuple[str, ...]) -> None:
    """Have these rules for an address; none take it out."""
    key = ForwardingKey(address, "", Protocol.TCP, Family.IPV4)
    dispatch.replace(key, {address: rules} if rules else {})


@settings(max_examples=150, deadline=None)
@given(HISTORIES)
@example([(f"10.96.0.{n}", True) for n in range(1, 40)] + [("10.111.0.1", True), ("10.111.0.1", False)])
def test_it_depends_on_its_addresses_alone(history: list[tuple[str, bool]]) -> None:
    grown, held = tree(), dict[str, tuple[str, ...]]()
    for address, comes in history:
        # More rules than stand inline, so that each address is worth a group.
        held[address] = tuple(f"-d {address} -j RULE-{n}" for n in range(6)) if comes else ()
        put(grown, address, held[address])
        grown.groups()
    cold = tree()
    for address, rules in held.items():
        put(cold, address, rules)
    assert (grown.root(), dict(grown.groups())) == (cold.root(), dict(cold.groups()))
