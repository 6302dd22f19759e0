"""Certificates made by openssl for one test run."""

from __future__ import annotations

import subprocess
from pathlib import Path

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
