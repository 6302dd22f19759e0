"""The settings for one family's rules in any dataplane, as a value. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from vipd.model.service import Family

if TYPE_CHECKING:  # pydantic is slow to import and not needed to compile
    from vipd.host.settings.settings import Settings


LOOPBACK = "127.0.0.0/8"
"""Sources with which no packet can leave this host and be answered."""


@dataclass(frozen=True, slots=True)
class FamilyOptions:
    """Everything besides the forwardings that shapes the rules of every dataplane. Each adds its own."""

    family: Family
    prefix: str = "VIPD"
    mark: int = 0x4000
    """Packet mark that asks for masquerade."""
    flow_mark: int = 0x2000
    """Connection mark of every flow that vipd translated."""
    cluster_cidrs: tuple[str, ...] = ()
    random_fully: bool = True
    kube_proxy: bool = False
    """Masquerade exactly as kube-proxy does; with iptables every rule has kube-proxy's exact form, also where
    vipd knows a better one (docs/architecture.md lists those)."""
    localhost_node_ports: bool = False
    node_port_addresses: tuple[str, ...] | None = None
    """This host's addresses that answer on node ports; None: all of them."""
    reject_unused_ports: bool = True
    """Refuse what is for a VIP and no port of a service."""
    affinity: bool = True
    """The kernel can remember clients (xt_recent, dynamic maps)."""
    ping: bool = True
    """The kernel can answer for another address (xt_REDIRECT, nft_redir)."""
    limits: bool = True
    """The kernel can limit new flows (xt_hashlimit and xt_connlimit; nft_limit and nft_connlimit)."""

    @classmethod
    def of_settings(
        cls, settings: Settings, family: Family, host_addresses: frozenset[str], **own: Any
    ) -> Self:
        """The options for these settings on a host with these addresses; `own`: the dataplane's further
        values."""
        return cls(
            family=family,
            prefix=settings.chain_prefix,
            mark=1 << settings.mark_bit,
            flow_mark=1 << settings.flow_mark_bit,
            cluster_cidrs=settings.cluster_cidrs_of(family),
            kube_proxy=settings.compat == "kube-proxy",
            localhost_node_ports=settings.answers_on_localhost,
            node_port_addresses=settings.node_addresses(family, host_addresses),
            reject_unused_ports=settings.reject_unused_ports,
            **own,
        )

    @property
    def loopback_clients(self) -> bool:
        """Whether node ports answer on `LOOPBACK`, so that clients have such sources: the flows of these are
        masqueraded in every mode."""
        return self.localhost_node_ports and self.family is Family.IPV4
