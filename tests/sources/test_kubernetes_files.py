"""In a file of Kubernetes objects each Service is taken or refused by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.sources.services_directory import GOOD, ServicesDirectory
from vipd.cli.inputs import read_inputs
from vipd.control.address_policy import AddressPolicy
from vipd.control.admission import admit_unit
from vipd.control.catalog import MergeResult, merge
from vipd.control.service_status import refused_units

Object = dict[str, Any]


def service(name: str, number: int, **spec: object) -> Object:
    """A Service with the address 10.96.0.NUMBER."""
    ports = [{"name": "http", "port": 80}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "shop"},
        "spec": {"clusterIP": f"10.96.0.{number}", "ports": ports, **spec},
    }


def slice_of(name: str, address: str, **keys: object) -> Object:
    """The EndpointSlice of a Service, with one endpoint."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{name}-x7k2p",
            "namespace": "shop",
            "labels": {"kubernetes.io/service-name": name},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080}],
        "endpoints": [{"addresses": [address]}],
        **keys,
    }


def balancer(name: str, number: int, *addresses: str, **spec: object) -> Object:
    """A Service of type LoadBalancer at these addresses."""
    found = service(name, number, type="LoadBalancer", **spec)
    found["status"] = {"loadBalancer": {"ingress": [{"ip": address} for address in addresses]}}
    return found


def cluster(*objects: object) -> str:
    """What `kubectl get -o json` prints: one List, over many lines."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}, indent=1)


WEB = (service("web", 10), slice_of("web", "10.244.0.10"))
API = (service("api", 11), slice_of("api", "10.244.0.11"))
NEW_API = (service("api", 11), slice_of("api", "10.244.0.99"))


def backends(services_dir: ServicesDirectory) -> dict[str, list[str]]:
    """The backends of each service that serves."""
    services = merge(services_dir.source.units()).services
    return {name: [str(b) for b in found.backends] for name, found in services.items()}


def changed(found: Object, **spec: object) -> Object:
    """A Service with another spec."""
    return {**found, "spec": {**found["spec"], **spec}}


def without(found: Object, *keys: str) -> Object:
    return {key: value for key, value in found.items() if key not in keys}


ODD: Mapping[str, tuple[object, ...]] = {
    "leading zeros": (changed(API[0], clusterIP="10.96.0.011"), NEW_API[1]),
    "leading zeros of a load balancer": (balancer("api", 11, "203.0.113.010"), NEW_API[1]),
    "source range": (
        balancer("api", 11, "203.0.113.1", loadBalancerSourceRanges=["10.0.0.0/33"]),
        NEW_API[1],
    ),
    "protocol": (changed(API[0], ports=[{"name": "http", "port": 80, "protocol": "QUIC"}]), NEW_API[1]),
    "port": (changed(API[0], ports=[{"name": "http", "port": 80000}]), NEW_API[1]),
    "no ports": (changed(API[0], ports=[]), NEW_API[1]),
    "twice": (*NEW_API, API[0]),
    "slice twice": (*NEW_API, NEW_API[1]),
    "slice of another type": (API[0], slice_of("api", "10.244.0.99", addressType="IPv9")),
    "slice with a bad address": (API[0], slice_of("api", "10.244.0.999")),
    "slice with a bad port": (API[0], slice_of("api", "10.244.0.99", ports=[{"name": "http", "port": -1}])),
    "slice that is no mapping": (API[0], slice_of("api", "10.244.0.99", endpoints={"addresses": 1})),
    "old version of slices": (API[0], {**NEW_API[1], "apiVersion": "discovery.k8s.io/v1beta1"}),
    "version": ({**NEW_API[0], "apiVersion": "v2"}, NEW_API[1]),
    "kind misspelt": ({**NEW_API[0], "kind": "Servcie"}, NEW_API[1]),
    "kind missing": (without(NEW_API[0], "kind"), NEW_API[1]),
    "kind of the slice missing": (NEW_API[0], without(NEW_API[1], "kind")),
    "spec of text": ({**NEW_API[0], "spec": "none"}, NEW_API[1]),
    "annotations of a list": (
        {**NEW_API[0], "metadata": {**NEW_API[0]["metadata"], "annotations": ["x"]}},
        NEW_API[1],
    ),
    "affinity": (changed(API[0], sessionAffinity="Cookie"), NEW_API[1]),
    "no name": (without(NEW_API[0], "metadata"), NEW_API[1]),
    "no object": (5, NEW_API[1]),
    "bad name": ({**NEW_API[0], "metadata": {"name": "A_B", "namespace": "shop"}}, NEW_API[1]),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_one_odd_object_keeps_its_last_good_version_and_all_others_serve(
    services_dir: ServicesDirectory, odd: tuple[object, ...]
) -> None:
    services_dir.write("cluster.json", cluster(*WEB, *API))
    assert services_dir.step() == {"shop/web", "shop/api"}
    assert services_dir.problems() == ""
    web = (service("web", 10), slice_of("web", "10.244.0.77"))
    services_dir.write("cluster.json", cluster(*odd, *web, service("fresh", 12)))
    for _ in range(2):
        assert services_dir.step() == {"shop/web", "shop/api", "shop/fresh"}
        assert backends(services_dir) == {
            "shop/web": ["10.244.0.77"],
            "shop/api": ["10.244.0.11"],
            "shop/fresh": [],
        }
        assert "cluster.json:" in services_dir.problems()
        assert services_dir.source.faults() == ()
        services_dir.restart()
    services_dir.write("cluster.json", cluster(*web, *NEW_API))
    assert services_dir.step() == {"shop/web", "shop/api"}
    assert services_dir.problems() == ""
    services_dir.write("cluster.json", cluster(*web))
    for _ in range(2):
        assert services_dir.step() == {"shop/web"}
        services_dir.restart()


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_check_names_every_problem_of_an_odd_object_and_those_that_vipd_names(
    services_dir: ServicesDirectory, odd: tuple[object, ...]
) -> None:
    path = services_dir.write("cluster.json", cluster(*WEB, *odd))
    assert "shop/web" in services_dir.step()
    read = read_inputs([str(path)])
    assert sorted(map(str, read.problems)) == sorted(services_dir.problems().splitlines())
    assert read.problems


def test_objects_of_no_concern_are_no_reason_to_hold_anything(services_dir: ServicesDirectory) -> None:
    services_dir.write("cluster.json", cluster(*WEB, *API))
    services_dir.step()
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "api"}}
    headless, alias = service("h", 1, clusterIP="None"), service("e", 1, type="ExternalName")
    stray = slice_of("unknown", "10.244.0.50")
    for number, objects in enumerate(
        ((deployment, *WEB), (*WEB, headless, alias, stray), (*WEB, service("m", 9)))
    ):
        text = "\n---\n".join(json.dumps(found) for found in objects)
        services_dir.write("cluster.yaml" if number else "cluster.json", text)
        assert services_dir.step() - {"shop/m"} == {"shop/web"}
        (services_dir.directory / "cluster.json").unlink(missing_ok=True)
    assert services_dir.problems() == ""


def test_a_deployment_beside_its_service_is_a_problem_of_its_own(services_dir: ServicesDirectory) -> None:
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web", "namespace": "shop"},
    }
    services_dir.write("web.yaml", "\n---\n".join(map(json.dumps, (*WEB, deployment))))
    assert services_dir.step() == {"shop/web"}
    assert "kind Deployment is not something that vipd serves" in services_dir.problems()
    services_dir.write("web.yaml", "\n---\n".join(map(json.dumps, (*API, deployment))))
    assert services_dir.step() == {"shop/api"}


def test_of_two_services_with_one_address_and_port_the_first_serves(services_dir: ServicesDirectory) -> None:
    twin = service("api", 10)
    services_dir.write("cluster.json", cluster(*WEB, twin))
    assert services_dir.step() == {"shop/web"}
    assert "shop/api: 10.96.0.10:80/tcp already belongs to shop/web" in services_dir.problems()
    services_dir.write("cluster.json", cluster(twin, *WEB, *API[1:]))
    assert services_dir.step() == {"shop/web"}, "who serves already goes on"
    services_dir.restart()
    assert services_dir.step() == {"shop/web"}


def test_a_text_that_is_no_yaml_changes_nothing(services_dir: ServicesDirectory) -> None:
    services_dir.write("cluster.yaml", cluster(*WEB, *API))
    services_dir.step()
    services_dir.write("cluster.yaml", f"{json.dumps(WEB[0])}\n---\n{{broken: [\n")
    for _ in range(2):
        assert services_dir.step() == {"shop/web", "shop/api"}
        assert backends(services_dir)["shop/api"] == ["10.244.0.11"]
        services_dir.restart()


@pytest.mark.parametrize("text", ["", cluster(), cluster(*API[1:])], ids=["nothing", "no item", "no Service"])
def test_a_dump_without_a_service_is_held(services_dir: ServicesDirectory, text: str) -> None:
    services_dir.write("cluster.json", cluster(*WEB, *API))
    services_dir.step()
    services_dir.write("cluster.json", text)
    for _ in range(2):
        assert services_dir.step() == {"shop/web", "shop/api"}
        assert "2 services of its last good version serve on" in services_dir.problems()
        services_dir.restart()
    services_dir.step()
    services_dir.source.accept_removal()
    assert services_dir.step() == set()


def test_native_services_beside_objects_are_one_unit(services_dir: ServicesDirectory) -> None:
    objects = "\n---\n".join(map(json.dumps, WEB))
    services_dir.write("both.yaml", f"{GOOD}\n---\n{objects}")
    assert services_dir.step() == {"dns", "shop/web"}
    bad = GOOD.replace("10.96.0.10", "10.96.0.300")
    moved = "\n---\n".join(map(json.dumps, (WEB[0], slice_of("web", "10.244.0.88"))))
    services_dir.write("both.yaml", f"{bad}\n---\n{moved}")
    for _ in range(2):
        assert services_dir.step() == {"dns", "shop/web"}
        assert backends(services_dir)["shop/web"] == ["10.244.0.88"]
        services_dir.restart()


def test_a_dump_becomes_vipd_v1_and_back_again(services_dir: ServicesDirectory) -> None:
    services_dir.write("web.yaml", cluster(*WEB))
    services_dir.step()
    services_dir.write("web.yaml", GOOD.replace("dns", "shop/web").replace("10.96.0.300", "10.96.0.10"))
    assert services_dir.step() == {"shop/web"}
    assert backends(services_dir) == {"shop/web": ["10.244.0.5"]}
    services_dir.write(
        "web.yaml", cluster(*ODD["protocol"], *ODD["slice twice"][:0], changed(WEB[0], ports=[]))
    )
    assert services_dir.step() == {"shop/web"}
    assert backends(services_dir) == {"shop/web": ["10.244.0.5"]}


def test_an_unchanged_service_of_a_changed_file_costs_nothing(services_dir: ServicesDirectory) -> None:
    services_dir.write("cluster.json", cluster(*WEB, *API))
    services_dir.step()
    before = dict(services_dir.source.units())
    services_dir.write("cluster.json", cluster(*WEB, *NEW_API))
    services_dir.step()
    after = services_dir.source.units()
    same = [name.rpartition("#")[2] for name in after if after[name] is before.get(name)]
    assert "shop/web" in same
    assert "shop/api" not in same


def admitted(services_dir: ServicesDirectory, policy: AddressPolicy) -> MergeResult:
    """One step with a policy on claims."""
    services_dir.source.scan()
    merged = merge({name: admit_unit(unit, policy) for name, unit in services_dir.source.units().items()})
    services_dir.source.save_accepted(merged.chosen)
    return merged


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (AddressPolicy(host_addresses=("192.0.2.1",)), "192.0.2.1 is an address of this host itself"),
        (
            AddressPolicy(allowed=("10.96.0.0/16", "203.0.113.0/24")),
            "192.0.2.1 lies outside allowed_addresses",
        ),
    ],
    ids=["the host's own, as with k3s", "outside the settings"],
)
def test_a_load_balancer_address_that_is_not_allowed_is_refused_alone(
    services_dir: ServicesDirectory, policy: AddressPolicy, why: str
) -> None:
    traefik = balancer("traefik", 20, "192.0.2.1", "203.0.113.7")
    services_dir.write("cluster.json", cluster(*WEB, traefik))
    for _ in range(2):
        for _ in range(2):
            merged = admitted(services_dir, policy)
            assert set(merged.services) == {"shop/web", "shop/traefik"}
            found = merged.services["shop/traefik"]
            assert [e.address for e in found.external_addresses] == ["203.0.113.7"]
            (problem,) = (str(p) for part in merged.problems.values() for p in part)
            assert f"shop/traefik: {why}: it is left out, and the rest of the service serves" in problem
        units, serving = services_dir.source.units(), dict.fromkeys(merged.chosen, 1)
        (refused,) = refused_units(units, merged.problems, serving)
        assert refused.serves == "the rest of the object serves"
        services_dir.restart()
    services_dir.write("cluster.json", cluster(*WEB, changed(traefik, clusterIP="10.96.0.021")))
    for _ in range(2):
        merged = admitted(services_dir, policy)
        found = merged.services["shop/traefik"]
        assert found.addresses == ("10.96.0.20",), "its last good version serves on"
        assert [e.address for e in found.external_addresses] == ["203.0.113.7"]
        services_dir.restart()


def test_a_cluster_address_that_is_not_allowed_refuses_its_service(services_dir: ServicesDirectory) -> None:
    services_dir.write("cluster.json", cluster(*WEB, *API))
    merged = admitted(services_dir, AddressPolicy(host_addresses=("10.96.0.11",)))
    assert set(merged.services) == {"shop/web"}


def test_port_names_of_digits_as_kubernetes_takes_them(services_dir: ServicesDirectory) -> None:
    ports = [{"name": "80-8080", "port": 80}, {"name": "81", "port": 81}]
    numbers = [{"name": "80-8080", "port": 8080}, {"name": "81", "port": 8081}]
    objects = (changed(API[0], ports=ports), slice_of("api", "10.244.0.11", ports=numbers))
    services_dir.write("cluster.json", cluster(*objects, changed(WEB[0], ports=[])))
    for _ in range(2):
        assert services_dir.step() == {"shop/api"}
        (found,) = merge(services_dir.source.units()).services.values()
        assert [(port.name, port.target) for port in found.ports] == [("80-8080", 8080), ("81", 8081)]
        services_dir.write("cluster.json", cluster(*ODD["port"]))
        services_dir.step()
        services_dir.restart()
