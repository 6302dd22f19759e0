"""The chains that spread the flows of a frontend over its endpoints, with affinity or without. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vipd.dataplane.nftables.layout import LOCAL_OFFSET, NUMBER_TO_IPV6, RESERVED, FrontendKind, Rules
from vipd.dataplane.nftables.options import TableOptions
from vipd.model.service import Balance, Family

HASH_SEED = 0x76697064
"""The same on every host, so that all of them send a client to the same backend."""


@dataclass(frozen=True, slots=True)
class _AffinityRules:
    """The rules of affinity by function; `BalanceChain._affinity` has their order."""

    look_up_entry: str
    """Look the client's entry up."""
    store_entry: str
    """Store an entry for the endpoint, or renew the timeout of an existing one."""
    restore_client: str
    """Restore the client's address as the packet's source."""
    translate: str
    """Translate to the endpoint."""
    delete_entry: str
    """Delete the entry."""
    endpoint_of_slot: str
    """Map a slot to its endpoint."""
    use_stored_entry: str
    """Use the endpoint of the existing entry."""


@dataclass(frozen=True, slots=True)
class BalanceChain:
    """Gives a flow one of a frontend's slots, and sends it to the endpoint there."""

    slots: int
    balance: Balance
    frontend_kind: FrontendKind = FrontendKind.ADDRESS
    local: bool = False
    """The slots of endpoints on this host."""
    timeout: int | None = None
    """Seconds for which a client keeps its endpoint; None: no affinity."""
    owner: str = ""
    """Service whose turns it counts; empty for the others, which count none."""

    @property
    def name(self) -> str:
        """`random-3`, `node-local-source-hash-1021-pinned-600`, `round-robin-3-5c0ffee05c0ffee0`."""
        words = [
            self.frontend_kind.value.rstrip("_"),
            "local" if self.local else "",
            self.balance,
            str(self.slots),
        ]
        pinned = f"pinned-{self.timeout}" if self.timeout is not None else ""
        return "-".join(word for word in (*words, self.owner, pinned) if word)

    def rules(self, options: TableOptions) -> Rules:
        """The flow is marked as vipd's, then translated.

        The destination address serves as the register between rules: it contains the slot, or the number of
        an endpoint, until the translation overwrites it. Two lookups in a row may see two states of the maps
        when a change happens between them; slot 0 then exists.
        """
        mark = f"ct mark set ct mark | {options.flow_mark:#x}"
        with_affinity = self.timeout is not None and options.affinity
        return (mark, *(self._affinity(options) if with_affinity else self._plain(options)), "drop")

    def targets(self) -> tuple[()]:
        """Returns an empty tuple."""
        return ()

    def _plain(self, options: TableOptions) -> Iterator[str]:
        ip, frontend = options.ip, self.frontend(options)
        for choice in self._choices(options):
            yield choice
            yield f"dnat {ip} to {frontend} . {ip} daddr map @{self.frontend_kind.endpoints.name}"

    def _affinity(self, options: TableOptions) -> Iterator[str]:
        """The rules of a service with affinity. The packet's two addresses serve as registers, since rules
        have no other way to pass on values:

            rule                 runs if   source then     destination then
            -------------------  --------  --------------  -----------------------------------------------
            1  look_up_entry     always    service number  number of the entry's endpoint, or as before
            2  store_entry       numbered  service number  the same; the entry is renewed
            3  restore_client    always    client          the same
            4  translate         numbered  client          endpoint: the packet leaves the chain
            5  delete_entry      numbered  service number  the same; the entry, to no endpoint, is deleted
            6  choose            always    any             number of the chosen slot
            7  endpoint_of_slot  always    any             number of the endpoint in that slot
            8  store_entry       numbered  service number  the same; there is an entry
            9  use_stored_entry  numbered  service number  number of the stored entry's endpoint
            10 restore_client    always    client          the same
            11 translate         numbered  client          endpoint: the packet leaves the chain
            12 delete_entry      numbered  service number  the same; the entry is deleted
            13 first_slot        always    any             number of slot 0
            14 endpoint_of_slot  always    any             number of the endpoint in slot 0
            15 store_entry       numbered  service number  the same; there is an entry
            16 restore_client    always    client          the same
            17 translate         numbered  client          endpoint: the packet leaves the chain

        "Numbered": the destination is in `RESERVED`, so it is the number of an endpoint, or of a slot without
        an endpoint. A failed map lookup ends its rule; what the rule has set before the lookup
        stays. A packet reaches rules 5 and 12 with a number only if it leads to no endpoint (any more).
        Rule 9: if flows of a client begin at the same moment on several processors, each may have chosen;
        the first one's entry stays, and the others follow it. Rules 13 to 17 are for a slot that a change has
        just removed; slot 0 exists.
        """
        rule = self._affinity_rules(options)
        choose, first_slot = self._choices(options)
        yield from (
            rule.look_up_entry,
            rule.store_entry,
            rule.restore_client,
            rule.translate,
            rule.delete_entry,
        )  # 1 to 5
        yield from (choose, rule.endpoint_of_slot, rule.store_entry, rule.use_stored_entry)  # 6 to 9
        yield from (rule.restore_client, rule.translate, rule.delete_entry)  # 10 to 12
        yield from (
            first_slot,
            rule.endpoint_of_slot,
            rule.store_entry,
            rule.restore_client,
            rule.translate,
        )  # 13 to 17

    def _affinity_rules(self, options: TableOptions) -> _AffinityRules:
        ip, frontend, client = options.ip, self.frontend(options), affinity_key(options)
        numbered = f"{ip} daddr {RESERVED[options.family]}"
        to_service = f"{ip} saddr set {frontend} map @{self.frontend_kind.service_numbers.name}"
        endpoints = self.frontend_kind.numbered_endpoints(self.local).name
        slot_endpoints = self.frontend_kind.slot_endpoints.name
        entry = f"{client} timeout {self.timeout}s : {ip} daddr"
        return _AffinityRules(
            look_up_entry=f"{to_service} {ip} daddr set {client} map @pins",
            store_entry=f"{numbered} {to_service} update @pins {{ {entry} }}",
            restore_client=f"{ip} saddr set ct original {ip} saddr",
            translate=f"{numbered} dnat {ip} to {frontend} . {ip} daddr map @{endpoints}",
            delete_entry=f"{numbered} {to_service} delete @pins {{ {client} : {ip} daddr }}",
            endpoint_of_slot=f"{ip} daddr set {frontend} . {ip} daddr map @{slot_endpoints}",
            use_stored_entry=f"{numbered} {ip} daddr set {client} map @pins",
        )

    def frontend(self, options: TableOptions) -> str:
        """The fields of a packet that identify the service port."""
        rest = "meta l4proto . th dport"
        return rest if self.frontend_kind is FrontendKind.NODE else f"ct original {options.ip} daddr . {rest}"

    def _choices(self, options: TableOptions) -> Iterator[str]:
        """Choose a slot; if it is empty, the first one."""
        to_ipv6 = f" map @{NUMBER_TO_IPV6.name}" if options.family is Family.IPV6 else ""
        offset = f" offset {LOCAL_OFFSET}" if self.local else ""
        for choice in (self._choice(options), "numgen inc mod 1"):
            yield f"{options.ip} daddr set {choice}{offset}{to_ipv6}"

    def _choice(self, options: TableOptions) -> str:
        if self.balance is Balance.SOURCE_HASH:
            return f"jhash ct original {options.ip} saddr mod {self.slots} seed {HASH_SEED:#x}"
        kind = "inc" if self.balance is Balance.ROUND_ROBIN else "random"
        return f"numgen {kind} mod {self.slots}"


def affinity_key(options: TableOptions) -> str:
    """The key of `pins` for a packet whose source address contains the number of the service port."""
    ip = options.ip
    plain = f"ct original {ip} saddr . {ip} saddr"
    if options.family is Family.IPV4:
        return plain
    return " . ".join(f"jhash {plain} mod 4294967295 seed {seed:#x}" for seed in (HASH_SEED, HASH_SEED + 1))
