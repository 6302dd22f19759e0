"""The objects of docs/api.md have the keys that the daemon's have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.docs.markdown import ROOT, Block, blocks, prose
from tests.lab.inside import Vipd, running

PAGE = ROOT / "docs" / "api.md"

DECLARED = """
apiVersion: vipd/v1
services:
  - {name: dns, address: 10.96.0.10, ports: 53/udp, backends: [10.244.0.5, 10.244.2.21@2]}
"""


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


def views(said: str = DECLARED) -> dict[str, Any]:
    """What a daemon answers that has this declaration, by the heading that describes it."""

    def prepare(vipd: Vipd) -> None:
        (vipd.services_dir / "dns.yaml").write_text(said)

    async def story(vipd: Vipd) -> dict[str, Any]:
        file = str(vipd.services_dir / "dns.yaml")
        words = ("explain", "-f", file, "--set", "host_addresses=10.0.0.1", "--from", "10.10.0.9", "dns")
        explained = json.loads((await vipd.vipctl(*words, "-o", "json")).stdout)
        status = {key: value for key, value in (await vipd.status()).items() if key != "apiVersion"}
        return {
            "ServiceView": await vipd.service("dns"),
            "Status": status,
            "Explanation": explained["explanation"],
        }

    return running(story, prepare)


def test_an_object_has_the_keys_that_are_described() -> None:
    # What a declaration and `settings` hold is said elsewhere.
    apart = (".spec", ".settings", ".outcomes[].rules[]")
    for heading, real in views().items():
        described = {key for key in keys(documented(heading)) if not key.startswith(apart)}
        assert described == {key for key in keys(real) if not key.startswith(apart)}, heading


def test_a_service_is_shown_with_the_values_that_are_described() -> None:
    """But for what belongs to a host: its paths, its chains, and what its checks found."""
    elsewhere = {"owner", "origin", "status", "chain", "health", "check"}

    def without_elsewhere(value: object) -> object:
        if isinstance(value, Mapping):
            return {key: without_elsewhere(item) for key, item in value.items() if key not in elsewhere}
        return [without_elsewhere(item) for item in value] if isinstance(value, list) else value

    described, real = documented("ServiceView"), views()["ServiceView"]
    assert isinstance(described, dict)
    wanted = described["forwardings"][0]["endpoints"]
    got = real["forwardings"][0]["endpoints"][: len(wanted)]
    real["forwardings"][0]["endpoints"] = got
    assert without_elsewhere(real) == without_elsewhere(described)


REFUSALS = {
    "ports: 53/udp": "reject",
    "ports: 53/udp, fallback: drop": "drop",
    "ports: 53/udp, traffic_policy: {internal: local}": "drop",
    "ports: [{port: 53, protocol: udp, node_port: 30053}], traffic_policy: {external: local}": "drop",
}


def test_the_refusal_is_what_a_flow_meets_that_no_endpoint_may_take() -> None:
    for said, refusal in REFUSALS.items():
        (forwarding,) = views(DECLARED.replace("ports: 53/udp", said))["ServiceView"]["forwardings"]
        assert forwarding["refusal"] == refusal, said
