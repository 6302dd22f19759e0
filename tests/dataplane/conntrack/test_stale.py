"""Which flows must end once rules have changed: a table of cases, and laws that hold for all."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.dataplane.conntrack.forwardings import forwarding
from tests.lab.inside import Flow, stale
from vipd.model.forwarding import Forwarding
from vipd.model.service import Protocol

DNS, DNS6, EXTERNAL, WEB = ("10.96.0.10", 53), ("fd00:96::a", 53), ("192.0.2.7", 53), ("10.96.0.20", 80)
EMPTY, EMPTY_WEB, STREAM = ("10.96.0.30", 53), ("10.96.0.31", 80), ("10.96.0.40", 7)
REMOVED, HOST = ("10.96.0.99", 53), "10.10.0.1"
B1, B2, LOCAL, LEAVING, DEAD = (
    ("10.244.0.1", 5353),
    ("10.244.0.2", 5353),
    ("10.244.0.3", 5353),
    ("10.244.0.4", 5353),
    ("10.244.0.9", 5353),
)
TCP, UDP, SCTP = Protocol.TCP, Protocol.UDP, Protocol.SCTP
GONE, UNTRANSLATED, STAYS = "backend gone", "made before the rules", ""
SYN_SENT, ESTABLISHED = 1, 3
"""States of TCP, as the kernel numbers them."""

FORWARDINGS = [
    forwarding(*DNS, B1, B2, local=(LOCAL,), resting=(LEAVING,), external=(EXTERNAL[0],), node_port=30053),
    forwarding(*DNS6, ("fd00:244::1", 5353)),
    forwarding(*EMPTY),
    forwarding(*WEB, B1, protocol=TCP, node_port=30080),
    forwarding(*EMPTY_WEB, protocol=TCP),
    forwarding(*STREAM, B1, protocol=SCTP),
]
ENDING = [replace(each, ends_flows=True) for each in FORWARDINGS]
"""The same services, which want their flows ended."""
GIVEN_UP = forwarding(*REMOVED, B1, node_port=30099)


def usual(*flows: Flow) -> dict[Flow, str]:
    """The flows that must end beside services, of which one has just been removed."""
    return stale([*FORWARDINGS, GIVEN_UP], FORWARDINGS, flows, [HOST, "127.0.0.1"])


def ending(*flows: Flow) -> dict[Flow, str]:
    """The same where services want their flows ended."""
    return stale([], ENDING, flows, [HOST])


def reply(frontend: tuple[str, int], backend: tuple[str, int]) -> Flow:
    """A flow of which this host saw a reply first."""
    return Flow(frontend, backend, protocol=TCP, tcp_state=ESTABLISHED, reply_first=True)


CASES: list[tuple[str, Flow, str, str]] = [
    # what flow, why it must end, and why it must when the service wants flows ended
    ("a backend that takes new flows", Flow(DNS, B1, replied=True), STAYS, STAYS),
    ("a local backend", Flow(DNS, LOCAL, replied=True), STAYS, STAYS),
    ("a backend on its way out", Flow(DNS, LEAVING, replied=True), STAYS, STAYS),
    ("a backend that is gone", Flow(DNS, DEAD, replied=True), GONE, GONE),
    ("a backend that is gone and never answered", Flow(DNS, DEAD), GONE, GONE),
    ("the right backend's wrong port", Flow(DNS, (B1[0], 53), replied=True), GONE, GONE),
    ("the frontend itself, unanswered", Flow(DNS), UNTRANSLATED, UNTRANSLATED),
    ("the frontend itself, answered by something there", Flow(DNS, replied=True), STAYS, STAYS),
    ("IPv6: right", Flow(DNS6, ("fd00:244::1", 5353)), STAYS, STAYS),
    ("IPv6: gone", Flow(DNS6, ("fd00:244::9", 5353)), GONE, GONE),
    ("IPv6: untranslated", Flow(DNS6), UNTRANSLATED, UNTRANSLATED),
    ("an external address: gone", Flow(EXTERNAL, DEAD, replied=True), GONE, GONE),
    ("an external address: VXLAN to it", Flow((EXTERNAL[0], 4789)), STAYS, STAYS),
    ("an external address: VXLAN, translated", Flow((EXTERNAL[0], 4789), DEAD, replied=True), STAYS, STAYS),
    ("a frontend's port at another address", Flow(("10.96.0.11", 53), DEAD), STAYS, STAYS),
    ("a frontend's port of another protocol", Flow(DNS, DEAD, protocol=TCP, replied=True), STAYS, STAYS),
    ("no endpoint: translated", Flow(EMPTY, DEAD, replied=True), GONE, GONE),
    ("no endpoint: untranslated", Flow(EMPTY), STAYS, STAYS),
    ("a node port: right", Flow((HOST, 30053), B2, replied=True), STAYS, STAYS),
    ("a node port: gone", Flow((HOST, 30053), DEAD), GONE, GONE),
    ("a node port: untranslated", Flow((HOST, 30053)), UNTRANSLATED, UNTRANSLATED),
    ("a node port at another host", Flow(("203.0.113.5", 30053), DEAD), STAYS, STAYS),
    ("a node port at another host, unanswered", Flow(("203.0.113.5", 30053)), STAYS, STAYS),
    ("the node's own port of the service", Flow((HOST, 53), DEAD), STAYS, STAYS),
    ("a node port at the VIP", Flow((DNS[0], 30053), DEAD), STAYS, STAYS),
    ("masqueraded: right", Flow(DNS, B1, answers_to=(HOST, 61000), replied=True), STAYS, STAYS),
    ("masqueraded: gone", Flow(DNS, DEAD, answers_to=(HOST, 61000), replied=True), GONE, GONE),
    ("removed: to its backend", Flow(REMOVED, B1, replied=True), GONE, STAYS),
    ("removed: somebody else serves it now", Flow(REMOVED, B2, replied=True), STAYS, STAYS),
    ("removed: untranslated", Flow(REMOVED), STAYS, STAYS),
    ("removed node port: to its backend", Flow((HOST, 30099), B1, replied=True), GONE, STAYS),
    ("removed node port at another host", Flow(("203.0.113.5", 30099), B1, replied=True), STAYS, STAYS),
    ("TCP: right", Flow(WEB, B1, protocol=TCP, tcp_state=ESTABLISHED, replied=True), STAYS, STAYS),
    ("TCP: gone", Flow(WEB, DEAD, protocol=TCP, tcp_state=ESTABLISHED, replied=True), STAYS, GONE),
    ("TCP: opening to one that is gone", Flow(WEB, DEAD, protocol=TCP, tcp_state=SYN_SENT), STAYS, GONE),
    (
        "TCP: opening to the frontend",
        Flow(WEB, protocol=TCP, tcp_state=SYN_SENT),
        UNTRANSLATED,
        UNTRANSLATED,
    ),
    ("TCP: answered by the frontend", Flow(WEB, protocol=TCP, tcp_state=2, replied=True), STAYS, STAYS),
    ("TCP: taken up in the middle", Flow(WEB, protocol=TCP, tcp_state=ESTABLISHED), STAYS, STAYS),
    ("TCP: no endpoint", Flow(EMPTY_WEB, protocol=TCP, tcp_state=SYN_SENT), STAYS, STAYS),
    (
        "TCP: opening to a node port",
        Flow((HOST, 30080), protocol=TCP, tcp_state=SYN_SENT),
        UNTRANSLATED,
        UNTRANSLATED,
    ),
    ("TCP: of another host, right", reply(WEB, B1), STAYS, STAYS),
    ("TCP: of another host, gone", reply(WEB, DEAD), STAYS, GONE),
    ("TCP: masqueraded by somebody else", reply(("203.0.113.5", 61000), DEAD), STAYS, STAYS),
    ("SCTP: right", Flow(STREAM, B1, protocol=SCTP, replied=True), STAYS, STAYS),
    ("SCTP: gone", Flow(STREAM, DEAD, protocol=SCTP, replied=True), STAYS, GONE),
    ("SCTP: untranslated", Flow(STREAM, protocol=SCTP), STAYS, UNTRANSLATED),
]


def test_what_must_end() -> None:
    flows = [flow for _, flow, _, _ in CASES]
    usually, when_ending = usual(*flows), ending(*flows)
    found = {name: (usually.get(flow, STAYS), when_ending.get(flow, STAYS)) for name, flow, _, _ in CASES}
    assert found == {name: (why, why_ending) for name, _, why, why_ending in CASES}


def test_of_special_addresses() -> None:
    served, at_host = Flow(DNS), Flow((HOST, DNS[1]))
    assert stale([], [forwarding(*DNS, DNS)], [served]) == {}, "a backend may be the frontend itself"
    external = [forwarding(*DNS, B1, external=(HOST,))]
    gone = Flow((HOST, DNS[1]), DEAD)
    assert stale([], external, [gone, at_host], [HOST]) == {gone: GONE, at_host: UNTRANSLATED}, "no node port"
    # IPv4 has backends, IPv6 has none: nothing would be gained by ending an IPv6 flow.
    both = [forwarding(*DNS, B1, node_port=30053), forwarding(*DNS6, node_port=30053)]
    v4, v6 = Flow((HOST, 30053)), Flow(("fd00:10::1", 30053))
    assert stale([], both, [v4, v6], [HOST, "fd00:10::1"]) == {v4: UNTRANSLATED}


def test_a_client_that_may_no_longer_come() -> None:
    limited = replace(forwarding(*DNS, B1), allow_from=("10.10.0.0/24",))
    may, may_not = (Flow(DNS, B1, client=client) for client in ("10.10.0.7", "10.20.0.7"))
    host = Flow(DNS, B1, client="192.0.2.1")
    assert stale([], [limited], [may, may_not, host], ["192.0.2.1", "10.10.0.1"]) == {
        may_not: "client may no longer come"
    }
    tcp = replace(limited, key=limited.key._replace(protocol=TCP))
    connected = Flow(DNS, B1, TCP, True, ESTABLISHED, client="10.20.0.7")
    assert stale([], [tcp], [connected]) == {}
    assert stale([], [replace(tcp, ends_flows=True)], [connected]) != {}


addresses = st.sampled_from([DNS[0], WEB[0], EMPTY[0], EXTERNAL[0], REMOVED[0], HOST, "203.0.113.5", B1[0]])
ports = st.sampled_from([53, 80, 30053, 30080, 30099, 4789, 5353])
flows = st.builds(
    Flow,
    st.tuples(addresses, ports),
    st.sampled_from([None, B1, B2, LOCAL, LEAVING, DEAD]),
    st.sampled_from(Protocol),
    st.booleans(),
    st.integers(0, 9),
)


def served_by(services: list[Forwarding], flow: Flow) -> Forwarding | None:
    """The service to which a flow goes."""
    for each in services:
        external = [external.address for external in each.external_addresses]
        ends = [(address, each.port) for address in (*each.addresses, *external)]
        if each.key.protocol is flow.protocol and flow.to in (*ends, (HOST, each.node_port)):
            return each
    return None


@given(flow=flows)
def test_laws(flow: Flow) -> None:
    for services, found in ((FORWARDINGS, usual(flow)), (ENDING, ending(flow))):
        service, reason = served_by(services, flow), found.get(flow, STAYS)
        if service is None:
            at_removed = flow.to == REMOVED or flow.to == (HOST, 30099)
            assert not reason or (at_removed and flow.answered_by == B1), "it is not ours"
            continue
        keeping = (*service.reachable(), *service.without_new_flows)
        keeps = flow.answered_by in [(endpoint.address, endpoint.port) for endpoint in keeping]
        if keeps:
            assert not reason, "a flow to a backend that serves was ended"
        if flow.protocol is TCP and flow.replied and not service.ends_flows:
            assert not reason, "an established connection was ended"
        if reason:
            assert (reason == GONE) is (flow.answered_by is not None)
        elif flow.protocol is UDP and flow.answered_by:
            assert keeps, "a flow to a dead backend was left alone"
