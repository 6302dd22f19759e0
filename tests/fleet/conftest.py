"""The etcd of the tests without namespaces."""

from __future__ import annotations

from tests.sources.etcd.conftest import etcd, one, root

__all__ = ["etcd", "one", "root"]
