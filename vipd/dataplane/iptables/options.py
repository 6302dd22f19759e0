"""What the settings say about the rules of one family, as a value. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vipd.dataplane.iptables.names import Names
from vipd.model import Family

if TYPE_CHECKING:  # pydantic is slow to import and not needed to compile
    from vipd.settings import Settings

KUBE_PREFIX = "KUBE"
"""The prefix with which chains are named, and commented, like kube-proxy's."""


@dataclass(frozen=True, slots=True)
class RuleOptions:
    """Everything besides the forwardings that shapes the rules."""

    family: Family
    prefix: str = "VIPD"
    kube_proxy: bool = False
    """kube-proxy's exact form, also where vipd knows a better one (docs/architecture.md lists those)."""
    mark: int = 0x4000
    flow_mark: int = 0x2000
    cluster_cidrs: tuple[str, ...] = ()
    random_fully: bool = True
    localhost_node_ports: bool = False
    node_port_addresses: tuple[str, ...] | None = None
    """This host's addresses that answer on node ports; None: all of them."""
    accept_forwarded: bool = True
    affinity: bool = True
    """The kernel can remember clients (xt_recent)."""
    ping: bool = True
    """The kernel can answer for another address (xt_REDIRECT)."""
    flow_marks: bool = True
    """The kernel can mark connections (xt_connmark)."""
    reject_unused_ports: bool = True
    """Refuse what is for a VIP and no port of a service."""
    dispatch: str = "auto"
    """`auto`, `flat` or `grouped`: how shared chains find an address (`dispatch.py`)."""

    @classmethod
    def of(
        cls,
        settings: Settings,
        family: Family,
        random_fully: bool,
        host_addresses: frozenset[str] = frozenset(),
    ) -> RuleOptions:
        """The options that the daemon's settings mean; `random_fully` is what the tool can do."""
        kube_proxy = settings.compat == "kube-proxy"
        return cls(
            family=family,
            prefix=settings.chain_prefix,
            kube_proxy=kube_proxy,
            mark=1 << settings.mark_bit,
            flow_mark=1 << settings.flow_mark_bit,
            cluster_cidrs=settings.cluster_cidrs_of(family),
            random_fully=random_fully if settings.random_fully is None else settings.random_fully,
            localhost_node_ports=settings.answers_on_localhost,
            node_port_addresses=settings.node_addresses(family, host_addresses),
            accept_forwarded=settings.accept_forwarded,
            reject_unused_ports=settings.reject_unused_ports,
            dispatch="flat" if kube_proxy else settings.dispatch,
        )

    @property
    def beyond_kube_proxy(self) -> bool:
        """Whether there are rules that kube-proxy lacks; with the prefix KUBE its chains stay as known."""
        return not self.kube_proxy and self.prefix != KUBE_PREFIX

    @property
    def names(self) -> Names:
        """The chain names of this prefix."""
        return Names(self.prefix)
