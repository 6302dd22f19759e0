"""Users, roles, tokens and TLS with a real etcd: each fault has a name, and mending it is enough."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.sources.etcd.following import Follower, follow, key, value
from tests.sources.etcd.members import Cluster, cluster, etcdctl
from tests.sources.etcd.register import all_say, registering

ROOT = ("--user", "root:rootpw")
TOKEN_SECONDS = 2
"""How long a token lasts that nobody uses."""


def with_users(made: Cluster) -> None:
    """Users root, vipd, and reader, who may write nothing; authentication on."""
    url = made.urls[0]
    for user, role in (("root", "root"), ("vipd", "vipd"), ("reader", "reader")):
        if role != "root":
            etcdctl(url, "role", "add", role)
            kind = "readwrite" if role == "vipd" else "read"
            etcdctl(url, "role", "grant-permission", "--prefix=true", role, kind, "/vipd/v1/")
        etcdctl(url, "user", "add", f"{user}:{user}pw")
        etcdctl(url, "user", "grant-role", user, role)
    etcdctl(url, "user", "add", "nobody:nobodypw")
    etcdctl(url, "auth", "enable")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Authentication on; tokens do not last."""
    flags = ["--auth-token-ttl", str(TOKEN_SECONDS)]
    with cluster(tmp_path_factory.mktemp("guarded"), 1, flags) as made:
        with_users(made)
        yield made


def as_user(directory: Path, user: str, password: str = "") -> dict[str, Any]:
    """The settings of a user, whose password is in a file."""
    file = directory / user
    file.write_text(f"{password or user + 'pw'}\n")
    return {"user": user, "password_file": str(file)}


def test_each_refusal_of_a_user_has_a_name(guarded: Cluster, tmp_path: Path) -> None:
    url = ("--endpoint", guarded.urls[0])

    def of(user: str, password: str = "") -> Sequence[str]:
        settings = as_user(tmp_path, user, password)
        return (*url, "--user", user, "--password-file", str(settings["password_file"]))

    (tmp_path / "log").mkdir()
    all_say(
        tmp_path / "log",
        {
            "a wrong password": (of("vipd", "wrong"), "hint: check user and password_file"),
            "no file": ((*url, "--user", "vipd", "--password-file", "/none"), "No such file"),
            "no user": (url, "hint: set user and password_file"),
            "a role that may not write": (of("reader"), "etcd denies write of /vipd/v1/backends/web/"),
            "no role": (of("nobody"), "hint: grant"),
        },
    )


def test_a_mended_password_and_a_granted_role_are_taken_without_a_restart(
    guarded: Cluster, tmp_path: Path, root: Path
) -> None:
    url, grant = guarded.urls[0], ("vipd", "readwrite", "/vipd/v1/")

    async def wrong_password(host: Follower) -> None:
        await host.until_problem("check user and password_file")
        as_user(tmp_path, "vipd")
        await host.until_well()
        spec = {"name": "a", "address": "10.96.0.1", "ports": [80], "backends": ["10.244.0.5"]}
        answer = await host.vipd.ask("POST", "/v1/services?store=etcd", {"service": spec})
        assert answer.status == 200, answer
        assert host.names() == {"a"}

    async def no_role(host: Follower) -> None:
        await host.until_problem("etcd denies read of /vipd/v1/services/*")
        assert "hint: grant" in await host.problems()
        assert host.names() == {"a"}
        etcdctl(url, *ROOT, "role", "grant-permission", "--prefix=true", *grant)
        await host.until_well()

    follow(guarded.urls, wrong_password, root, **as_user(tmp_path, "vipd", "wrong"))
    etcdctl(url, *ROOT, "role", "revoke-permission", "vipd", "/vipd/v1/", "/vipd/v10")
    follow(guarded.urls, no_role, root, **as_user(tmp_path, "vipd"))


def test_a_host_outlives_its_tokens(guarded: Cluster, tmp_path: Path) -> None:
    """Nobody uses them for longer than they last."""

    async def story(host: Follower) -> None:
        await host.until_well()
        await asyncio.sleep(TOKEN_SECONDS + 1.2)
        etcdctl(guarded.urls[0], *ROOT, "put", key("b"), value(2))
        await host.until(lambda: "b" in host.names(), "a change after the token's end")
        specs = [
            {"name": f"n{n}", "address": f"10.96.1.{n}", "ports": [80], "backends": []} for n in range(5)
        ]
        answers = await asyncio.gather(
            *(host.vipd.ask("POST", "/v1/services?store=etcd", {"service": spec}) for spec in specs)
        )
        assert {answer.status for answer in answers} == {200}, answers

    follow(guarded.urls, story, settings={}, **as_user(tmp_path, "vipd"))


def test_a_token_of_a_store_that_was_wiped_is_replaced(tmp_path: Path) -> None:
    """A real etcd lets requests with such a token wait for ever."""

    async def story(host: Follower) -> None:
        await host.until(lambda: host.names() == {"a"}, "the first list")
        member.stop()
        member.wipe()
        member.start()
        member.wait()
        with_users(made)
        etcdctl(made.urls[0], *ROOT, "put", key("b"), value(2))
        await host.until(lambda: host.names() == {"a", "b"}, "followed again")

    with cluster(tmp_path / "etcd") as made:
        member = made.members[0]
        made.put(key("a"), value(1))
        for _ in range(60):  # a token has the revision in it
            made.put("/elsewhere", "")
        with_users(made)
        follow(made.urls, story, **{**as_user(tmp_path, "vipd"), "timeout": "3s"})


_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Certificates:
    """A CA, what it signs, and another CA. Files NAME.crt and NAME.key in one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        for name in ("ca", "other"):
            _openssl(root, "req", "-x509", *_KEY, *_named(name, f"/CN={name}"), "-days", "2")
        self.sign("server", "/CN=etcd", "IP:127.0.0.1,DNS:localhost")
        self.sign("elsewhere", "/CN=etcd", "DNS:elsewhere.example")
        self.sign("expired", "/CN=etcd", "IP:127.0.0.1", days=-1)
        self.sign("named", "/CN=vipd", "DNS:vipd")
        self.sign("nameless", "/O=vipd", "DNS:vipd")

    def crt(self, name: str) -> Path:
        return self.root / f"{name}.crt"

    def key(self, name: str) -> Path:
        return self.root / f"{name}.key"

    def sign(self, name: str, subject: str, names: str, days: int = 2) -> None:
        """A certificate of the CA, for a server and a client."""
        extensions = self.root / f"{name}.ext"
        extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
        _openssl(
            self.root, "req", "-new", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject
        )
        _openssl(
            self.root,
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", str(days), "-extfile", extensions.name, "-out", f"{name}.crt"),
        )


def _named(name: str, subject: str) -> tuple[str, ...]:
    return ("-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj", subject)


def _openssl(root: Path, *arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], cwd=root, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def tls(certificates: Certificates, name: str) -> list[str]:
    return [f"--cert-file={certificates.crt(name)}", f"--key-file={certificates.key(name)}"]


@pytest.fixture(scope="module")
def secure(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """TLS, and a client certificate is demanded."""
    demand = ["--client-cert-auth", f"--trusted-ca-file={certificates.crt('ca')}"]
    with cluster(tmp_path_factory.mktemp("secure"), 1, [*tls(certificates, "server"), *demand]) as made:
        # It listens a moment before it takes handshakes; etcdctl knows how to wait for that.
        etcdctl(made.urls[0], "endpoint", "health", *ctl_files(certificates, "named"))
        yield made


def ctl_files(certificates: Certificates, own: str) -> list[str]:
    """etcdctl's options for a client certificate."""
    crt, key_file = certificates.crt, certificates.key
    return [f"--cacert={crt('ca')}", f"--cert={crt(own)}", f"--key={key_file(own)}"]


def options(url: str, certificates: Certificates, own: str = "", ca: str = "ca") -> Sequence[str]:
    """vipctl's options for a server, a CA and a client certificate."""
    mine = ("--cert", str(certificates.crt(own)), "--key", str(certificates.key(own))) if own else ()
    return ("--endpoint", url, "--ca", str(certificates.crt(ca)), *mine)


def test_each_fault_of_tls_has_a_name(
    secure: Cluster, guarded: Cluster, certificates: Certificates, tmp_path: Path
) -> None:
    url, plain = secure.urls[0], guarded.urls[0]
    nonsense = tmp_path / "nonsense.crt"
    nonsense.write_text("nonsense")
    (tmp_path / "log").mkdir()
    with (
        cluster(tmp_path / "elsewhere", 1, tls(certificates, "elsewhere")) as elsewhere,
        cluster(tmp_path / "expired", 1, tls(certificates, "expired")) as expired,
    ):
        all_say(
            tmp_path / "log",
            {
                "all is well": (options(url, certificates, "named"), "registered"),
                "no client certificate": (options(url, certificates), "demands a client certificate"),
                "another CA's": (options(url, certificates, "other"), "refuses our client certificate"),
                "unknown CA": (
                    options(url, certificates, "named", "other"),
                    "hint: name the CA's file in ca",
                ),
                "http to https": (("--endpoint", url.replace("https", "http")), "hint: write https://"),
                "https to http": (
                    options(plain.replace("http", "https"), certificates),
                    "hint: write http://",
                ),
                "another name": (options(elsewhere.urls[0], certificates), "is for another name"),
                "expired": (options(expired.urls[0], certificates), "is out of date"),
                "no CA file": (("--endpoint", url, "--ca", "/none.crt"), "/none.crt"),
                "a CA file of nonsense": (("--endpoint", url, "--ca", str(nonsense)), str(nonsense)),
            },
        )


def test_a_ca_file_is_mended_without_a_restart(
    secure: Cluster, certificates: Certificates, tmp_path: Path
) -> None:
    ca = tmp_path / "ca.crt"
    mine = ("--cert", str(certificates.crt("named")), "--key", str(certificates.key("named")))
    (tmp_path / "log").mkdir()
    with registering(tmp_path / "log", "--endpoint", secure.urls[0], "--ca", str(ca), *mine) as process:
        process.until_said(str(ca))
        shutil.copy(certificates.crt("other"), ca)
        process.until_said("unknown CA")
        shutil.copy(certificates.crt("ca"), ca)
        process.until_said(": registered")


def test_a_common_name_with_authentication_on(
    secure: Cluster, certificates: Certificates, tmp_path: Path
) -> None:
    """The last test of this server: authentication stays on."""
    files = ctl_files(certificates, "nameless")
    etcdctl(secure.urls[0], *files, "user", "add", "root:rootpw")
    etcdctl(secure.urls[0], *files, "user", "grant-role", "root", "root")
    etcdctl(secure.urls[0], *files, "auth", "enable")
    login = as_user(tmp_path, "root")
    nameless = options(secure.urls[0], certificates, "nameless")
    (tmp_path / "log").mkdir()
    all_say(
        tmp_path / "log",
        {
            "a name": (
                options(secure.urls[0], certificates, "named"),
                "hint: issue the certificate without CN",
            ),
            "none": (
                (*nameless, "--user", "root", "--password-file", str(login["password_file"])),
                "registered",
            ),
        },
    )
