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
from tests.bench.trials.subjects import Subject, count_iptables, count_nft
from tests.bench.trials.usage import Meter
from tests.bench.trials.worker import main
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.names import ChainId, Rules
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.ruleset import DesiredChains, Ruleset
from vipd.host.process import run
from vipd.host.settings.settings import Settings
from vipd.model.forwarding import Forwarding
from vipd.model.service import Family, Service

Variant = Literal["nft", "legacy"]

RESTORES: dict[str, Variant] = {"one iptables-restore, nft": "nft", "one iptables-restore, legacy": "legacy"}
KUBE_PROXY_NFT = "one nft -f"
IPVS = "one ipvsadm --restore"
"""Only on kernels that have IPVS: see `tests.bench.ipvs_guest`."""
CLUSTER = ("10.128.0.0/9",)


class Tool:
    """A program that is given text: once for everything, and once for a change, as kube-proxy's partial sync
    is. It leaves nothing that would have to be collected later."""

    argv: Sequence[str]

    def __init__(self) -> None:
        self.services: dict[str, Service] = {}
        self._text = ""

    def whole(self, services: Sequence[Service]) -> str:
        raise NotImplementedError

    def changed(self, before: Service, after: Service) -> str:
        raise NotImplementedError

    async def counts(self) -> dict[str, int]:
        return {}

    def prepare(self, services: Sequence[Service]) -> None:
        self.services = {service.name: service for service in services}
        self._text = self.whole(services)

    def prepare_change(self, service: Service) -> None:
        self._text = self.changed(self.services[service.name], service)
        self.services[service.name] = service

    async def load(self, meter: Meter) -> None:
        finished = await meter.run(self.argv, self._text)
        if finished.exit_code:
            raise ApplyError(f"{self.argv[0]} failed", finished.stderr.strip())

    change = load

    async def collect_garbage(self) -> None:
        """Nothing is left, or it stays as kube-proxy leaves old chains where there are many."""


class OneRestore(Tool):
    """kube-proxy's rules in one restore. A change writes all chains that services share, and those of the
    service."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self._variant = variant
        self.argv = [f"iptables-{variant}-restore", "-w", "5", "--noflush", "--counters"]
        self._ruleset = Ruleset(RuleOptions(Family.IPV4, prefix="KUBE", kube_proxy=True, dispatch="flat"))

    def whole(self, services: Sequence[Service]) -> str:
        self._update(services)
        return self._restore(self._ruleset.whole({}), jumps=True)

    def changed(self, before: Service, after: Service) -> str:
        self._update([after])
        return self._restore(self._ruleset.dirty(), jumps=False)

    async def counts(self) -> dict[str, int]:
        return await count_iptables(self._variant, run)

    def _update(self, services: Sequence[Service]) -> None:
        for forwarding in _forwardings(services):
            self._ruleset.update(forwarding.key, forwarding)

    def _restore(self, wanted: DesiredChains, *, jumps: bool) -> str:
        leaves = {chain: rules for group in wanted.service_chains for chain, rules in group.items()}
        self._ruleset.mark_clean()
        return _restore_text({**leaves, **wanted.shared}, wanted.jumps if jumps else {})


class OneTransaction(Tool):
    """kube-proxy's nftables table in one transaction of nft. An endpoint has no chain."""

    argv = ("nft", "-f", "-")

    def whole(self, services: Sequence[Service]) -> str:
        return whole_table(services, CLUSTER)

    def changed(self, before: Service, after: Service) -> str:
        return changed_service(before, after)

    async def counts(self) -> dict[str, int]:
        return await count_nft(run)


class OneIpvsadm(Tool):
    """IPVS by one run of ipvsadm. It has neither chains nor rules."""

    argv = ("ipvsadm", "--restore")

    def whole(self, services: Sequence[Service]) -> str:
        """Every virtual server. IPVS asks the routes what a backend's address is; there are none before the
        first address."""
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=60)
        return ipvs_rules.all_services(services)

    def changed(self, before: Service, after: Service) -> str:
        return ipvs_rules.changed_service(before, after)


def comparator(name: str, directory: Path) -> Subject:
    if name == IPVS:
        return OneIpvsadm()
    return OneTransaction() if name == KUBE_PROXY_NFT else OneRestore(RESTORES[name])


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
