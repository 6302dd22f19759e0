"""Keys below `hosts/` that no vipd has written: the other hosts are shown all the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.sources.etcd.members import Cluster, cluster
from vipd.control import fleet_member
from vipd.control.announcements import AnnouncedKey, OtherHosts
from vipd.control.fleet_member import FleetMember, Json
from vipd.host.settings.etcd import EtcdSettings
from vipd.host.settings.settings import Settings
from vipd.model.service import AnnounceMethod

HOSTS = "/vipd/v1/hosts/"
GOOD = {
    "version": "0.1.0",
    "revision": 0,
    "services": 3,
    "problems": 0,
    "announced": {"l2 192.0.2.1": "served"},
}


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path / "etcd") as made:
        yield made


def asked(etcd: Cluster, state: Path) -> tuple[list[Json], OtherHosts]:
    """The hosts, and what they announce, as a host of this fleet reads them."""

    async def ask() -> tuple[list[Json], OtherHosts]:
        options = EtcdSettings(etcd.urls, timeout=30.0)
        member = FleetMember(
            Settings(node_name="me", state_dir=state), options, lambda: datetime(2030, 1, 2, tzinfo=UTC)
        )
        try:
            return await member.hosts(), await member.announced_elsewhere()
        finally:
            await member.close()

    return asyncio.run(ask())


def test_hostile_keys_leave_the_others_to_be_seen(
    etcd: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(14):  # together above what one answer may have
        etcd.put(f"{HOSTS}big{n:02}", "x" * 1_400_000)
    etcd.put_all(
        {
            f"{HOSTS}a": json.dumps(GOOD),
            f"{HOSTS}z": json.dumps(GOOD),
            f"{HOSTS}list": "[1]",
            f"{HOSTS}deep": "[" * 10_000,
            f"{HOSTS}revision": json.dumps({**GOOD, "revision": 10**40}),
            f"{HOSTS}version": json.dumps({**GOOD, "version": "\x1b[2J"}),
            f"{HOSTS}{'n' * 5000}": json.dumps(GOOD),
            f"{HOSTS}line\nfeed": "",
        }
    )
    hosts, elsewhere = asked(etcd, tmp_path)
    by_name = {host["name"]: host for host in hosts}
    assert len(hosts) == 22
    assert [by_name[name]["fault"] for name in "az"] == ["", ""]
    assert by_name["z"]["services"] == 3
    for name in ("big00", "big13", "list", "deep", "revision", "version"):
        assert "its report cannot be read" in str(by_name[name]["fault"])
    assert max(len(str(name)) for name in by_name) <= fleet_member.MAX_NAME + 20
    assert all(str(name).isprintable() for name in by_name)
    assert elsewhere.served == {AnnouncedKey("192.0.2.1", AnnounceMethod.L2)}
    monkeypatch.setattr(fleet_member, "MAX_HOSTS", 5)
    hosts, _ = asked(etcd, tmp_path)
    assert (len(hosts), hosts[0]["name"], hosts[-1]["name"]) == (6, "a", "17 more")
