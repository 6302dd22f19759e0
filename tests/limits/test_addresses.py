"""Addresses times backends: the dataplane has an element for each, so it is limited before they are made."""

from __future__ import annotations

import pytest

from tests.lab.inside import declare
from tests.model.samples import HEAD
from vipd.model import limits

KUBERNETES = """\
apiVersion: v1
kind: Service
metadata: {{name: web}}
spec: {{clusterIP: 10.96.0.1, externalIPs: [{externals}], ports: [{{port: 80}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: web-1, labels: {{kubernetes.io/service-name: web}}}}
addressType: IPv4
ports: [{{port: 80}}]
endpoints: [{endpoints}]
"""


def _texts(externals: int, backends: int) -> tuple[str, str]:
    outside = ", ".join(f"203.0.{n // 250}.{n % 250 + 1}" for n in range(externals))
    servers = [f"10.244.{n // 250}.{n % 250 + 1}" for n in range(backends)]
    native = f"  - {{name: web, address: 10.96.0.1, ports: 80, external_addresses: [{outside}],"
    native = f"{HEAD}{native} backends: [{', '.join(servers)}]}}\n"
    endpoints = ", ".join(f"{{addresses: [{server}]}}" for server in servers)
    return native, KUBERNETES.format(externals=outside, endpoints=endpoints)


@pytest.mark.parametrize("language", [0, 1], ids=["vipd", "Kubernetes"])
def test_endpoints_at_each_of_many_addresses_are_limited(language: int) -> None:
    found = declare(_texts(999, 501)[language], "x.yaml")
    wanted = "501 endpoints at each of 1000 addresses make 501000: 500000 are the most"
    assert wanted in str(found.problems[0])
    assert declare(_texts(199, 50)[language], "x.yaml").ok


def test_a_service_of_many_addresses_counts_what_it_makes() -> None:
    many, few = (declare(_texts(*n)[0], "x.yaml").services[0] for n in ((199, 200), (0, 200)))
    assert limits.declared_size(many) == 200 * 200 // 2
    assert limits.declared_size(few) == 201
