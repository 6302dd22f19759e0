"""The roles that the documentation makes are enough for what each user does, and for no more."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from tests.docs.markdown import ROOT, blocks
from tests.etcd.following import following
from tests.etcd.members import Cluster, cluster, etcdctl, etcdctl_environment
from vipd.etcd.client import EtcdClient
from vipd.etcd.errors import PermissionDeniedError
from vipd.etcd.messages import KeyRange
from vipd.etcd.settings import EtcdSettings

USERS = ("host", "admin", "register")
WEB = "address: 10.96.0.80\nports: 80\nbackends: [10.244.0.11]\n"


def documented() -> list[str]:
    """The command lines that make users and roles."""
    page = ROOT / "docs" / "operations.md"
    (block,) = (b for b in blocks(page, "console") if "etcdctl role add" in b.text)
    return [line.removeprefix("# ") for line in block.text.splitlines()]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    directory = tmp_path_factory.mktemp("roles")
    for user in USERS:
        (directory / f"{user}-password").write_text(f"secret-of-{user}\n")
    with cluster(directory / "etcd") as made:
        environment = {**etcdctl_environment(), "ETCDCTL_ENDPOINTS": made.urls[0]}
        script = "\n".join(("set -e", *documented()))
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        etcdctl(made.urls[0], "user", "add", "root:root")
        etcdctl(made.urls[0], "user", "grant-role", "root", "root")
        etcdctl(made.urls[0], "auth", "enable")
        yield made, directory


def settings(guarded: tuple[Cluster, Path], user: str) -> EtcdSettings:
    made, directory = guarded
    password = directory / f"{user}-password"
    return EtcdSettings(made.urls, user=f"vipd-{user}", password_file=password, timeout=30.0)


@asynccontextmanager
async def client_of(guarded: tuple[Cluster, Path], user: str) -> AsyncIterator[EtcdClient]:
    client = EtcdClient(settings(guarded, user), Random(1))
    try:
        yield client
    finally:
        await client.close()


async def denied(client: EtcdClient, *keys: str) -> None:
    for key in keys:
        with pytest.raises(PermissionDeniedError):
            await client.put(key.encode(), b"")


def test_each_user_may_do_its_work_and_no_more(guarded: tuple[Cluster, Path], tmp_path: Path) -> None:
    async def scene() -> None:
        async with client_of(guarded, "admin") as admin:
            await admin.put(b"/vipd/v1/services/web", WEB.encode())
            await admin.put(b"/vipd/v1/overrides/services/web/x", b"{}")
            await denied(admin, "/vipd/v1/backends/web/10.0.0.1:80", "/other")
        async with client_of(guarded, "register") as register:
            lease = await register.grant_lease(60)
            await register.put(b"/vipd/v1/backends/web/10.244.0.12:80", b"", lease)
            assert await register.keep_lease(lease) == 60
            assert await register.get(b"/vipd/v1/backends/web/10.244.0.12:80")
            await denied(register, "/vipd/v1/services/web", "/vipd/v1/hosts/n1")
            await register.revoke_lease(lease)
        async with client_of(guarded, "host") as host:
            lease = await host.grant_lease(60)
            await host.put(b"/vipd/v1/hosts/n1", b"{}", lease)
            assert (await host.lease_times(lease))[0] == 60
            assert len((await host.range(KeyRange.prefix(b"/vipd/v1/hosts/"))).kvs) == 1
            await denied(host, "/vipd/v1/services/web", "/vipd/v1/overrides/x", "/vipd/v1/backends/web/x")
        async with following(guarded[0].urls, tmp_path, settings=settings(guarded, "host")) as known:
            await known.until(lambda: known.names() == {"web"}, "the service")
            assert known.source.faults() == ()

    asyncio.run(scene())
