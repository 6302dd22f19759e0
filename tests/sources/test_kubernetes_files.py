"""In a file of Kubernetes objects each Service is taken or refused by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.sources.host import GOOD, Host, QuickHost

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


def in_file(number: int, *objects: object) -> str:
    """A List of objects whose namespace and addresses are those of one file."""
    text = cluster(*objects).replace('"namespace": "shop"', f'"namespace": "shop{number}"')
    return text.replace("10.96.0.", f"10.96.{number}.").replace("203.0.113.", f"203.0.{number}.")


def test_one_odd_object_keeps_its_last_good_version_and_all_others_serve(host: Host) -> None:
    """Each in a file of its own."""
    web, fresh = (service("web", 10), slice_of("web", "10.244.0.77")), service("fresh", 12)
    for number in range(len(ODD)):
        host.put(f"{number}.json", in_file(number, *WEB, *API))
    host.step()
    assert host.problems() == []
    for number, odd in enumerate(ODD.values()):
        host.put(f"{number}.json", in_file(number, *odd, *web, fresh))
    expected = {"web": ["10.244.0.77"], "api": ["10.244.0.11"], "fresh": []}
    for _ in range(2):
        host.step()
        serving, problems = host.backends(), "\n".join(host.problems())
        differing = {
            case: seen
            for number, case in enumerate(ODD)
            if (seen := {name: serving.get(f"shop{number}/{name}") for name in expected}) != expected
            or f"/{number}.json:" not in problems
        }
        assert differing == {}
        host.crash()
    for number in range(len(ODD)):
        host.put(f"{number}.json", in_file(number, *web, *NEW_API))
    assert len(host.step()) == 2 * len(ODD)
    assert host.problems() == []
    for number in range(len(ODD)):
        host.put(f"{number}.json", in_file(number, *web))
    for _ in range(2):
        assert host.step() == {f"shop{number}/web" for number in range(len(ODD))}
        host.restart()


def test_check_names_every_problem_of_an_odd_object_and_those_that_vipd_names(host: Host) -> None:
    for number, odd in enumerate(ODD.values()):
        host.put(f"{number}.json", in_file(number, *WEB, *odd))
    assert host.step() >= {f"shop{number}/web" for number in range(len(ODD))}
    checked = host.vipctl("check", str(host.services_dir), check=False)
    assert checked.returncode == 1
    problems = [line for line in checked.stderr.splitlines() if ".json:" in line and ": note: " not in line]
    assert sorted(problems) == sorted(host.problems())
    assert [n for n in range(len(ODD)) if f"/{n}.json:" not in "\n".join(problems)] == []


def test_objects_of_no_concern_are_no_reason_to_hold_anything(host: Host) -> None:
    host.put("cluster.json", cluster(*WEB, *API))
    host.step()
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "api"}}
    headless, alias = service("h", 1, clusterIP="None"), service("e", 1, type="ExternalName")
    stray = slice_of("unknown", "10.244.0.50")
    for number, objects in enumerate(
        ((deployment, *WEB), (*WEB, headless, alias, stray), (*WEB, service("m", 9)))
    ):
        text = "\n---\n".join(map(json.dumps, objects))
        host.put("cluster.yaml" if number else "cluster.json", text)
        assert host.step() - {"shop/m"} == {"shop/web"}
        (host.services_dir / "cluster.json").unlink(missing_ok=True)
    assert host.problems() == []


def test_a_deployment_beside_its_service_is_a_problem_of_its_own(host: Host) -> None:
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web", "namespace": "shop"},
    }
    host.put("web.yaml", "\n---\n".join(map(json.dumps, (*WEB, deployment))))
    assert host.step() == {"shop/web"}
    assert "kind Deployment is not something that vipd serves" in str(host.problems())
    host.put("web.yaml", "\n---\n".join(map(json.dumps, (*API, deployment))))
    assert host.step() == {"shop/api"}


def test_of_two_services_with_one_address_and_port_the_first_serves(host: Host) -> None:
    twin = service("api", 10)
    host.put("cluster.json", cluster(*WEB, twin))
    assert host.step() == {"shop/web"}
    assert "shop/api: 10.96.0.10:80/tcp already belongs to shop/web" in str(host.problems())
    host.put("cluster.json", cluster(twin, *WEB, *API[1:]))
    assert host.step() == {"shop/web"}, "who serves already goes on"
    host.restart()
    assert host.step() == {"shop/web"}


def test_a_text_that_is_no_yaml_changes_nothing(host: Host) -> None:
    host.put("cluster.yaml", cluster(*WEB, *API))
    host.step()
    host.put("cluster.yaml", f"{json.dumps(WEB[0])}\n---\n{{broken: [\n")
    for _ in range(2):
        assert host.step() == {"shop/web", "shop/api"}
        assert host.backends()["shop/api"] == ["10.244.0.11"]
        host.restart()


def test_a_dump_without_a_service_is_held(host: Host) -> None:
    for text in ("", cluster(), cluster(*API[1:])):
        host.put("cluster.json", cluster(*WEB, *API))
        assert host.step() == {"shop/web", "shop/api"}
        host.put("cluster.json", text)
        for _ in range(2):
            assert host.step() == {"shop/web", "shop/api"}
            assert "2 services of its last good version serve on" in str(host.problems())
            host.restart()
    host.accept_removal()
    assert host.step() == set()


def test_native_services_beside_objects_are_one_unit(host: Host) -> None:
    host.put("both.yaml", f"{GOOD}\n---\n" + "\n---\n".join(map(json.dumps, WEB)))
    assert host.step() == {"dns", "shop/web"}
    bad = GOOD.replace("10.96.0.10", "10.96.0.300")
    moved = "\n---\n".join(map(json.dumps, (WEB[0], slice_of("web", "10.244.0.88"))))
    host.put("both.yaml", f"{bad}\n---\n{moved}")
    for _ in range(2):
        assert host.step() == {"dns", "shop/web"}
        assert host.backends()["shop/web"] == ["10.244.0.88"]
        host.restart()


def test_a_dump_becomes_vipd_v1_and_back_again(host: Host) -> None:
    host.put("web.yaml", cluster(*WEB))
    host.step()
    host.put("web.yaml", GOOD.replace("dns", "shop/web"))
    assert host.step() == {"shop/web"}
    assert host.backends() == {"shop/web": ["10.244.0.5"]}
    host.put("web.yaml", cluster(*ODD["protocol"], changed(WEB[0], ports=[])))
    assert host.step() == {"shop/web"}
    assert host.backends() == {"shop/web": ["10.244.0.5"]}


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"host_addresses": ["192.0.2.1"]}, "192.0.2.1 is an address of this host itself"),
        (
            {"allowed_addresses": ["10.96.0.0/16", "203.0.113.0/24"]},
            "192.0.2.1 lies outside allowed_addresses",
        ),
    ],
    ids=["the host's own, as with k3s", "outside the settings"],
)
def test_a_load_balancer_address_that_is_not_allowed_is_refused_alone(
    setting: dict[str, Any], why: str
) -> None:
    traefik = balancer("traefik", 20, "192.0.2.1", "203.0.113.7")
    with QuickHost(**setting) as host:
        host.put("cluster.json", cluster(*WEB, traefik))
        for _ in range(2):
            assert host.step() == {"shop/web", "shop/traefik"}
            assert host.service("shop/traefik")["spec"]["load_balancer_addresses"] == "203.0.113.7"
            (refused,) = host.source("files")["refused"]
            (problem,) = refused["problems"]
            assert f"shop/traefik: {why}: it is left out, and the rest of the service serves" in problem
            assert refused["serves"] == "the rest of the object serves"
            host.restart()
        host.put("cluster.json", cluster(*WEB, changed(traefik, clusterIP="10.96.0.021")))
        for _ in range(2):
            host.step()
            spec = host.service("shop/traefik")["spec"]
            assert spec["address"] == "10.96.0.20", "its last good version serves on"
            assert spec["load_balancer_addresses"] == "203.0.113.7"
            host.restart()


def test_a_cluster_address_that_is_not_allowed_refuses_its_service() -> None:
    with QuickHost(host_addresses=["10.96.0.11"]) as host:
        host.put("cluster.json", cluster(*WEB, *API))
        assert host.step() == {"shop/web"}


def test_port_names_of_digits_as_kubernetes_takes_them(host: Host) -> None:
    ports = [{"name": "80-8080", "port": 80}, {"name": "81", "port": 81}]
    numbers = [{"name": "80-8080", "port": 8080}, {"name": "81", "port": 8081}]
    objects = (changed(API[0], ports=ports), slice_of("api", "10.244.0.11", ports=numbers))
    host.put("cluster.json", cluster(*objects, changed(WEB[0], ports=[])))
    for _ in range(2):
        assert host.step() == {"shop/api"}
        declared = host.service("shop/api")["spec"]["ports"]
        assert [(port["name"], port["target"]) for port in declared] == [("80-8080", 8080), ("81", 8081)]
        host.put("cluster.json", cluster(*ODD["port"]))
        host.step()
        host.restart()
