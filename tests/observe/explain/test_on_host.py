"""`explain` of a real daemon, and `--on-host` beside real packets: what rules of others do, or unknown."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.lab.daemon import Daemon
from tests.lab.inside import DATAPLANES
from tests.lab.topology import UPLINK, Lab
from tests.packets.services import SERVED_PORT, Services, backend_text

pytestmark = pytest.mark.root

FORWARD = "type filter hook forward priority 0; policy {};"
FIREWALLS = {
    "nothing": "",
    "nft: drops what it does not know": (
        "table inet f {{ chain c {{ {drop} ct state established,related accept; }}; }}"
    ),
    "nft: accepts the backends": (
        "table inet f {{ set b {{ type ipv4_addr; flags interval; elements = {{ 10.244.0.0/16 }}; }}; "
        "chain c {{ {drop} ct state established,related accept; ip daddr @b tcp dport {port} accept; }}; }}"
    ),
    "nft: accepts what was translated": (
        "table inet f {{ chain c {{ {drop} ct state vmap {{ established : accept, related : accept, "
        "invalid : drop }}; ct status dnat accept; }}; }}"
    ),
    "nft: by interface": (
        "table ip f {{ chain c {{ {drop} ct state established accept; "
        'iifname "{client}" oifname "b*" accept; }}; }}'
    ),
    "nft: before translation": (
        "table ip f {{ chain c {{ type filter hook prerouting priority -150; policy accept; "
        "ip daddr 10.96.0.0/12 reject; }}; }}"
    ),
    "nft: by a jump": (
        "table inet f {{ chain own {{ tcp dport {port} reject with tcp reset; }}; "
        "chain c {{ {accept} ip protocol tcp jump own; }}; }}"
    ),
    "nft: in a table with a name of iptables": (
        "table ip mangle {{ chain own {{ type filter hook forward priority -150; policy accept; "
        "tcp dport {port} drop; }}; }}"
    ),
    "nft: with what iptables cannot show": (
        "table ip mangle {{ set s {{ type inet_service; elements = {{ {port} }}; }}; "
        "chain own {{ type filter hook forward priority -150; policy accept; tcp dport @s drop; }}; }}"
    ),
    "nft: a set in a chain of iptables": (
        "table ip raw {{ chain PREROUTING {{ type filter hook prerouting priority -300; policy accept; "
        "tcp dport {{ 9, 10 }} drop; }}; }}"
    ),
    "iptables: drops a port": "filter FORWARD -p tcp -m multiport --dports 9,{port} -j DROP",
    "iptables: another port": "filter FORWARD -p tcp -m multiport --dports 9,10 -j DROP",
    "iptables: refuses": "filter FORWARD -o b+ -m conntrack --ctstate NEW -j REJECT",
    "iptables: raw": "raw PREROUTING -s {source}/32 -j DROP",
    "iptables: mangle": "mangle POSTROUTING ! -p udp -m mark ! --mark 0x99 -j DROP",
}
UNKNOWN = {
    "nft: a limit": "table inet f {{ chain c {{ {drop} limit rate 500/second accept; }}; }}",
    "iptables: a quota": "filter FORWARD -p tcp -m quota --quota 1000000 -j ACCEPT",
}


@pytest.fixture(scope="module", params=DATAPLANES)
def dataplane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as built:
        built.serve_everywhere(SERVED_PORT)
        yield built


@pytest.fixture(scope="module")
def daemon(lab: Lab, dataplane: str) -> Iterator[Daemon]:
    """One that accepts nothing on behalf of its services in chains of others, so that these decide."""
    with Daemon(lab.host, dataplane=dataplane, accept_forwarded=False) as running:
        yield running


@pytest.fixture(scope="module")
def target(lab: Lab, daemon: Daemon) -> str:
    return str(Services(daemon).add(lab.backends[:2]))


def device_to(lab: Lab, address: str) -> str:
    """The host's interface to an address."""
    route = json.loads(lab.host.run("ip", "-j", "route", "get", address).stdout)
    return str(route[0]["dev"])


@pytest.fixture
def firewall(lab: Lab, request: pytest.FixtureRequest) -> Iterator[str]:
    name = str(request.param)
    policies = {policy: FORWARD.format(policy) for policy in ("drop", "accept")}
    text = {**FIREWALLS, **UNKNOWN}[name].format(
        port=SERVED_PORT, source=lab.client.ipv4, client=device_to(lab, lab.client.ipv4), **policies
    )
    if name.startswith("iptables"):
        table, chain, *rule = text.split()
        lab.host.run("iptables", "-t", table, "-I", chain, *rule)
        yield name
        lab.host.run("iptables", "-t", table, "-D", chain, *rule)
    else:
        lab.host.run("nft", "-f", "-", text=text)
        yield name
        if text:
            lab.host.run("nft", "delete", "table", *text.split()[1:3])


def explained(daemon: Daemon, source: str, target: str) -> dict[str, object]:
    said = daemon.vipctl("explain", "--on-host", "-o", "json", "--from", source, target)
    found: dict[str, object] = json.loads(said.stdout)["explanation"]
    return found


@pytest.mark.parametrize("firewall", FIREWALLS, indirect=True)
def test_the_answer_is_what_packets_meet(lab: Lab, daemon: Daemon, target: str, firewall: str) -> None:
    address, _, port = target.partition("/")[0].partition(":")
    verdict = explained(daemon, lab.client.ipv4, target)["verdict"]
    result = lab.client.send(address, int(port), timeout=1.0)
    met = {0: "delivered"}.get(
        len(result.failures), "dropped" if "timeout" in result.failures else "rejected"
    )
    assert verdict == met, firewall


@pytest.mark.parametrize("firewall", UNKNOWN, indirect=True)
def test_a_rule_that_is_not_understood_is_named(lab: Lab, daemon: Daemon, target: str, firewall: str) -> None:
    found = explained(daemon, lab.client.ipv4, target)
    assert (found["verdict"], found["backends"]) == ("unknown", [])
    assert any(word in str(found["reason"]) for word in ("limit rate 500/second", "--quota 1000000"))
    plain = daemon.vipctl("explain", "--from", lab.client.ipv4, target).stdout
    assert "vipd's own rules alone" in plain


def test_an_unreachable_backend_and_the_assumed_interface_are_noted(lab: Lab, daemon: Daemon) -> None:
    lab.host.run("ip", "route", "replace", "unreachable", "203.0.113.99")
    daemon.vipctl("add", "10.96.9.9:80/tcp", backend_text(lab.backends[0]), "203.0.113.99")
    notes = explained(daemon, lab.client.ipv4, "10.96.9.9:80/tcp")["notes"]
    assert isinstance(notes, list)
    assert "this host has no route to 203.0.113.99" in notes
    device = device_to(lab, lab.client.ipv4)
    assert f"it is assumed to come by {device}, for replies leave by it" in notes


def test_a_daemon_knows_its_dataplane_its_services_and_the_addresses_of_its_host(
    lab: Lab, daemon: Daemon, dataplane: str
) -> None:
    backend, (here, client) = backend_text(lab.backends[0]), (UPLINK[4], lab.client.ipv4)
    daemon.write(f"""
  - name: web
    address: 10.96.0.20
    ports: [{{port: 80, node_port: 30080}}]
    backends: ['{backend}']
""")
    daemon.wait_until(lambda: daemon.endpoints("web"), [backend])

    def asked(source: str, target: str) -> tuple[str, str, list[bool]]:
        said = daemon.vipctl("explain", "-o", "json", "--from", source, target)
        view = json.loads(said.stdout)["explanation"]
        tables = {rule["table"] for outcome in view["outcomes"] for rule in outcome["rules"]}
        assert ({"ip vipd", "nat"} & tables) == {"nat" if dataplane == "iptables" else "ip vipd"}
        return view["packet"]["arriving"], view["verdict"], [b["masqueraded"] for b in view["backends"]]

    assert asked("local", "web") == asked(here, "web") == ("local", "delivered", [False])
    assert asked(client, "web")[1:] == ("delivered", [True])
    assert asked(client, f"{here}:30080/tcp")[1:] == ("delivered", [True])
    assert asked(client, f"{lab.backends[0].ipv4}:30080/tcp")[1:] == ("unchanged", [])
    missing = daemon.vipctl("explain", "--from", "local", "nope", check=False)
    assert (missing.returncode, "no service nope" in missing.stderr) == (3, True)
