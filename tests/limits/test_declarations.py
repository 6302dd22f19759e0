"""Each limit of a declaration: what is at it is read, one more is a problem with its place, and cheap."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.inside import declare
from tests.model.samples import HEAD
from vipd.model import limits


def listed(items: object) -> str:
    return f"[{', '.join(map(str, items))}]"  # type: ignore[call-overload]


def service(ports: int = 1, backends: int = 1, addresses: int = 1, number: int = 0, **more: str) -> str:
    """One service, on the lines behind the head."""
    parts = {
        "name": f"s{number}",
        "address": listed(f"10.{96 + number}.{i >> 8}.{i & 255}" for i in range(addresses)),
        "ports": listed(range(1, ports + 1)),
        "backends": listed(f"172.16.{i >> 8}.{i & 255}" for i in range(backends)),
        **more,
    }
    return "- " + "\n  ".join(f"{key}: {value}" for key, value in parts.items()) + "\n"


def networks(number: int) -> str:
    found = listed(f"192.{i >> 8}.{i & 255}.0/24" for i in range(number))
    return f"[{{address: 203.0.113.1, allow_from: {found}}}]"


def outside(number: int) -> str:
    return listed(f"203.0.{n // 250}.{n % 250 + 1}" for n in range(number))


def fallback(number: int) -> str:
    return f"{{backends: {listed(f'172.31.{i >> 8}.{i & 255}' for i in range(number))}}}"


def of_kubernetes(servers: int, externals: int = 0) -> str:
    endpoints = "".join(f"- addresses: [172.16.{i >> 8}.{i & 255}]\n" for i in range(servers))
    return (
        "apiVersion: v1\nkind: Service\nmetadata: {name: a}\n"
        f"spec: {{clusterIP: 10.96.0.1, externalIPs: {outside(externals)}, "
        "ports: [{name: a, port: 80}, {name: b, port: 81}]}\n---\n"
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n"
        "metadata: {name: a-1, labels: {kubernetes.io/service-name: a}}\naddressType: IPv4\n"
        f"ports: [{{name: a, port: 80}}, {{name: b, port: 81}}]\nendpoints:\n{endpoints}"
    )


def of_addresses(number: int) -> str:
    return HEAD + service(backends=number // 10, external_addresses=outside(9 + number % 10))


CASES: dict[str, tuple[str, int, Callable[[int], str], str]] = {
    "ports": ("PORTS", 30, lambda n: HEAD + service(ports=n), "31 ports are too many: 30 are the most"),
    "backends": ("BACKENDS", 30, lambda n: HEAD + service(backends=n), "31 backends are too many"),
    "fallback": (
        "BACKENDS",
        30,
        lambda n: HEAD + service(backends=10, fallback=fallback(n - 10)),
        "31 backends are too many",
    ),
    "endpoints": (
        "SERVICE_ENDPOINTS",
        10_000,
        lambda n: HEAD + service(ports=20, backends=n // 20 + n % 20),
        "20 ports and 501 backends make 10020 endpoints: 10000 are the most",
    ),
    "frontends": (
        "SERVICE_ENDPOINTS",
        10_000,
        lambda n: HEAD + service(ports=20, addresses=n // 20 + n % 20),
        "20 ports and 501 addresses and networks make 10020 frontends",
    ),
    "networks": (
        "SERVICE_ENDPOINTS",
        1_000,
        lambda n: HEAD + service(ports=20, external_addresses=networks(n // 20 + n % 20 - 2)),
        "20 ports and 51 addresses and networks make 1020 frontends",
    ),
    "endpoints at each of many addresses": (
        "ADDRESS_ENDPOINTS",
        500,
        of_addresses,
        "50 endpoints at each of 11 addresses make 550: 500 are the most",
    ),
    "endpoints at each of many addresses in Kubernetes": (
        "ADDRESS_ENDPOINTS",
        500,
        lambda n: of_kubernetes(n // 20, 9 + n % 20),
        "50 endpoints at each of 11 addresses make 550: 500 are the most",
    ),
    "services": (
        "SERVICES",
        5,
        lambda n: HEAD + "".join(service(number=i) for i in range(n)),
        "the document has more than 5 services",
    ),
    "endpoints in all": (
        "MAX_UNIT_SIZE",
        300,
        lambda n: HEAD + "".join(service(ports=10, backends=9, number=i) for i in range(-(-n // 100))),
        "up to here the services have more than 300 endpoints",
    ),
    "text": ("TEXT", 300, lambda n: HEAD + service(name="x" * n), "has 301 characters, of which 300 are"),
    "depth": ("YAML_DEPTH", 12, lambda n: "x: " * 0 + "[" * n + "]" * n, "nested more than 12 levels deep"),
    "kubernetes": ("BACKENDS", 30, of_kubernetes, "31 backends are too many"),
    "kubernetes endpoints": (
        "SERVICE_ENDPOINTS",
        60,
        lambda n: of_kubernetes(n // 2 + n % 2),
        "2 ports and 31 backends make 62 endpoints: 60 are the most",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_at_a_limit_is_read_and_one_more_is_a_problem(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, most, text, wanted = CASES[case]
    monkeypatch.setattr(limits, name, most)
    at_limit, beyond = declare(text(most)), declare(text(most + 1))
    about = [str(problem) for problem in at_limit.problems]
    # A name of so many letters, and a list instead of a mapping, are wrong for other reasons.
    assert not any("the most" in each or "more than" in each for each in about), about
    assert about == [] or case in ("text", "depth"), about
    (problem,) = [each for each in beyond.problems if wanted in each.what]
    assert problem.line > 0
    assert problem.hint


@pytest.mark.parametrize("accepted", [False, True])
def test_a_product_is_refused_before_it_is_multiplied_out(accepted: bool) -> None:
    """3,000 ports times 3,000 backends in 108 kB kept the loop for two minutes."""
    began = time.thread_time()
    found = declare(HEAD + service(3000, 3000) + service(number=1), accepted=accepted)
    assert [each.name for each in found.services] == ["s1"]
    spec = {"address": "10.96.0.1", "ports": [*range(1, 3001)], "name": "a"}
    spec["backends"] = [{"address": f"172.16.{i >> 8}.{i & 255}", "port": 80} for i in range(3000)]
    request = declare(json.dumps({"apiVersion": "vipd/v1", "services": [spec]}), accepted=accepted)
    assert not request.services
    for problems in (found.problems, request.problems):
        assert "3000 ports and 3000 backends make 9000000 endpoints" in problems[0].what
    assert time.thread_time() - began < 20


def test_twins_among_many_ports_are_not_compared_before_the_product_is_known() -> None:
    twins = listed(["172.16.0.1"] * 3000)
    text = HEAD + service(3000, 0).replace("backends: []", f"backends: {twins}")
    assert "9000000 endpoints" in declare(text).problems[0].what


def test_backends_of_defaults_are_not_copied_into_every_service_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,000 services with 9,000 backends that one list in `defaults` names are nine million."""
    monkeypatch.setattr(limits, "MAX_UNIT_SIZE", 150_000)
    head = f"apiVersion: vipd/v1\ndefaults:\n  fallback: {fallback(9000)}\nservices:\n"
    found = declare(head + "".join(service(number=i % 100).replace("s", f"x{i}-", 1) for i in range(1000)))
    assert "more than 150000 endpoints" in str(found.problems)
    assert len(found.services) < 20


def test_one_name_for_many_ports_of_many_servers_is_no_product_either() -> None:
    ports = listed(f"{{name: a, port: {i}}}" for i in range(1, 2001))
    text = of_kubernetes(2000).replace(
        "ports: [{name: a, port: 80}, {name: b, port: 81}]\nendp", f"ports: {ports}\nendp"
    )
    assert "its endpoints reach 4000000 ports" in str(declare(text).problems)


@pytest.mark.slow
def test_five_thousand_backends_and_ten_thousand_services_are_below_every_limit() -> None:
    assert declare(HEAD + service(backends=5000)).ok
    one = service(backends=5)
    many = "".join(
        one.replace("s0", f"s{i}", 1).replace("10.96.0.0", f"10.{i >> 8}.{i & 255}.1") for i in range(10_000)
    )
    assert declare(HEAD + many).ok
    assert limits.MAX_UNIT_SIZE > 100_000 * (5 + 1)
    assert limits.SERVICES > 100_000


def test_values_of_a_file_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "YAML_VALUES", 20_000)
    assert "20000 values" not in str(declare("- 1\n" * 19_000).problems)
    assert "more than 20000 values" in declare("- 1\n" * 60_000).problems[0].what


@pytest.mark.parametrize("text", ["a: '{}'", "a: {}", "a: |\n  {}", "a:\n# {}\n  b", '{{"{}": 1}}', "&{} a"])
def test_a_value_is_not_read_on_for_ever(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "YAML_VALUE_BYTES", 100_000)
    # Between what is read at once and what the parser asks for are some ten thousand bytes.
    fine = declare(text.format("x" * 60_000)).problems
    assert not any("more than 100000 bytes" in each.what for each in fine)
    found = declare(text.format("x" * 300_000))
    assert len(found.problems) == 1, "a syntax error, where a key or an anchor cannot be as long"
    assert not found.services


def test_a_service_of_many_addresses_counts_what_it_makes() -> None:
    for externals, size in ((199, 200 * 200 // 2), (0, 201)):
        (made,) = declare(HEAD + service(backends=200, external_addresses=outside(externals))).services
        assert limits.declared_size(made) == size


def test_problems_of_a_file_are_counted() -> None:
    found = declare("apiVersion: vipd/v1\n" + "".join(f"key{i}: 1\n" for i in range(412)))
    assert len(found.problems) == limits.PROBLEMS + 1
    assert str(found.problems[-1]) == "a.yaml:101: and 312 more problems; mend those that are named first"
    assert found.problems[0].hint


def test_conflicts_are_counted_without_their_words() -> None:
    text = HEAD + "".join(service(number=0) for _ in range(1 + 200))
    found = declare(text)
    assert found.problems[-1].what.startswith("and ")
    assert len(found.problems) == limits.PROBLEMS + 1


def test_the_documentation_tells_the_limits() -> None:
    page = (Path(__file__).parents[2] / "docs" / "declaration.md").read_text()
    table = page.partition("\n## Limits\n")[2].partition("\n## ")[0]
    cells = [row.strip("| ").rpartition("| ")[2] for row in table.splitlines() if row.startswith("| ")]
    listed = sorted(int(cell) for cell in cells if cell.isdecimal())
    aside = {
        "TYPE_CHECKING",
        "STATE_DIR_FULL_BYTES",
        "STATE_DIR_LOW_BYTES",
        "MIB",
        "JSON_DEPTH",
        "JSON_DIGITS",
        "ANSWER_BYTES",
    }
    numbers = {name: value for name, value in vars(limits).items() if name.isupper() and name not in aside}
    assert listed == sorted(numbers.values())
