"""What a check asks when it says no more, and which checks may come from where."""

from __future__ import annotations

import pytest

from vipd.model.check import Check, ExecProbe, HttpProbe, Probe, TcpProbe, depends_on_host
from vipd.model.claim_limits import check_violation


def test_an_http_check_takes_every_success_and_redirection() -> None:
    assert HttpProbe().status == ((200, 399),)


@pytest.mark.parametrize(
    ("source", "method", "refused"),
    [("etcd", "GET", False), ("etcd", "HEAD", False), ("etcd", "POST", True), ("file", "POST", False)],
)
def test_a_check_of_etcds_changes_nothing(source: str, method: str, refused: bool) -> None:
    assert bool(check_violation(Check(HttpProbe(method=method)), source)) is refused
    assert check_violation(Check(TcpProbe()), source) is None


@pytest.mark.parametrize(
    ("probe", "depends"),
    [
        (HttpProbe(tls=True, ca="/etc/ca.pem"), True),
        (HttpProbe(tls=True, verify=False, ca="/etc/ca.pem"), False),
        (HttpProbe(ca="/etc/ca.pem"), False),
        (HttpProbe(tls=True), False),
        (ExecProbe(command=("/bin/true",)), True),
        (TcpProbe(), False),
    ],
)
def test_programs_and_certificates_are_of_this_host(probe: Probe, depends: bool) -> None:
    assert depends_on_host(Check(probe)) is depends
