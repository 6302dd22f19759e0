"""The tree over addresses: however it came about, it is the one that its addresses have."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.lab.examples import examples
from vipd.dataplane.iptables.dispatch import GROUPED_ABOVE, NO_ADDRESS, Dispatch
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


@settings(max_examples=examples(150), deadline=None)
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


def rule(service: str, address: str) -> tuple[str, ...]:
    return tuple(f"-d {address} -j {service}-{number}" for number in range(3))


def test_a_tree_has_its_rules_in_the_order_of_addresses_and_services() -> None:
    dispatch, near, far = tree(), ("10.96.0.1", "10.96.0.2", "10.111.0.1"), "192.0.2.1"
    for service in ("web", "dns"):
        for address in (far, *near):
            key = ForwardingKey(f"{service} {address}", "", Protocol.TCP, Family.IPV4)
            dispatch.replace(key, {address: rule(service, address)})
    dispatch.replace(ForwardingKey("last", "", Protocol.TCP, Family.IPV4), {NO_ADDRESS: ("-j LAST",)})
    one, other = sorted(dispatch.groups().items(), key=lambda group: group[1][0])
    assert dispatch.root() == (
        f"-d 10.96.0.0/12 -j {one[0].name}",
        f"-d {far}/32 -j {other[0].name}",
        "-j LAST",
    )
    assert one[1] == tuple(r for a in near for service in ("dns", "web") for r in rule(service, a))
    assert other[1] == (*rule("dns", far), *rule("web", far))


def test_rules_without_an_address_make_no_tree() -> None:
    dispatch = tree()
    dispatch.replace(ForwardingKey("last", "", Protocol.TCP, Family.IPV4), {NO_ADDRESS: ("-j LAST",)})
    assert (dispatch.root(), dispatch.groups()) == (("-j LAST",), {})


def test_many_addresses_are_grouped_and_few_are_not_again() -> None:
    dispatch = tree("auto")
    addresses = [f"10.96.0.{number}" for number in range(GROUPED_ABOVE + 1)]
    for address in addresses:
        assert not dispatch.groups()
        put(dispatch, address, rule("web", address))
    assert dispatch.unsettled == len(addresses)
    assert dispatch.groups()
    assert dispatch.unsettled == 0
    put(dispatch, addresses[0], ())
    assert dispatch.unsettled == 1
    assert not dispatch.groups()
    assert len(dispatch.root()) == 3 * GROUPED_ABOVE
