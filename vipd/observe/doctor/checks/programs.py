"""iptables, nft and the kernel: present, without known bugs, and with the required features. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vipd.model.service import Family
from vipd.observe.doctor.facts import Facts, Feature
from vipd.observe.doctor.finding import Check, CheckResult, ok, problem, unchecked, warning

GROUP = "Programs and kernel"
LOST = {
    "affinity": ("clients do not keep their backend", "xt_recent"),
    "flow_marks": ("FORWARD cannot tell vipd's flows", "xt_connmark"),
    "ping": ("virtual IPs do not answer ping", "xt_REDIRECT"),
    "counts": ("traffic is not counted", "nft_counter"),
    "random_fully": ("masquerading does not choose ports at random", "xt_MASQUERADE"),
}
NFT_MODULES = {
    "affinity": "nft_dynset",
    "ping": "nft_redir",
    "random_fully": "nft_masq",
}
"""Optional feature -> effect of its absence, and the kernel module that provides it."""


def check_iptables(facts: Facts) -> Iterator[CheckResult]:
    """Variant and version; unusable ones are reported with the reason."""
    needed = (facts.families() or (Family.IPV4,)) if facts.dataplane == "iptables" else ()
    for program in facts.programs.iptables:
        if program.text:
            yield ok(f"{program.family}: {program.text}")
        elif program.family in needed:
            title = f"there is no usable iptables for {program.family}"
            yield problem(title, program.fault, *filter(None, [program.fix]))


def check_nft(facts: Facts) -> Iterator[CheckResult]:
    """nft only shows what iptables does not, unless it is the dataplane."""
    if facts.programs.nft:
        yield ok(facts.programs.nft)
        return
    if facts.programs.fault:
        return
    why = facts.programs.nft_fault
    repair = ["apt install nftables"] if why == "there is no such program" else []
    if facts.dataplane == "nftables":
        yield problem("nft cannot be run", why, *repair)
    else:
        yield unchecked("nft cannot be run, and its chains are not looked at", why, *repair)


def check_kernel(facts: Facts) -> Iterator[CheckResult]:
    """The running kernel; its features are tested, not inferred from its version."""
    if facts.programs.kernel:
        yield ok(f"Linux {facts.programs.kernel}")


def check_features(facts: Facts) -> Iterator[CheckResult]:
    """Each form of rule was tried in a separate network namespace."""
    if facts.programs.probe_fault:
        yield unchecked("what the kernel can do was not tried", facts.programs.probe_fault)
    for feature in facts.programs.missing_features:
        if feature.required:
            yield problem(f"{feature.family}: {feature.name}", feature.why, *filter(None, [feature.fix]))
        else:
            yield _optional(feature, facts)


def _optional(feature: Feature, facts: Facts) -> CheckResult:
    lost, module = LOST.get(feature.name, (f"{feature.name.replace('_', ' ')} is not possible", ""))
    if facts.dataplane == "nftables":
        module = NFT_MODULES.get(feature.name, module)
    pinned = {port.service for port in facts.services if port.affinity and port.family is feature.family}
    judged = problem if feature.name == "affinity" and pinned else warning
    cause = f"this kernel or {facts.dataplane} lacks {module or 'what it needs'}"
    if not module:
        return judged(f"{feature.family}: {lost}", cause)
    again = ("vipctl reload",) if facts.daemon.status else ()
    return judged(f"{feature.family}: {lost}", cause, f"modprobe {module}", *again)


def _features_unread(facts: Facts) -> str:
    return facts.skipped_as_user() or facts.programs_unread() or facts.services_fault


CHECKS = (
    Check("iptables", GROUP, "iptables can be used", check_iptables, Facts.programs_unread),
    Check("nft", GROUP, "nft can be used", check_nft, Facts.programs_unread),
    Check("kernel", GROUP, "the kernel is known", check_kernel, Facts.programs_unread),
    Check("kernel-features", GROUP, "the kernel has every rule form", check_features, _features_unread),
)
