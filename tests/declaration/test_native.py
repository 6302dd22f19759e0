import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.declaration.strategies import PATIENT, services
from tests.lab.examples import examples
from tests.lab.inside import Declared, declare, written
from tests.model.samples import HEAD
from vipd.model.check import ExecProbe
from vipd.model.service import (
    Affinity,
    Backend,
    BackendState,
    ExternalAddress,
    Masquerade,
    Origin,
    Protocol,
    RejectAction,
    Service,
    ServicePort,
    TrafficPolicy,
)

HERE = Path(__file__).parent
BROKEN = sorted((HERE / "broken").glob("*.yaml"))
VALID = sorted((HERE / "valid").iterdir())
DNS = Service("dns", ("10.96.0.10",), (ServicePort(53, Protocol.UDP),), (Backend("10.244.0.5"),))
TEXT = written([DNS])


def read(path: Path) -> Declared:
    return declare(path.read_bytes().decode("utf-8", "surrogateescape"), path.name)


def only(text: str) -> Service:
    declaration = declare(text, "x.yaml")
    assert declaration.problems == ()
    (service,) = declaration.services
    return service


def spec_of(service: Service) -> dict[str, object]:
    """What is written of a service."""
    (spec,) = yaml.safe_load(written([service]))["services"]
    assert isinstance(spec, dict)
    return spec


def declare_spec(*specs: object) -> Declared:
    """What services of JSON declare."""
    return declare(json.dumps({"apiVersion": "vipd/v1", "services": specs}))


def one(rest: str) -> Service:
    return only(f"apiVersion: vipd/v1\nservices:\n  - address: 10.96.0.10\n    ports: 53/udp\n{rest}")


def test_every_fault_of_a_broken_declaration_is_told() -> None:
    assert len(BROKEN) >= 45
    assert {path.stem for path in BROKEN} == {p.stem for p in (HERE / "broken").glob("*.expected")}
    differing = {}
    for path in BROKEN:
        told = "".join(f"{problem}\n" for problem in read(path).problems)
        if not told or told != path.with_suffix(".expected").read_text():
            differing[path.name] = told
    assert differing == {}


def test_valid_declarations_have_no_problem_and_survive_formatting() -> None:
    for path in VALID:
        declaration = read(path)
        assert (path.name, declaration.problems) == (path.name, ())
        assert declare(written(declaration.services)).services == declaration.services, path.name


def test_a_short_spelling_is_the_same_as_the_long_one() -> None:
    services = {service.name: service for service in read(HERE / "valid" / "spellings.yaml").services}
    short = [name for name in services if name.startswith("short/")]
    assert len(short) == len(services) / 2 == 6
    for name in short:
        spelled, written_out = (
            {key: value for key, value in spec_of(services[each]).items() if key not in ADDRESSES}
            for each in (name, name.replace("short/", "long/"))
        )
        assert spelled == written_out


def test_a_command_line_in_one_text_that_was_accepted_before_stays() -> None:
    check = "    check: {type: exec, command: /opt/check --quick}\n"
    text = f"apiVersion: vipd/v1\nservices:\n  - address: 10.96.0.10\n    ports: 53/udp\n{check}"
    assert not declare(text, "x.yaml").ok
    kept = declare(text, "x.yaml", accepted=True)
    assert kept.problems == ()
    assert kept.services[0].check.probe == ExecProbe(command=("/opt/check --quick",))


ADDRESSES = ("name", "address", "external_addresses")


def test_short_spellings_are_read_in_json_too() -> None:
    spec = {
        "address": "10.96.0.10",
        "ports": ["80:8080/TCP", "53/tcp,udp"],
        "fallback": "10.244.9.9",
        "affinity": True,
        "external_addresses": "203.0.113.1",
        "allow_from": "10.0.0.5",
        "x-note": {"any": "thing"},
    }
    declared = declare_spec(spec)
    assert declared.problems == ()
    (service,) = declared.services
    assert spec_of(service) == {
        "address": "10.96.0.10",
        "external_addresses": "203.0.113.1",
        "allow_from": "10.0.0.5/32",
        "ports": [{"port": 80, "protocol": "tcp", "target": 8080}, "53/tcp", "53/udp"],
        "affinity": "client-ip",
        "fallback": {"backends": ["10.244.9.9"]},
    }


def test_every_field_of_a_service_is_read() -> None:
    (service,) = read(HERE / "valid" / "kube-dns.yaml").services
    assert service == Service(
        "kube-system/kube-dns",
        ("10.96.0.10", "fd00::10"),
        (
            ServicePort(53, Protocol.UDP, "dns"),
            ServicePort(53, Protocol.TCP),
            ServicePort(9153, Protocol.TCP, "metrics"),
        ),
        (
            Backend("10.244.0.5"),
            Backend("10.244.2.21", None, 2),
            Backend("fd00:1::5"),
            Backend("fd00:1::6", 5353, 0),
        ),
        Affinity(600),
        None,
        RejectAction.REJECT,
        (Backend("10.244.9.9"),),
    )
    assert service.origin == Origin("file", "kube-dns.yaml", 5)


def test_what_leads_to_a_service_from_outside_is_read() -> None:
    (service,) = read(HERE / "valid" / "external.yaml").services
    assert service == Service(
        "203.0.113.10:443/tcp",
        (),
        (ServicePort(443, Protocol.TCP, "https", 8443, 30443), ServicePort(80, Protocol.TCP, "http", 8080)),
        (
            Backend("10.0.0.1", state=BackendState.UP, node="a1", zones=("z1",)),
            Backend("10.0.0.2", state=BackendState.UP),
            Backend("10.0.0.3", state=BackendState.DRAIN, zones=("z1", "z2")),
            Backend("10.0.0.4", state=BackendState.DOWN),
            Backend("10.0.0.5", ports=(("http", 8081),)),
        ),
        external_addresses=(
            ExternalAddress("203.0.113.10"),
            ExternalAddress("2001:db8::10", allow_from=()),
            ExternalAddress("198.51.100.5", load_balancer=True, allow_from=("10.0.0.0/8", "192.0.2.0/24")),
        ),
        allow_from=("203.0.113.0/24",),
        external_policy=TrafficPolicy.LOCAL,
        health_port=32100,
    )


def test_a_node_port_of_a_service_is_that_of_its_only_port() -> None:
    assert one("    node_port: 30053\n").ports == (ServicePort(53, Protocol.UDP, node_port=30053),)


@pytest.mark.parametrize(
    ("word", "state"),
    [("active", "up"), ("ready", "up"), ("draining", "drain"), ("disabled", "down"), ("drain", "drain")],
)
def test_other_words_for_a_state_are_printed_as_the_canonical_one(word: str, state: str) -> None:
    service = one(f"    backends: {{address: 10.244.0.5, state: {word}}}\n")
    assert service.backends[0].state == state
    shown = spec_of(service).get("backends")
    assert shown == (["10.244.0.5"] if state == "up" else [{"address": "10.244.0.5", "state": state}])


def test_any_network_is_another_thing_than_the_services_networks() -> None:
    text = "    external_addresses: [203.0.113.1, {address: 203.0.113.2, allow_from: any}]\n"
    service = one(text + "    allow_from: 10.0.0.0/8\n")
    assert [external.allow_from for external in service.external_addresses] == [None, ()]
    assert one(text + "    allow_from: any\n").allow_from == ()


def test_backends_with_disjoint_ports_may_share_an_address() -> None:
    service = only(
        "apiVersion: vipd/v1\nservices:\n  - address: 10.96.0.1\n"
        "    ports: [{name: a, port: 1}, {name: b, port: 2}]\n    backends:\n"
        "      - {address: 10.0.0.1, ports: {a: 1}}\n"
        "      - {address: 10.0.0.1, ports: {b: 2}, state: down}\n"
    )
    reached = [backend.port_for(port) for backend in service.backends for port in service.ports]
    assert reached == [1, None, None, 2]


def test_a_server_on_an_external_address_is_no_loop() -> None:
    text = "    external_addresses: 203.0.113.1\n    backends: 203.0.113.1\n"
    assert one(text).backends == (Backend("203.0.113.1"),)


def test_short_forms_and_default_names() -> None:
    names = [service.name for service in read(HERE / "valid" / "short.yaml").services]
    v6 = "[1:2:3:4:5:6:7:8]:1/sctp"
    assert names == ["[fd00::10]:53/tcp", "10.96.0.10:53/udp", "web", "10.96.0.21:80/tcp", v6]


def test_a_service_overrides_defaults() -> None:
    text = """apiVersion: vipd/v1
defaults: {affinity: {by: client-ip}, masquerade: always, fallback: {backends: [10.9.9.9, "fd00::9"]}}
services:
  - {name: a, address: 10.96.0.1, ports: 53}
  - {name: b, address: 10.96.0.2, ports: 53, affinity: none, masquerade: auto, fallback: drop}
  - {name: c, address: "fd00::3", ports: 53}
"""
    declaration = declare(text, "x.yaml")
    assert declaration.ok
    a, b, c = declaration.services
    assert (a.affinity, a.masquerade) == (Affinity(), Masquerade.ALWAYS)
    assert a.fallback == (Backend("10.9.9.9"),)
    assert (b.affinity, b.masquerade, b.refusal, b.fallback) == (None, None, RejectAction.DROP, ())
    assert c.fallback == (Backend("fd00::9"),)


def test_what_can_be_read_is_kept_beside_the_problems() -> None:
    text = TEXT.replace("10.244.0.5", "nowhere")
    declaration = declare(text, "x.yaml")
    assert not declaration.ok
    assert [service.name for service in declaration.services] == ["dns"]


def test_a_misspelt_key_is_one_problem_though_that_key_is_required() -> None:
    service = "{addres: 10.0.0.1, port: 53/udp, backends: [{adress: 10.0.0.2}]}"
    found = declare(f"apiVersion: vipd/v1\nservices: [{service}]", "x.yaml")
    unknown = [f'unknown key "{key}"' for key in ("addres", "port", "adress")]
    assert [problem.what for problem in found.problems] == unknown


def test_a_torn_file_does_not_half_declare_its_last_document() -> None:
    assert declare(TEXT + "  - address: [", "x.yaml").services == ()


def test_a_spec_has_the_canonical_short_form() -> None:
    service = Service(
        "web",
        ("10.96.0.1", "fd00::1"),
        (ServicePort(80, Protocol.TCP), ServicePort(53, Protocol.UDP, "dns", 5353)),
        (Backend("10.0.0.5"), Backend("10.0.0.6", 8080), Backend("10.0.0.7", None, 0)),
        Affinity(90),
        Masquerade.OFF_CLUSTER,
        fallback=(Backend("10.0.0.9"),),
    )
    assert spec_of(service) == {
        "name": "web",
        "address": ["10.96.0.1", "fd00::1"],
        "ports": ["80/tcp", {"name": "dns", "port": 53, "protocol": "udp", "target": 5353}],
        "backends": ["10.0.0.5", {"address": "10.0.0.6", "port": 8080}, {"address": "10.0.0.7", "weight": 0}],
        "affinity": {"by": "client-ip", "timeout": "90s"},
        "masquerade": "off-cluster",
        "fallback": {"backends": ["10.0.0.9"]},
    }


def test_a_service_that_the_language_cannot_say_is_not_written_wrongly() -> None:
    both = Service("x", ("10.0.0.1",), DNS.ports, refusal=RejectAction.DROP, fallback=DNS.backends)
    with pytest.raises(ValueError, match="cannot say both drop and fallback"):
        written([both])


@pytest.mark.parametrize("external", ["", "external_addresses: [198.51.100.7], "])
@pytest.mark.parametrize("announce", ["l2", "{by: l2, addresses: all}", "{by: routes, addresses: external}"])
def test_what_is_announced_is_read_back(announce: str, external: str) -> None:
    keys = f"address: 10.96.0.1, {external}ports: [80], backends: [10.0.0.1], announce: {announce}"
    declared = declare(f"apiVersion: vipd/v1\nservices:\n  - {{{keys}}}\n", "x.yaml")
    if not external and "external" in announce:
        assert not declared.ok, "there is no such address"
        return
    (service,) = declared.services
    assert service.announcement is not None
    assert only(written([service])) == service


def test_json_obeys_the_same_rules() -> None:
    spec = {"address": "10.96.0.10", "ports": ["53/udp", {"port": "54"}], "backends": ["10.96.0.10"]}
    declared = declare_spec({**spec, "nmae": None})
    assert [str(problem) for problem in declared.problems] == [
        (
            'a.yaml:1: services[0].ports[1].port: must be an integer from 1 to 65535, not "54"; '
            "write 54 without quotes"
        ),
        'a.yaml:1: services[0]: unknown key "nmae"; did you mean "name"?',
        (
            "a.yaml:1: services[0].backends[0]: 10.96.0.10:53/udp is the service itself: a loop; "
            "name the address and port that the server listens on"
        ),
    ]


SHAPES = (
    *("null", "5", '"x"', "[]", "{}", '{"address": {"a": []}, "ports": [[[]]]}', "1" + "0" * 5000),
    *("1e999", f'{{"address": {"[" * 100_000}{"]" * 100_000}}}'),
)


def test_json_of_any_shape_gives_problems() -> None:
    for spec in SHAPES:
        declared = declare(f'{{"apiVersion": "vipd/v1", "services": [{spec}]}}')
        assert (declared.services, bool(declared.problems)) == ((), True), spec[:40]


@pytest.mark.slow
@settings(PATIENT, max_examples=examples(50))
@given(st.lists(services(), max_size=4, unique_by=lambda service: service.name))
def test_what_is_written_is_read_back_as_the_same_services(declared: list[Service]) -> None:
    text = written(declared)
    in_yaml, in_json = declare(text, "x.yaml"), declare_spec(*yaml.safe_load(text)["services"] or ())
    for declaration in (in_yaml, in_json):
        assert list(declaration.services) == declared
        # Each service is valid by itself; only frontends drawn twice may clash.
        assert all("already belongs to" in problem.what for problem in declaration.problems)


def never_raises(text: str) -> None:
    declaration = declare(text, "x.yaml")
    lines = [problem.line for problem in declaration.problems]
    assert lines == sorted(lines)
    for problem in declaration.problems:
        assert str(problem).isprintable()
    if declaration.ok:
        again = declare(written(declaration.services), "y.yaml")
        assert again == Declared(declaration.services)


@PATIENT
@given(st.text())
def test_any_text_gives_a_declaration(text: str) -> None:
    never_raises(text)


@PATIENT
@given(st.text("apiVers:/v1 \n-[]{}&*!<'\"#,?|>%@`~0123456789.x", max_size=200))
def test_any_yaml_like_text_gives_a_declaration(text: str) -> None:
    never_raises("apiVersion: vipd/v1\nservices:\n" + text)


VALUES = "10.96.0.10 fd00::10 53/udp 10.244.0.5:80@2 client-ip none drop 3h ::1 auto any drain 10.9.0.0/24"
WORDS = st.sampled_from(
    """name address ports backends affinity masquerade fallback check
    port protocol target weight by type timeout node_port external_addresses load_balancer_addresses
    allow_from traffic_policy internal external health_port state node zone""".split()  # noqa: SIM905 - a list is no clearer
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-1, 70000)
    | st.floats()
    | st.text(max_size=8)
    | WORDS
    | st.sampled_from(VALUES.split())
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=6)
    ),
    max_leaves=25,
)


def as_json(tree: object) -> str:
    return json.dumps({"apiVersion": "vipd/v1", "services": tree})


def as_yaml(tree: object) -> str:
    return yaml.safe_dump({"apiVersion": "vipd/v1", "services": tree}, allow_unicode=True)


@PATIENT
@given(TREES, st.sampled_from([as_json, as_yaml]))
def test_any_structure_gives_a_declaration(tree: object, write: Callable[[object], str]) -> None:
    never_raises(write(tree))
    never_raises(write([tree]))
    declared = declare_spec(tree)
    assert declared.services or declared.problems


SEED = (HERE / "valid" / "kube-dns.yaml").read_text() + "---\n" + (HERE / "valid" / "short.yaml").read_text()
PIECES = re.split(r"([\s,:\[\]{}]+)", SEED)
NOISE = st.sampled_from(
    ["", "no", "53:22", "010", "~", "{", "]", "- ", "\n", "\n  ", "&a ", "*a", "!x ", "<<", "\x00", "é"]
)


@settings(PATIENT, max_examples=examples(200))
@given(st.lists(st.tuples(st.integers(0, len(PIECES) - 1), NOISE | st.sampled_from(PIECES)), max_size=4))
def test_any_mutation_of_a_valid_declaration_gives_a_declaration(edits: list[tuple[int, str]]) -> None:
    pieces = list(PIECES)
    for index, piece in edits:
        pieces[index] = piece
    never_raises("".join(pieces))


WEB = "{name: web, address: 10.96.0.2, ports: 80, external_addresses: 192.0.2.1"


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            f"services: [{WEB}, {', '.join(f'x{n}: 1' for n in range(300))}}}]",
            ["and 200 more problems; mend those that are named first"],
        ),
        (
            f"services: [{WEB}, check: {{type: tcp, interval: 1ms}}}}]",
            ['"1ms" is out of range; from 100ms to 60m'],
        ),
        (f"services: [{WEB}, allow_from: [10.0.0.0/8, 'fd00::/8']}}]", []),
        (
            f"services: [{WEB}, allow_from: ['fd00::/8', 'fd01::/16']}}]",
            ["no network of allow_from is IPv4: 192.0.2.1 would be open to all"],
        ),
    ],
    ids=["counted", "interval", "one-of-the-family", "none-of-the-family"],
)
def test_the_last_problem(text: str, problems: list[str]) -> None:
    found = declare(f"apiVersion: vipd/v1\n{text}", "a.yaml").problems
    assert [problem in str(found[-1]) for problem in problems] == [True] * len(found[-1:])


def test_flow_takeover_is_written_as_it_was_read() -> None:
    service = only(
        "apiVersion: vipd/v1\nservices:\n  - {address: 10.96.0.10, ports: 80, balance: source-hash,"
        " masquerade: hairpin, flow_takeover: true}\n"
    )
    assert service.flow_takeover
    assert spec_of(service)["flow_takeover"] is True
    assert only(written([service])) == service


def test_words_are_compared_only_for_the_problems_that_are_told() -> None:
    """Comparing takes a tenth of a millisecond for each key, for minutes in a file of 64 MiB."""

    def seconds(service: str) -> float:
        lines = [service.replace("#", str(n)) for n in range(1000)]
        started = time.thread_time()  # not what else the machine does
        assert declare(f"{HEAD}{''.join(lines)}").problems[-1].what.startswith("and ")
        return time.thread_time() - started

    backend = "{address: 10.0.0.5, weight: 7, state: down}"
    known = f"  - {{name: a, address: 10.96.0.1, ports: [{{port: 80}}], backends: [{backend}]}}\n"
    misspelt = known
    for word in ("name", "address", "port", "weight", "state", "down"):
        misspelt = misspelt.replace(f"{word}: ", f"{word[0]}{word[2:]}#: ").replace("down", "dwon#")
    assert min(seconds(misspelt), seconds(misspelt)) < 5 * seconds(known)
