"""What `limits` may say, and what is wrong with the rest."""

from __future__ import annotations

import pytest

from tests.lab.inside import declare
from vipd.model.flow_limits import FlowLimits

SERVICE = (
    "apiVersion: vipd/v1\nservices: [{{address: 10.96.0.1, ports: 80, backends: [10.244.0.5], limits: {}}}]\n"
)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("none", None),
        ("{connections: 5}", FlowLimits(connections=5)),
        (
            "{new_per_client: 3, client_burst: 9, client_ipv6_prefix: 56}",
            FlowLimits(new_per_client=3, client_burst=9, client_ipv6_prefix=56),
        ),
        (
            "{connections: 1000000, new_per_second: 100000, burst: 100000, client_ipv6_prefix: 32}",
            FlowLimits(connections=1000000, new_per_second=100000, burst=100000, client_ipv6_prefix=32),
        ),
        ("{new_per_client: 1, client_ipv6_prefix: 64}", FlowLimits(new_per_client=1)),
    ],
)
def test_limits_are_read(written: str, meant: FlowLimits | None) -> None:
    found = declare(SERVICE.format(written), "web.yaml")
    assert found.ok, found.problems
    assert found.services[0].limits == meant


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("{}", "names no limit"),
        ("{client_ipv6_prefix: 64}", "names no limit"),
        ("{connections: 1, burst: 5}", "there is no new_per_second"),
        ("{client_burst: 5}", "there is no new_per_client"),
        ("{connections: 0}", "0 is out of range"),
        ("{connections: 1000001}", "1000001 is out of range"),
        ("{new_per_second: 100001}", "100001 is out of range"),
        ("{new_per_second: 1, burst: 100001}", "100001 is out of range"),
        ("{new_per_client: 1, client_ipv6_prefix: 31}", "31 is out of range"),
        ("{connection: 5}", 'unknown key "connection"'),
        ("5", "must be a mapping or none"),
    ],
)
def test_a_fault_is_told_once(written: str, told: str) -> None:
    (problem,) = declare(SERVICE.format(written), "web.yaml").problems
    assert told in str(problem)
