from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.conftest import Vipctl
from tests.cli.documents import DNS, Json, changed, one
from tests.cli.fake_daemon import FakeDaemon
from vipd.cli import services
from vipd.cli.service_options import ServiceOption
from vipd.cli.words import CHECK_ARGUMENTS, check_spec
from vipd.declaration.check_reader import CHECK_TYPES, PROBE_KEYS
from vipd.declaration.service_reader import SERVICE_KEYS

STORED = "; stored in /var/lib/vipd/services.yaml; survives reboot"


def test_add_as_in_the_manual(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("POST /v1/services", changed(("created", "10.96.0.10:53/udp")))
    ended = vipctl("add", "10.96.0.10:53/udp", "10.244.0.5", "10.244.2.21")
    hint = "hint: vipctl set 10.96.0.10:53/udp --check dns:NAME"
    unchecked = f"no check is set: dead backends get flows, too; {hint}\n"
    assert ended == (0, f"created 10.96.0.10:53/udp (2 backends){STORED}\n", unchecked)
    spec = {"address": "10.96.0.10", "ports": ["53/udp"], "backends": ["10.244.0.5", "10.244.2.21"]}
    assert daemon.last.body == {"service": spec}
    assert daemon.last.query == ""


def test_warnings_of_a_change_are_told_on_stderr(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    warned = {"warnings": ["service web: one", "service web: two"]}
    daemon.answer("POST /v1/services", changed(("created", "web")) | warned)
    words = ("add", "10.96.0.10:53/udp", "--name", "web")
    ended = vipctl(*words)
    assert (ended.code, ended.err) == (0, "warning: service web: one\nwarning: service web: two\n")
    assert vipctl(*words, "-q") == (0, "", "")
    ended = vipctl(*words, "-o", "json")
    assert (json.loads(ended.out)["warnings"], ended.err) == (warned["warnings"], "")


@pytest.mark.parametrize(
    ("words", "spec"),
    [
        (
            ["[fd00::0A]:53/udp", "[fd00::5]:5353@2", "fd00::6@3", "fd00::7"],
            {
                "address": "fd00::a",
                "ports": ["53/udp"],
                "backends": [
                    {"address": "fd00::5", "port": 5353, "weight": 2},
                    {"address": "fd00::6", "weight": 3},
                    "fd00::7",
                ],
            },
        ),
        (
            ["10.0.0.1:80/tcp", "--target", "8080", "--name", "web", "--affinity", "10m"],
            {
                "name": "web",
                "address": "10.0.0.1",
                "ports": [{"port": 80, "protocol": "tcp", "target": 8080}],
                "affinity": {"by": "client-ip", "timeout": "10m"},
            },
        ),
        (
            ["10.0.0.1:80:8080", "--affinity", "true"],
            {
                "address": "10.0.0.1",
                "ports": [{"port": 80, "protocol": "tcp", "target": 8080}],
                "affinity": "client-ip",
            },
        ),
        (
            ["[fd00::1]:53/tcp,UDP", "--target", "5353"],
            {
                "address": "fd00::1",
                "ports": [
                    {"port": 53, "protocol": "tcp", "target": 5353},
                    {"port": 53, "protocol": "udp", "target": 5353},
                ],
            },
        ),
        (
            ["10.0.0.1:80/tcp", "--affinity", "none", "--masquerade", "auto", "--fallback", "drop"],
            {"address": "10.0.0.1", "ports": ["80/tcp"], "fallback": "drop"},
        ),
        (
            [
                "10.0.0.1:80/tcp",
                *("--affinity", "client-ip", "--masquerade", "always"),
                *("--fallback", "10.0.9.1,dns:a.b:80", "--fallback", "10.0.9.3:81"),
            ],
            {
                "address": "10.0.0.1",
                "ports": ["80/tcp"],
                "affinity": "client-ip",
                "masquerade": "always",
                "fallback": {
                    "backends": [
                        "10.0.9.1",
                        {"dns": "a.b", "port": 80},
                        {"address": "10.0.9.3", "port": 81},
                    ]
                },
            },
        ),
        (
            ["10.0.0.1,fd00::0A", "-p", "80:8080/tcp", "-p", "53/udp", "10.1.0.5", "--backup", "10.1.0.9@2"],
            {
                "address": ["10.0.0.1", "fd00::a"],
                "ports": ["80:8080/tcp", "53/udp"],
                "backends": ["10.1.0.5", {"address": "10.1.0.9", "weight": 2, "backup": True}],
            },
        ),
        (
            [
                *(
                    "none",
                    "--port",
                    "443",
                    "--external",
                    "203.0.113.1,203.0.113.2",
                    "--load-balancer",
                    "203.0.113.3",
                ),
                *("--external", "{address: 203.0.113.4, allow_from: any}", "--allow-from", "198.51.100.0/24"),
            ],
            {
                "ports": ["443"],
                "external_addresses": [
                    "203.0.113.1",
                    "203.0.113.2",
                    {"address": "203.0.113.4", "allow_from": "any"},
                ],
                "load_balancer_addresses": ["203.0.113.3"],
                "allow_from": ["198.51.100.0/24"],
            },
        ),
        (
            [
                *(
                    "10.0.0.1:80/tcp",
                    "--check",
                    "http:/healthz",
                    "--slow-start",
                    "30s",
                    "--weight-from",
                    "check",
                ),
                *("--node-port", "30080", "--health-port", "30081", "--respond-to-ping", "false"),
                *("--internal-policy", "local", "--external-policy", "local", "--on-remove", "reset"),
                *("--balance", "round-robin", "--registrations", "true", "--flow-takeover", "false"),
            ],
            {
                "address": "10.0.0.1",
                "ports": ["80/tcp"],
                "node_port": 30080,
                "health_port": 30081,
                "respond_to_ping": False,
                "check": {"type": "http", "path": "/healthz"},
                "slow_start": "30s",
                "weight_from": "check",
                "registrations": True,
                "flow_takeover": False,
                "balance": "round-robin",
                "traffic_policy": {"internal": "local", "external": "local"},
                "on_remove": "reset",
            },
        ),
        (
            [
                *("10.0.0.1", "-p", "{port: 80, target: 8080, node_port: 30080, name: http}"),
                *("{address: 10.1.0.5, zone: [east, '2'], backup: true}", "--check", "{type: tcp, fall: 2}"),
                *("--node-port", "none", "--external", "none", "--allow-from", "any"),
            ],
            {
                "address": ["10.0.0.1"],
                "ports": [{"port": 80, "target": 8080, "node_port": 30080, "name": "http"}],
                "backends": [{"address": "10.1.0.5", "zone": ["east", "2"], "backup": True}],
                "check": {"type": "tcp", "fall": 2},
            },
        ),
    ],
)
def test_add_sends_a_spec(vipctl: Vipctl, daemon: FakeDaemon, words: list[str], spec: dict[str, Any]) -> None:
    daemon.answer("POST /v1/services", changed(("created", "x")))
    assert vipctl("add", *words).code == 0
    assert daemon.last.body == {"service": spec}


@pytest.mark.parametrize(
    ("word", "spec"),
    [
        ("none", "none"),
        ("tcp", "tcp"),
        ("tcp:8081", {"type": "tcp", "port": 8081}),
        ("http:8081", {"type": "http", "port": 8081}),
        ("http:8081/a:b", {"type": "http", "port": 8081, "path": "/a:b"}),
        ("https:/", {"type": "https", "path": "/"}),
        ("http:healthz", {"type": "http", "path": "healthz"}),
        ("dns:example.com", {"type": "dns", "query": "example.com"}),
        ("udp:ping", {"type": "udp", "send": "ping"}),
        ("exec:/bin/check --name 'a b'", {"type": "exec", "command": ["/bin/check", "--name", "a b"]}),
        ("tcp:seven", {"type": "tcp", "port": "seven"}),
    ],
)
def test_a_check_in_one_word(word: str, spec: object) -> None:
    assert check_spec(word) == spec


def test_every_type_of_check_has_a_word() -> None:
    assert tuple(CHECK_ARGUMENTS) == CHECK_TYPES
    assert all(key in {"", *PROBE_KEYS[kind]} for kind, key in CHECK_ARGUMENTS.items())


def test_an_option_sets_every_key_of_a_service() -> None:
    keys = {option.key for option in services.add.params if isinstance(option, ServiceOption)}
    assert keys | {"name", "address", "backends"} == SERVICE_KEYS.keys()


def test_several_ports_are_told_with_their_addresses(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("POST /v1/services", changed(("created", "10.0.0.1:80/tcp")))
    ended = vipctl("add", "10.0.0.1,fd00::1", "-p", "80", "-p", "53/udp", "10.1.0.5", "--backup", "10.1.0.9")
    told = "10.0.0.1,fd00::1 80 53/udp, 1 backend, 1 backup"
    assert ended.out == f"created 10.0.0.1:80/tcp ({told}){STORED}\n"


def test_add_without_backends_says_what_that_means(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("POST /v1/services", changed(("created", "dns")))
    ended = vipctl("add", "10.96.0.10:53/udp", "--name", "dns")
    assert ended.out == f"created dns (10.96.0.10:53/udp, no backends: new flows are refused){STORED}\n"


def test_the_same_again_is_unchanged(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("POST /v1/services", changed(("unchanged", "10.96.0.10:53/udp")))
    ended = vipctl("add", "10.96.0.10:53/udp", "10.244.0.5")
    assert ended == (0, "unchanged 10.96.0.10:53/udp (1 backend)\n", "")


def test_stored_but_not_in_the_kernel_fails(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    answer = changed(("created", "dns"), applied=False, message="iptables-restore: exit code 4")
    daemon.answer("POST /v1/services", answer)
    ended = vipctl("add", "10.96.0.10:53/udp")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == (
        "vipctl: dns: stored in /var/lib/vipd/services.yaml, but not in the kernel yet: "
        "iptables-restore: exit code 4; hint: vipd goes on trying; vipctl status shows how it goes\n"
    )
    as_json = vipctl("add", "10.96.0.10:53/udp", "--json")
    assert as_json.code == 1
    assert json.loads(as_json.out)["applied"] is False


@pytest.mark.parametrize(
    ("words", "check"),
    [
        (["10.96.0.10:80/tcp", "10.244.0.5"], "tcp"),
        (["10.96.0.10:80", "10.244.0.5"], "tcp"),
        (["10.96.0.10:514/udp", "10.244.0.5"], "udp:TEXT"),
        (["10.96.0.10", "-p", "53/udp", "-p", "9153/tcp", "10.244.0.5"], "tcp"),
        (["10.96.0.10:53/tcp,udp", "10.244.0.5"], "tcp"),
        (["10.96.0.10:36412/sctp", "10.244.0.5"], "exec:COMMAND"),
        (["10.96.0.10:80/tcp", "dns:web.internal:80"], "tcp"),
        (["10.96.0.10:80/tcp", "{address: 10.244.0.5, check: tcp}", "10.244.0.6"], "tcp"),
    ],
)
def test_add_says_that_no_check_is_set(
    vipctl: Vipctl, daemon: FakeDaemon, words: list[str], check: str
) -> None:
    daemon.answer("POST /v1/services", changed(("created", "web")))
    ended = vipctl("add", *words, "--name", "web")
    assert (ended.code, ended.err.count("\n")) == (0, 1)
    assert ended.err.endswith(f"; hint: vipctl set web --check {check}\n")
    assert "check" not in ended.out
    for quiet in (["-q"], ["-o", "json"], ["--json"], ["-o", "yaml"]):
        assert vipctl("add", *words, "--name", "web", *quiet).err == ""


@pytest.mark.parametrize(
    "words",
    [
        ["10.244.0.5", "--check", "tcp"],
        ["10.244.0.5", "--check", "http:/healthz"],
        ["10.244.0.5", "--check", "none"],
        ["{address: 10.244.0.5, check: tcp}"],
        [],
    ],
)
def test_add_says_nothing_where_a_check_is_named(
    vipctl: Vipctl, daemon: FakeDaemon, words: list[str]
) -> None:
    daemon.answer("POST /v1/services", changed(("created", "web")))
    assert vipctl("add", "10.96.0.10:80/tcp", *words).err == ""


def test_the_same_service_again_says_nothing_of_checks(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("POST /v1/services", changed(("unchanged", "web")))
    assert vipctl("add", "10.96.0.10:80/tcp", "10.244.0.5").err == ""


def test_dry_run_says_so_and_asks_for_it(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("POST /v1/services", changed(("created", "dns"), applied=False))
    ended = vipctl("add", "10.96.0.10:53/udp", "10.0.0.1", "--dry-run")
    assert ended.out == (
        "# dns: would be created\n"
        "+ name: 10.96.0.10:53/udp\n"
        "+ address: 10.96.0.10\n"
        "+ ports: [53/udp]\n"
        "+ backends: [10.0.0.1]\n"
        "created dns (1 backend); dry run: nothing was done\n"
    )
    unchecked = "no check is set: dead backends get flows, too; hint: --check dns:NAME\n"
    assert (ended.code, ended.err, daemon.last.query) == (0, unchecked, "dry_run=1")
    assert vipctl("add", "10.96.0.10:53/udp", "10.0.0.1", "--dry-run", "-q") == (0, "", "")
    assert json.loads(vipctl("add", "10.96.0.10:53/udp", "--dry-run", "--json").out)["applied"] is False


def test_a_dry_run_of_set_shows_the_difference(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    name = DNS["name"]
    daemon.answer(f"GET /v1/services/{name}", one(DNS))
    daemon.answer(f"PATCH /v1/services/{name}", changed(("changed", name), applied=False))
    ended = vipctl("set", name, "--affinity", "none", "--check", "dns:example.com", "--dry-run")
    differing = [line for line in ended.out.splitlines() if line[0] != " "]
    assert differing == [
        f"# {name}: would be changed",
        "- affinity: {by: client-ip, timeout: 10m}",
        "+ check: {type: dns, query: example.com}",
        f"changed {name} (check dns:example.com, affinity none); dry run: nothing was done",
    ]
    assert daemon.last.query == "dry_run=1&version=0123456789abcdef"


@pytest.mark.parametrize(
    "words",
    [
        ["10.96.0.10/udp"],
        ["10.96.0.10:53/upd"],
        ["10.96.0.300:53/udp"],
        ["fd00::10:53/udp"],
        ["10.96.0.10:53/udp", "10.244.0.5@70000"],
        ["10.96.0.10:53/udp", "backend-1"],
        ["10.96.0.10:53/udp", "--affinity", "soon"],
        ["10.96.0.10:53/udp", "--fallback", "drop,10.0.0.1"],
        ["10.96.0.10:53/udp", "--masquerade", "sometimes"],
        ["10.96.0.10:53/udp", "--target", "0"],
        ["10.96.0.10:53:5353/udp", "--target", "5353"],
        ["10.96.0.10:53/udp,udp"],
        ["10.96.0.10:53:0/udp"],
        ["10.96.0.10,10.96.0.11"],
        ["10.96.0.10", "-p", "80", "--target", "81"],
        ["10.96.0.10:80/tcp", "-p", "80"],
        ["10.96.0.10:53/udp", "--check", "htp:/x"],
        ["10.96.0.10:53/udp", "--check", "none:1"],
        ["10.96.0.10:53/udp", "--check", "http:"],
        ["10.96.0.10:53/udp", "--check", "exec:/bin/sh -c 'x"],
        ["10.96.0.10:53/udp", "--check", "{type: tcp"],
        ["10.96.0.10:53/udp", "{}"],
        ["10.96.0.10:53/udp", "--backup", "web"],
    ],
)
def test_words_in_no_known_form_are_wrong_usage(vipctl: Vipctl, daemon: FakeDaemon, words: list[str]) -> None:
    ended = vipctl("add", *words)
    assert (ended.code, ended.out) == (2, "")
    assert "; hint: " in ended.err
    assert daemon.requests == []


@pytest.mark.parametrize(
    ("word", "path"),
    [
        ("dns/10.244.0.5", "dns/backends/10.244.0.5"),
        ("kube-system/kube-dns/10.244.0.5:53", "kube-system%2Fkube-dns/backends/10.244.0.5%3A53"),
        ("10.96.0.10:53/udp/10.244.0.5", "10.96.0.10%3A53%2Fudp/backends/10.244.0.5"),
        ("[fd00::10]:53/udp/[fd00::5]:53", "%5Bfd00%3A%3A10%5D%3A53%2Fudp/backends/%5Bfd00%3A%3A5%5D%3A53"),
        ("[fd00::10]:53/udp/fd00::0005", "%5Bfd00%3A%3A10%5D%3A53%2Fudp/backends/fd00%3A%3A5"),
    ],
)
def test_set_weight_finds_the_backend_after_the_last_slash(
    vipctl: Vipctl, daemon: FakeDaemon, word: str, path: str
) -> None:
    vipctl("set", word, "--weight", "5")
    assert daemon.last.method == "PATCH"
    assert daemon.last.path == f"/v1/services/{path}"
    assert daemon.last.body == {"weight": 5}


@pytest.mark.parametrize(
    "words",
    [
        ["kube-system/kube-dns", "--weight", "5"],
        ["10.96.0.10:53/udp", "--weight", "5"],
        ["/10.0.0.1", "--weight", "5"],
        ["dns/10.0.0.1@2", "--weight", "5"],
        ["dns/10.0.0.1", "--weight", "5", "--affinity", "none"],
        ["dns/10.0.0.1", "--weight", "-1"],
        ["dns/10.0.0.1", "--weight", "5", "--backup", "true"],
        ["dns/10.0.0.1", "--backup", "true", "--address", "10.0.0.9"],
        ["dns", "--backup", "true"],
        ["dns"],
    ],
)
def test_set_needs_one_thing_to_set(vipctl: Vipctl, daemon: FakeDaemon, words: list[str]) -> None:
    assert vipctl("set", *words).code == 2
    assert daemon.requests == []


def test_set_sends_only_what_was_named(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("PATCH /v1/services/kube-system/kube-dns", changed(("changed", "kube-system/kube-dns")))
    ended = vipctl("set", "kube-system/kube-dns", "--affinity", "none", "--masquerade", "auto")
    assert ended.out == f"changed kube-system/kube-dns (affinity none, masquerade auto){STORED}\n"
    assert daemon.last.body == {"service": {"affinity": None, "masquerade": None}}
    fallback = ("--fallback", "10.0.0.1", "--fallback", "10.0.0.2")
    told = vipctl("set", "kube-system/kube-dns", "--affinity", "10m", *fallback).out
    assert "(affinity 10m, fallback 10.0.0.1 10.0.0.2)" in told
    assert "(balance source-hash)" in vipctl("set", "kube-system/kube-dns", "--balance", "source-hash").out
    assert daemon.last.body == {"service": {"balance": "source-hash"}}


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["--address", "10.0.0.1,fd00::1"], {"address": ["10.0.0.1", "fd00::1"]}),
        (
            ["--address", "none", "--external", "203.0.113.1"],
            {"address": None, "external_addresses": ["203.0.113.1"]},
        ),
        (["-p", "80", "--node-port", "30080"], {"ports": ["80"], "node_port": 30080}),
        (["--external", "none", "--allow-from", "any"], {"external_addresses": None, "allow_from": None}),
        (["--health-port", "none", "--check", "none"], {"health_port": None, "check": "none"}),
    ],
)
def test_set_replaces_a_list_and_clears_a_field(
    vipctl: Vipctl, daemon: FakeDaemon, words: list[str], fields: Json
) -> None:
    daemon.answer("GET /v1/services/dns", one(DNS))
    daemon.answer("PATCH /v1/services/kube-system/kube-dns", changed(("changed", "dns")))
    daemon.answer("PATCH /v1/services/dns", changed(("changed", "dns")))
    assert vipctl("set", "dns", *words).code == 0
    assert daemon.last.body == {"service": fields}


@pytest.mark.parametrize(
    ("spec", "words", "fields"),
    [
        (
            {"ports": [{"port": 80, "protocol": "tcp", "node_port": 30080}]},
            ["--node-port", "30081"],
            {"ports": [{"port": 80, "protocol": "tcp"}], "node_port": 30081},
        ),
        (
            {"ports": [{"port": 80, "protocol": "tcp", "node_port": 30080}]},
            ["--node-port", "none"],
            {"ports": [{"port": 80, "protocol": "tcp"}], "node_port": None},
        ),
        ({"ports": ["80/tcp"]}, ["--node-port", "30081"], {"node_port": 30081}),
        (
            {"ports": ["80/tcp"], "traffic_policy": {"internal": "local"}},
            ["--external-policy", "local"],
            {"traffic_policy": {"internal": "local", "external": "local"}},
        ),
    ],
)
def test_set_changes_a_part_of_a_field_of_the_version_that_it_read(
    vipctl: Vipctl, daemon: FakeDaemon, spec: Json, words: list[str], fields: Json
) -> None:
    daemon.answer("GET /v1/services/web", one(DNS | {"name": "web", "spec": {"name": "web", **spec}}))
    daemon.answer("PATCH /v1/services/web", changed(("changed", "web")))
    assert vipctl("set", "web", *words).code == 0
    assert daemon.last.body == {"service": fields}
    assert daemon.last.query == "version=0123456789abcdef"


def test_set_makes_a_backend_a_backup(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    web = with_backends("10.0.0.1", {"address": "fd00::5", "port": 80, "weight": 2})
    web["service"] |= {"name": "web"}
    daemon.answer("GET /v1/services/web", web)
    daemon.answer("PATCH /v1/services/web", changed(("changed", "web")))
    ended = vipctl("set", "web/[fd00::05]:80", "--backup", "true")
    assert ended.out == f"changed web ([fd00::5]:80: backup true){STORED}\n"
    marked = {"address": "fd00::5", "port": 80, "weight": 2, "backup": True}
    assert daemon.last.body == {"service": {"backends": ["10.0.0.1", marked]}}
    assert daemon.last.query == "version=0123456789abcdef"
    ended = vipctl("set", "web/10.0.0.7", "--backup", "true")
    assert (ended.code, ended.err) == (
        3,
        "vipctl: web has no backend 10.0.0.7; hint: vipctl describe web shows them\n",
    )


@pytest.mark.parametrize(
    ("word", "known", "keys"),
    [
        ("500", {}, {"max_connections": 500}),
        ("none", {"max_connections": 7}, {}),
        ("5x", {}, {"max_connections": "5x"}),
    ],
)
def test_set_limits_the_connections_of_a_backend(
    vipctl: Vipctl, daemon: FakeDaemon, word: str, known: Json, keys: Json
) -> None:
    web = with_backends("10.0.0.1", {"address": "10.0.0.5", "weight": 2, **known})
    web["service"] |= {"name": "web"}
    daemon.answer("GET /v1/services/web", web)
    daemon.answer("PATCH /v1/services/web", changed(("changed", "web")))
    ended = vipctl("set", "web/10.0.0.5", "--max-connections", word)
    assert ended.out == f"changed web (10.0.0.5: max_connections {word}){STORED}\n"
    backends = ["10.0.0.1", {"address": "10.0.0.5", "weight": 2, **keys}]
    assert daemon.last.body == {"service": {"backends": backends}}


def test_remove_several_is_one_json_document(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("DELETE /v1/services/a", changed(("unchanged", "a")))
    daemon.answer("DELETE /v1/services/b", changed(("removed", "b"), applied=False, message="later"))
    daemon.answer("DELETE /v1/services/c", changed(("unchanged", "c")))
    ended = vipctl("remove", "a", "b", "c", "-o", "json")
    document = json.loads(ended.out)
    assert (document["changed"], document["applied"], document["message"]) == (True, False, "later")
    assert [result["name"] for result in document["results"]] == ["a", "b", "c"]
    assert ended.code == 1


def with_backends(*backends: object) -> Json:
    return one(DNS | {"spec": DNS["spec"] | {"backends": [*backends]}})


@pytest.mark.parametrize(
    ("others", "given", "sent", "told"),
    [
        ([{"address": "10.0.0.1", "port": 8080}], "10.0.0.9", {"address": "10.0.0.9", "port": 8080}, True),
        (
            [{"address": "10.0.0.1", "port": 8080}],
            "10.0.0.9@2",
            {"address": "10.0.0.9", "port": 8080, "weight": 2},
            True,
        ),
        ([{"address": "10.0.0.1", "port": 8080}], "10.0.0.9:80", {"address": "10.0.0.9", "port": 80}, False),
        (["10.0.0.1", {"address": "10.0.0.2", "weight": 2}], "10.0.0.9", "10.0.0.9", False),
        ([], "10.0.0.9", "10.0.0.9", False),
        (["10.0.0.1", {"address": "10.0.0.2", "port": 8080}], "10.0.0.1", "10.0.0.1", False),
    ],
)
def test_a_new_backend_gets_the_port_that_all_others_have(
    vipctl: Vipctl, daemon: FakeDaemon, others: list[object], given: str, sent: object, told: bool
) -> None:
    daemon.answer("GET /v1/services/web", with_backends(*others))
    daemon.answer("POST /v1/services/web/backends", changed(("changed", "web")))
    ended = vipctl("add-backend", "web", given)
    assert ended.code == 0
    assert daemon.last.body == {"backends": [sent]}
    assert ("on port 8080, as all its others" in ended.out) == told


@pytest.mark.parametrize(
    ("others", "shown"),
    [
        ([{"address": "10.0.0.1", "port": 80}, {"address": "10.0.0.2", "port": 8080}], "80, 8080"),
        (["10.0.0.1", {"address": "10.0.0.2", "port": 8080}], "none of their own, 8080"),
    ],
)
def test_where_the_others_differ_the_port_has_to_be_said(
    vipctl: Vipctl, daemon: FakeDaemon, others: list[object], shown: str
) -> None:
    daemon.answer("GET /v1/services/web", with_backends(*others))
    ended = vipctl("add-backend", "web", "10.0.0.9")
    assert ended.code == 2
    assert f"the backends of web have different ports: {shown}; hint: say which: 10.0.0.9:8080" in ended.err
    assert [request.method for request in daemon.requests] == ["GET"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["drain", "web"], "vipctl drain web/ADDR; vipctl describe web shows its backends"),
        (["drain", "10.96.0.1:80/tcp"], "vipctl drain 10.96.0.1:80/tcp/ADDR"),
        (["disable", "shop/web"], "vipctl disable shop/web/ADDR"),
        (
            ["drain", "10.0.0.1:80"],
            "vipctl drain TARGET/10.0.0.1:80, or in every service: vipctl drain --address",
        ),
        (["resume", "10.0.0.1"], "vipctl resume TARGET/10.0.0.1, or in"),
        (
            ["drain", "fd00::5"],
            "vipctl drain TARGET/fd00::5, or in every service: vipctl drain --address fd00::5",
        ),
        (["set", "web", "--weight", "3"], "vipctl set web/ADDR --weight 3"),
        (["set", "10.0.0.1", "--weight", "3"], "vipctl set TARGET/10.0.0.1 --weight 3"),
        (["add", "fd00:96::1:80/tcp", "fd00::5"], "write it like [fd00:96::1]:80/tcp"),
        (["add", "http://10.96.0.1/x", "10.0.0.1"], "write address, port and protocol: 10.96.0.1:80/tcp"),
        (["add", "10.96.0.1:80/tcp", "http://10.0.0.1"], "write an address, and a port"),
        (["add", "10.96.0.1", "10.0.0.1"], "vipctl add 10.96.0.1:80/tcp, or for several ports: vipctl add"),
        (
            ["add", "10.96.0.1:80", "10.0.0.1", "--check", "http:8080/x,interval=1s,rise=2"],
            "--check '{type: http, port: 8080, path: /x, interval: 1s, rise: 2}'",
        ),
        (["set", "web", "--check", "tcp:80,fall=1"], "--check '{type: tcp, port: 80, fall: 1}'"),
        (["completion"], "vipctl completion -h"),
        (["set-dataplane"], "vipctl set-dataplane -h"),
    ],
)
def test_the_hint_is_for_what_was_typed(
    vipctl: Vipctl, daemon: FakeDaemon, words: list[str], hint: str
) -> None:
    ended = vipctl(*words)
    assert ended.code == 2
    assert f"hint: {hint}" in ended.err
    assert ended.err.count("\n") == 1
    assert daemon.requests == []


def test_add_and_remove_backends(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("GET /v1/services/dns", one(DNS))
    daemon.answer("POST /v1/services/dns/backends", changed(("changed", "dns")))
    ended = vipctl("add-backend", "dns", "10.244.3.9", "10.244.3.10@2")
    assert ended.out == f"changed dns (with 10.244.3.9, 10.244.3.10@2){STORED}\n"
    assert daemon.last.body == {"backends": ["10.244.3.9", {"address": "10.244.3.10", "weight": 2}]}
    ended = vipctl("add-backend", "dns", "--backup", "10.244.3.11")
    assert ended.out == f"changed dns (with 10.244.3.11 as a backup){STORED}\n"
    assert daemon.last.body == {"backends": [{"address": "10.244.3.11", "backup": True}]}
    assert vipctl("add-backend", "dns").code == 2
    daemon.answer("DELETE /v1/services/dns/backends", changed(("changed", "dns")))
    ended = vipctl("remove-backend", "dns", "10.244.3.9:53", "[fd00::05]:53")
    assert ended.out == f"changed dns (without 10.244.3.9:53, [fd00::5]:53){STORED}\n"
    assert daemon.last.body == {"backends": ["10.244.3.9:53", "[fd00::5]:53"]}
    assert vipctl("remove-backend", "dns", "10.244.3.9@2").code == 2


def test_the_only_problem_of_a_request_is_said_once(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    what, hint = "web: 10.10.0.1 is an address of this host itself", "choose another"
    daemon.refuse("POST /v1/services", 422, "invalid", what, hint=hint, problems=[f"{what}; {hint}"])
    ended = vipctl("add", "10.10.0.1:80/tcp", "10.0.0.1", "--name", "web")
    assert ended == (1, "", f"vipctl: {what}; hint: {hint}\n")
    daemon.refuse("POST /v1/services", 422, "invalid", "the service is not valid", problems=["a", "b"])
    ended = vipctl("add", "10.10.0.1:80/tcp", "10.0.0.1", "--name", "web")
    assert ended == (1, "", "a\nb\nvipctl: the service is not valid\n")


def test_quiet_prints_nothing(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("DELETE /v1/services/a", changed(("removed", "a")))
    assert vipctl("remove", "a", "-q") == (0, "", "")
