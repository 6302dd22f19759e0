"""The JSON Schemas: they take what the readers take, and refuse what a value or mapping shows to be wrong."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from jsonschema import Draft7Validator

from tests.cli.manual.editor import faults
from tests.declaration.strategies import PATIENT, services
from tests.docs.markdown import ROOT, name_of
from tests.docs.programs import settings_problems
from tests.docs.test_examples import WRONG, YAML, declaration_text, is_settings
from tests.docs.test_reference import parts
from tests.lab.examples import examples
from tests.lab.inside import Problem, declare, written
from vipd.model.service import Service

DECLARATION, SETTINGS = "declaration.schema.json", "settings.schema.json"
INSTALLED = "/usr/share/doc/vipd/docs"
DECLARED, SET = (
    Draft7Validator(json.loads((ROOT / "docs" / name).read_text(encoding="utf-8")))
    for name in (DECLARATION, SETTINGS)
)
"""They are those of the program: see test_pages.py."""

ONE_OF_EACH = ROOT / "tests/dataplane/one_of_each"
FILES = [
    *sorted((ROOT / "tests/declaration/valid").iterdir()),
    *sorted((ROOT / "tests/golden").glob("*/manifest.json")),
    *sorted((ROOT / "examples").glob("[!p]*.yaml")),
    *sorted(ONE_OF_EACH.glob("services*.yaml")),
]


@cache
def declarations() -> tuple[dict[str, str], dict[str, str]]:
    """The good ones and the broken ones, by name."""
    in_pages = {str(block): declaration_text(block) for block in YAML if not is_settings(block)}
    good = {name_of(path): path.read_text(encoding="utf-8") for path in FILES}
    good |= {name: text for name, text in in_pages.items() if not declare(text).problems}
    broken = {
        path.name: path.read_bytes().decode("utf-8", "surrogateescape")
        for path in sorted((ROOT / "tests/declaration/broken").glob("*.yaml"))
    }
    return good, broken | {name: text for name, text in in_pages.items() if name not in good}


BEYOND_A_SCHEMA = {
    r"already (is|belongs|taken|said|on line)|is already|stands already": "it compares two places of a file",
    r"is the service itself|the service's own virtual IP": "it compares backends and addresses",
    r"is IPv[46], but the service|no network of allow_from": "the same",
    r"the service has no |no check of this service|node_port fits a service": "it compares keys of a service",
    r"^needs (the same |a )?backend": "the same",
    r"port and ports exclude each other|is longer than interval": "it compares two keys",
    r"only the default name|is not a service name": "a name may be a frontend, but only the service's own",
    r"is an? (unspecified|loopback|multicast|link-local|broadcast) address": "it knows no kinds of addresses",
    r"has bits set beyond its prefix|is no range|\"2[dh]\" is out of range": "it does not calculate",
    r"is not a regular expression": "it does not know RE2's syntax",
    r"(integer|port|name|node|mapping).*, not .*YAML": "it sees the value that the text stands for",
    r"not True \(a boolean\)": "the same",
    r"names a protocol twice": "it compares the words of a text",
    r"YAML syntax": "YAML readers differ in what they accept",
    r"stands twice in one mapping": "it sees one of the two; editors find this themselves",
    r"alias|YAML tag|merge key|nested more": "it sees what the YAML stands for",
}
"""What a schema cannot see, and why; by the message of vipd."""


SETTINGS_TEXTS = {
    **{str(block): block.text for block in YAML if is_settings(block) and WRONG not in block.text},
    **{name_of(path): path.read_text(encoding="utf-8") for path in sorted(ONE_OF_EACH.glob("[!s]*.yaml"))},
    "all of debian/vipd.yaml": re.sub(
        r"(?m)^#(?=[a-z_]+:)", "", (ROOT / "debian/vipd.yaml").read_text(encoding="utf-8")
    ),
    "nothing": "# no setting\n",
    "numbers of users": "check_uids: 60706-61183\n",
    "no numbers of users": "check_uids: off\n",
    "texts with commas": 'cluster_cidrs: 10.244.0.0/16, fd00:244::/56\nhost_addresses: "192.0.2.1,fd00::1"\n',
    "ports": "node_port_range: {etcd: [30000-31999, 8443], cli: any, file: 80}\nstatus_page: 8080\n",
    "etcd": "etcd: {endpoints: 'https://10.0.0.1:2379', timeout: 500ms, max_removal: 20%, ca: /etc/ca.pem}\n",
}
BAD_SETTINGS = {
    "cluster_cidr: []": "cluster_cidr",
    "services_dir: services.d": "services_dir",
    "notify: notify --short": "notify",
    "notify: [notify, --short]": "notify",
    "log_level: warn": "log_level",
    "mark_bit: 32": "mark_bit",
    "affinity_clients: 10": "affinity_clients",
    "chain_prefix: vipd": "chain_prefix",
    "vip_device: a b": "vip_device",
    "manage_sysctls: perhaps": "manage_sysctls",
    "manage_sysctls: null": "manage_sysctls",
    "cluster_cidrs: [10.244.0.0/16, pods]": "cluster_cidrs",
    "cluster_cidrs: pods": "cluster_cidrs",
    "host_addresses: [192.0.2]": "host_addresses",
    "allowed_addresses: {files: [10.96.0.0/16]}": "allowed_addresses",
    "allowed_backends: {etcd: [x]}": "allowed_backends",
    "node_port_range: 0": "node_port_range",
    "check_uids: 1000": "check_uids",
    "check_uids: vipd-check": "check_uids",
    "node_port_range: 30000-70000": "node_port_range",
    "node_port_range: {etcd: 30000..32767}": "node_port_range",
    "health_address: 10256": "health_address",
    "status_page: localhost:80": "status_page",
    "metrics_address: 70000": "metrics_address",
    "etcd: http://10.0.0.1:2379": "etcd",
    "etcd: {}": "etcd",
    "etcd: {endpoints: [10.0.0.1:2379]}": "etcd",
    "etcd: {endpoints: ['http://10.0.0.1:2379'], timeouts: 5s}": "etcd",
    "etcd: {endpoints: ['http://10.0.0.1:2379'], timeout: 5 s}": "etcd",
    "etcd: {endpoints: ['http://10.0.0.1:2379'], max_removal: 101%}": "etcd",
    "etcd: {endpoints: ['http://10.0.0.1:2379'], cert: cert.pem}": "etcd",
    "etcd: {endpoints: ['http://10.0.0.1:2379'], report_interval: 20}": "etcd",
    **{
        line: line.partition(":")[0]
        for block in YAML
        if is_settings(block)
        for line in block.text.splitlines()
        if WRONG in line
    },
}


def within(place: str, outer: str) -> bool:
    """Whether a place is in another one, or is it. The whole document has no name."""
    return place == outer or place.startswith((f"{outer}.", f"{outer}["))


def reason_for(problem: Problem) -> str:
    """Why a schema cannot see it; empty when it should."""
    if re.match("items|metadata|spec|status|ports|endpoints|subsets|addressType", problem.path):
        return "of Kubernetes objects it knows the kinds and versions only"
    return next((why for rule, why in BEYOND_A_SCHEMA.items() if re.search(rule, problem.what)), "")


def test_a_good_declaration_is_taken() -> None:
    for name, text in declarations()[0].items():
        assert (name, declare(text).problems, faults(DECLARED, text)) == (name, (), [])


@given(services())
@settings(PATIENT, max_examples=examples(30))
def test_what_vipd_writes_is_taken(service: Service) -> None:
    assert faults(DECLARED, written([service])) == []


def test_a_bad_declaration_is_refused_at_the_same_places() -> None:
    wrong: dict[str, object] = {}
    needless = set(BEYOND_A_SCHEMA)
    for name, text in declarations()[1].items():
        problems = declare(text, "broken.yaml").problems
        needless -= {rule for rule in needless if any(re.search(rule, each.what) for each in problems)}
        try:
            places = [place for place, _ in faults(DECLARED, text)]
        except yaml.YAMLError:
            continue  # an editor says so without a schema
        missed = [each for each in problems if not any(within(place, each.path) for place in places)]
        if unexplained := [str(each) for each in missed if not reason_for(each)]:
            wrong[name] = unexplained
        invented = [p for p in places if not any(within(p, q.path) or within(q.path, p) for q in problems)]
        if invented and all(each.path for each in problems):
            wrong[f"{name}, by the schema alone"] = invented
    assert wrong == {}
    assert needless == set(), "rules of what is beyond a schema that no text needs"


def service_with(line: str) -> str:
    """A declaration of a service with this line."""
    lines = {"address": 'address: [10.96.0.10, "fd00:96::1"]', "ports": "ports: [80, 53/udp]"}
    lines[line.partition(":")[0]] = line
    return "apiVersion: vipd/v1\nservices:\n  - " + "\n    ".join(lines.values())


SPELLINGS = {
    "ports": (
        "443",
        "65535",
        '"443"',
        "53/udp",
        "[80, 81/sctp]",
        "80:8080/tcp",
        '"53/TCP,udp"',
        "{port: 80, target: 8080}",
    ),
    "address": ("223.0.0.1", "fd00::1", "fd00:1:2:3:4:5:6:7", '"64:ff9b::10.0.0.1"', "[10.0.0.1, 10.0.0.2]"),
    "backends": ("", "[]", '"[fd00::5]:80@0"', "fd00::5", "10.0.0.1:65535@65535", "{address: 10.0.0.1}"),
    "affinity": ("none", "true", "false", "client-ip", "600", "10m", "1d", "{by: client-ip}"),
    "slow_start": ("0", "0s", "1h", "3600"),
    "fallback": ("keep", "10.244.9.9", "[10.244.9.9]", "{backends: 10.244.9.9}", "{dns: a.b}", "[dns:a.b]"),
    "check": (
        *(
            "none",
            "tcp",
            "{type: none}",
            "{type: exec, command: /bin/true}",
            "{type: exec, command: [/bin/a, 5]}",
        ),
        *(f"{{type: http, status: {text}}}" for text in ("200", '"200-299"', "[200, 204-206]")),
        *(f"{{type: tcp, jitter: {text}}}" for text in ("0%", "7%", "50%")),
        *(f"{{type: tcp, interval: {text}}}" for text in ("2", "60m", "2.5s", "3600")),
        *(f"{{type: udp, send: {text}}}" for text in ("5", "ping", "hex:0a", '"a hex:"')),
        *(f"{{type: dns, query: {text}}}" for text in (".", "example.com.", "_sip._udp.example.com")),
    ),
    "name": ("a/b", "a", '"[fd00:96::1]:80/tcp"'),
}


def test_every_spelling_is_taken() -> None:
    for line in (f"{key}: {text}" for key, texts in SPELLINGS.items() for text in texts):
        if not line.startswith("name: "):  # a frontend is a name for its own service only
            assert (line, declare(service_with(line)).problems) == (line, ())
        assert (line, faults(DECLARED, service_with(line))) == (line, [])


def test_every_mapping_may_have_keys_for_anchors() -> None:
    mappings = [part for part in DECLARED.schema["definitions"].values() if "properties" in part]
    assert len(mappings) >= 10
    for mapping in mappings:
        assert mapping["additionalProperties"] is False
        assert mapping["patternProperties"] == {"^x-": {}}
    assert faults(DECLARED, service_with("x-hosts: [a]") + "\nx-hosts: b\n") == []
    assert faults(DECLARED, service_with("check: {type: tcp, x-why: a}")) == []
    assert faults(DECLARED, service_with("y-hosts: [a]"))


def test_good_settings_are_taken_and_bad_ones_refused() -> None:
    for name, text in SETTINGS_TEXTS.items():
        assert (name, settings_problems(text), faults(SET, text)) == (name, [], [])
    for text, setting in BAD_SETTINGS.items():
        assert [each for each in settings_problems(text) if each.startswith(setting)], text
        found = faults(SET, text)
        assert any(within(place, setting) or f"'{setting}'" in message for place, message in found), text


def test_settings_that_only_exclude_each_other_are_for_vipd_to_find() -> None:
    for text in ("store: etcd", "masquerade: off-cluster", "etcd: {endpoints: ['http://a:1'], user: x}"):
        assert settings_problems(text)
        assert faults(SET, text) == []


@pytest.mark.parametrize("schema", [DECLARED, SET])
def test_a_schema_is_sound(schema: Draft7Validator) -> None:
    Draft7Validator.check_schema(schema.schema)
    found = list(parts(schema.schema))
    named = {part["$ref"].removeprefix("#/definitions/") for part in found if "$ref" in part}
    assert named <= set(schema.schema["definitions"])
    for part in found:
        if isinstance(part.get("pattern"), str):
            # Python would take more than ECMAScript, by whose rules editors read these.
            assert not re.search(r"\(\?[#P<]|\\[AzZ]|[*+?}]\+", part["pattern"])


MODELINE = re.compile(r"^# yaml-language-server: \$schema=(\S+)$", re.MULTILINE)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("[!p]*.yaml")), ids=lambda path: path.name)
def test_an_example_names_the_schema_where_it_is_in_the_project_and_in_the_package(path: Path) -> None:
    found = MODELINE.findall(path.read_text(encoding="utf-8"))
    assert [(path.parent / each).resolve() for each in found] == [ROOT / "docs" / DECLARATION]
    installed = (ROOT / "debian/vipd.install").read_text()
    assert f"docs/* {INSTALLED.removeprefix('/')}\n" in installed, "beside /usr/share/doc/vipd/examples"


def test_the_packaged_settings_file_names_the_schema_where_the_package_has_it() -> None:
    (found,) = MODELINE.findall((ROOT / "debian/vipd.yaml").read_text(encoding="utf-8"))
    assert found == f"{INSTALLED}/{SETTINGS}"
