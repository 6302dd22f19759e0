"""The roles that the documentation makes are enough for what each is for, and for no more."""

from __future__ import annotations

import re
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.markdown import ROOT, blocks
from tests.sources.etcd.following import Follower, follow
from tests.sources.etcd.members import Cluster, cluster, etcdctl, etcdctl_environment
from tests.sources.etcd.register import registering

SERVER = "vipd-register-shop-web"
USERS = ("root", "vipd-host", "vipd-admin", SERVER)
ROOT_USER = ("--user", "root:secret-of-root")
ADD = ("--store", "etcd", "add", "10.96.0.80:80/tcp", "10.244.0.11", "--name", "shop/web")

KEYS = {
    "services": "services/shop/web",
    "overrides": "overrides/services/shop/web/x",
    "own backends": "backends/shop/web/10.244.0.12:80",
    "others' backends": "backends/shop/other/10.244.0.12:80",
    "hosts": "hosts/n1",
    "history": "history/x",
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


def b64(text: str) -> str:
    return b64encode(text.encode()).decode()


def reads(etcd: Cluster, token: str, key: str, end: str = "") -> bool:
    more = {"range_end": b64(end)} if end else {}
    return etcd.allowed("/v3/kv/range", {"key": b64(key), **more}, token)


def writes(etcd: Cluster, token: str, key: str) -> bool:
    return etcd.allowed("/v3/kv/put", {"key": b64(key), "value": b64("{}")}, token)


def test_each_role_reads_and_writes_its_keys_and_no_others(guarded: tuple[Cluster, Path]) -> None:
    etcd, _ = guarded
    for role in READS:
        token = etcd.token(alone(role), f"secret-of-{alone(role)}")
        found = (
            {kind for kind, key in KEYS.items() if reads(etcd, token, f"/vipd/v1/{key}")},
            {kind for kind, key in KEYS.items() if writes(etcd, token, f"/vipd/v1/{key}")},
        )
        assert found == (READS[role], WRITES[role]), role
        assert not reads(etcd, token, "/vipd/v1/", "/vipd/v10"), "not all at once"
        assert not writes(etcd, token, "/vipd/v1/backends/shop/web")
        assert writes(etcd, token, "/vipd/v1/hosts/a") is role.startswith("vipd-heartbeat")
        # Roles and users are root's alone.
        words = ("--user", f"{alone(role)}:secret-of-{alone(role)}", "role", "add", "more")
        with pytest.raises(AssertionError, match="permission denied"):
            etcdctl(etcd.urls[0], *words)
    assert not [key for key in KEYS.values() if reads(etcd, "", f"/vipd/v1/{key}")], "nobody without a user"


def test_the_users_can_do_their_work(guarded: tuple[Cluster, Path], tmp_path: Path) -> None:
    """A host follows and reports, vipctl writes, a server registers."""
    etcd, directory = guarded
    etcdctl(etcd.urls[0], *ROOT_USER, "del", "--prefix", "/vipd/v1/")

    def login(user: str) -> dict[str, Any]:
        return {"user": user, "password_file": str(directory / f"{user}-password")}

    async def administer(host: Follower) -> None:
        await host.until_well()
        assert (await host.vipd.vipctl(*ADD)).code == 0
        assert host.names() == {"shop/web"}
        drain = await host.vipd.vipctl("drain", "shop/web/10.244.0.11", "--fleet")
        assert drain.code == 0, drain
        await host.until(lambda: host.serving() == {"shop/web": set()}, "the order")
        assert (await host.vipd.vipctl("resume", "shop/web/10.244.0.11", "--fleet")).code == 0
        await host.until(lambda: host.serving() == {"shop/web": {"10.244.0.11:80"}}, "the order's end")
        await host.until_well()

    async def serve(host: Follower) -> None:
        await host.until_well()
        options = ("--endpoint", etcd.urls[0], "--user", SERVER, "--password-file")
        with registering(
            tmp_path,
            *options,
            str(directory / f"{SERVER}-password"),
            service="shop/web",
            backend="10.244.0.12",
        ) as process:
            await host.until(lambda: len(host.serving()["shop/web"]) == 2, "the registered backend")
            assert process.stop() == 0
        await host.until(lambda: len(host.serving()["shop/web"]) == 1, "its end")
        assert "taken back" in process.said

        async def reported() -> bool:
            hosts = (await host.vipd.ask("GET", "/v1/fleet")).body["hosts"]
            return [(h["name"], h["services"], h["fault"]) for h in hosts] == [("host-a", 1, "")]

        await host.until(reported, "its report")
        await host.until_well()

    follow(etcd.urls, administer, **login("vipd-admin"))
    follow(etcd.urls, serve, **login("vipd-host"))
