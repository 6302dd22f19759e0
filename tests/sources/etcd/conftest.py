"""The etcd that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.sources.etcd.members import Cluster, cluster


@pytest.fixture(scope="session")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("one")) as made:
        yield made


@pytest.fixture
def etcd(one: Cluster) -> Cluster:
    """A real etcd without any key."""
    one.ensure()
    one.clear()
    return one


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory with a short name, for a vipd that is started again."""
    with TemporaryDirectory(prefix="vipd-etcd-") as directory:
        yield Path(directory)
