"""The whole table of some forwardings as one input for `nft -f`, for an empty namespace. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from vipd.dataplane.nftables.base_chains import HOOKS
from vipd.dataplane.nftables.layout import DISPATCH_MAP, NftSet, Rules, digest
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.plan import TABLE_COMMENT
from vipd.dataplane.nftables.table import DesiredTable
from vipd.model.forwarding import Forwarding


def render(forwardings: Iterable[Forwarding], options: TableOptions) -> str:
    """The table, or nothing without forwardings. Forwardings of other families are left out."""
    table = DesiredTable(options)
    for forwarding in forwardings:
        if forwarding.key.family is options.family:
            table.update(forwarding.key, forwarding)
    structure = table.structure()
    if not structure.chains:
        return ""
    handlers = [f"{number} : {verdict}" for number, verdict in structure.dispatch_map.items()]
    elements: dict[str, list[str]] = {DISPATCH_MAP.name: handlers}
    for slot, value in table.elements():
        elements.setdefault(slot.set_name, []).append(f"{slot.key} : {value}" if value else slot.key)
    parts = [f'\tcomment "{TABLE_COMMENT}"']
    parts += ["\n".join(_holder(h, options, elements.get(h.name, ()))) for h in structure.sets.values()]
    parts += ["\n".join(_chain(name, rules)) for name, rules in structure.chains.items()]
    return "\n\n".join([f"table {options.table} {{", *parts]).replace("{\n\n", "{\n", 1) + "\n}\n"


def _holder(holder: NftSet, options: TableOptions, elements: Sequence[str]) -> Iterator[str]:
    yield f"\t{holder.kind} {holder.name} {{"
    for line in holder.declaration(options.family).split("; "):
        yield f"\t\t{line.rstrip(';')}"
    if elements:
        yield "\t\telements = {"
        yield from (f"\t\t\t{element}," for element in sorted(elements))
        yield "\t\t}"
    yield "\t}"


def _chain(name: str, rules: Rules) -> Iterator[str]:
    hook = HOOKS.get(name)
    yield f"\tchain {name} {{"
    yield from (f"\t\t{hook}",) if hook else ()
    yield from (f'\t\t{rule} comment "{digest(rule)}"' for rule in rules)
    yield "\t}"
