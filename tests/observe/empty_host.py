"""A network namespace with nothing but `lo`, and a vipctl in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.lab.namespace_names import new_prefix
from tests.lab.node import Node
from tests.lab.topology import ip


@contextmanager
def empty_host() -> Iterator[Node]:
    """It goes with all of its processes."""
    node = Node(f"{new_prefix()}-empty", "host", "127.0.0.1", "::1")
    ip("netns", "add", node.namespace)
    try:
        node.run("ip", "link", "set", "lo", "up")
        yield node
    finally:
        node.kill()
        ip("netns", "delete", node.namespace)
