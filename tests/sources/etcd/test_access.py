"""Users, roles, tokens and TLS with a real etcd: each fault has a name, and mending it is enough."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from tests.sources.etcd.certificates import Certificates
from tests.sources.etcd.following import FAST, following, key, value
from tests.sources.etcd.members import Cluster, cluster, etcdctl
from vipd.host.settings.etcd import EtcdSettings
from vipd.sources.etcd import transport_faults
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.errors import (
    AuthFailedError,
    CommonNameError,
    EndpointError,
    EtcdError,
    PermissionDeniedError,
    TLSError,
    TLSFault,
)
from vipd.sources.etcd.messages import KeyRange
from vipd.sources.etcd.tls_files import tls_context
from vipd.sources.etcd.transport_faults import diagnose

ROOT = ("--user", "root:rootpw")
MINE = b"/vipd/v1/services/a"
RIGHT = "pw"
PATIENCE = 30.0
TOKEN_SECONDS = 2
"""How long a token lasts that nobody uses."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, the other scheme is found out."""
    monkeypatch.setattr(transport_faults, "DIAGNOSIS_SECONDS", PATIENCE)
    monkeypatch.setattr(transport_faults, "TLS_ALERT_SECONDS", PATIENCE / 10)


@asynccontextmanager
async def client_with(settings: EtcdSettings) -> AsyncIterator[EtcdClient]:
    client = EtcdClient(settings, Random(1))
    try:
        yield client
    finally:
        await client.close()


async def read(settings: EtcdSettings) -> None:
    async with client_with(settings) as client:
        await client.get(MINE)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Authentication on; tokens do not last."""
    flags = ["--auth-token-ttl", str(TOKEN_SECONDS)]
    with cluster(tmp_path_factory.mktemp("guarded"), 1, flags) as made:
        url = made.urls[0]
        etcdctl(url, "user", "add", "root:rootpw")
        etcdctl(url, "user", "grant-role", "root", "root")
        etcdctl(url, "role", "add", "vipd")
        etcdctl(url, "role", "grant-permission", "--prefix=true", "vipd", "readwrite", "/vipd/v1/")
        etcdctl(url, "user", "add", "vipd:pw")
        etcdctl(url, "user", "grant-role", "vipd", "vipd")
        etcdctl(url, "auth", "enable")
        yield made


def user(guarded: Cluster, tmp_path: Path, password: str = RIGHT) -> EtcdSettings:
    (tmp_path / "password").write_text(f"{password}\n")
    file = tmp_path / "password"
    return EtcdSettings(guarded.urls, user="vipd", password_file=file, timeout=PATIENCE)


def test_a_wrong_password_is_told_and_a_mended_one_is_taken(guarded: Cluster, tmp_path: Path) -> None:
    settings = user(guarded, tmp_path, "wrong")

    async def scene() -> None:
        async with client_with(settings) as client:
            with pytest.raises(AuthFailedError, match="hint: check user and password_file"):
                await client.get(MINE)
            user(guarded, tmp_path)
            await client.get(MINE)
            (tmp_path / "password").unlink()
            client.connection._token = None
            with pytest.raises(AuthFailedError, match="No such file"):
                await client.get(MINE)

    asyncio.run(scene())


def test_no_user_where_one_is_needed(guarded: Cluster) -> None:
    async def scene() -> None:
        async with client_with(EtcdSettings(guarded.urls)) as client:
            with pytest.raises(AuthFailedError, match="hint: set user and password_file"):
                await client.get(MINE)
            with pytest.raises(AuthFailedError, match="hint: set user and password_file"):
                async with client.watch(KeyRange(MINE), 1):
                    pass

    asyncio.run(scene())


def test_an_expired_token_is_renewed_once_for_all_who_need_it(guarded: Cluster, tmp_path: Path) -> None:
    async def scene() -> None:
        async with client_with(user(guarded, tmp_path)) as client:
            tokens, log_in = list[str](), client.connection._log_in

            async def recorded(endpoint: str) -> str:
                tokens.append(await log_in(endpoint))
                return tokens[-1]

            client.connection._log_in = recorded  # type: ignore[method-assign]
            await client.get(MINE)
            assert len(tokens) == 1
            async with asyncio.timeout(90):
                while len(tokens) == 1:  # each use prolongs it, and a busy etcd looks late
                    await asyncio.sleep(TOKEN_SECONDS + 1.2)
                    await asyncio.gather(*(client.get(MINE) for _ in range(10)))
            assert len(tokens) == len(set(tokens)) == 2
            client.connection._token = "no.1"
            async with client.watch(KeyRange(MINE), 1):
                assert len(tokens) == 3

    asyncio.run(scene())


def test_what_a_role_lacks_is_named(guarded: Cluster, tmp_path: Path) -> None:
    async def scene() -> None:
        async with client_with(user(guarded, tmp_path)) as client:
            with pytest.raises(PermissionDeniedError, match=r"etcd denies read of /other/\*; hint: grant"):
                await client.range(KeyRange.prefix(b"/other/"))
            with pytest.raises(PermissionDeniedError, match=r"etcd denies write of /other/a; hint"):
                await client.put(b"/other/a", b"")
            with pytest.raises(PermissionDeniedError, match=r"etcd denies watch of /other/\*; hint"):
                async with client.watch(KeyRange.prefix(b"/other/"), 1):
                    pass

    asyncio.run(scene())


def test_a_source_outlives_its_tokens_and_a_lost_permission(guarded: Cluster, tmp_path: Path) -> None:
    url, grant = guarded.urls[0], ("vipd", "readwrite", "/vipd/v1/")

    async def scene() -> None:
        settings = user(guarded, tmp_path)
        async with client_with(settings) as writer, following((), tmp_path, FAST, settings) as there:
            await there.until(lambda: there.source.connected, "the first list")
            there.client.connection._token = "no.1"
            await writer.put(key("a").encode(), value(1).encode())
            await there.until(lambda: there.names() == {"a"}, "a change after the token's end")
            await asyncio.to_thread(
                etcdctl, url, *ROOT, "role", "revoke-permission", "vipd", "/vipd/v1/", "/vipd/v10"
            )
            loss = "etcd denies read of /vipd/v1/services/*"
            await there.until(lambda: loss in "\n".join(there.source.faults()), "the loss")
            assert there.names() == {"a"}
            await asyncio.to_thread(etcdctl, url, *ROOT, "role", "grant-permission", "--prefix=true", *grant)
            await there.until(lambda: not there.source.faults(), "mended")

    asyncio.run(scene())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secure(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """TLS, and a client certificate is demanded."""
    flags = [
        *tls(certificates, "server"),
        "--client-cert-auth",
        f"--trusted-ca-file={certificates.crt('ca')}",
    ]
    with cluster(tmp_path_factory.mktemp("secure"), 1, flags) as made:
        # It listens a moment before it takes handshakes; etcdctl knows how to wait for that.
        crt, private = certificates.crt, certificates.key
        files = (f"--cacert={crt('ca')}", f"--cert={crt('named')}", f"--key={private('named')}")
        etcdctl(made.urls[0], "endpoint", "health", *files)
        yield made


def tls(certificates: Certificates, name: str) -> list[str]:
    return [f"--cert-file={certificates.crt(name)}", f"--key-file={certificates.key(name)}"]


def settings_of(etcd: Cluster, certificates: Certificates, own: str = "", ca: str = "ca") -> EtcdSettings:
    cert, private = (certificates.crt(own), certificates.key(own)) if own else (None, None)
    return EtcdSettings(etcd.urls, ca=certificates.crt(ca), cert=cert, key=private, timeout=PATIENCE)


def tls_fault(settings: EtcdSettings) -> tuple[TLSFault, str]:
    for _ in range(20):
        with pytest.raises(EtcdError) as told:
            asyncio.run(read(settings))
        if isinstance(told.value, TLSError):
            return told.value.fault, str(told.value)
        # A server that has said why may have hung up before a busy client comes to hear it.
        assert "the connection broke" in str(told.value)
    raise told.value


def test_a_client_certificate(secure: Cluster, certificates: Certificates) -> None:
    asyncio.run(read(settings_of(secure, certificates, "named")))
    fault, text = tls_fault(settings_of(secure, certificates))
    assert fault is TLSFault.CLIENT_CERTIFICATE
    assert "the server demands a client certificate" in text
    fault, text = tls_fault(settings_of(secure, certificates, "other"))
    assert fault is TLSFault.CLIENT_CERTIFICATE
    assert "the server refuses our client certificate" in text


def test_a_refusal_that_the_client_did_not_hear_is_asked_for(
    secure: Cluster, certificates: Certificates
) -> None:
    """The reason is lost where the server resets the connection over a request that it did not read."""
    broken = EndpointError("the connection broke", sent=True)

    def looked_at(own: str = "") -> EndpointError:
        context = tls_context(settings_of(secure, certificates, own))
        error = ConnectionResetError()
        return asyncio.run(diagnose(secure.urls[0], error, broken, context, has_certificate=bool(own)))

    assert "demands a client certificate" in str(looked_at())
    assert "refuses our client certificate" in str(looked_at("other"))
    assert looked_at("named") is broken


def test_an_unknown_ca_and_the_wrong_scheme(secure: Cluster, certificates: Certificates) -> None:
    fault, text = tls_fault(settings_of(secure, certificates, "named", ca="other"))
    assert fault is TLSFault.UNKNOWN_CA
    assert "hint: name the CA's file in ca" in text
    plain = EtcdSettings((secure.urls[0].replace("https", "http"),), timeout=PATIENCE)
    fault, text = tls_fault(plain)
    assert fault is TLSFault.TLS_SERVER
    assert "hint: write https://" in text


def test_https_to_a_plain_server(guarded: Cluster, certificates: Certificates) -> None:
    urls = (guarded.urls[0].replace("http", "https"),)
    fault, text = tls_fault(EtcdSettings(urls, ca=certificates.crt("ca"), timeout=PATIENCE))
    assert fault is TLSFault.PLAIN_SERVER
    assert "hint: write http://" in text


@pytest.mark.parametrize(
    ("name", "fault", "words"),
    [
        ("elsewhere", TLSFault.HOSTNAME, "is for another name"),
        ("expired", TLSFault.EXPIRED, "is out of date"),
    ],
)
def test_a_servers_certificate_that_does_not_fit(
    name: str, fault: TLSFault, words: str, certificates: Certificates, tmp_path: Path
) -> None:
    with cluster(tmp_path / name, 1, tls(certificates, name)) as etcd:
        found, text = tls_fault(settings_of(etcd, certificates))
    assert found is fault
    assert words in text


def test_files_that_cannot_be_used_and_are_mended(
    secure: Cluster, certificates: Certificates, tmp_path: Path
) -> None:
    ca = tmp_path / "ca.crt"
    cert, private = certificates.crt("named"), certificates.key("named")
    settings = EtcdSettings(secure.urls, ca=ca, cert=cert, key=private, timeout=PATIENCE)

    async def scene() -> None:
        async with client_with(settings) as client:
            for text in ("", "nonsense"):
                if text:
                    ca.write_text(text)
                with pytest.raises(TLSError, match=str(ca)) as told:
                    await client.get(MINE)
                assert told.value.fault is TLSFault.FILES
            shutil.copy(certificates.crt("other"), ca)
            os.utime(ca, (1, 1))  # a clock that ticks slowly may give both copies one time, and they one size
            with pytest.raises(TLSError, match="unknown CA"):
                await client.get(MINE)
            shutil.copy(certificates.crt("ca"), ca)
            os.utime(ca, (2, 2))
            await client.get(MINE)

    asyncio.run(scene())


def test_a_common_name_with_authentication_on(
    secure: Cluster, certificates: Certificates, tmp_path: Path
) -> None:
    """The last test of this server: authentication stays on."""
    files = (
        *("--cacert", str(certificates.crt("ca")), "--cert", str(certificates.crt("nameless"))),
        *("--key", str(certificates.key("nameless"))),
    )
    etcdctl(secure.urls[0], *files, "user", "add", "root:rootpw")
    etcdctl(secure.urls[0], *files, "user", "grant-role", "root", "root")
    etcdctl(secure.urls[0], *files, "auth", "enable")
    with pytest.raises(CommonNameError, match="hint: issue the certificate without CN"):
        asyncio.run(read(settings_of(secure, certificates, "named")))
    (tmp_path / "password").write_text("rootpw")
    nameless = settings_of(secure, certificates, "nameless")
    asyncio.run(
        read(
            EtcdSettings(
                nameless.endpoints,
                ca=nameless.ca,
                cert=nameless.cert,
                key=nameless.key,
                user="root",
                password_file=tmp_path / "password",
                timeout=PATIENCE,
            )
        )
    )
