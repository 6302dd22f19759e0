"""TLS contexts of probes, made once for each CA file and kept until the file changes.

A handshake is computed on the event loop, and the server chooses how. With a group of 8192 bits of finite
fields it takes a hundred milliseconds; in TLS 1.2, with one of its own making, as long as it likes. So a
probe offers one elliptic curve, P-256, which every server of TLS 1.3 has (RFC 8446, 9.1), and nothing else.
"""

from __future__ import annotations

import errno
import os
import re
import ssl
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from vipd.host.durable import read_regular
from vipd.model.check import HttpProbe

MOST_CA_BYTES = 1024 * 1024
"""Largest CA file: more than four times the size of Debian's trusted roots."""

CONTENT = "content:"
"""Begins a `ca` that is not the path of a file, which begins with /, but what the file contains."""

_CERTIFICATE = re.compile(
    r"-----BEGIN (?P<kind>(?:X509 |TRUSTED )?CERTIFICATE)-----[^-]*-----END (?P=kind)-----"
)
_KEPT = 64
_CURVE = "prime256v1"
"""P-256. With OpenSSL 3 `set_ecdh_curve` sets the groups of a client, too."""
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20:ECDHE+AES"
"""Of TLS 1.2."""


def with_content(probe: HttpProbe, most: int) -> HttpProbe:
    """The probe with the certificates of its CA file, and no key that is there too, in place of the path: for
    a process that may not read it. As it is, if they have more than `most` bytes. Raises OSError as
    `tls_context` does."""
    tls_context(probe)
    certificates = "\n".join(found[0] for found in _CERTIFICATE.finditer(_certificates(probe.ca)))
    return replace(probe, ca=f"{CONTENT}{certificates}") if len(certificates) <= most else probe


def ca_name(probe: HttpProbe) -> str:
    """What a probe trusts, for people."""
    return "its ca" if probe.ca.startswith(CONTENT) else probe.ca or "what this host trusts"


def tls_context(probe: HttpProbe) -> ssl.SSLContext:
    """The TLS context of such a probe. Raises OSError (ssl.SSLError too) when its CA file cannot be used."""
    if not probe.verify:
        return _context("", 0, verify=False)
    changed = _status(probe.ca).st_mtime_ns if probe.ca and not probe.ca.startswith(CONTENT) else 0
    return _context(probe.ca, changed, verify=True)


def _status(ca: str) -> os.stat_result:
    try:
        return Path(ca).stat()
    except ValueError:
        raise OSError(errno.EINVAL, "not a path") from None


@lru_cache(maxsize=_KEPT)
def _context(ca: str, changed: int, *, verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=_certificates(ca) if ca else None)
    context.set_ciphers(_CIPHERS)
    context.set_ecdh_curve(_CURVE)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _certificates(ca: str) -> str:
    """A file's text. Anything but a plain file could hang, or never end."""
    if ca.startswith(CONTENT):
        return ca.removeprefix(CONTENT)
    text = read_regular(Path(ca), MOST_CA_BYTES)
    if b"-----BEGIN" not in text:
        raise ssl.SSLError(0, "no certificate in it")
    # Text between certificates may be in any script; it is not read.
    return text.decode("ascii", "ignore")


def tls_trouble(error: ssl.SSLError) -> str:
    """Why a handshake failed, in its own words, without the library's source lines."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not valid: {error.verify_message}"
    # An error that the library did not raise itself has no reason.
    why = getattr(error, "reason", None) or error.strerror or str(error)
    return f"TLS failed: {why.replace('_', ' ').lower()}"
