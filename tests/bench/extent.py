"""How much is measured: sizes, rounds and limits of every group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extent:
    name: str
    sizes: tuple[int, ...]
    nftables_sizes: tuple[int, ...]
    """Further ones, for nftables alone: vipd's table and kube-proxy's."""
    rounds: int
    large_rounds: int
    """Rounds at 10,000 services and more."""
    limit: float
    """Seconds after which programming them is given up."""
    counted_up_to: int
    """Services up to which the rules in the kernel are counted: listing large tables takes long."""
    daemon_sizes: tuple[int, ...]
    """Numbers of services that whole daemons are given."""
    control_services: int
    control_rounds: int
    idle_seconds: float
    busy_seconds: float
    soak_seconds: float
    settling_seconds: float
    """How long a daemon is left alone before it is looked at."""


SMOKE = Extent(
    name="smoke",
    sizes=(10,),
    nftables_sizes=(),
    rounds=1,
    large_rounds=1,
    limit=120.0,
    counted_up_to=10,
    daemon_sizes=(10,),
    control_services=10,
    control_rounds=1,
    idle_seconds=0.5,
    busy_seconds=1.0,
    soak_seconds=1.0,
    settling_seconds=0.2,
)

QUICK = Extent(
    name="quick",
    sizes=(10, 100, 1_000),
    nftables_sizes=(10_000,),
    rounds=3,
    large_rounds=2,
    limit=30.0,
    counted_up_to=100,
    daemon_sizes=(100, 1_000),
    control_services=100,
    control_rounds=5,
    idle_seconds=4.0,
    busy_seconds=6.0,
    soak_seconds=20.0,
    settling_seconds=3.0,
)

FULL = Extent(
    name="full",
    sizes=(10, 100, 1_000, 10_000),
    nftables_sizes=(100_000,),
    rounds=5,
    large_rounds=2,
    limit=90.0,
    counted_up_to=1_000,
    daemon_sizes=(100, 1_000, 10_000),
    control_services=1_000,
    control_rounds=11,
    idle_seconds=10.0,
    busy_seconds=15.0,
    soak_seconds=90.0,
    settling_seconds=5.0,
)
