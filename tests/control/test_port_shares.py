"""Ports of this host: however many one author names, another one finds a port."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.api.serving import Api, served
from vipd.cli.main import cli
from vipd.control.address_policy import AddressPolicy
from vipd.control.admission import Admission
from vipd.declaration.problems import Declaration
from vipd.declaration.unit import Unit
from vipd.host.settings.settings import load_settings
from vipd.model.service import Backend, Origin, Protocol, Service, ServicePort

MOST = 10
POLICY = AddressPolicy(host_ports_per_author=MOST)
BEYOND = f"more than {MOST} ports of this host, the most of one author"


def service(author: str, number: int) -> Service:
    """One with a node port for TCP and UDP, from etcd."""
    ports = tuple(ServicePort(53, protocol, node_port=number) for protocol in (Protocol.TCP, Protocol.UDP))
    key, namespace = f"/services/{author}/{number}", f"etcd:/services/{author}/"
    origin = Origin("etcd", key, 1, written_by=namespace)
    return Service(f"{author}/{number}", ("10.96.0.1",), ports, (Backend("10.0.0.1"),), origin=origin)


class Keys:
    """Units with one service each."""

    def __init__(self) -> None:
        self.admission, self.units = Admission(), dict[str, Unit]()

    def put(self, *services: Service) -> None:
        for each in services:
            before = self.units.get(each.name, Unit(Declaration(), Declaration()))
            self.units[each.name] = Unit(Declaration((each,)), before.accepted)
        self.admit()

    def admit(self) -> None:
        self.admission.admit(self.admission.update_units([self.units], POLICY))
        for name, unit in self.admission.units.items():  # what may serve is accepted
            if unit.candidate.ok:
                self.units[name] = Unit(self.units[name].candidate, self.units[name].candidate)

    def serving(self, author: str) -> set[str]:
        units = self.admission.units.items()
        return {name for name, unit in units if name.startswith(author) and unit.candidate.ok}


def test_many_keys_of_one_author_leave_ports_to_others() -> None:
    keys = Keys()
    keys.put(*(service("greedy", 30000 + n) for n in range(300)), service("modest", 30400))
    assert len(keys.serving("greedy")) == MOST
    assert keys.serving("modest") == {"modest/30400"}
    refused = next(unit for unit in keys.admission.units.values() if not unit.candidate.ok)
    (problem,) = refused.candidate.problems
    assert problem.what.endswith(f"etcd:/services/greedy/ has {BEYOND}")


def test_a_port_that_is_given_back_can_be_used_and_what_serves_can_change() -> None:
    keys = Keys()
    keys.put(*(service("a", 30000 + n) for n in range(MOST + 1)))
    (late,) = keys.units.keys() - keys.serving("a")
    kept = sorted(keys.serving("a"))[0]
    before = keys.units[kept].candidate.services[0]
    keys.put(replace(before, backends=()))
    assert kept in keys.serving("a"), "its ports are not new"
    del keys.units[kept]
    keys.admit()
    keys.admit()
    assert late in keys.serving("a")


def test_what_served_before_the_limit_serves_on_after_a_restart() -> None:
    keys = Keys()
    declared = [Declaration((service("a", 30000 + n),)) for n in range(2 * MOST)]
    keys.units = {each.services[0].name: Unit(each, each) for each in declared}
    keys.admit()
    assert len(keys.serving("a")) == 2 * MOST
    keys.put(service("a", 31000))
    assert "a/31000" not in keys.serving("a")


@pytest.mark.parametrize(("number", "code"), [(MOST, 0), (MOST + 1, 1)])
def test_check_tells_of_a_file_with_too_many(number: int, code: int, tmp_path: Path) -> None:
    file, other = tmp_path / "many.yaml", tmp_path / "other.yaml"
    text = "apiVersion: vipd/v1\nservices:\n"
    lines = (
        f"  - {{name: s{n}, address: 10.96.0.{n + 1}, ports: [{{port: 80, node_port: {30000 + n}}}]}}"
        for n in range(number)
    )
    file.write_text(text + "\n".join(lines) + "\n")
    other.write_text(f"{text}  - {{name: o, address: 10.96.1.1, ports: [{{port: 80, node_port: 30200}}]}}\n")
    words = ["check", str(file), str(other), "--set", f"node_ports_per_author={MOST}"]
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    assert done.return_value == code, done.output
    assert (f"many.yaml:{number + 2}: s{MOST}: " in done.output and BEYOND in done.output) is bool(code)


def test_the_api_refuses_a_service_with_a_port_too_many() -> None:
    async def story(api: Api) -> None:
        def body(n: int, port: int) -> dict[str, object]:
            ports = [{"port": 80, "node_port": port}]
            return {"name": f"s{n}", "address": f"10.96.0.{n + 1}", "ports": ports}

        api.claims = replace(api.claims, host_ports_per_author=2)
        for n in range(2):
            added = await api.ask("POST", "/v1/services", {"service": body(n, 30000 + n)})
            assert added.status == 200, added.body
        refused = await api.ask("POST", "/v1/services", {"service": body(2, 30002)})
        assert refused.status == 422
        assert "vipctl's services have more than 2 ports" in str(refused.body)
        more = {"service": {"backends": ["10.0.0.1"]}}
        assert (await api.ask("PATCH", "/v1/services/s1", more)).status == 200, "its port is not new"
        other = {"service": {**body(2, 80), "ports": ["80/tcp"]}}
        assert (await api.ask("POST", "/v1/services", other)).status == 200

    served(story)


def test_a_cluster_that_kube_proxy_served_has_no_such_limit_unless_it_is_set() -> None:
    assert load_settings(flags={}).host_ports_per_author == 1384
    assert load_settings(flags={"compat": "kube-proxy"}).host_ports_per_author == 65535
    both = {"compat": "kube-proxy", "node_ports_per_author": 5}
    assert load_settings(flags=both).host_ports_per_author == 5
