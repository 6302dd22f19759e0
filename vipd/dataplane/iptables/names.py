"""Chain names: prefix, kind, hash; equal to kube-proxy's when the prefix is KUBE (contract 1.1).

A user chain's name has at most 28 characters (29 is refused by both iptables variants): prefix <= 7, `-SVC-`
is 5, hash 16. The longest fixed name, `-EXTERNAL-SERVICES`, is 18.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from vipd.model.forwarding import Endpoint, ForwardingKey

Rules = tuple[str, ...]
"""A chain's rules in order, each without its leading `-A CHAIN`."""


class ChainId(NamedTuple):
    """A chain in its table."""

    table: str
    name: str


TABLES = ("nat", "filter")
"""The tables that vipd writes to."""

FIXED_KINDS = {
    "nat": ("SERVICES", "PREROUTING", "POSTROUTING", "NODEPORTS", "MARK-MASQ", "MARK-OFF-CLUSTER", "PROBE"),
    "filter": (
        "SERVICES",
        "EXTERNAL-SERVICES",
        "NODEPORTS",
        "PROXY-FIREWALL",
        "UNUSED",
        "FORWARD",
        "FIREWALL",
        "PROBE",
    ),
}
"""The chains that exist once, by table."""

_BASE32 = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_PAIRS = [first + second for first in _BASE32 for second in _BASE32]
_SHIFTS = range(70, -1, -10)
"""Ten bits at a time take a quarter of the time of `base64.b32encode`."""

HASHED_KINDS = {"nat": ("SVC", "SEP", "SVL", "EXT", "FW", "LIM", "GRP"), "filter": ("GRP",)}
"""The chains that exist for each service port, endpoint or group of addresses, by table."""


@lru_cache(maxsize=1024)  # while a forwarding is compiled, each of its names is requested several times
def hashed(text: str) -> str:
    """The first 16 characters of base32(SHA-256(text)): 80 bits, so 10 bytes of the digest."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:10], "big")
    return "".join([_PAIRS[number >> shift & 1023] for shift in _SHIFTS])


class Names:
    """The names that one chain prefix gives, and the recognition of our own chains by them."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._hashed = {
            table: re.compile(rf"^{prefix}-(?:{'|'.join(kinds)})-[A-Z2-7]{{16}}$")
            for table, kinds in HASHED_KINDS.items()
        }
        self._fixed = {table: {f"{prefix}-{kind}" for kind in FIXED_KINDS[table]} for table in FIXED_KINDS}

    def fixed(self, kind: str) -> str:
        """`VIPD-SERVICES` and the like."""
        return f"{self.prefix}-{kind}"

    def service(self, key: ForwardingKey, kind: str = "SVC") -> str:
        """A chain of one service port: SVC balances over the cluster's endpoints, SVL over this host's,
        EXT takes traffic from outside, LIM limits new flows."""
        return f"{self.prefix}-{kind}-{hashed(key.service_port + key.protocol)}"

    def firewall(self, key: ForwardingKey, limit: str = "") -> str:
        """An FW chain, which checks the source of new flows.

        kube-proxy has one limit for each service port, on traffic from outside, hence one chain; further ones
        differ by the hash of `limit`.
        """
        return f"{self.prefix}-FW-{hashed(f'{key.service_port}{key.protocol}{limit}')}"

    def endpoint(self, key: ForwardingKey, endpoint: Endpoint) -> str:
        """The chain that translates to one endpoint of one service port."""
        return self.endpoints(key, (endpoint,))[0]

    def endpoints(self, key: ForwardingKey, endpoints: Iterable[Endpoint]) -> list[str]:
        """The same for several endpoints, in less time for each."""
        chain, owner = f"{self.prefix}-SEP-", f"{key.service_port}{key.protocol}"
        return [chain + hashed(f"{owner}{endpoint}") for endpoint in endpoints]

    def group(self, chain: str, network: str) -> str:
        """The chain that contains the part of a shared chain for one network."""
        return f"{self.prefix}-GRP-{hashed(f'{chain} {network}')}"

    def owns(self, chain: ChainId) -> bool:
        """Whether a chain is vipd's. Canary chains of other programs with the same prefix are not."""
        hashed_name = self._hashed.get(chain.table)
        return self.is_fixed(chain) or bool(hashed_name and hashed_name.match(chain.name))

    def is_fixed(self, chain: ChainId) -> bool:
        """Whether a chain is one of those that exist once."""
        return chain.name in self._fixed.get(chain.table, ())
