"""Firewalls and other rules beside vipd's: their effect on its flows. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vipd.dataplane.fast_path.table import fast_path_table
from vipd.dataplane.forward_accept.accepts import OTHER_TABLES
from vipd.dataplane.iptables.foreign_rules import UFW_USER_INPUT
from vipd.dataplane.iptables.names import ChainId
from vipd.model.service import Family
from vipd.observe.doctor.facts import Facts
from vipd.observe.doctor.finding import Check, CheckResult, listed, ok, problem, unchecked, warning
from vipd.observe.doctor.rules import ForwardVerdict, Ruleset

GROUP = "Firewalls"
KNOWN = {
    "firewalld": ("firewalld", "FORWARD_direct", "FWD_public"),
    "ufw": ("ufw-before-forward", "ufw-user-forward"),
    "Docker": ("DOCKER", "DOCKER-USER"),
}
"""Firewall -> names of its nft tables or iptables chains."""
ACCEPT_TRANSLATED = "-m conntrack --ctstate DNAT -j ACCEPT"


def check_readable(facts: Facts) -> Iterator[CheckResult]:
    """Most checks of this kind need the rules."""
    if facts.rules_fault:
        yield unchecked("some rules could not be read", facts.rules_fault)


def check_mixed(facts: Facts) -> Iterator[CheckResult]:
    """Rules of both iptables variants at once: the kernel applies both."""
    for ruleset in _other_variant(facts):
        tables = ruleset.foreign_tables(facts.settings.chain_prefix)
        used = facts.programs.variant(ruleset.family)
        if tables and used and facts.dataplane == "iptables":
            where = ", ".join(tables)
            cause = f"{ruleset.program} holds rules of other programs ({where}) while vipd writes {used}"
            yield warning(
                f"rules of both iptables variants ({ruleset.family})",
                f"{cause}: the kernel applies both, and services may behave oddly",
                hint=f"let what wrote them use {used} as well, and take them away by its own means",
            )


def check_twice(facts: Facts) -> Iterator[CheckResult]:
    """vipd's own rules in the variant, or of the dataplane, that is no longer used."""
    prefix = facts.settings.chain_prefix
    by_nftables = facts.dataplane == "nftables"
    for family in sorted(facts.tables) if not by_nftables else ():
        table = f"{'ip' if family is Family.IPV4 else 'ip6'} {prefix.lower()}"
        cause = f"nft table {table} is of the dataplane nftables, and vipd uses iptables"
        yield problem(f"vipd's rules stand in both dataplanes ({family})", cause, *_cleanup_fix(facts))
    for ruleset in facts.rulesets if by_nftables else _other_variant(facts):
        accept = f"{prefix}-FORWARD"  # every dataplane may need it
        if ruleset.jumps_to(f"{prefix}-", but=accept) and not ruleset.has("KUBE-PROXY-CANARY"):
            program = ruleset.program
            cause = (
                f"{program} still holds chains {prefix}-*: they forward as they did when they were written"
            )
            yield problem(f"vipd's rules stand twice ({ruleset.family})", cause, *_cleanup_fix(facts))


def _cleanup_fix(facts: Facts) -> tuple[str, ...]:
    """The commands that remove vipd's former rules: a daemon does so at its start, and established flows
    continue."""
    return ("systemctl restart vipd",) if facts.daemon.runs else ("systemctl start vipd",)


def check_forward_policy(facts: Facts) -> Iterator[CheckResult]:
    """FORWARD of every table of iptables must let translated flows pass."""
    for ruleset in facts.rulesets:
        if ruleset.family not in facts.families():
            continue
        for table in OTHER_TABLES:  # vipd writes no accept there
            forward_verdict = ruleset.forward_chain_verdict(facts.settings.chain_prefix, table)
            if forward_verdict in (ForwardVerdict.BLOCKED, ForwardVerdict.MAYBE):
                yield _blocked(ruleset, forward_verdict, on_purpose=False, table=table)
        accepts = facts.settings.accept_forwarded
        if accepts and not facts.has_vipd_rules(ruleset.family):
            continue  # vipd's first write brings its own accept
        forward_verdict = ruleset.forward_chain_verdict(facts.settings.chain_prefix)
        if forward_verdict in (ForwardVerdict.BLOCKED, ForwardVerdict.MAYBE):
            yield _blocked(ruleset, forward_verdict, on_purpose=not accepts)


def _blocked(
    ruleset: Ruleset, forward_verdict: ForwardVerdict, on_purpose: bool, table: str = "filter"
) -> CheckResult:
    policy = ruleset.tables.policies.get(ChainId(table, "FORWARD"), "ACCEPT")
    where = "" if table == "filter" else f" -t {table}"
    why = f"the policy {policy}" if policy != "ACCEPT" else "a rule that refuses everything"
    cause = (
        f"FORWARD of {ruleset.program}{where} has {why}, and no rule before it accepts what vipd translated"
    )
    if on_purpose:
        cause += "; the setting accept_forwarded is off"
    repair = f"{ruleset.program}{where} -I FORWARD {ACCEPT_TRANSLATED}"
    if forward_verdict is ForwardVerdict.MAYBE:
        return warning("FORWARD may drop flows to virtual IPs", f"{cause} under all conditions", repair)
    return problem("FORWARD drops flows to virtual IPs", cause, repair)


def check_forward_chains(facts: Facts) -> Iterator[CheckResult]:
    """So must every nft chain at the hook forward: an accept in one table has no effect in another."""
    for chain in facts.forward_chains:
        concerned = [family for family in facts.families() if chain.concerns(family)]
        coming = facts.settings.accept_forwarded and not any(map(facts.has_vipd_rules, concerned))
        if not concerned or coming or not chain.drops:
            continue
        place = f"{chain.family} {chain.table} {chain.name}"
        cause = f"nft chain {place} drops by policy, also what iptables rules accept; its rules are not read"
        repair = f"nft insert rule {place} ct status dnat accept"
        hint = "put the same line into the file that it is loaded from"
        yield warning("an nft chain may drop flows to virtual IPs", cause, repair, hint=hint)


def check_refusals(facts: Facts) -> Iterator[CheckResult]:
    """Rules of others that may refuse flows of services, and those that would if vipd's accept were not
    before them."""
    flows = [each.flow for each in facts.services]
    for ruleset in facts.rulesets:
        place = f"FORWARD of {ruleset.program}"
        before, behind = ruleset.forward_refusals(facts.settings.chain_prefix)
        here = [flow for flow in flows if flow.family is ruleset.family]
        if refusals := [each for each in before if any(map(each.may_match, here))]:
            cause = f"{place}: {listed([str(each) for each in refusals])}, before vipd's accept"
            hint = "what an administrator refuses stays refused; accept_forwarded: first puts vipd before it"
            yield warning("a rule of others may refuse flows of services", cause, hint=hint)
        if refusals := [each for each in behind if any(map(each.may_match, here))]:
            cause = f"{place}: {listed([str(each) for each in refusals])}, behind vipd's accept"
            hint = "insert it at the head of the chain: vipd leaves it there"
            yield warning("a rule of others refuses nothing of services", cause, hint=hint)


def check_ufw(facts: Facts) -> Iterator[CheckResult]:
    """ufw denies what comes to this host itself. Flows to virtual IPs are forwarded."""
    flows = [each.flow for each in facts.services]
    for ruleset in facts.rulesets:
        here = [flow for flow in flows if flow.family is ruleset.family]
        told = ruleset.ufw_denials(facts.settings.chain_prefix)
        denials = [each for each in told if any(each.scopes[0].may_match_untranslated(flow) for flow in here)]
        hint = "ufw route deny, or allow_from of the service"
        if denials:
            cause = f"{listed([str(each) for each in denials])}: it does not see flows to virtual IPs"
            yield warning("ufw denies what services let in", f"{cause}, which are forwarded", hint=hint)
        elif here and any(ruleset.has(name) for name in UFW_USER_INPUT):
            cause = (
                "its default, deny incoming, is for this host itself; virtual IPs are forwarded to backends"
            )
            yield ok(f"services are open beside ufw ({ruleset.family})", f"{cause}; against that: {hint}")


def check_flowtables(facts: Facts) -> Iterator[CheckResult]:
    """Packets of a flow in a flowtable pass no rule after its first ones."""
    own = fast_path_table(facts.settings.chain_prefix)
    foreign = [name for name in facts.flowtables if not name.startswith(f"{own} ")]
    if foreign:
        bit = 1 << facts.settings.flow_mark_bit
        cause = (
            f"rules add flows to {listed(foreign)}: their packets bypass the forward hook, so that "
            "on_remove: reset does not reach them, and their traffic is counted only if the flowtable has "
            "`counter`"
        )
        hint = f"leave out the flows of vipd in these rules: ct mark and {bit:#x} == 0 flow add @NAME"
        yield warning("flows are offloaded past the rules", cause, hint=hint)


def check_fast_path(facts: Facts) -> Iterator[CheckResult]:
    """Whether the fast path that vipd.yaml asks for is in use."""
    state = facts.daemon.status.get("fast_path")
    if not state:
        return
    if state["active"]:
        cause = f"offloaded between {listed(state['devices'])}; rules of other programs do not see them"
        yield ok("established TCP flows skip the rules", cause)
    else:
        reason, _, hint = str(state["reason"]).partition("; hint: ")
        cause = f"{reason}: flows pass the rules, as with fast_path: off"
        yield warning("the fast path is not in use", cause, hint=hint)


def check_present(facts: Facts) -> Iterator[CheckResult]:
    """Which firewalls are active; the checks above report whether they do harm."""
    names = {chain for ruleset in facts.rulesets for _, chain in ruleset.tables.chains}
    names |= {chain.table for chain in facts.forward_chains}
    found = [firewall for firewall, marks in KNOWN.items() if names.intersection(marks)]
    strangers = {c.table for c in facts.forward_chains if c.table not in KNOWN["firewalld"]}
    found += [f"nft table {table}" for table in sorted(strangers)]
    if found:
        cause = "a reload of it may delete vipd's rules too; vipd writes them again"
        yield ok(f"beside vipd: {', '.join(found)}", cause)


def _other_variant(facts: Facts) -> Iterator[Ruleset]:
    for ruleset in facts.rulesets:
        if facts.programs.variant(ruleset.family) not in ("", ruleset.variant):
            yield ruleset


def _fast_path_unread(facts: Facts) -> str:
    """Only the daemon knows what it tried."""
    return facts.daemon_unread() if facts.settings.fast_path == "auto" else ""


def _variants_unread(facts: Facts) -> str:
    return facts.rules_unread() or facts.programs_unread()


def _places_unread(facts: Facts) -> str:
    return _variants_unread(facts) or facts.nft_fault


CHECKS = (
    Check("rules-readable", GROUP, "all rules could be read", check_readable, Facts.rules_unread),
    Check("mixed-variants", GROUP, "one iptables variant is in use", check_mixed, _variants_unread),
    Check("rules-twice", GROUP, "vipd's rules stand in one place only", check_twice, _places_unread),
    Check(
        "forward-policy",
        GROUP,
        "FORWARD lets translated flows pass",
        check_forward_policy,
        Facts.forwarding_unread,
    ),
    Check(
        "forward-chains",
        GROUP,
        "nft chains let translated flows pass",
        check_forward_chains,
        Facts.nft_unread,
    ),
    Check(
        "foreign-refusals",
        GROUP,
        "no rule of others refuses flows of services",
        check_refusals,
        Facts.forwarding_unread,
    ),
    Check("ufw", GROUP, "ufw denies nothing that services let in", check_ufw, Facts.forwarding_unread),
    Check("flow-offload", GROUP, "no flows are offloaded past the rules", check_flowtables, Facts.nft_unread),
    Check("fast-path", GROUP, "the fast path is as vipd.yaml says", check_fast_path, _fast_path_unread),
    Check("firewalls", GROUP, "no other firewall is seen", check_present, _places_unread),
)
