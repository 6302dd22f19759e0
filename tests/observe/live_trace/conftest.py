"""An empty host, and one with legacy tables."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.node import Node
from tests.observe.empty_host import empty_host

LOGGER = "net.netfilter.nf_log.2"
"""Who gets the traces of legacy tables."""


@pytest.fixture(scope="module")
def host() -> Iterator[Node]:
    """A network namespace with nothing but `lo`."""
    with empty_host() as node:
        yield node


@pytest.fixture
def legacy(host: Node) -> Iterator[str]:
    """Legacy tables are there; the logger of before."""
    host.run("iptables-legacy", "-t", "nat", "-A", "OUTPUT", "-j", "ACCEPT")
    before = host.sysctl(LOGGER)
    assert before != "nfnetlink_log"
    yield before
    host.run("iptables-legacy", "-t", "nat", "-F")
