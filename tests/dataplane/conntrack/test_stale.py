"""Which flows must end: a table of cases, and laws that hold for all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dataplane.conntrack.forwardings import forwarding
from tests.dataplane.conntrack.kernel import ESTABLISHED, made
from vipd.dataplane.conntrack.entries import SOURCE_TRANSLATED, TCP_SYN_SENT, Entry
from vipd.dataplane.conntrack.messages import Query
from vipd.dataplane.conntrack.stale import (
    Destination,
    FlowTarget,
    FlowTargets,
    Reason,
    default_target,
    flow_targets,
    stale_reason,
)
from vipd.model.forwarding import Forwarding
from vipd.model.service import Family, Protocol

CLIENT = ("10.10.0.2", 40000)
CLIENT6 = ("fd00:10::2", 40000)
DNS, DNS6, EXTERNAL, WEB = ("10.96.0.10", 53), ("fd00:96::a", 53), ("192.0.2.7", 53), ("10.96.0.20", 80)
EMPTY, EMPTY_WEB, STREAM = ("10.96.0.30", 53), ("10.96.0.31", 80), ("10.96.0.40", 7)
HOST = "10.10.0.1"
B1, B2, LOCAL, LEAVING, DEAD = (
    ("10.244.0.1", 5353),
    ("10.244.0.2", 5353),
    ("10.244.0.3", 5353),
    ("10.244.0.4", 5353),
    ("10.244.0.9", 5353),
)
TCP, UDP, SCTP = Protocol.TCP, Protocol.UDP, Protocol.SCTP
GONE, UNTRANSLATED = Reason.BACKEND_GONE, Reason.UNTRANSLATED

FORWARDINGS = [
    forwarding(*DNS, B1, B2, local=(LOCAL,), resting=(LEAVING,), external=(EXTERNAL[0],), node_port=30053),
    forwarding(*DNS6, ("fd00:244::1", 5353)),
    forwarding(*EMPTY),
    forwarding(*WEB, B1, protocol=TCP, node_port=30080),
    forwarding(*EMPTY_WEB, protocol=TCP),
    forwarding(*STREAM, B1, protocol=SCTP),
]
REMOVED = ("10.96.0.99", 53)
WANTED = flow_targets(FORWARDINGS, [HOST, "127.0.0.1"])
WANTED = replace(
    WANTED,
    targets={
        **WANTED.targets,
        Destination(Family.IPV4, UDP, *REMOVED): FlowTarget(
            frozenset(), end_stale_flows=True, former_backends=frozenset({B1})
        ),
        Destination(Family.IPV4, UDP, "", 30099): FlowTarget(
            frozenset(), end_stale_flows=True, former_backends=frozenset({B1})
        ),
    },
)


def ending(each: Forwarding) -> FlowTarget:
    """Every service wants its flows ended."""
    return replace(default_target(each), end_stale_flows=True)


ENDING = flow_targets(FORWARDINGS, [HOST], ending)


def flow(to: tuple[str, int], answered_by: tuple[str, int] | None = None, **more: object) -> Entry:
    return made(CLIENT6 if ":" in to[0] else CLIENT, to, answered_by, **more)  # type: ignore[arg-type]


def reply(frontend: tuple[str, int], backend: tuple[str, int]) -> Entry:
    """A flow of which this host saw a reply first."""
    taken = made(backend, CLIENT, CLIENT, reply_destination=frontend, protocol=TCP, tcp_state=ESTABLISHED)
    return taken._replace(status=taken.status | SOURCE_TRANSLATED)


CASES: list[tuple[str, Entry, Reason | None, Reason | None]] = [
    # name, entry, why it must end, why it must when the service wants flows ended
    ("a backend that takes new flows", flow(DNS, B1, replied=True), None, None),
    ("a local backend", flow(DNS, LOCAL, replied=True), None, None),
    ("a backend on its way out", flow(DNS, LEAVING, replied=True), None, None),
    ("a backend that is gone", flow(DNS, DEAD, replied=True), GONE, GONE),
    ("a backend that is gone and never answered", flow(DNS, DEAD), GONE, GONE),
    ("the right backend's wrong port", flow(DNS, (B1[0], 53), replied=True), GONE, GONE),
    ("the frontend itself, unanswered", flow(DNS), UNTRANSLATED, UNTRANSLATED),
    ("the frontend itself, answered by something there", flow(DNS, replied=True), None, None),
    ("IPv6: right", flow(DNS6, ("fd00:244::1", 5353)), None, None),
    ("IPv6: gone", flow(DNS6, ("fd00:244::9", 5353)), GONE, GONE),
    ("IPv6: untranslated", flow(DNS6), UNTRANSLATED, UNTRANSLATED),
    ("an external address: gone", flow(EXTERNAL, DEAD, replied=True), GONE, GONE),
    ("an external address: VXLAN to it", flow((EXTERNAL[0], 4789)), None, None),
    ("an external address: VXLAN, translated", flow((EXTERNAL[0], 4789), DEAD, replied=True), None, None),
    ("a frontend's port at another address", flow(("10.96.0.11", 53), DEAD), None, None),
    ("a frontend's port of another protocol", flow(DNS, DEAD, protocol=TCP, replied=True), None, None),
    ("no endpoint: translated", flow(EMPTY, DEAD, replied=True), GONE, GONE),
    ("no endpoint: untranslated", flow(EMPTY), None, None),
    ("a node port: right", flow((HOST, 30053), B2, replied=True), None, None),
    ("a node port: gone", flow((HOST, 30053), DEAD), GONE, GONE),
    ("a node port: untranslated", flow((HOST, 30053)), UNTRANSLATED, UNTRANSLATED),
    ("a node port at another host", flow(("203.0.113.5", 30053), DEAD), None, None),
    ("a node port at another host, unanswered", flow(("203.0.113.5", 30053)), None, None),
    ("the node's own port of the service", flow((HOST, 53), DEAD), None, None),
    ("a node port at the VIP", flow((DNS[0], 30053), DEAD), None, None),
    ("masqueraded: right", flow(DNS, B1, reply_destination=(HOST, 61000), replied=True), None, None),
    ("masqueraded: gone", flow(DNS, DEAD, reply_destination=(HOST, 61000), replied=True), GONE, GONE),
    ("removed: to its backend", flow(REMOVED, B1, replied=True), GONE, None),
    ("removed: somebody else serves it now", flow(REMOVED, B2, replied=True), None, None),
    ("removed: untranslated", flow(REMOVED), None, None),
    ("removed node port: to its backend", flow((HOST, 30099), B1, replied=True), GONE, None),
    ("removed node port at another host", flow(("203.0.113.5", 30099), B1, replied=True), None, None),
    ("TCP: right", flow(WEB, B1, protocol=TCP, tcp_state=ESTABLISHED, replied=True), None, None),
    ("TCP: gone", flow(WEB, DEAD, protocol=TCP, tcp_state=ESTABLISHED, replied=True), None, GONE),
    ("TCP: opening to one that is gone", flow(WEB, DEAD, protocol=TCP, tcp_state=TCP_SYN_SENT), None, GONE),
    (
        "TCP: opening to the frontend",
        flow(WEB, protocol=TCP, tcp_state=TCP_SYN_SENT),
        UNTRANSLATED,
        UNTRANSLATED,
    ),
    ("TCP: answered by the frontend", flow(WEB, protocol=TCP, tcp_state=2, replied=True), None, None),
    ("TCP: taken up in the middle", flow(WEB, protocol=TCP, tcp_state=ESTABLISHED), None, None),
    ("TCP: no endpoint", flow(EMPTY_WEB, protocol=TCP, tcp_state=TCP_SYN_SENT), None, None),
    (
        "TCP: opening to a node port",
        flow((HOST, 30080), protocol=TCP, tcp_state=TCP_SYN_SENT),
        UNTRANSLATED,
        UNTRANSLATED,
    ),
    ("TCP: of another host, right", reply(WEB, B1), None, None),
    ("TCP: of another host, gone", reply(WEB, DEAD), None, GONE),
    ("TCP: masqueraded by somebody else", reply(("203.0.113.5", 61000), DEAD), None, None),
    ("SCTP: right", flow(STREAM, B1, protocol=SCTP, replied=True), None, None),
    ("SCTP: gone", flow(STREAM, DEAD, protocol=SCTP, replied=True), None, GONE),
    ("SCTP: untranslated", flow(STREAM, protocol=SCTP), None, UNTRANSLATED),
]


@pytest.mark.parametrize(
    ("entry", "usual", "ending"),
    [pytest.param(entry, usual, ending, id=name) for name, entry, usual, ending in CASES],
)
def test_what_must_end(entry: Entry, usual: Reason | None, ending: Reason | None) -> None:
    assert stale_reason(entry, WANTED) is usual
    assert stale_reason(entry, ENDING) is ending


def test_a_backend_may_be_the_frontend_itself() -> None:
    assert stale_reason(flow(DNS), flow_targets([forwarding(*DNS, DNS)], [])) is None


def test_an_external_address_of_the_host_itself_is_no_node_port() -> None:
    wanted = flow_targets([forwarding(*DNS, B1, external=(HOST,))], [HOST])
    assert stale_reason(flow((HOST, DNS[1]), DEAD), wanted) is GONE
    assert stale_reason(flow((HOST, DNS[1])), wanted) is UNTRANSLATED


def test_node_ports_of_the_families_are_apart() -> None:
    """IPv4 has backends, IPv6 has none: nothing would be gained by ending an IPv6 flow."""
    both = [forwarding(*DNS, B1, node_port=30053), forwarding(*DNS6, node_port=30053)]
    wanted = flow_targets(both, [HOST, "fd00:10::1"])
    assert stale_reason(flow((HOST, 30053)), wanted) is UNTRANSLATED
    assert stale_reason(flow(("fd00:10::1", 30053)), wanted) is None


@dataclass(frozen=True)
class Part:
    """What one forwarding makes worth reading."""

    forwardings: tuple[Forwarding, ...]
    queries: tuple[Query, ...]


V4, V6 = Family.IPV4, Family.IPV6


@pytest.mark.parametrize(
    "part",
    [
        Part((), ()),
        Part((forwarding(*DNS, B1),), (Query(V4, UDP),)),
        Part((forwarding(*EMPTY),), (Query(V4, UDP),)),
        Part((forwarding(*DNS6),), (Query(V6, UDP),)),
        Part((forwarding(*WEB, B1, protocol=TCP),), (Query(V4, TCP, unreplied=True),)),
        Part((forwarding(*EMPTY_WEB, protocol=TCP),), ()),
        Part((forwarding(*STREAM, B1, protocol=SCTP),), ()),
    ],
)
def test_only_what_can_hold_something_to_judge_is_read(part: Part) -> None:
    assert flow_targets(part.forwardings, [HOST]).queries() == part.queries


def test_where_flows_are_ended_the_whole_protocol_is_read_once() -> None:
    assert ENDING.queries() == (Query(V4, SCTP), Query(V4, TCP), Query(V4, UDP), Query(V6, UDP))


addresses = st.sampled_from([DNS[0], WEB[0], EMPTY[0], EXTERNAL[0], REMOVED[0], HOST, "203.0.113.5", B1[0]])
ports = st.sampled_from([53, 80, 30053, 30080, 30099, 4789, 5353])
ends = st.tuples(addresses, ports)


@st.composite
def any_flow(draw: st.DrawFn) -> Entry:
    to = draw(ends)
    return made(
        CLIENT,
        to,
        draw(st.sampled_from([to, B1, B2, LOCAL, LEAVING, DEAD])),
        protocol=draw(st.sampled_from(Protocol)),
        replied=draw(st.booleans()),
        tcp_state=draw(st.integers(0, 9)),
    )


@given(entry=any_flow(), wanted=st.sampled_from([WANTED, ENDING]))
def test_laws(entry: Entry, wanted: FlowTargets) -> None:
    reason = stale_reason(entry, wanted)
    target = wanted.target(entry)
    if target is None:
        assert reason is None
        return
    if entry.reply_source in target.serving:
        assert reason is None, "a flow to a backend that serves was ended"
    if entry.protocol is TCP and entry.replied and not target.end_stale_flows:
        assert reason is None, "an established connection was ended"
    if reason:
        assert any(query.fits(entry) for query in wanted.queries()), "it is judged but would not be read"
        assert (reason is GONE) == entry.translated
    elif entry.protocol is UDP and entry.translated and target.former_backends is None:
        assert entry.reply_source in target.serving, "a flow to a dead backend was left alone"


@given(entry=any_flow(), wanted=st.sampled_from([WANTED, ENDING]), port=st.integers(1, 65535))
def test_other_ports_of_our_addresses_are_never_touched(entry: Entry, wanted: FlowTargets, port: int) -> None:
    """A node's own address may be an external address: tunnels end there."""
    used = {d.port for d in wanted.targets}
    if port not in used:
        moved = entry._replace(destination=(entry.destination[0], port))
        assert stale_reason(moved, wanted) is None
