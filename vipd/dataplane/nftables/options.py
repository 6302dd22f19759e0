"""The settings for one family's table, as a value. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vipd.dataplane.options import FamilyOptions
from vipd.model.service import Family

if TYPE_CHECKING:  # pydantic is slow to import and not needed to compile
    from vipd.host.settings.settings import Settings

DEFAULT_AFFINITY_MAP_SIZE = 1_000_000
"""Clients whose backend is remembered, in all services of a family together."""


@dataclass(frozen=True, slots=True)
class TableOptions(FamilyOptions):
    """Everything besides the forwardings that shapes a table."""

    counts: bool = True
    """The kernel can count in sets."""
    affinity_map_size: int = DEFAULT_AFFINITY_MAP_SIZE

    @classmethod
    def of(
        cls, settings: Settings, family: Family, host_addresses: frozenset[str] = frozenset()
    ) -> TableOptions:
        """The options for the daemon's settings on a host with these addresses."""
        randomly, size = settings.random_fully is not False, settings.affinity_clients
        return cls.of_settings(
            settings, family, host_addresses, random_fully=randomly, affinity_map_size=size
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
    """The name of the table for a chain prefix."""
    return prefix.lower()
