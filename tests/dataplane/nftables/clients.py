"""Clients of a lab: one flow from each of many addresses.

Stand-alone program, standard library only.

    clients.py many --to 10.96.0.1 --port 80 --from 10.20.0.0 --count 1000     {"10.20.0.1": "b1", ...}
    clients.py checksums --to eth0                                             no offloading from now on
"""

from __future__ import annotations

import argparse
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


def ask(to: str, port: int, source: str = "", timeout: float = PATIENCE) -> str:
    """Who answers a connection; or `refused`, `timeout` or an error's name."""
    try:
        with socket.create_connection((to, port), timeout, (source, 0) if source else None) as made:
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


def many(arguments: argparse.Namespace) -> None:
    """One connection from each address."""
    first = ipaddress.ip_address(arguments.first)
    sources = [str(first + number) for number in range(1, arguments.count + 1)]
    print(json.dumps({source: ask(arguments.to, arguments.port, source) for source in sources}))


def compute_checksums(device: str) -> None:
    """Have checksums made before packets leave by a device, as where no card makes them."""
    with socket.socket() as any_socket:
        for command in (ETHTOOL_STXCSUM, ETHTOOL_GTXCSUM):
            value = array.array("I", [command, 0])
            request = struct.pack("16sP", device.encode(), value.buffer_info()[0])
            fcntl.ioctl(any_socket.fileno(), SIOCETHTOOL, request)
    if value[1]:
        sys.exit(f"{device} still leaves checksums to others")


def main() -> None:
    """Read the arguments, do the work and print its outcome."""
    parser = argparse.ArgumentParser(description="Make flows to one address and tell who answered.")
    parser.add_argument("work", choices=("many", "checksums"))
    parser.add_argument("--to", default="", help="an address, or a device")
    parser.add_argument("--port", type=int, default=80)
    parser.add_argument("--from", dest="first", default="")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument(
        "--life", type=int, default=LONGEST_LIFE, help="seconds after which it ends in any case"
    )
    arguments = parser.parse_args()
    signal.alarm(arguments.life)
    if arguments.work == "checksums":
        compute_checksums(arguments.to)
    else:
        many(arguments)


if __name__ == "__main__":
    main()
