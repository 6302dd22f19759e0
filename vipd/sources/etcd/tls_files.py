"""The files that a connection to etcd requires: certificates, a key, a password.

Each must be a regular file of limited size, so that no read waits for ever; a file system that hangs
causes a timeout (vipd/host/file_calls.py).
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vipd.host.durable import error_text, open_regular, read_regular
from vipd.host.settings.etcd import EtcdSettings
from vipd.sources.etcd.errors import AuthFailedError, TLSError, TLSFault

MAX_BYTES = 2**20
"""Of one file."""

Signatures = tuple[tuple[int, ...], ...]


def tls_context(settings: EtcdSettings) -> ssl.SSLContext:
    """Raises TLSError, saying which file is at fault. It waits: call it in a thread."""
    place = settings.ca
    try:
        context = ssl.create_default_context(cadata=_authorities(settings.ca))
        place = settings.cert
        if settings.cert is not None and settings.key is not None:
            with ExitStack() as stack:
                opened = [stack.enter_context(_opened(path)) for path in (settings.cert, settings.key)]
                context.load_cert_chain(*opened)
    except (OSError, ssl.SSLError, ValueError) as error:
        files = f"{place}, {settings.key}" if place and place == settings.cert else f"{place}"
        raise TLSError(TLSFault.FILES, f"{files}: cannot be used for TLS: {error_text(error)}") from None
    return context


def signatures(settings: EtcdSettings) -> Signatures:
    """Changes whenever one of the files does. It blocks: call it in a thread."""
    return tuple(map(_signature, (settings.ca, settings.cert, settings.key)))


def password(path: Path | None) -> str:
    """Raises AuthFailedError. It waits: call it in a thread."""
    try:
        data = read_regular(path, MAX_BYTES) if path else b""
        return data.decode("utf-8").partition("\n")[0].rstrip("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise AuthFailedError(f"{path}: the password cannot be read: {error_text(error)}") from None


def _authorities(path: Path | None) -> str | None:
    """The text of certificates to trust; None: the system's. Raises OSError."""
    if path is None:
        return None
    data = read_regular(path, MAX_BYTES)
    if b"-----BEGIN" not in data:
        raise ssl.SSLError(0, "no certificate in it")
    # Text between certificates may be in any script; it is not read.
    return data.decode("ascii", "ignore")


@contextmanager
def _opened(path: Path) -> Iterator[str]:
    """A path to exactly the file that was checked: OpenSSL accepts only paths, and blocks on special files.
    Raises OSError."""
    descriptor = open_regular(path)
    try:
        if os.fstat(descriptor).st_size > MAX_BYTES:
            raise OSError(0, f"{path} is larger than {MAX_BYTES >> 20} MiB")
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _signature(path: Path | None) -> tuple[int, ...]:
    try:
        found = path.stat() if path else None
    except OSError:
        return (-1,)
    return (found.st_ino, found.st_size, found.st_mtime_ns) if found else ()
