"""One slow backend among fast ones: what clients wait, and how many flows it holds, by way of balancing."""

from tests.bench.balance.slow_backend import measure

__all__ = ["measure"]
