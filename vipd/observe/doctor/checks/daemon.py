"""The daemon: whether it runs, its state, its socket, its clock. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vipd.model.service import Family
from vipd.observe.doctor.facts import Facts
from vipd.observe.doctor.finding import Check, CheckResult, ok, problem, unchecked, warning

GROUP = "Daemon"
START = "systemctl start vipd"
_WORLD = 0o006
_GROUP_ACCESS = 0o060
_REPORTED_BY_CHECKS = (
    "affinity of ",
    "holds rules of other programs",
    "no route leads to ",
    "manage_sysctls is false",
    "IPv6 is disabled on this host",
    "which vipd does not answer",
    "and gets no connections any more",
    "vipctl doctor says what helps",
)
"""Warnings of the daemon that the doctor's checks report in more detail."""


def check_settings(facts: Facts) -> Iterator[CheckResult]:
    """Settings that the daemon could not start with, or had better not."""
    if facts.settings_faults:
        cause = "; ".join(facts.settings_faults)
        yield problem(
            "the settings cannot be used", f"{cause}; the defaults are assumed here", "vipd --check"
        )
    if facts.settings.etcd and not facts.daemon.status:  # else the daemon warns of it
        for text in facts.settings.etcd.warnings():
            yield warning("a setting is unsafe", text)


def check_running(facts: Facts) -> Iterator[CheckResult]:
    """Without a daemon no changes are applied."""
    daemon = facts.daemon
    if daemon.in_other_namespace:
        title = "the daemon that answers serves another network namespace"
        cause = "what it says of services is not about this namespace, and was not used"
        yield warning(title, cause, hint="give this namespace's daemon with --socket")
    elif not daemon.runs:
        yield from _not_running(facts)
    elif not daemon.status:
        cause = f"a vipd is at work here, but: {daemon.fault}; services are read from files instead"
        yield warning("the daemon could not be asked", cause, hint="give its socket with --socket")


def _not_running(facts: Facts) -> Iterator[CheckResult]:
    unknown = facts.daemon.prefixes_fault or facts.vipd_rules_unread()
    if not facts.root or facts.daemon.prefixes_fault:
        cause = "; ".join(filter(None, (facts.daemon.fault, facts.daemon.prefixes_fault)))
        yield unchecked("whether vipd runs is not known", cause)
        return
    working = [
        str(family) for family in facts.families() or _all_families(facts) if facts.has_vipd_rules(family)
    ]
    if working:
        cause = f"its rules ({', '.join(working)}) forward as last written, and nobody follows changes"
        yield warning("vipd does not run, its rules are in the kernel", cause, START)
        return
    if unknown or facts.services_fault:
        cause = f"whether its rules are in the kernel is not known: {unknown or facts.services_fault}"
        yield warning("vipd does not run", cause, START)
        return
    count = len({port.service for port in facts.services})
    cause = f"{count} service{' is' if count == 1 else 's are'} declared, and no rule is in the kernel"
    judged = problem if facts.services else warning
    yield judged("vipd does not run", cause, START)


def _all_families(facts: Facts) -> tuple[Family, ...]:
    return tuple({ruleset.family for ruleset in facts.rulesets})


def check_state(facts: Facts) -> Iterator[CheckResult]:
    """The daemon's own report of its state."""
    status = facts.daemon.status
    state = status.get("state", "")
    if state in ("failed", "pending", "starting"):
        judged = problem if state == "failed" else warning
        cause = status.get("message") or "a change, or the first load, is on its way for seconds already"
        yield judged(f"the daemon's state is {state}", str(cause), "vipctl reload")
    elif status:
        yield ok("the kernel has what is declared", f"last apply: {status.get('last_apply') or 'none yet'}")


def check_warnings(facts: Facts) -> Iterator[CheckResult]:
    """The daemon's warnings."""
    for text in facts.daemon.status.get("warnings", ()):
        if not any(told in text for told in _REPORTED_BY_CHECKS):
            yield warning("the daemon warns", str(text))


def check_version(facts: Facts) -> Iterator[CheckResult]:
    """After an upgrade the old daemon may still run."""
    runs, here = facts.daemon.status.get("version", ""), facts.daemon.vipctl
    if runs and runs != here:
        cause = f"the daemon is {runs}, vipctl {here}: an upgrade takes effect when the daemon starts anew"
        yield warning("daemon and vipctl differ in version", cause, "systemctl restart vipd")


def check_socket(facts: Facts) -> Iterator[CheckResult]:
    """Which users may connect: root, and the members of one group."""
    socket = facts.socket
    if socket is None:
        return
    if socket.mode & _WORLD:
        cause = f"{socket.path} has the mode {socket.mode:04o}: every user may read what vipd knows"
        yield warning("everybody may connect to the API", cause, f"chmod 0660 {socket.path}")
    wanted = socket.wanted_group
    if wanted and (socket.group != wanted or socket.mode & _GROUP_ACCESS != _GROUP_ACCESS):
        cause = f"{socket.path} belongs to {socket.group or 'no group'}, mode {socket.mode:04o}"
        repair = f"chgrp {wanted} {socket.path}", f"chmod 0660 {socket.path}"
        yield warning(f"members of {wanted} cannot connect to the API", cause, *repair)


def check_clock(facts: Facts) -> Iterator[CheckResult]:
    """etcd's leases depend on time. Checked only if etcd is a source."""
    if facts.kernel.clock_synchronised is False:
        cause = "the kernel says that no time server corrects it; leases in etcd may end early or late"
        yield warning("the clock is not synchronised", cause, "timedatectl set-ntp true")


CHECKS = (
    Check("settings", GROUP, "the settings can be used", check_settings),
    Check("daemon-running", GROUP, "vipd runs", check_running),
    Check("daemon-state", GROUP, "the daemon does well", check_state, Facts.daemon_unread),
    Check(
        "daemon-warnings",
        GROUP,
        "the daemon warns of nothing else",
        check_warnings,
        Facts.daemon_unread,
    ),
    Check(
        "daemon-version",
        GROUP,
        "daemon and vipctl are of one version",
        check_version,
        Facts.daemon_unread,
    ),
    Check(
        "socket-permissions",
        GROUP,
        "the API's socket is for its group only",
        check_socket,
        lambda facts: facts.socket_fault,
    ),
    Check(
        "clock",
        GROUP,
        "the clock is synchronised, or does not matter",
        check_clock,
        lambda facts: facts.kernel.fault or facts.kernel.clock_fault,
    ),
)
