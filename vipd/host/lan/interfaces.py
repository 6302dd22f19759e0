"""The LANs that this host is on, and the kernel settings that it needs to answer there for others' addresses.

The functions block: use them from a thread.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_interface
from pathlib import Path

from vipd.host.host_changes import PROXY_NDP, HostChanges, proxy_delays
from vipd.host.rtnetlink import NEW_ADDRESS, NEW_LINK, listing

SYSCTLS = Path("/proc/sys")
MAX_ADDRESSES = 20_000
_IFNAME, _HARDWARE = 3, 1
_ADDRESS, _LOCAL = 1, 2
_UP, _LOOPBACK, _RUNNING, _NOARP = 0x1, 0x8, 0x40, 0x80
"""RUNNING: it has a carrier. An unplugged device is up and has its addresses, but nobody there hears it."""
_SCOPE_LINK = 253
_ETHERNET = 1
_HARDWARE_BYTES = 6


@dataclass(frozen=True, slots=True)
class Lan:
    """A subnet on an Ethernet device of this host."""

    interface: str
    device: int
    network: IPv4Network | IPv6Network
    address: str
    """This host's own there."""
    hardware: str
    """Its hardware address, as `aa:bb:cc:dd:ee:ff`."""


def read_lans() -> tuple[Lan, ...]:
    """Every LAN on a device that is up and plugged in, the longest prefixes first. Raises OSError."""
    links = {}
    for link in listing(NEW_LINK, 0, MAX_ADDRESSES):
        kind, number, flags = struct.unpack_from("=HiI", link.body, 2)
        hardware = link.attributes.get(_HARDWARE, b"")
        works = flags & _UP and flags & _RUNNING and not flags & (_LOOPBACK | _NOARP)
        usable = works and len(hardware) == _HARDWARE_BYTES
        if kind == _ETHERNET and usable and any(hardware):
            name = link.attributes.get(_IFNAME, b"").rstrip(b"\0").decode("utf-8", "replace")
            links[number] = name, hardware.hex(":")
    found = []
    for message in listing(NEW_ADDRESS, 0, MAX_ADDRESSES):
        (number,) = struct.unpack_from("=i", message.body, 4)
        there = message.attributes.get(_ADDRESS) or message.attributes.get(_LOCAL)
        here = message.attributes.get(_LOCAL, there)
        if number not in links or there is None or here != there or message.body[3] >= _SCOPE_LINK:
            continue
        interface = ip_interface((there, message.body[1]))
        if interface.network.prefixlen < interface.max_prefixlen:
            name, own = links[number]
            found.append(Lan(name, number, interface.network, str(interface.ip), own))
    return tuple(sorted(found, key=lambda lan: (-lan.network.prefixlen, lan.interface, lan.address)))


def lan_of(address: str, lans: Iterable[Lan]) -> Lan | None:
    """The LAN in which an address lies; None if this host is on none."""
    parsed = ip_address(address)
    return next(
        (lan for lan in lans if lan.network.version == parsed.version and parsed in lan.network), None
    )


def prepare_settings(interfaces: Collection[str], record: HostChanges, root: Path = SYSCTLS) -> list[str]:
    """Set what answers need; returns a warning for each setting that cannot be set.

    The kernel delays the answer of a proxy entry by up to `proxy_delay` (0.8 s, measured: 0.03 to 0.74 s),
    at random; with 0 it answers as fast as for an address of its own (1 ms). `proxy_ndp` of all devices, not
    of one alone: with the latter the kernel does not answer the unicast queries by which a client
    confirms what it knows (measured with Linux 6.18).
    """
    warnings = []
    wanted = {**dict.fromkeys(proxy_delays(interfaces), "0"), PROXY_NDP: "1"}
    for name, value in wanted.items():
        path = root / name
        try:
            was = path.read_text().strip()
            if was != value:
                record.record_sysctl(name, was, value)
                path.write_text(value)
        except FileNotFoundError:
            continue  # no IPv6, or the device has just gone
        except OSError as error:
            setting = name.replace("/", ".")
            warnings.append(
                f"{setting} cannot be set to {value}: {error.strerror}; answers for addresses of the LAN are "
                f"late or missing; hint: sysctl -w {setting}={value}"
            )
    return warnings
