"""What of a large load is written at once: a share for each author."""

from __future__ import annotations

from tests.dataplane.conntrack.forwardings import forwarding
from vipd.control.write_order import WriteOrder

PART = 2000


def test_a_part_of_a_load_has_a_share_for_each_author() -> None:
    heavy = [forwarding(f"10.98.{n >> 8}.{n & 255}", 80, name=f"s{n}") for n in range(2 * PART)]
    light = [forwarding(f"10.97.{n >> 8}.{n & 255}", 80, name=f"t{n}") for n in range(PART // 3)]
    changes = {each.key: each for each in (*heavy, *light)}
    later = WriteOrder().postponed(changes, lambda _: None, lambda name: name[0])
    assert {key.service[0] for key in later} == {"s"}
    assert len(changes) - len(later) == PART
