"""The numbers of the chains to which frontends lead, for the dispatch map. Pure."""

from __future__ import annotations

from collections.abc import Container
from ipaddress import ip_address, ip_network
from itertools import count

from vipd.dataplane.nftables.layout import RESERVED, name_address
from vipd.model.service import Family


class Handlers:
    """Gives each chain a number, as an address, that no other chain has, nor a slot or an endpoint.

    It follows from the chain's name, so it is the same after a restart. Where two chains would have the same,
    the second takes another; which is the second may then be otherwise after a restart, and be written anew.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        self._numbers: dict[str, str] = {}
        self._taken: set[str] = set()
        self._reserved = ip_network(RESERVED[family])

    def number(self, chain: str) -> str:
        """That of a chain, by its name."""
        return self._numbers.get(chain) or self._take(chain)

    def keep(self, chains: Container[str]) -> None:
        """Forget all chains but these."""
        self._numbers = {chain: number for chain, number in self._numbers.items() if chain in chains}
        self._taken = set(self._numbers.values())

    def _take(self, chain: str) -> str:
        names = (f"{chain} {attempt}" if attempt else chain for attempt in count())
        numbers = (name_address(self._family, name) for name in names)
        number = self._numbers[chain] = next(number for number in numbers if self._free(number))
        self._taken.add(number)
        return number

    def _free(self, number: str) -> bool:
        return number not in self._taken and ip_address(number) not in self._reserved
