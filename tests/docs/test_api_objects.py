"""The objects of docs/api.md have the keys that the daemon's have."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import pytest

from tests.docs.markdown import ROOT, Block, blocks, prose
from tests.reconciling import World
from vipd.api.views import service_view, status_view
from vipd.cli.offline import explain_files
from vipd.declaration.native import parse_declaration
from vipd.model import Service
from vipd.settings import Settings

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


def served() -> World:
    """A daemon's core that has put the service into its kernel."""
    world = World(dns())
    asyncio.run(world.reconciler.step())
    return world


def view_of(heading: str) -> object:
    if heading == "Explanation":
        return explain_files([dns()], Settings(host_addresses=("10.0.0.1",)), "10.10.0.9", "dns")
    world = served()
    if heading == "ServiceView":
        return service_view(dns(), world.reconciler, world.dataplane)
    about = {"version": "", "pid": 1, "started": "", "settings": {"chain_prefix": "VIPD"}, "warnings": ()}
    return status_view(world.reconciler, world.dataplane, [world.source], about)


@pytest.mark.parametrize("heading", ["ServiceView", "Status", "Explanation"])
def test_an_object_has_the_keys_that_are_described(heading: str) -> None:
    # What a declaration and `settings` hold is said elsewhere.
    apart = (".spec", ".settings", ".outcomes[].rules[]")
    described, real = keys(documented(heading)), keys(view_of(heading))
    assert {key for key in described if not key.startswith(apart)} == {
        key for key in real if not key.startswith(apart)
    }
