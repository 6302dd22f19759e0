"""The lab's host with rules loaded by hand from `vipctl render`, and a keeper of its table: no daemon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import yaml
from click.testing import CliRunner

from tests.dataplane.conntrack.kernel import connect_in
from tests.lab.topology import Lab
from vipd.cli.main import cli
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.dataplane.conntrack.cleaner import CleanupResult
from vipd.dataplane.conntrack.entries import Entry
from vipd.dataplane.conntrack.messages import Query
from vipd.dataplane.conntrack.netlink import Conntrack
from vipd.dataplane.conntrack.scheduler import ConntrackScheduler
from vipd.dataplane.conntrack.stale import TargetOf, default_target
from vipd.declaration.native import parse_declaration
from vipd.host.settings.settings import Settings
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family

Spec = dict[str, object]
"""One service as the declaration has it."""

OTHER: Spec = {"name": "other", "address": "10.96.99.1", "ports": ["9/udp"], "backends": ["10.244.0.99"]}
OTHER6: Spec = {"name": "other6", "address": "fd00:99::9", "ports": ["9/udp"], "backends": ["fd00:244::99"]}
"""Always declared: a namespace tracks connections only while some rule needs it."""


class ProgrammedHost:
    """Programs the host of a lab. Rules and cleaning are separate steps, to show what each does."""

    def __init__(self, lab: Lab, target_of: TargetOf = default_target) -> None:
        self._host = lab.host
        self._connect = connect_in(lab.host.namespace)
        self._forwardings: dict[ForwardingKey, Forwarding] = {}
        addresses = [lab.host.ipv4, lab.host.ipv6]
        self._policy = SelectionPolicy.of(Settings(), addresses)
        self.keeper = ConntrackScheduler(time.monotonic, connect=self._connect, target_of=target_of)
        self.keeper.host_changed(frozenset(addresses))
        for name in ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"):
            lab.host.sysctl(name, 1)

    def declare(self, *services: Spec) -> None:
        """Have the kernel's rules say just this, and tell the keeper."""
        text = yaml.safe_dump({"apiVersion": "vipd/v1", "services": [OTHER, OTHER6, *services]})
        for family, tool in ((Family.IPV4, "iptables"), (Family.IPV6, "ip6tables")):
            arguments = ["render", "-", "--family", str(family), "--set", "reject_unused_ports=false"]
            rendered = CliRunner().invoke(cli, arguments, text)
            assert rendered.exit_code == 0, rendered.output
            self._host.run(f"{tool}-restore", text=rendered.output)
        declaration = parse_declaration(text, "lab")
        assert declaration.ok, declaration.problems
        new = {f.key: f for service in declaration.services for f in select_backends(service, self._policy)}
        self.keeper.services_changed({**dict.fromkeys(self._forwardings), **new})
        self.keeper.applied(wrote=True)
        self._forwardings = new

    def clean(self) -> CleanupResult:
        """End what must end."""
        return asyncio.run(self.keeper.clean())

    def flows(self) -> Sequence[Entry]:
        """The whole table."""
        found: list[Entry] = []
        for family in Family:
            with Conntrack(self._connect()) as table:
                found += (entry for chunk in table.dump(Query(family)) for entry in chunk)
        return found

    def forget_flows(self) -> None:
        """Empty the table, so that no test sees another's flows."""
        with Conntrack(self._connect()) as table:
            table.delete(self.flows())
