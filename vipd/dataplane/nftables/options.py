"""What the settings say about one family's table, as a value. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vipd.model import Family

if TYPE_CHECKING:  # pydantic is slow to import and not needed to compile
    from vipd.settings import Settings

DEFAULT_PINS = 1_000_000
"""Clients whose backend is remembered, in all services of a family together."""


@dataclass(frozen=True, slots=True)
class TableOptions:
    """Everything besides the forwardings that shapes a table."""

    family: Family
    prefix: str = "VIPD"
    mark: int = 0x4000
    """Packet mark that asks for masquerade."""
    flow_mark: int = 0x2000
    """Connection mark of every flow that the table translated."""
    cluster_cidrs: tuple[str, ...] = ()
    random_fully: bool = True
    localhost_node_ports: bool = False
    node_port_addresses: tuple[str, ...] | None = None
    """This host's addresses that answer on node ports; None: all of them."""
    reject_unused_ports: bool = True
    ping: bool = True
    """The kernel can answer for another address (nft_redir)."""
    affinity: bool = True
    """The kernel can remember clients (dynamic maps)."""
    counts: bool = True
    """The kernel can count in sets."""
    pins: int = DEFAULT_PINS

    @classmethod
    def of(
        cls, settings: Settings, family: Family, host_addresses: frozenset[str] = frozenset()
    ) -> TableOptions:
        """The options that the daemon's settings mean on a host with these addresses."""
        return cls(
            family=family,
            prefix=settings.chain_prefix,
            mark=1 << settings.mark_bit,
            flow_mark=1 << settings.flow_mark_bit,
            cluster_cidrs=settings.cluster_cidrs_of(family),
            random_fully=settings.random_fully is not False,
            localhost_node_ports=settings.answers_on_localhost,
            node_port_addresses=settings.node_addresses(family, host_addresses),
            reject_unused_ports=settings.reject_unused_ports,
            pins=settings.affinity_clients,
        )

    @property
    def table(self) -> str:
        """The table as nft commands name it: `ip vipd`."""
        return f"{self.ip} {table_name(self.prefix)}"

    @property
    def ip(self) -> str:
        """The family's word in rules, which is also the name of the table's family."""
        return "ip" if self.family is Family.IPV4 else "ip6"

    @property
    def random(self) -> str:
        """How masquerade chooses source ports."""
        return " fully-random" if self.random_fully else ""


def table_name(prefix: str) -> str:
    """The table that stands for a chain prefix."""
    return prefix.lower()
