"""Other ways of programming the same services, carried out like vipd's own, in a worker process.

Only the tool is measured here, not the making of what it is given.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from tests.bench import ipvs_rules
from tests.bench.kube_proxy_nft import changed_service, whole_table
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.names import ChainId, Rules
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.ruleset import Ruleset
from vipd.host.process import run
from vipd.host.settings.settings import Settings
from vipd.model.forwarding import Forwarding
from vipd.model.service import Family, Service
from vipd.observe.bench.subjects import Subject, count_iptables, count_nft
from vipd.observe.bench.usage import Meter
from vipd.observe.bench.worker import main

Variant = Literal["nft", "legacy"]

RESTORES: dict[str, Variant] = {"one iptables-restore, nft": "nft", "one iptables-restore, legacy": "legacy"}
KUBE_PROXY_NFT = "one nft -f"
"""The table that kube-proxy's nftables mode writes."""
IPVS = "one ipvsadm --restore"
"""Only on kernels that have IPVS: see `tests.bench.ipvs_guest`."""
CLUSTER = ("10.128.0.0/9",)
"""Where the backends of the declared services are."""


class OneRestore:
    """kube-proxy's rules in one restore. A change writes what its partial sync does: all chains that services
    share, and those of the service."""

    def __init__(self, variant: Variant) -> None:
        self._variant = variant
        self._ruleset = Ruleset(RuleOptions(Family.IPV4, prefix="KUBE", kube_proxy=True, dispatch="flat"))
        self._text = ""

    def prepare(self, services: Sequence[Service]) -> None:
        """Make the text of everything."""
        for forwarding in _forwardings(services):
            self._ruleset.update(forwarding.key, forwarding)
        wanted = self._ruleset.whole({})
        leaves = {chain: rules for group in wanted.service_chains for chain, rules in group.items()}
        self._text = _restore_text({**leaves, **wanted.shared}, wanted.jumps)
        self._ruleset.mark_clean()

    async def load(self, meter: Meter) -> None:
        """One restore."""
        await self._write(meter)

    def prepare_change(self, service: Service) -> None:
        """Make the text of the change."""
        for forwarding in _forwardings([service]):
            self._ruleset.update(forwarding.key, forwarding)
        wanted = self._ruleset.dirty()
        leaves = {chain: rules for group in wanted.service_chains for chain, rules in group.items()}
        self._text = _restore_text({**leaves, **wanted.shared}, {})
        self._ruleset.mark_clean()

    async def change(self, meter: Meter) -> None:
        """One restore."""
        await self._write(meter)

    async def collect_garbage(self) -> None:
        """Nothing: old chains of endpoints stay, as kube-proxy leaves them for later where there are many."""

    async def counts(self) -> dict[str, int]:
        """What iptables-save lists."""
        return await count_iptables(self._variant, run)

    async def _write(self, meter: Meter) -> None:
        await _run(
            meter, [f"iptables-{self._variant}-restore", "-w", "5", "--noflush", "--counters"], self._text
        )


class OneTransaction:
    """kube-proxy's nftables table in one transaction of nft. A change writes what its partial sync does."""

    def __init__(self) -> None:
        self._services: dict[str, Service] = {}
        self._text = ""

    def prepare(self, services: Sequence[Service]) -> None:
        """Make the text of everything."""
        self._services = {service.name: service for service in services}
        self._text = whole_table(services, CLUSTER)

    async def load(self, meter: Meter) -> None:
        """One transaction."""
        await _run(meter, ["nft", "-f", "-"], self._text)

    def prepare_change(self, service: Service) -> None:
        """Make the text of the change."""
        self._text = changed_service(self._services[service.name], service)
        self._services[service.name] = service

    async def change(self, meter: Meter) -> None:
        """One transaction."""
        await _run(meter, ["nft", "-f", "-"], self._text)

    async def collect_garbage(self) -> None:
        """Nothing: an endpoint has no chain."""

    async def counts(self) -> dict[str, int]:
        """What nft lists."""
        return await count_nft(run)


class OneIpvsadm:
    """IPVS by one run of ipvsadm. A change adds the new backend and deletes the old one."""

    def __init__(self) -> None:
        self._services: dict[str, Service] = {}
        self._text = ""

    def prepare(self, services: Sequence[Service]) -> None:
        """Make the text of everything."""
        self._services = {service.name: service for service in services}
        self._text = ipvs_rules.all_services(services)
        # IPVS asks the routes what a backend's address is; there are none before the first address.
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=60)

    async def load(self, meter: Meter) -> None:
        """One run."""
        await _run(meter, ["ipvsadm", "--restore"], self._text)

    def prepare_change(self, service: Service) -> None:
        """Make the text of the change."""
        self._text = ipvs_rules.changed_service(self._services[service.name], service)
        self._services[service.name] = service

    async def change(self, meter: Meter) -> None:
        """One run."""
        await _run(meter, ["ipvsadm", "--restore"], self._text)

    async def collect_garbage(self) -> None:
        """Nothing: no virtual server is left."""

    async def counts(self) -> dict[str, int]:
        """It has neither chains nor rules."""
        return {}


def comparator(name: str, directory: Path) -> Subject:
    """The subject of that name. Raises KeyError."""
    if name == IPVS:
        return OneIpvsadm()
    return OneTransaction() if name == KUBE_PROXY_NFT else OneRestore(RESTORES[name])


async def _run(meter: Meter, argv: Sequence[str], text: str) -> None:
    finished = await meter.run(argv, text)
    if finished.exit_code:
        raise ApplyError(f"{argv[0]} failed", finished.stderr.strip())


def _forwardings(services: Sequence[Service]) -> list[Forwarding]:
    policy = SelectionPolicy.of(Settings(), ())
    return [forwarding for service in services for forwarding in select_backends(service, policy)]


def _restore_text(chains: Mapping[ChainId, Rules], jumps: Mapping[ChainId, Rules]) -> str:
    tables = []
    for table in ("filter", "nat"):
        own = [chain for chain in chains if chain.table == table]
        declared = [f":{chain.name} - [0:0]" for chain in own]
        ruled = [(c, r) for c, r in (*jumps.items(), *chains.items()) if c.table == table]
        rules = [f"-A {chain.name} {rule}" for chain, each in ruled for rule in each]
        tables.append("\n".join([f"*{table}", *declared, *rules, "COMMIT", ""]))
    return "".join(tables)


if __name__ == "__main__":
    main(comparator)
