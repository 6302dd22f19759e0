from __future__ import annotations

import resource

import pytest

from vipd.host.descriptors import RESERVED, WANTED, make_room, shares


@pytest.mark.parametrize("limit", [64, 256, 1024, 4096, WANTED, 65536, resource.RLIM_INFINITY])
def test_clients_and_probes_together_leave_enough_for_what_vipd_does_itself(limit: int) -> None:
    found = shares(limit)
    whole = WANTED if limit == resource.RLIM_INFINITY else min(limit, WANTED)
    assert min(found) >= 1
    assert sum(found) <= whole - min(RESERVED, whole // 4)


def test_most_are_for_health_checks() -> None:
    assert shares(WANTED) == (2048, 2048, WANTED - 256 - 4096)
    assert shares(1024).probes == 512
    assert make_room().probes > 0
