"""TLS contexts of probes, made once for each CA file and kept until the file changes."""

from __future__ import annotations

import ssl
from functools import lru_cache
from pathlib import Path

from vipd.checks import HttpProbe

_KEPT = 64


def tls_context(probe: HttpProbe) -> ssl.SSLContext:
    """What such a probe trusts. Raises OSError (ssl.SSLError too) when its CA file cannot be used."""
    if not probe.verify:
        return _context("", 0, verify=False)
    changed = Path(probe.ca).stat().st_mtime_ns if probe.ca else 0
    return _context(probe.ca, changed, verify=True)


@lru_cache(maxsize=_KEPT)
def _context(ca: str, changed: int, *, verify: bool) -> ssl.SSLContext:
    if verify:
        return ssl.create_default_context(cafile=ca or None)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def tls_trouble(error: ssl.SSLError) -> str:
    """Why a handshake failed, in its own words, without the library's source lines."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not valid: {error.verify_message}"
    return f"TLS failed: {(error.reason or str(error)).replace('_', ' ').lower()}"
