from __future__ import annotations

import resource

import pytest

from vipd.host.descriptors import RESERVED, WANTED_DESCRIPTORS, divide_limit, raise_limit


@pytest.mark.parametrize("limit", [64, 256, 1024, 4096, WANTED_DESCRIPTORS, 65536, resource.RLIM_INFINITY])
def test_clients_and_probes_together_leave_enough_for_what_vipd_does_itself(limit: int) -> None:
    found = divide_limit(limit)
    whole = WANTED_DESCRIPTORS if limit == resource.RLIM_INFINITY else min(limit, WANTED_DESCRIPTORS)
    assert min(found) >= 1
    assert sum(found) <= whole - min(RESERVED, whole // 4)


def test_most_are_for_health_checks() -> None:
    assert divide_limit(WANTED_DESCRIPTORS) == (2048, 2048, WANTED_DESCRIPTORS - 256 - 4096)
    assert divide_limit(1024).probes == 512
    assert raise_limit().probes > 0
