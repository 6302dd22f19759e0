"""Netlink datagrams as the kernel sent them, in files written by
`python -m tests.dataplane.iptables.watch.recorded`.

Each file holds the datagrams of one command, each after its length (4 bytes, big endian).
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

from tests.dataplane.namespace import Namespace, inside
from vipd.dataplane.iptables.watch.events import open_socket

FILES = Path(__file__).with_name("recorded")
_LENGTH = struct.Struct(">I")

SEP = "VIPD-SEP-AAAAAAAAAAAAAAAA"
DNAT_ELSEWHERE = ("-j", "DNAT", "--to-destination", "10.6.6.6:80")
OURS = """*nat
:VIPD-SERVICES - [0:0]
:VIPD-SEP-AAAAAAAAAAAAAAAA - [0:0]
-A PREROUTING -m comment --comment "vipd services" -j VIPD-SERVICES
-A PREROUTING -j RETURN
-A VIPD-SERVICES -d 10.96.0.10/32 -p tcp -j VIPD-SEP-AAAAAAAAAAAAAAAA
-A VIPD-SEP-AAAAAAAAAAAAAAAA -p tcp -j DNAT --to-destination 10.244.0.5:80
COMMIT
*filter
:VIPD-FORWARD - [0:0]
-A FORWARD -j VIPD-FORWARD
COMMIT
"""
COMMANDS: dict[str, tuple[list[str], str]] = {
    "restore": (["iptables-nft-restore", "--noflush"], OURS),
    "insert-ahead": (["iptables-nft", "-t", "nat", "-I", "PREROUTING", "-j", "RETURN"], ""),
    "append-behind": (["iptables-nft", "-t", "nat", "-A", "PREROUTING", "-p", "udp", "-j", "RETURN"], ""),
    "delete-foreign": (["iptables-nft", "-t", "nat", "-D", "PREROUTING", "-p", "udp", "-j", "RETURN"], ""),
    "policy": (["iptables-nft", "-P", "FORWARD", "DROP"], ""),
    "replace-in-sep": (
        ["iptables-nft", "-t", "nat", "-R", SEP, "1", "-p", "tcp", *DNAT_ELSEWHERE],
        "",
    ),
    "foreign-chain": (
        ["iptables-nft-restore", "--noflush"],
        "*nat\n:DOCKER - [0:0]\n-A DOCKER -j RETURN\nCOMMIT\n",
    ),
    "delete-jump": (
        ["iptables-nft", "-t", "filter", "-D", "FORWARD", "-j", "VIPD-FORWARD"],
        "",
    ),
    "flush": (["iptables-nft", "-t", "nat", "-F"], ""),
    "flush-ruleset": (["nft", "flush", "ruleset"], ""),
}
"""In the order in which they were done, one after the other in one namespace."""


def datagrams(name: str) -> list[bytes]:
    """What the kernel said of one of COMMANDS."""
    data, found, place = (FILES / f"{name}.bytes").read_bytes(), [], 0
    while place < len(data):
        (length,) = _LENGTH.unpack_from(data, place)
        found.append(data[place + 4 : place + 4 + length])
        place += 4 + length
    return found


def record() -> None:
    """Do COMMANDS for real and keep what is heard. Needs root."""
    FILES.mkdir(exist_ok=True)
    with Namespace() as namespace, inside(namespace, open_socket) as heard:
        for name, (argv, text) in COMMANDS.items():
            command = ["ip", "netns", "exec", namespace.name, *argv]
            subprocess.run(command, input=text, text=True, check=True)
            found = []
            while True:
                try:
                    found.append(heard.recv(1 << 16))
                except BlockingIOError:
                    break
            (FILES / f"{name}.bytes").write_bytes(b"".join(_LENGTH.pack(len(d)) + d for d in found))


if __name__ == "__main__":
    record()
