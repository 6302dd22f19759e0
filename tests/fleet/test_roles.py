"""The roles that the documentation makes are enough for what each is for, and for no more."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pytest

from tests.docs.markdown import ROOT, blocks
from tests.sources.etcd.following import following
from tests.sources.etcd.members import Cluster, cluster, etcdctl, etcdctl_environment
from vipd.declaration.native import parse_declaration
from vipd.declaration.operations import Outcome
from vipd.host.settings.etcd import EtcdSettings
from vipd.model.backend_status import AdminState
from vipd.model.override import Override, OverrideTarget
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.errors import EtcdError, PermissionDeniedError
from vipd.sources.etcd.heartbeat import HostHeartbeat, HostReport
from vipd.sources.etcd.messages import KeyRange
from vipd.sources.etcd.registration import Registration
from vipd.sources.etcd.store import EtcdStore

USERS = ("root", "vipd-host", "vipd-admin", "vipd-register-shop-web")
ROOT_USER = ("--user", "root:secret-of-root")
WEB = "{name: shop/web, address: 10.96.0.80, ports: 80, backends: [10.244.0.11]}"

KEYS = {
    "services": "services/shop/web",
    "overrides": "overrides/services/shop/web/x",
    "own backends": "backends/shop/web/10.244.0.12:80",
    "others' backends": "backends/shop/other/10.244.0.12:80",
    "hosts": "hosts/n1",
    "history": "history",
    "beside": "beside",
}
"""A key of each kind below the prefix."""

READS = {
    "vipd-reader": {"services", "overrides", "own backends", "others' backends", "history"},
    "vipd-heartbeat": {"hosts"},
    "vipd-author": {"services", "history"},
    "vipd-operator": {"overrides"},
    "vipd-register-shop-web": {"own backends"},
    "vipd-heartbeat-a": set[str](),
}
WRITES = {**READS, "vipd-reader": set[str]()}
"""What each role may; the rest is refused."""


def documented() -> list[str]:
    """The command lines that make users and roles, and turn authentication on."""
    page = ROOT / "docs" / "operations.md"
    (block,) = (b for b in blocks(page, "console") if "etcdctl role add" in b.text)
    return [line.removeprefix("# ") for line in block.text.splitlines()]


def documented_heartbeat_command() -> str:
    """The command for the role of a single host, from the text of the page."""
    text = (ROOT / "docs" / "operations.md").read_text()
    (found,) = re.findall(r"`(etcdctl role grant-permission vipd-heartbeat-a [^`]+)`", text)
    return str(found)


def alone(role: str) -> str:
    """A user that has one role, for these tests."""
    return f"only-{role}"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    directory = tmp_path_factory.mktemp("roles")
    for user in (*USERS, *map(alone, READS)):
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
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        as_root = (made.urls[0], *ROOT_USER)
        etcdctl(*as_root, "role", "add", "vipd-heartbeat-a")
        etcdctl(*as_root, *documented_heartbeat_command().split()[1:])
        for role in READS:
            etcdctl(*as_root, "user", "add", f"{alone(role)}:secret-of-{alone(role)}")
            etcdctl(*as_root, "user", "grant-role", alone(role), role)
        for key in KEYS.values():
            etcdctl(*as_root, "put", f"/vipd/v1/{key}", "{}")
        yield made, directory


def settings(guarded: tuple[Cluster, Path], user: str) -> EtcdSettings:
    made, directory = guarded
    return EtcdSettings(made.urls, user=user, password_file=directory / f"{user}-password", timeout=30.0)


@asynccontextmanager
async def client_of(guarded: tuple[Cluster, Path], user: str) -> AsyncIterator[EtcdClient]:
    client = EtcdClient(settings(guarded, user), Random(1))
    try:
        yield client
    finally:
        await client.close()


async def allowed(work: object) -> bool:
    """Whether etcd does it."""
    try:
        await work  # type: ignore[misc]
    except PermissionDeniedError:
        return False
    return True


@pytest.mark.nightly
def test_without_a_user_nothing_is_readable(guarded: tuple[Cluster, Path]) -> None:
    async def scene() -> None:
        client = EtcdClient(EtcdSettings(guarded[0].urls, timeout=30.0), Random(1))
        try:
            for key in KEYS.values():
                with pytest.raises(EtcdError):
                    await client.get(f"/vipd/v1/{key}".encode())
        finally:
            await client.close()

    asyncio.run(scene())


@pytest.mark.parametrize("role", list(READS))
def test_each_role_reads_and_writes_its_keys_and_no_others(guarded: tuple[Cluster, Path], role: str) -> None:
    async def scene() -> None:
        reads, writes = set[str](), set[str]()
        async with client_of(guarded, alone(role)) as client:
            for kind, key in KEYS.items():
                name = f"/vipd/v1/{key}".encode()
                if await allowed(client.get(name)):
                    reads.add(kind)
                if await allowed(client.put(name, b"{}")):
                    writes.add(kind)
            assert not await allowed(client.range(KeyRange.prefix(b"/vipd/v1/"))), "not all at once"
            assert not await allowed(client.put(b"/vipd/v1/backends/shop/web", b""))
            assert await allowed(client.put(b"/vipd/v1/hosts/a", b"{}")) is role.startswith("vipd-heartbeat")
        assert (reads, writes) == (READS[role], WRITES[role])

    asyncio.run(scene())
    # Roles and users are root's alone.
    made, _ = guarded
    words = ("--user", f"{alone(role)}:secret-of-{alone(role)}", "role", "add", "more")
    with pytest.raises(AssertionError, match="permission denied"):
        etcdctl(made.urls[0], *words)


def test_the_users_can_do_their_work(guarded: tuple[Cluster, Path], tmp_path: Path) -> None:
    """With the code that does it: a host follows and reports, vipctl writes, a server registers."""
    now, reports = datetime.now(UTC), list[tuple[bool, str]]()
    (web,) = parse_declaration(f"apiVersion: vipd/v1\nservices: [{WEB}]\n", "", "etcd").services
    order = Override(OverrideTarget("shop/web", "10.244.0.11"), "root", now, AdminState.DRAINING)
    for key in KEYS.values():
        etcdctl(guarded[0].urls[0], *ROOT_USER, "del", f"/vipd/v1/{key}")

    async def scene() -> None:
        async with (
            following(guarded[0].urls, tmp_path, settings=settings(guarded, "vipd-host")) as host,
            client_of(guarded, "vipd-host") as reporting,
            client_of(guarded, "vipd-admin") as admin,
            client_of(guarded, "vipd-register-shop-web") as server,
        ):
            await host.until(lambda: host.source.connected, "the first list")
            store = EtcdStore(admin, host.source, "/vipd/v1/", lambda: now)
            await store.save(Outcome({"shop/web": web}, {"shop/web": "created"}))
            await host.until(lambda: host.names() == {"shop/web"}, "the service")
            await store.put_override(order)
            await host.until(lambda: len(host.source.overrides) == 1, "the order")
            await store.clear_overrides([order.target])
            await host.until(lambda: len(host.source.overrides) == 0, "the order's end")
            key = "/vipd/v1/backends/shop/web/10.244.0.12:80"
            keeping = asyncio.create_task(
                Registration(server, key, "", 60, lambda *s: reports.append(s)).run()
            )
            await host.until(lambda: "shop/web" in host.source.registrations, "the registered backend")
            await host.until(lambda: bool(reports), "the registration's report")  # the host may see it before
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await host.until(lambda: not host.source.registrations, "the registration's end")
            assert [what for _, what in reports] == ["registered", "taken back"]
            report = HostReport("n1", 1, 0, "0", 1)
            beacon = HostHeartbeat(reporting, "/vipd/v1/", lambda: report, lambda: now, gather=0.05)
            beating = asyncio.create_task(beacon.run())
            hosts = KeyRange.prefix(b"/vipd/v1/hosts/n1")
            while not (found := (await reporting.range(hosts)).kvs):
                assert beacon.fault == ""
                await asyncio.sleep(0.05)
            assert json.loads(found[0].value)["name"] == "n1"
            assert (await reporting.lease_times(found[0].lease))[0] > 0
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            assert host.source.faults() == ()

    asyncio.run(scene())
