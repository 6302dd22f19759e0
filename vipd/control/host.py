"""Prepares the host itself: packet forwarding, routes to VIPs, and its addresses."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from time import monotonic
from typing import Protocol

from vipd.control.address_policy import AddressPolicy
from vipd.control.claim_warnings import ClaimIndex, PortClaim, warnings_of
from vipd.control.host_checks import HostChecks
from vipd.control.selection import SelectionPolicy
from vipd.health.host_problems import host_problems
from vipd.health.prerequisites import Prerequisites, Problems
from vipd.host.facts import NO_FACTS
from vipd.host.host_changes import BE_LIBERAL, IP_FORWARD, IPV6_FORWARDING, HostChanges
from vipd.host.network import read_addresses
from vipd.host.reader import HostReader
from vipd.host.requirements import HostRequirements
from vipd.host.settings.settings import Settings, balances_of
from vipd.host.vip_routes import VipRoutes
from vipd.model.check import Check
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import AnnounceMethod, Family, Service

log = logging.getLogger(__name__)

SYSCTLS = Path("/proc/sys")
FORWARDING = {
    Family.IPV4: IP_FORWARD,
    # Turning this on makes the kernel ignore router advertisements on interfaces with accept_ra=1.
    Family.IPV6: IPV6_FORWARDING,
}
IPV6_DISABLED = "net/ipv6/conf/all/disable_ipv6"
LIBERAL = BE_LIBERAL
"""Without it a packet outside of the TCP window counts as INVALID and is not translated, so that a host
resets the connection (contract 7.6). kube-proxy drops every forwarded INVALID packet, also those of other
programs; this setting repairs the flows instead, also those that end on this host."""


MOST_REMEMBERED = 200
"""Number of warnings that are remembered, so that they are not logged again."""


class HostProvider(Protocol):
    """A reconciler's view of this host, besides its rules."""

    async def policy(self) -> SelectionPolicy:
        """The policy by current settings and host addresses. Raises OSError."""

    def claims(self) -> AddressPolicy:
        """The addresses that services may claim."""

    async def check_problems(self, checks: Collection[Check]) -> Mapping[Check, Problems]:
        """The requirements of checks that this host lacks. Answers soon, even if a lookup hangs."""

    def services_changed(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Forwardings are new, or gone."""

    def assigned_vips(self) -> frozenset[str]:
        """Services' addresses that this host itself has on a device, and should not."""

    async def prepare(self) -> tuple[str, ...]:
        """Prepare the host for all forwardings; returns a warning for each problem."""


class Host:
    """This host's addresses, and the kernel settings that the families in use need."""

    def __init__(
        self,
        settings: Settings,
        record: HostChanges,
        root: Path = SYSCTLS,
        dataplane: Callable[[], str] | None = None,
        invalidate: Callable[[], None] = lambda: None,
    ) -> None:
        """`dataplane` returns the name of the active one; without it the settings name it. `invalidate` makes
        it read all its rules, and remove those of another iptables variant that are found then."""
        self._settings = settings
        self._record = record
        self._root = root
        self._policy: SelectionPolicy | None = None
        self._needs = HostRequirements()
        self._routes = VipRoutes(settings.vip_device, record)
        self._prerequisites = Prerequisites(self.check_problem)
        self._dataplane = dataplane or (lambda: settings.dataplane)
        self._checks = HostChecks(settings, dataplane=self._dataplane, found_own=invalidate)
        self._reader, self._claims, self._facts = HostReader(settings), ClaimIndex(), NO_FACTS
        self._admitted_by = NO_FACTS
        """The facts of this host at the last step, or at the first poll."""
        self._claim_warnings: tuple[str, ...] | None = ()
        """None: claims have changed."""
        self._logged: dict[str, None] = {}
        """Warnings of claims that were logged, or are given now."""
        self._conntrack_absent = False
        """Connection tracking was not there yet when it was to be set."""
        self._seen_on: set[str] = set()
        """Kernel settings that were on when this host was last prepared."""

    async def policy(self) -> SelectionPolicy:
        """The policy by settings and host, as of the last poll. Raises OSError if the first poll fails."""
        if self._policy is None:
            await self.refresh()
        assert self._policy is not None  # noqa: S101 (refresh sets it)
        self._admitted_by = self._facts
        return self._policy

    def claims(self) -> AddressPolicy:
        """The claims that services may make; with `compat: kube-proxy` also this host's own addresses."""
        own = self._policy.host.addresses if self._policy else ()
        compatible = self._settings.compat == "kube-proxy"
        return AddressPolicy(
            self._settings.allowed_addresses,
            () if compatible else tuple(sorted(own)),
            self._settings.exec_sources,
            balances_of(self._dataplane()),
            host=self._facts.without_addresses() if compatible else self._facts,
            backends=self._settings.allowed_backends,
            host_ports=self._settings.host_ports,
            host_ports_per_author=self._settings.host_ports_per_author,
            announced=self._settings.announce_addresses,
            names=self._settings.allowed_names,
            flow_limits=self._settings.has_own_chains,
            lan_holders=self._settings.etcd is not None,
        )

    def check_problem(self, check: Check) -> Problems:
        """The requirements of the check that this host lacks. It blocks: call it in a thread."""
        return host_problems(check, self._settings.check_users)

    async def check_problems(self, checks: Collection[Check]) -> Mapping[Check, Problems]:
        """The requirements of checks that this host lacks; a lookup that takes too long is a problem
        itself."""
        return await self._prerequisites.problems(checks)

    async def refresh_claims(self) -> bool:
        """Check what services must not, or should not, claim; returns whether another step is required."""
        own = self._policy.host.addresses if self._policy else frozenset[str]()
        self._facts = await self._reader.read(own)
        warnings = self._claims.warnings(self._facts, monotonic())
        differs = self._facts != self._admitted_by or warnings != self._claim_warnings
        differs = differs or self._facts.bound_ports != self._admitted_by.bound_ports
        self._claim_warnings = None if differs else self._claim_warnings
        return differs

    def faults(self) -> tuple[str, ...]:
        """Facts of this host that cannot be read; their last known values still apply."""
        return self._reader.faults()

    def warnings_of(self, services: Collection[Service]) -> tuple[str, ...]:
        """The warnings about claims of these services, as of the last poll."""
        return warnings_of(services, self._facts)

    async def refresh(self) -> bool:
        """Poll this host: returns whether its addresses (unless settings name them), the required routes and
        kernel settings, or the warnings have changed. Raises OSError when the addresses
        cannot be read."""
        named = self._settings.host_addresses
        found = await host_addresses() if named is None else named
        # An invalid address is detected here, as a fault of this poll, and not in each step.
        addresses = frozenset(str(ipaddress.ip_address(address)) for address in found)
        before, self._policy = self._policy, SelectionPolicy.of(self._settings, addresses)
        claims = await self.refresh_claims()
        if before is None:
            self._admitted_by = self._facts
            return True  # nothing has been prepared yet
        routes = await self._routes.poll()
        checks = await self._checks.refresh(self._needs)
        host = routes or checks or claims or self._conntrack_absent or self._sysctls_changed()
        return host or before != self._policy or self._prerequisites.answered_late

    def services_changed(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Add new forwardings, and remove those that are None. `prepare` prepares the host for them."""
        self._routes.mark_dirty(self._needs.update(changes))
        for key, forwarding in changes.items():
            self._claims.put(key, PortClaim.of(forwarding) if forwarding else None)
        self._claim_warnings = None

    def assigned_vips(self) -> frozenset[str]:
        """Services' addresses that this host itself has on a device, and should not, as of the last poll."""
        return self._claims.assigned

    def announced_addresses(self, by: AnnounceMethod) -> set[str]:
        """The addresses that services ask to announce by one method."""
        return {
            address
            for forwarding in self.announcing().values()
            if forwarding.announcement and forwarding.announcement.by is by
            for address in forwarding.announced_addresses()
        }

    def announcing(self) -> Mapping[ForwardingKey, Forwarding]:
        """The forwardings that ask for an announcement of their addresses beyond this host."""
        return self._needs.announcing() if self._needs.announced else {}

    async def prepare(self) -> tuple[str, ...]:
        """Ensure that the host forwards the families in use and has routes to their VIPs.

        Returns a warning for each thing that failed, and for each problem of this host.
        """
        return (
            *self._prepare_sysctls(self._needs.families),
            *await self._routes.ensure(self._needs.vips, self._needs.announced),
            *self._checks.warnings(self._needs),
            *self._record.warnings(),
            *self._warn_of_claims(),
        )

    def _warn_of_claims(self) -> tuple[str, ...]:
        """The current warnings about claims; logs the new ones."""
        if self._claim_warnings is None:
            self._claim_warnings = self._claims.warnings(self._facts, monotonic())
            for warning in self._claim_warnings:
                if warning not in self._logged:
                    log.warning("%s", warning)
            known = (*self._claim_warnings, *self._logged)
            self._logged = dict.fromkeys(known[:MOST_REMEMBERED])
        return self._claim_warnings

    def _sysctls_changed(self) -> bool:
        """Whether another program has changed a kernel setting since the host was last prepared."""
        return self._enabled_sysctls() != self._seen_on

    def _enabled_sysctls(self) -> set[str]:
        """The kernel settings that services need, or need to be off, and that are on."""
        families = self._needs.families
        names = [FORWARDING[family] for family in families]
        if families and self._settings.manage_sysctls and self._settings.compat != "kube-proxy":
            names.append(LIBERAL)
        names += [IPV6_DISABLED] if Family.IPV6 in families else []
        return {name for name in names if self._sysctl(name) not in ("", "0")}

    def _sysctl(self, name: str) -> str:
        """The value of a kernel setting; empty if it does not exist."""
        try:
            return (self._root / name).read_text().strip()
        except OSError:
            return ""

    def _prepare_sysctls(self, families: Collection[Family]) -> tuple[str, ...]:
        if self._settings.manage_sysctls and families:
            otherwise = "clients behind this host will fail"
            warnings = [self._turn_on(FORWARDING[family], otherwise) for family in sorted(families)]
            warnings.append(self._be_liberal())
        else:
            warnings = [self._forwarding_off_warning(FORWARDING[family]) for family in sorted(families)]
        warnings.append(self._ipv6_disabled_warning(families))
        self._seen_on = self._enabled_sysctls()
        return tuple(filter(None, warnings))

    def _ipv6_disabled_warning(self, families: Collection[Family]) -> str:
        """The warning that IPv6 is disabled on every device although services need it."""
        if Family.IPV6 not in families or self._sysctl(IPV6_DISABLED) != "1":
            return ""
        # One that was enabled by itself works all the same.
        others = (self._root / "net/ipv6/conf").glob("*/disable_ipv6")
        known = {"all", "default", "lo", self._settings.vip_device}
        if any(
            path.parent.name not in known and self._sysctl(str(path.relative_to(self._root))) == "0"
            for path in others
        ):
            return ""
        setting = IPV6_DISABLED.replace("/", ".")
        return (
            f"IPv6 is disabled on this host ({setting} is 1): no client reaches an IPv6 address of a "
            f"service; hint: sysctl -w {setting}=0, then give this host its IPv6 addresses again; or declare "
            "no IPv6"
        )

    def _forwarding_off_warning(self, name: str) -> str:
        """The warning that forwarding is off and vipd may not turn it on."""
        if self._sysctl(name) != "0":
            return ""
        setting = name.replace("/", ".")
        return (
            f"{setting} is 0, and manage_sysctls is false: clients behind this host get no answer; "
            f"hint: sysctl -w {setting}=1, or manage_sysctls: true"
        )

    def _be_liberal(self) -> str:
        """Not with `compat: kube-proxy`, whose rules drop INVALID packets instead."""
        if self._settings.compat == "kube-proxy":
            return ""
        self._conntrack_absent = not (self._root / LIBERAL).exists() and not self._conntrack_absent
        if self._conntrack_absent:
            return ""  # it appears with the first rules; the next poll requests another step
        return self._turn_on(LIBERAL, "large transfers may be reset")

    def _turn_on(self, name: str, otherwise: str) -> str:
        path, setting = self._root / name, name.replace("/", ".")
        try:
            was = path.read_text().strip()
            if was != "0":
                return ""
            self._record.record_sysctl(name, was, "1")
            path.write_text("1")
        except OSError as error:
            return f"{setting} cannot be set to 1: {error.strerror}; {otherwise}"
        if name in self._seen_on:
            log.warning("%s had been turned off by somebody; set to 1 again: %s", setting, otherwise)
        else:
            log.info("%s set to 1; it was %s", setting, was)
        return ""


def restore_sysctls(record: HostChanges, root: Path = SYSCTLS, *, dry_run: bool = False) -> list[str]:
    """Restore settings that are still as vipd left them; returns those restored, or to restore. Raises
    OSError."""
    undone = []
    for name, change in record.read().sysctls.items():
        path = root / name
        if path.exists() and path.read_text().strip() == change["set"]:
            if not dry_run:
                path.write_text(change["was"])
            undone.append(f"{name.replace('/', '.')} = {change['was']}")
    return undone


async def host_addresses() -> frozenset[str]:
    """Every address of this host in its network namespace, loopback included. Raises OSError."""
    return await asyncio.to_thread(read_addresses)
