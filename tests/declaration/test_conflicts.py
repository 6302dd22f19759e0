from hypothesis import given
from hypothesis import strategies as st

from vipd.declaration import conflicts
from vipd.declaration.conflicts import find_conflicts, has_conflicts
from vipd.model.service import Backend, Origin, Protocol, Service, ServicePort

UDP = ServicePort(53, Protocol.UDP)
TCP = ServicePort(53, Protocol.TCP)


def service(name: str, address: str, line: int, *ports: ServicePort, path: str = "a.yaml") -> Service:
    return Service(name, (address,), ports or (UDP,), origin=Origin("file", path, line))


def conflicts_of(*services: Service) -> list[str]:
    return [str(problem) for problem in find_conflicts(iter(services))]


def test_protocols_of_one_port_do_not_clash() -> None:
    assert conflicts_of(service("a", "10.0.0.1", 1, UDP), service("b", "10.0.0.1", 2, TCP)) == []


def test_the_later_service_is_told_where_the_earlier_one_stands() -> None:
    earlier, later = service("a", "10.0.0.1", 3), service("b", "10.0.0.1", 1, TCP, UDP, path="b.yaml")
    assert conflicts_of(earlier, later) == [
        (
            "b.yaml:1: b: 10.0.0.1:53/udp already belongs to a at a.yaml:3; "
            "one address, port and protocol can serve once"
        )
    ]


def test_the_order_given_decides_who_was_first() -> None:
    a, b = service("a", "10.0.0.1", 1), service("b", "10.0.0.1", 9)
    assert [problem.line for problem in find_conflicts([b, a])] == [1]


def test_a_third_claim_is_told_of_the_first() -> None:
    problems = find_conflicts([service(name, "10.0.0.1", line) for line, name in enumerate("abc", 1)])
    assert [(problem.line, "at a.yaml:1" in problem.what) for problem in problems] == [(2, True), (3, True)]


def test_a_name_is_claimed_once() -> None:
    assert conflicts_of(service("a", "10.0.0.1", 1), service("a", "10.0.0.2", 2, path="b.yaml")) == [
        "b.yaml:2: the name a is already taken by the service at a.yaml:1; give each service its own name"
    ]


def test_unnamed_services_clash_once() -> None:
    name = "10.0.0.1:53/udp"
    assert len(conflicts_of(service(name, "10.0.0.1", 1), service(name, "10.0.0.1", 2))) == 1


def test_services_without_a_file_are_named_by_their_source() -> None:
    cli = Service("a", ("10.0.0.1",), (UDP,), origin=Origin("cli"))
    assert conflicts_of(service("a", "10.0.0.2", 4), cli)[0].startswith("cli: the name a is")
    assert conflicts_of(cli, service("a", "10.0.0.2", 4))[0].endswith(
        "by vipctl; give each service its own name"
    )
    other = Service("b", ("10.0.0.2",), (UDP,), origin=Origin("cli"))
    assert conflicts_of(service("a", "10.0.0.2", 4), other)[0].startswith("cli: b: 10.0.0.2:53/udp already")


ADDRESSES = st.sampled_from([f"10.0.0.{n}" for n in range(1, 9)])
SERVICES = st.builds(
    lambda name, address, port, backends: Service(
        name or f"{address}:53/{port.protocol}", (address,), (port,), tuple(map(Backend, backends))
    ),
    st.sampled_from(["", *"abcdef"]),
    ADDRESSES,
    st.sampled_from([UDP, TCP]),
    st.lists(ADDRESSES, max_size=2, unique=True),
)


@given(st.lists(SERVICES, max_size=3), st.booleans())
def test_sets_show_the_same_as_each_claim(services: list[Service], addresses: bool) -> None:
    found = any(conflicts.conflicts_of(services, addresses=addresses))
    assert has_conflicts(services, addresses=addresses) is found
