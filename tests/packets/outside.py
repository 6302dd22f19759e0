"""What tests of traffic from outside share: declared services, FORWARD policies, a rival owner of addresses.

Addresses for clients from outside lie in `OUTSIDE`. The lab's host routes them to its last backend, which
answers for all of them: a flow that vipd neither translates nor drops is therefore answered by the wrong one,
and a test that wants silence cannot take a packet that got lost for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import yaml

from tests.lab.daemon import Daemon
from tests.lab.node import Node
from tests.lab.topology import UPLINK, Lab, Wiring
from tests.packets.services import SERVED_PORT, backend_text

OUTSIDE = {4: "198.18.0.0/16", 6: "2001:db8:9::/64"}
FILTERS = {4: "iptables", 6: "ip6tables"}
SILENCE = 0.4
"""Seconds without an answer that count as none, where none must come: a first answer takes milliseconds.
Where one must come there is no such hurry."""

ACCEPT_OURS = ("ct", "mark", "&", "0x2000", "==", "0x2000", "ct", "status", "dnat", "accept")
"""What makes a chain of others accept the flows of the nftables dataplane."""

_numbers = {4: itertools.count(1), 6: itertools.count(1)}
_ports = itertools.count(30000)


def outside_address(family: int) -> str:
    """An address for clients from outside that no other test uses."""
    number = next(_numbers[family])
    return f"198.18.{number >> 8}.{number & 255}" if family == 4 else f"2001:db8:9::{number:x}"


def inside_address(family: int) -> str:
    """An address for clients from inside that no other test uses. Its range is the rival's too."""
    return outside_address(family)


def node_port() -> int:
    """A port of the host that no other test uses."""
    return next(_ports)


def host_addresses(family: int) -> tuple[str, str, str]:
    """The host's addresses: towards the client, towards the backends, and towards the world."""
    if family == 4:
        return ("10.10.0.1", "10.244.0.1", UPLINK[4])
    return ("fd00:10::1", "fd00:244::1", UPLINK[6])


@contextmanager
def outside_lab(backends: int = 3) -> Iterator[Lab]:
    """A lab whose last backend, the rival, answers for every outside address on `SERVED_PORT`."""
    with Lab(Wiring(backends=backends)) as lab:
        lab.serve_everywhere(SERVED_PORT)
        # vipd turns forwarding on with its first service; the rival is to be reached before that.
        lab.host.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
        rival = lab.backends[-1]
        for family, network in OUTSIDE.items():
            lab.host.run("ip", f"-{family}", "route", "add", network, "via", rival.address(family))
            rival.run("ip", f"-{family}", "route", "add", "local", network, "dev", "lo")
        yield lab


def forward_policies(lab: Lab, family: int) -> Iterator[str]:
    """Each policy of FORWARD in turn, set while it is looked at; ACCEPT in the end.

    vipd's own table cannot stop FORWARD from dropping: with the nftables dataplane the operator adds the rule
    that `vipctl status` shows.
    """
    table = ("ip" if family == 4 else "ip6", "filter", "FORWARD")
    own_table = f"table {table[0]} vipd" in lab.host.run("nft", "list", "tables").stdout
    try:
        for policy in ("DROP", "ACCEPT"):
            lab.host.run(FILTERS[family], "-P", "FORWARD", policy)
            if own_table and policy == "DROP":
                lab.host.run("nft", "insert", "rule", *table, *ACCEPT_OURS)
            yield policy
    finally:
        lab.host.run(FILTERS[family], "-P", "FORWARD", "ACCEPT")
        if own_table:
            lab.host.run("nft", "flush", "chain", *table)


class Declared:
    """Services in a file each, as an operator writes them."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def put(self, name: str, backends: Sequence[str | Mapping[str, Any]], family: int, **spec: Any) -> None:
        """Declare the service `NAME-v4` or `NAME-v6`, or declare it anew; returns once the kernel has it."""
        whole = {"name": f"{name}-v{family}", "backends": list(backends), **spec}
        self._daemon.write(yaml.safe_dump([whole]), f"{name}-v{family}.yaml")
        self._daemon.reload()

    def drop(self, name: str, family: int) -> None:
        """Remove the service's file; returns once the kernel has it no more."""
        (self._daemon.services_dir / f"{name}-v{family}.yaml").unlink()
        self._daemon.reload()


def backend_texts(nodes: tuple[Node, ...], family: int) -> tuple[str, ...]:
    return tuple(backend_text(node, family) for node in nodes)
