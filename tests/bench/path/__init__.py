"""The path of packets: what vipd costs a connection, beside no rules at all, other rules, and proxies."""

from tests.bench.path.measuring import measure

__all__ = ["measure"]
