"""The JSON Schemas: they take what the readers take, and refuse what a value or mapping shows to be wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from jsonschema import Draft7Validator

from tests.cli.manual.editor import faults
from tests.declaration.strategies import PATIENT, services
from tests.docs.markdown import ROOT, name_of
from tests.docs.test_examples import WRONG, YAML, declaration_text, is_settings
from tests.lab.examples import examples
from vipd.cli.manual.schemas import (
    DECLARATION,
    INSTALLED,
    SETTINGS,
    declaration_schema,
    schemas,
    settings_schema,
)
from vipd.cli.manual.services_page import EXAMPLES
from vipd.declaration.key_docs import BACKEND, GROUPS, KeyDoc
from vipd.declaration.native import API_VERSION, parse_declaration, service_to_spec
from vipd.declaration.problems import Problem
from vipd.declaration.value_forms import choice, definition_name
from vipd.host.settings.settings import Settings, load_settings
from vipd.host.settings.settings_file import SettingsError, read_settings_text
from vipd.model.service import Service

DECLARED = Draft7Validator(declaration_schema())
SET = Draft7Validator(settings_schema())

ONE_OF_EACH = ROOT / "tests/dataplane/one_of_each"
FILES = [
    *sorted((ROOT / "tests/declaration/valid").iterdir()),
    *sorted((ROOT / "tests/golden").glob("*/manifest.json")),
    *sorted((ROOT / "examples").glob("[!p]*.yaml")),
    ONE_OF_EACH / "services.yaml",
]
IN_PAGES = {str(block): declaration_text(block) for block in YAML if not is_settings(block)}
GOOD = {
    **{name_of(path): path.read_text(encoding="utf-8") for path in FILES},
    **dict(EXAMPLES),
    **{name: text for name, text in IN_PAGES.items() if not parse_declaration(text, name).problems},
}
BROKEN = {
    **{
        path.name: path.read_bytes().decode("utf-8", "surrogateescape")
        for path in sorted((ROOT / "tests/declaration/broken").glob("*.yaml"))
    },
    **{name: text for name, text in IN_PAGES.items() if name not in GOOD},
}

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


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in GOOD.items()])
def test_a_good_declaration_is_taken(text: str) -> None:
    assert parse_declaration(text, "good.yaml").problems == ()
    assert faults(DECLARED, text) == []


@given(services())
@settings(PATIENT, max_examples=examples(30))
def test_what_vipd_writes_is_taken(service: Service) -> None:
    text = json.dumps({"apiVersion": API_VERSION, "services": [service_to_spec(service)]})
    assert faults(DECLARED, text) == []


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in BROKEN.items()])
def test_a_bad_declaration_is_refused_at_the_same_places(text: str) -> None:
    problems = parse_declaration(text, "broken.yaml").problems
    try:
        places = [place for place, _ in faults(DECLARED, text)]
    except yaml.YAMLError:
        return  # an editor says so without a schema
    missed = [each for each in problems if not any(within(place, each.path) for place in places)]
    assert [str(each) for each in missed if not reason_for(each)] == []
    invented = [p for p in places if not any(within(p, q.path) or within(q.path, p) for q in problems)]
    assert invented == [] or any(not each.path for each in problems)


@pytest.mark.parametrize("rule", BEYOND_A_SCHEMA)
def test_each_rule_of_what_is_beyond_a_schema_is_needed(rule: str) -> None:
    told = (each.what for text in BROKEN.values() for each in parse_declaration(text, "x").problems)
    assert any(re.search(rule, what) for what in told)


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


@pytest.mark.parametrize("line", [f"{key}: {text}" for key, texts in SPELLINGS.items() for text in texts])
def test_a_spelling_is_taken(line: str) -> None:
    if not line.startswith("name: "):  # a frontend is a name for its own service only
        assert parse_declaration(service_with(line), "x.yaml").problems == ()
    assert faults(DECLARED, service_with(line)) == []


def test_every_mapping_may_have_keys_for_anchors() -> None:
    for name in map(definition_name, GROUPS):
        mapping = DECLARED.schema["definitions"][name]
        assert mapping["additionalProperties"] is False
        assert mapping["patternProperties"] == {"^x-": {}}
    assert faults(DECLARED, service_with("x-hosts: [a]") + "\nx-hosts: b\n") == []
    assert faults(DECLARED, service_with("check: {type: tcp, x-why: a}")) == []
    assert faults(DECLARED, service_with("y-hosts: [a]"))


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in SETTINGS_TEXTS.items()])
def test_good_settings_are_taken(text: str) -> None:
    load_settings(flags=read_settings_text(text, "x"))
    assert faults(SET, text) == []


@pytest.mark.parametrize(("text", "setting"), BAD_SETTINGS.items())
def test_bad_settings_are_refused(text: str, setting: str) -> None:
    with pytest.raises(SettingsError):
        load_settings(flags=read_settings_text(text, "x"))
    assert any(within(place, setting) or f"'{setting}'" in message for place, message in faults(SET, text))


def test_settings_that_only_exclude_each_other_are_for_vipd_to_find() -> None:
    for text in ("store: etcd", "masquerade: off-cluster", "etcd: {endpoints: ['http://a:1'], user: x}"):
        with pytest.raises(SettingsError):
            load_settings(flags=read_settings_text(text, "x"))
        assert faults(SET, text) == []


def test_every_key_and_setting_is_there_with_its_meaning() -> None:
    for title, group in GROUPS.items():
        properties = DECLARED.schema["definitions"][definition_name(title)]["properties"]
        assert list(properties) == list(group.keys)
        for key, doc in group.described():
            assert properties[key]["description"].startswith(doc.meaning)
    assert list(SET.schema["properties"]) == list(Settings.model_fields)
    assert all(setting["description"] for setting in SET.schema["properties"].values())


def test_a_key_that_is_added_to_the_table_is_in_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    group = GROUPS["A backend"]
    doc = KeyDoc(choice("fast", "slow"), "`fast`", "How fast it is.")
    longer = group._replace(keys=(*group.keys, "speed"), docs={**BACKEND, "speed": doc})
    monkeypatch.setitem(GROUPS, "A backend", longer)
    changed = Draft7Validator(declaration_schema())
    backend = changed.schema["definitions"]["backend"]["properties"]["speed"]
    assert backend == {"description": "How fast it is. Default: `fast`.", "enum": ["fast", "slow"]}
    assert faults(changed, service_with("backends: {address: 10.0.0.1, speed: slow}")) == []
    assert faults(changed, service_with("backends: {address: 10.0.0.1, speed: fats}"))
    assert faults(DECLARED, service_with("backends: {address: 10.0.0.1, speed: slow}"))


@pytest.mark.parametrize("schema", [DECLARED, SET])
def test_a_schema_is_sound(schema: Draft7Validator) -> None:
    Draft7Validator.check_schema(schema.schema)
    parts = list(parts_of(schema.schema))
    named = {part["$ref"].removeprefix("#/definitions/") for part in parts if "$ref" in part}
    assert named <= set(schema.schema["definitions"])
    for part in parts:
        if isinstance(part.get("pattern"), str):
            # Python would take more than ECMAScript, by whose rules editors read these.
            assert not re.search(r"\(\?[#P<]|\\[AzZ]|[*+?}]\+", part["pattern"])


def parts_of(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts_of(part)


@pytest.mark.parametrize("name", schemas())
def test_the_documentation_has_the_schema_of_the_program(name: str) -> None:
    hint = "python -m vipd.cli.manual DIR && cp DIR/schemas/* docs/"
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == schemas()[name], hint


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
