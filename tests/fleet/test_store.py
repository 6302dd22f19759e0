"""What the store asks of etcd when etcd refuses, and what the daemon warns of."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest

from vipd.control.fleet_member import FleetMember
from vipd.declaration.operations import RefusedError
from vipd.host.settings.settings import load_settings
from vipd.model.backend_status import AdminState
from vipd.model.override import Override, OverrideTarget
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.errors import RejectedError
from vipd.sources.etcd.source import EtcdSource
from vipd.sources.etcd.store import EtcdStore

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DRAIN = OverrideTarget("dns", "10.244.0.5")


class Refusing:
    """An etcd that refuses every write."""

    def __init__(self) -> None:
        self.revoked: list[int] = []

    async def grant_lease(self, seconds: int) -> int:
        return 7

    async def txn(self, conditions: object, then: object) -> int:
        raise RejectedError("no", 3)

    async def revoke_lease(self, lease: int) -> None:
        self.revoked.append(lease)


class Empty:
    """A source that knows no key."""

    overrides: Mapping[str, str] = {}

    def mod_revision(self, key: str) -> int:
        return 0


@pytest.mark.parametrize(("until", "revoked"), [(None, []), (NOW + timedelta(hours=1), [7])])
def test_a_refused_order_revokes_its_lease_and_no_other(until: datetime | None, revoked: list[int]) -> None:
    etcd = Refusing()
    store = EtcdStore(cast(EtcdClient, etcd), cast(EtcdSource, Empty()), "/vipd/v1/", lambda: NOW)
    with pytest.raises(RefusedError):
        asyncio.run(store.put_override(Override(DRAIN, "root", NOW, AdminState.DRAINING, until=until)))
    assert etcd.revoked == revoked


def test_the_daemon_warns_of_a_password_that_goes_unencrypted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    etcd = {"endpoints": ["http://10.0.0.1:2379"], "user": "u", "password_file": "/pw"}
    settings = load_settings(flags={"etcd": etcd, "state_dir": str(tmp_path)})
    assert settings.etcd is not None
    fleet = FleetMember(settings, settings.etcd, lambda: NOW)
    with caplog.at_level(logging.WARNING):
        fleet.load()
    assert "unencrypted" in caplog.text
    assert any("unencrypted" in warning for warning in fleet.warnings())
