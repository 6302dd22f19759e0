"""What ipvsadm and keepalived have in common: schedulers, forwarding methods, persistence of IPVS. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from vipd.declaration.conversion.draft import Conversion, ServiceDraft
from vipd.model.service import Balance, Masquerade

DEFAULT_SCHEDULER = "wlc"

_BALANCES = {
    "rr": Balance.ROUND_ROBIN,
    "wrr": Balance.ROUND_ROBIN,
    "sh": Balance.SOURCE_HASH,
    "mh": Balance.SOURCE_HASH,
    "lc": Balance.LEAST_CONNECTIONS,
    "wlc": Balance.LEAST_CONNECTIONS,
}
_LEAST = "vipd does not compare backends for each flow, and chooses at random by weight"
_OTHERS = {
    "sed": _LEAST,
    "nq": _LEAST,
    "ovf": _LEAST,
    "lblc": _LEAST,
    "lblcr": _LEAST,
    "twos": _LEAST,
    "dh": "vipd does not choose by the destination: all backends serve at random by weight",
    "fo": "vipd has no order of backends: all serve at random by weight",
}
_HINTS = {"fo": "give all but the first backup: true", "dh": "or write balance: round-robin"}
LOWER_THRESHOLD = "a full backend gets flows again when a twentieth of them has ended"
_NO_DIRECT = "replies pass through this host, and backends see its address as the client's"
METHODS = {
    "m": "",
    "g": f"direct routing has no counterpart: {_NO_DIRECT}",
    "i": f"tunnels have no counterpart: {_NO_DIRECT}",
}
"""The forwarding methods by ipvsadm's letter, each with what is lost."""


def set_balance(
    conversion: Conversion, line: int, draft: ServiceDraft, scheduler: str, flags: Iterable[str]
) -> None:
    """Give a draft the balance of a scheduler with these flags; report what has no counterpart."""
    what = f"scheduler {scheduler}"
    why = _OTHERS.get(scheduler)
    if why is not None:
        conversion.lost(line, what, why, _HINTS.get(scheduler, "or write balance: least-connections"))
    elif scheduler not in _BALANCES:
        conversion.lost(line, what, "is not known: all backends serve at random by weight")
    draft.balance = _BALANCES.get(scheduler, Balance.RANDOM)
    for flag in flags:
        if flag in ("sh-port", "mh-port", "flag-2"):
            draft.balance = Balance.RANDOM
            why = "vipd hashes the client's address alone: it chooses at random by weight"
            conversion.lost(line, flag, why)
        elif flag in ("sh-fallback", "mh-fallback", "flag-1"):
            conversion.note(line, flag, "a flow never goes to a backend that is down")
        else:
            conversion.lost(line, f"flag {flag}", "has no counterpart")
    if scheduler in ("rr", "lc"):
        _level_weights(conversion, draft, scheduler)


def _level_weights(conversion: Conversion, draft: ServiceDraft, scheduler: str) -> None:
    """These schedulers do not read weights, except that 0 means none."""
    for place, server in enumerate(draft.backends):
        if server.value.weight > 1:
            why = f"the scheduler {scheduler} does not use it, so that weight 1 was written"
            conversion.note(server.line, f"{server.path} weight {server.value.weight}", why)
            draft.backends[place] = server._replace(value=replace(server.value, weight=1))


def set_masquerade(draft: ServiceDraft, methods: Collection[str]) -> None:
    """IPVS keeps the client's address with NAT: then the backends' replies come through this host."""
    if methods and set(methods) == {"m"}:
        draft.masquerade = Masquerade.HAIRPIN
