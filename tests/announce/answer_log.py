"""Run in the client's namespace: asks for an address by ARP every 10 ms, and logs who answers or announces.

Prints a line for each answer and announcement: seconds, `answer` or `announcement`, hardware address. Ends
when its standard input does.
"""

from __future__ import annotations

import select
import socket
import sys
import time

INTERVAL_SECONDS = 0.01


def main(address: str) -> None:
    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0806)) as opened:
        opened.bind(("eth0", 0x0806))
        own = opened.getsockname()[4]
        # Not a probe from 0.0.0.0 (RFC 5227): the kernel does not answer that for a proxy entry.
        body = bytes.fromhex("0001080006040001") + own + socket.inet_aton(sys.argv[2]) + bytes(6) + wanted
        query = b"\xff" * 6 + own + b"\x08\x06" + body
        due = time.monotonic()
        print("ready", flush=True)
        while True:
            if time.monotonic() >= due:
                opened.send(query)
                due += INTERVAL_SECONDS
            ready, _, _ = select.select([opened, sys.stdin], [], [], max(0.0, due - time.monotonic()))
            if opened in ready:  # before the end: what has come is told
                frame, origin = opened.recvfrom(100)
                if origin[2] != socket.PACKET_OUTGOING and frame[28:32] == wanted:
                    kind = "answer" if frame[20:22] == b"\0\2" else "announcement"
                    print(f"{time.monotonic():.4f} {kind} {frame[22:28].hex(':')}", flush=True)
            elif sys.stdin in ready:
                return


main(sys.argv[1])
