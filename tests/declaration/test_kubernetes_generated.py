"""What is true of every Kubernetes object: golden manifests, generated ones, and damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.declaration.manifests import Json, manifests
from tests.declaration.strategies import PATIENT
from tests.lab.examples import examples
from tests.lab.inside import Declared, declare, written
from vipd.model.service import BackendState

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*/manifest.json"))
UP, DRAIN, DOWN = BackendState.UP, BackendState.DRAIN, BackendState.DOWN


def test_what_kube_proxy_was_given_survives_formatting() -> None:
    assert len(GOLDEN) >= 20
    for path in GOLDEN:
        declaration = declare(path.read_text(), "manifest.json")
        assert (declaration.problems, declaration.notes) == ((), ()), path
        assert len(declaration.services) >= 1, path
        assert declare(written(declaration.services)).services == declaration.services, path


def states_by_rule(manifest: Json, of: str, port: Json) -> dict[tuple[str, int], set[BackendState]]:
    """Straight from the objects: what each endpoint of one service port may be, by address and number."""
    found: dict[tuple[str, int], set[BackendState]] = {}
    for each in manifest["items"]:
        if each["metadata"].get("labels", {}).get("kubernetes.io/service-name") != of:
            continue
        numbers = [
            p["port"]
            for p in each["ports"]
            if p["port"] and (p["name"], p["protocol"]) == (port["name"], "TCP")
        ]
        for endpoint in each["endpoints"]:
            conditions = endpoint["conditions"]
            leaving = conditions["terminating"] and conditions["serving"] is not False
            state = UP if conditions["ready"] is not False else DRAIN if leaving else DOWN
            for number in numbers:
                found.setdefault((endpoint["addresses"][0], number), set()).add(state)
    return found


@pytest.mark.slow
@PATIENT
@given(manifests())
def test_each_port_has_exactly_the_endpoints_of_its_slices_also_when_read_back(manifest: Json) -> None:
    declaration = declare(json.dumps(manifest), "k.json")
    assert declaration.problems == ()
    again = declare(written(declaration.services), "x.yaml")
    assert (again.problems, again.services) == ((), declaration.services)
    specs = {o["metadata"]["name"]: o["spec"] for o in manifest["items"] if o["kind"] == "Service"}
    assert {s.name for s in declaration.services} == {f"default/{name}" for name in specs}
    for found in declaration.services:
        spec = specs[found.name.partition("/")[2]]
        families = {":" in address for address in spec["clusterIPs"]}
        for port, declared in zip(found.ports, spec["ports"], strict=True):
            wanted = {
                key: min(states, key=[UP, DRAIN, DOWN].index)
                for key, states in states_by_rule(manifest, found.name.partition("/")[2], declared).items()
                if (":" in key[0]) in families
            }
            told = [((b.address, n), b.state) for b in found.backends if (n := b.port_for(port))]
            assert dict(told) == wanted
            assert len(told) == len(wanted)


KEYS = st.sampled_from(
    """apiVersion kind items metadata name namespace labels annotations spec status type clusterIP clusterIPs
    ports port nodePort protocol targetPort externalIPs loadBalancer ingress ip loadBalancerSourceRanges
    addressType endpoints addresses conditions ready hints forZones subsets
    kubernetes.io/service-name""".split()  # noqa: SIM905 - a list is no clearer
)
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-1, 70000)
    | st.text(max_size=6)
    | st.sampled_from(["v1", "Service", "EndpointSlice", "Endpoints", "List", "10.96.0.1", "TCP"])
)
SHAPES = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=20,
)


def put(tree: object, path: list[int], value: object) -> object:
    """The tree with `value` at some place below; `path` chooses it."""
    if not path or not isinstance(tree, dict | list) or not tree:
        return value
    if isinstance(tree, list):
        index = path[0] % len(tree)
        return [put(each, path[1:], value) if i == index else each for i, each in enumerate(tree)]
    chosen = sorted(tree)[path[0] % len(tree)]
    return {key: put(each, path[1:], value) if key == chosen else each for key, each in tree.items()}


def never_raises(tree: object, write: Callable[[object], str]) -> None:
    declaration = declare(write(tree), "x")
    for told in (*declaration.problems, *declaration.notes):
        assert str(told).isprintable()
    if declaration.ok:
        again = declare(written(declaration.services), "y")
        assert again == Declared(declaration.services)


@pytest.mark.slow
@settings(PATIENT, max_examples=examples(60))
@given(manifests(), st.lists(st.integers(0, 9), min_size=1, max_size=9), SHAPES)
def test_any_damage_to_a_manifest_gives_a_declaration(manifest: Json, path: list[int], value: object) -> None:
    never_raises(put(manifest, path, value), json.dumps)


@PATIENT
@given(st.dictionaries(KEYS, SHAPES), st.sampled_from(["Service", "EndpointSlice", "Endpoints", "List"]))
def test_any_object_gives_a_declaration(tree: Json, kind: str) -> None:
    group = "discovery.k8s.io/v1" if kind == "EndpointSlice" else "v1"
    never_raises(tree | {"apiVersion": group, "kind": kind}, yaml.safe_dump)
