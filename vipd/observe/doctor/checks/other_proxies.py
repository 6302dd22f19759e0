"""Others that translate: a kube-proxy, another vipd, rules that claim the same addresses. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vipd.model.service import socket_text
from vipd.observe.doctor.facts import Facts
from vipd.observe.doctor.finding import Check, CheckResult, listed, ok, problem, warning
from vipd.observe.doctor.rules import Ruleset

GROUP = "Other proxies"
KUBE_CHAINS = ("KUBE-PROXY-CANARY", "KUBE-SERVICES", "KUBE-NODEPORTS")
_DESTINATION = re.compile(r"(?:^| )-d (\S+?)(?:/32|/128)?(?: |$)")


def check_kube_proxy(facts: Facts) -> Iterator[CheckResult]:
    """It may share the host, under another prefix and with other addresses."""
    holders = [r for r in facts.rulesets if any(r.has(chain) for chain in KUBE_CHAINS)]
    running = "kube-proxy" in (facts.programs_running or ())
    ours = facts.settings.chain_prefix == "KUBE" and not any(r.has(KUBE_CHAINS[0]) for r in holders)
    if not holders or ours:
        return
    where = listed([ruleset.program for ruleset in holders])
    if facts.settings.chain_prefix == "KUBE":
        cause = f"its canary chain is in {where}, and both write chains KUBE-*"
        title = "a kube-proxy is at work under vipd's prefix"
        yield problem(title, cause, hint="use another chain_prefix: only one may write those chains")
    elif running:
        cause = f"its chains are in {where}; both mark packets with bit {facts.settings.mark_bit} by default"
        hint = "declare other addresses for vipd than the cluster's"
        yield warning("a kube-proxy is at work on this host", cause, hint=hint)
    else:
        seen = "no such process is seen" if facts.programs_running is not None else "processes cannot be seen"
        cause = f"its chains are in {where}, and {seen}: if none runs, its services go on as they were"
        hint = "if this host is no part of a cluster any more: kube-proxy --cleanup, or restart the host"
        yield warning("there are rules of a kube-proxy", cause, hint=hint)


def check_other_vipd(facts: Facts) -> Iterator[CheckResult]:
    """Chains of a vipd with another prefix: of a running daemon, or left by one."""
    own = facts.settings.chain_prefix
    prefixes = {prefix for ruleset in facts.rulesets for prefix in ruleset.vipd_prefixes()}
    for prefix in sorted((prefixes | set(facts.daemon.other_prefixes)) - {own}):
        if prefix in facts.daemon.other_prefixes:
            title = f"another vipd is at work, with the prefix {prefix}"
            yield warning(title, "both translate on this host", hint="give them different addresses")
            continue
        if facts.daemon.prefixes_fault:
            continue  # it may be at work
        holders = [r for r in facts.rulesets if prefix in r.vipd_prefixes()]
        where = listed([r.program for r in holders])
        cause = f"no daemon with that prefix runs; its rules in {where} translate on"
        title = f"rules of a former vipd are left (prefix {prefix})"
        # It takes away everything of vipd, so that it is for people to decide when.
        hint = f"vipctl cleanup --prefix {prefix}, while vipd is stopped; then start vipd"
        yield problem(title, cause, hint=hint)


def check_claims(facts: Facts) -> Iterator[CheckResult]:
    """Rules of others that translate our virtual IPs."""
    own = f"{facts.settings.chain_prefix}-"
    vips = facts.vips()
    for ruleset in facts.rulesets:
        claimed = list(_claims(ruleset, own, frozenset(vips)))
        if claimed:
            cause = f"nat of {ruleset.program} has rules of others for {listed([c[0] for c in claimed])}; "
            rules = listed([f"-A {chain} {rule}" for _, chain, rule in claimed])
            title = "virtual IPs are translated by others, too"
            hint = f"let what wrote them take them away, or give the services other addresses: {rules}"
            yield warning(title, f"{cause}whose comes first wins", hint=hint)


def _claims(ruleset: Ruleset, own: str, vips: frozenset[str]) -> Iterator[tuple[str, str, str]]:
    """(address, chain, rule) of each foreign rule for one of these addresses."""
    for (table, name), rules in ruleset.tables.chains.items():
        if table != "nat" or name.startswith(own):
            continue
        for rule in rules:
            match, target = _DESTINATION.search(rule.text), rule.target
            if match and match[1] in vips and not target.startswith(own) and target not in ("", "RETURN"):
                yield match[1], name, rule.text


def check_ipvs(facts: Facts) -> Iterator[CheckResult]:
    """IPVS takes packets that reach this host itself, and those of masks; vipd translates before that."""
    if not facts.kernel.ipvs:
        return
    vips = {
        f"{socket_text(address, port.port)}/{port.protocol}": port.service
        for port in facts.services
        for address in port.addresses
    }
    both = sorted(vips.keys() & facts.kernel.ipvs)
    if both:
        cause = f"{listed(both)}: vipd's rules come first, so IPVS gets nothing of it"
        hint = "ipvsadm -d deletes its service; or remove vipd's, if IPVS is to serve it"
        yield warning("IPVS serves a virtual IP of vipd, too", cause, hint=hint)
    else:
        yield ok("IPVS serves other addresses than vipd", listed(sorted(facts.kernel.ipvs)))


def _vipds_unread(facts: Facts) -> str:
    return facts.rules_unread() or facts.daemon.prefixes_fault


CHECKS = (
    Check("kube-proxy", GROUP, "no kube-proxy is at work", check_kube_proxy, Facts.rules_unread),
    Check("other-vipd", GROUP, "no other vipd is at work", check_other_vipd, _vipds_unread),
    Check("ipvs", GROUP, "IPVS serves nothing on this host", check_ipvs, lambda facts: facts.kernel.fault),
    Check(
        "foreign-claims",
        GROUP,
        "nobody else translates virtual IPs",
        check_claims,
        Facts.forwarding_unread,
    ),
)
