"""From the targets of an answer to backends. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from vipd.model.service import MAX_WEIGHT, Backend, Family, NamedBackend, NameKind, family_of
from vipd.resolver.answers import Target

_SMALL = 100
"""A record of weight 0 beside others gets one part where the others get this many (RFC 2782: "a very small
chance of being selected"); in vipd weight 0 would be none at all."""


def backends_of(
    named: NamedBackend, targets: Collection[Target], families: Collection[Family]
) -> Iterator[Backend]:
    """The backends that a name stands for, in these families.

    The SRV records of the lowest priority serve, the others are their backups. Each address of a record's
    target has the weight of the record.
    """
    wanted = [target for target in targets if family_of(target.address) in families]
    first = min((target.priority for target in wanted), default=0)
    for target in wanted:
        backend = replace(named.template, address=target.address, resolved_from=str(named))
        if named.kind is NameKind.SRV:
            equals = [other.weight for other in wanted if other.priority == target.priority]
            backend = replace(
                backend,
                port=target.port,
                weight=_weight(target.weight, equals),
                backup=backend.backup or target.priority > first,
            )
        yield backend


def _weight(weight: int, equals: Collection[int]) -> int:
    """The weight of an SRV record among those of its priority."""
    largest = max(equals)
    if min(equals) > 0 or largest == 0:
        return weight or 1
    return max(1, weight * min(_SMALL, MAX_WEIGHT // largest))
