"""Clients of a lab: one flow from each of many addresses.

Stand-alone program, standard library only.

    clients.py many 10.96.0.1 80 10.20.0.1 1000     {"10.20.0.1": "b1", ...}
    clients.py checksums eth0                       no offloading from now on
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import json
import signal
import socket
import struct
import sys

LONGEST_LIFE = 280
PATIENCE = 60.0
"""Who is translated to nowhere stays so, however often a packet is sent again; a busy machine comes round."""
SIOCETHTOOL, ETHTOOL_GTXCSUM, ETHTOOL_STXCSUM = 0x8946, 0x16, 0x17
"""The kernel's include/uapi/linux/sockios.h and ethtool.h."""


def ask(to: str, port: int, source: str) -> str:
    """Who answers a connection; or `refused`, `timeout` or an error's name."""
    try:
        with socket.create_connection((to, port), PATIENCE, (source, 0)) as made:
            # Reset on close: many thousand closed connections would use up the source ports.
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            made.sendall(b"hello\n")
            return made.recv(200).decode().split()[0]
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "timeout"
    except (OSError, IndexError) as error:
        return type(error).__name__


def many(to: str, port: str, first: str, count: str) -> None:
    """One connection from each of so many addresses."""
    sources = [str(ipaddress.ip_address(first) + number) for number in range(int(count))]
    print(json.dumps({source: ask(to, int(port), source) for source in sources}))


def compute_checksums(device: str) -> None:
    """Have checksums made before packets leave by a device, as where no card makes them."""
    with socket.socket() as any_socket:
        for command in (ETHTOOL_STXCSUM, ETHTOOL_GTXCSUM):
            value = array.array("I", [command, 0])
            request = struct.pack("16sP", device.encode(), value.buffer_info()[0])
            fcntl.ioctl(any_socket.fileno(), SIOCETHTOOL, request)
    if value[1]:
        sys.exit(f"{device} still leaves checksums to others")


if __name__ == "__main__":
    signal.alarm(LONGEST_LIFE)
    work, *words = sys.argv[1:]
    if work == "many":
        many(*words)
    else:
        compute_checksums(*words)
