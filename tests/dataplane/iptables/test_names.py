"""Chain names: kube-proxy's own under the prefix KUBE, and short enough under every prefix."""

from __future__ import annotations

import itertools

import pytest

from vipd.dataplane.iptables.names import (
    FIXED_KINDS,
    HASHED_KINDS,
    ChainId,
    Names,
    hashed,
)
from vipd.model.forwarding import Endpoint, ForwardingKey
from vipd.model.service import Family, Protocol

KUBE = Names("KUBE")
LONGEST = Names("ABCDEFG")


def key(service: str, port_name: str, protocol: Protocol) -> ForwardingKey:
    return ForwardingKey(service, port_name, protocol, Family.IPV4)


@pytest.mark.parametrize(
    ("service", "port_name", "protocol", "expected"),
    [
        ("kube-system/kube-dns", "dns", Protocol.UDP, "TCOU7JCQXEZGVUNU"),
        ("kube-system/kube-dns", "dns-tcp", Protocol.TCP, "ERIFXISQEP7F7OF4"),
        ("kube-system/kube-dns", "metrics", Protocol.TCP, "JD5MR3NA4I4DYORP"),
        ("default/kubernetes", "https", Protocol.TCP, "NPX46M4PTMTKRN6Y"),
        ("default/nginx", "", Protocol.TCP, "2CMXP7HKUVJN7L6M"),
        ("default/my-nginx-svc", "", Protocol.TCP, "NE3M6G7FP5C7DVRO"),
        ("default/web", "http", Protocol.TCP, "CDGGSHYLG3RE2FKL"),
    ],
)
def test_service_chain(service: str, port_name: str, protocol: Protocol, expected: str) -> None:
    assert KUBE.service(key(service, port_name, protocol)) == f"KUBE-SVC-{expected}"


def test_colon_of_an_unnamed_port_is_left_out() -> None:
    assert hashed("default/nginx:tcp") == "4N57TFCL4MD7ZTDA"
    assert KUBE.service(key("default/nginx", "", Protocol.TCP)) != "KUBE-SVC-4N57TFCL4MD7ZTDA"


@pytest.mark.parametrize(
    ("of", "endpoint", "expected"),
    [
        (
            key("kube-system/kube-dns", "dns", Protocol.UDP),
            Endpoint("10.200.0.27", 53),
            "LRUTK6XRXU43VLIG",
        ),
        (key("default/my-nginx-svc", "", Protocol.TCP), Endpoint("10.244.3.38", 80), "DSBJGVCOU4RGUKVK"),
        (key("default/web", "http", Protocol.TCP), Endpoint("fd00:10:244:1::a", 8080), "M75EHTPXWMMPEGRJ"),
    ],
)
def test_endpoint_chain(of: ForwardingKey, endpoint: Endpoint, expected: str) -> None:
    assert KUBE.endpoint(of, endpoint) == f"KUBE-SEP-{expected}"


def test_weight_is_no_part_of_an_endpoint_chain() -> None:
    of = key("default/web", "http", Protocol.TCP)
    assert KUBE.endpoint(of, Endpoint("10.0.0.1", 80, 7)) == KUBE.endpoint(of, Endpoint("10.0.0.1", 80))


def test_protocols_and_ports_have_chains_of_their_own() -> None:
    keys = [key("a", name, protocol) for name, protocol in itertools.product(("", "x"), Protocol)]
    assert len({KUBE.service(each) for each in keys}) == len(keys)


def test_every_name_fits_with_a_prefix_of_seven() -> None:
    fixed = [LONGEST.fixed(kind) for kinds in FIXED_KINDS.values() for kind in kinds]
    chains = [f"ABCDEFG-{kind}-{hashed('x')}" for kinds in HASHED_KINDS.values() for kind in kinds]
    built = [
        LONGEST.service(key("a", "b", Protocol.SCTP)),
        LONGEST.endpoint(key("a", "b", Protocol.SCTP), Endpoint("10.0.0.1", 80)),
    ]
    assert max(map(len, [*fixed, *chains, *built])) <= 28, "XT_EXTENSION_MAXNAMELEN, less its end"


def test_own_chains_are_known_by_name_and_table() -> None:
    ours = [ChainId(table, KUBE.fixed(kind)) for table, kinds in FIXED_KINDS.items() for kind in kinds]
    ours += [
        ChainId("nat", f"KUBE-{kind}-{hashed('x')}") for kinds in HASHED_KINDS.values() for kind in kinds
    ]
    assert all(KUBE.owns(chain) for chain in ours)


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ("nat", "KUBE-PROXY-CANARY"),
        ("nat", "KUBE-KUBELET-CANARY"),
        ("nat", "VIPD-SERVICES"),
        ("nat", "XKUBE-SERVICES"),
        ("nat", "KUBE-SERVICES-X"),
        ("nat", f"KUBE-SVC-{hashed('x')}A"),
        ("nat", "KUBE-SVC-lowercaseletters"),
        ("nat", "KUBE-SVC-0189AAAAAAAAAAAA"),
        ("filter", f"KUBE-SVC-{hashed('x')}"),
        ("mangle", "KUBE-SERVICES"),
        ("nat", "KUBE-FORWARD"),
        ("filter", "KUBE-POSTROUTING"),
        ("nat", "PREROUTING"),
        ("nat", ""),
    ],
)
def test_chains_of_others_are_not_ours(table: str, name: str) -> None:
    assert not KUBE.owns(ChainId(table, name))
