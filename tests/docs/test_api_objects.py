"""The objects of docs/api.md have the keys that the daemon's have."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import pytest

from tests.control.reconciling import IsolatedReconciler
from tests.docs.markdown import ROOT, Block, blocks, prose
from vipd.cli.offline import explain_files
from vipd.declaration.native import parse_declaration
from vipd.host.settings.settings import Settings
from vipd.model.service import Service
from vipd.observe.views import service_view, status_view

PAGE = ROOT / "docs" / "api.md"

DECLARED = """
apiVersion: vipd/v1
services:
  - {name: dns, address: 10.96.0.10, ports: 53/udp, backends: [10.244.0.5, 10.244.2.21@2]}
"""


def dns() -> Service:
    return parse_declaration(DECLARED, "dns.yaml").services[0]


def documented(heading: str) -> object:
    """The first JSON object below a heading."""
    above = next(line.number for line in prose(PAGE) if line.text == f"## {heading}")
    found: Block = next(block for block in blocks(PAGE, "json") if block.line > above)
    return json.loads(found.text)


def keys(value: object, path: str = "") -> set[str]:
    """Every key with its way from the top; of a list the first item stands for all."""
    if isinstance(value, Mapping):
        here = {f"{path}.{key}" for key in value}
        return here.union(*(keys(item, f"{path}.{key}") for key, item in value.items()))
    return keys(value[0], f"{path}[]") if isinstance(value, list) and value else set()


def served() -> IsolatedReconciler:
    """A daemon's core that has put the service into its kernel."""
    isolated = IsolatedReconciler(dns())
    asyncio.run(isolated.reconciler.step())
    return isolated


def view_of(heading: str) -> object:
    if heading == "Explanation":
        return explain_files([dns()], Settings(host_addresses=("10.0.0.1",)), "10.10.0.9", "dns")
    isolated = served()
    if heading == "ServiceView":
        return service_view(dns(), isolated.reconciler, isolated.dataplane)
    about = {"version": "", "pid": 1, "started": "", "settings": {"chain_prefix": "VIPD"}, "warnings": ()}
    return status_view(isolated.reconciler, isolated.dataplane, [isolated.source], about)


@pytest.mark.parametrize("heading", ["ServiceView", "Status", "Explanation"])
def test_an_object_has_the_keys_that_are_described(heading: str) -> None:
    # What a declaration and `settings` hold is said elsewhere.
    apart = (".spec", ".settings", ".outcomes[].rules[]")
    described, real = keys(documented(heading)), keys(view_of(heading))
    assert {key for key in described if not key.startswith(apart)} == {
        key for key in real if not key.startswith(apart)
    }


def test_a_service_is_shown_with_the_values_that_are_described() -> None:
    """But for what belongs to a host: its paths, its chains, and what its checks found."""
    elsewhere = {"owner", "origin", "status", "chain", "health", "check"}

    def without_elsewhere(value: object) -> object:
        if isinstance(value, Mapping):
            return {key: without_elsewhere(item) for key, item in value.items() if key not in elsewhere}
        return [without_elsewhere(item) for item in value] if isinstance(value, list) else value

    described, real = documented("ServiceView"), json.loads(json.dumps(view_of("ServiceView")))
    assert isinstance(described, dict)
    wanted = described["forwardings"][0]["endpoints"]
    got = real["forwardings"][0]["endpoints"][: len(wanted)]
    real["forwardings"][0]["endpoints"] = got
    assert without_elsewhere(real) == without_elsewhere(described)


@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        ("ports: 53/udp", "reject"),
        ("ports: 53/udp, fallback: drop", "drop"),
        ("ports: 53/udp, traffic_policy: {internal: local}", "drop"),
        ("ports: [{port: 53, protocol: udp, node_port: 30053}], traffic_policy: {external: local}", "drop"),
    ],
)
def test_the_refusal_is_what_a_flow_meets_that_no_endpoint_may_take(said: str, refusal: str) -> None:
    (service,) = parse_declaration(DECLARED.replace("ports: 53/udp", said), "dns.yaml").services
    isolated = IsolatedReconciler(service)
    asyncio.run(isolated.reconciler.step())
    view = json.loads(json.dumps(service_view(service, isolated.reconciler, isolated.dataplane)))
    assert view["forwardings"][0]["refusal"] == refusal
