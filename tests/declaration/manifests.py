"""Kubernetes objects for tests: written by hand, drawn by Hypothesis, and read as vipd reads them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.lab.inside import Declared, declare
from vipd.model.service import Backend, Service

Json = dict[str, Any]


def service(name: str = "web", status: Json | None = None, **spec: Any) -> Json:
    """A Service, of type ClusterIP and with one unnamed port if nothing else is said."""
    whole = {"clusterIP": "10.96.0.20", "ports": [{"port": 80}], **spec}
    found: Json = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": whole}
    return found | ({"status": status} if status else {})


def endpoint_slice(
    *endpoints: Json | str, of: str = "web", name: str = "", ports: Any = None, family: str = "IPv4"
) -> Json:
    """An EndpointSlice with one unnamed port 8080 if nothing else is said."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": of}},
        "addressType": family,
        "ports": [{"port": 8080}] if ports is None else ports,
        "endpoints": [{"addresses": [e]} if isinstance(e, str) else e for e in endpoints],
    }


def items(*objects: Json) -> Json:
    """A List of objects."""
    return {"apiVersion": "v1", "kind": "List", "items": list(objects)}


_NUMBERS = st.sampled_from([8080, 8081, 9090])
_OPTIONAL = st.none() | st.booleans()
_NAMES = ["http", "https", "dns"]


@st.composite
def _endpoints(draw: st.DrawFn, prefix: str) -> Json:
    conditions = {key: draw(_OPTIONAL) for key in ("ready", "serving", "terminating")}
    found: Json = {"addresses": [f"{prefix}{draw(st.integers(1, 4))}"], "conditions": conditions}
    if draw(st.booleans()):
        found["nodeName"] = draw(st.sampled_from(["node1", "node2"]))
    if draw(st.booleans()):
        found["hints"] = {"forZones": [{"name": draw(st.sampled_from(["a", "b"]))}]}
        if "nodeName" in found:
            found["hints"]["forNodes"] = [{"name": found["nodeName"]}]
    return found


@st.composite
def _slices(draw: st.DrawFn, of: str, index: int, names: list[str]) -> Json:
    family, prefix = draw(st.sampled_from([("IPv4", "10.244.0."), ("IPv6", "fd01::")]))
    ports = [
        {
            "name": name,
            "port": draw(st.none() | _NUMBERS),
            "protocol": draw(st.sampled_from(["TCP", "TCP", "UDP"])),
        }
        for name in draw(st.lists(st.sampled_from([*names, "other"]), max_size=4))
    ]
    drawn = draw(st.lists(_endpoints(prefix), max_size=5))
    return endpoint_slice(*drawn, of=of, name=f"{of}-{index}", ports=ports, family=family)


@st.composite
def _services(draw: st.DrawFn, index: int) -> list[Json]:
    name = f"s{index}"
    names = draw(st.just([""]) | st.lists(st.sampled_from(_NAMES), min_size=1, max_size=3, unique=True))
    ports = [
        {"name": n, "port": 80 + i, "nodePort": 30000 + 10 * index + i, "targetPort": draw(_NUMBERS)}
        for i, n in enumerate(names)
    ]
    ips = [f"10.96.0.{index}", f"fd00::{index}"]
    spec: Json = {
        "type": draw(st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer"])),
        "clusterIPs": draw(st.permutations(ips))[: draw(st.integers(1, 2))],
        "clusterIP": None,
        "ports": ports,
        "externalIPs": draw(st.sampled_from([[], [f"203.0.113.{index}"], [f"2001:db8::{index}"]])),
        "loadBalancerSourceRanges": draw(st.sampled_from([[], [" 10.1.2.3/8"], ["10.0.0.0/8", "fd00::/8"]])),
        "sessionAffinity": draw(st.sampled_from(["None", "ClientIP"])),
        "internalTrafficPolicy": draw(st.sampled_from(["Cluster", "Local"])),
        "externalTrafficPolicy": draw(st.sampled_from(["Cluster", "Local"])),
        "healthCheckNodePort": 32000 + index,
        "publishNotReadyAddresses": draw(st.booleans()),
        "trafficDistribution": draw(
            st.sampled_from([None, "PreferClose", "PreferSameZone", "PreferSameNode"])
        ),
    }
    ingress = [
        {"ip": f"198.51.100.{index}"},
        {"ip": f"2001:db8:1::{index}", "ipMode": "VIP"},
        {"hostname": "x"},
    ]
    whole = service(name, status={"loadBalancer": {"ingress": ingress[: draw(st.integers(0, 3))]}}, **spec)
    if draw(st.booleans()):
        whole["metadata"]["annotations"] = {"service.kubernetes.io/topology-mode": "Auto"}
    return [whole, *(draw(_slices(name, i, names)) for i in range(draw(st.integers(0, 3))))]


@st.composite
def manifests(draw: st.DrawFn) -> Json:
    """A List of Services and their EndpointSlices, in any order, that Kubernetes would accept."""
    found = [each for index in range(1, draw(st.integers(1, 3)) + 1) for each in draw(_services(index))]
    return items(*draw(st.permutations(found)))


def read(*objects: Json) -> Declared:
    """What these objects declare."""
    return declare(json.dumps(items(*objects)), "k.json")


def only(*objects: Json) -> Service:
    """The one service that these objects declare, without a problem."""
    declaration = read(*objects)
    assert declaration.problems == ()
    (found,) = declaration.services
    return found


def notes(*objects: Json) -> list[str]:
    """What is told of these objects, none of which is a problem."""
    declaration = read(*objects)
    assert declaration.problems == ()
    return [note.text for note in declaration.notes]


def backends(*objects: Json) -> tuple[Backend, ...]:
    """Those of the one service."""
    return only(*objects).backends
