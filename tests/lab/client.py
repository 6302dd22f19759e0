"""A client: makes many connections or datagrams in one process, or keeps one flow open.

Stand-alone program, standard library only. Everything is bounded in time.

    client.py burst --to 10.96.0.10 --port 80 --count 1000      one JSON object with all outcomes
    client.py burst ... --tally                                 one line "b1 512" for each outcome
    client.py bursts                                            each line of standard input, a JSON list of
                                                                options, is one burst
    client.py flow --to 10.96.0.10 --port 80                    each line on standard input, `SECONDS TEXT`,
                                                                is sent, and its outcome after so many seconds
                                                                (0: --timeout) printed as one JSON line
An outcome is `{"answer": "b1 10.10.0.2:40000"}`, or `{"failure": "refused" | "timeout" | an errno's name}`;
in a burst with `"resent": "1"` when TCP had to send so many segments again.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import errno
import itertools
import json
import os
import signal
import socket
import struct
import sys

IPPROTO_SCTP = 132
KINDS = {
    "tcp": (socket.SOCK_STREAM, 0),
    "udp": (socket.SOCK_DGRAM, 0),
    "sctp": (socket.SOCK_STREAM, IPPROTO_SCTP),
}
LONGEST_LIFE = 280
RESENT_AT = 100
"""tcpi_total_retrans in the kernel's include/uapi/linux/tcp.h: segments that were sent again."""
_FIRST_PORT = 10_000 + os.getpid() % 20_000
FRESH_PORTS = itertools.cycle((*range(_FIRST_PORT, 30_000), *range(10_000, _FIRST_PORT)))
Outcome = dict[str, str]


def failure(error: OSError) -> Outcome:
    if isinstance(error, ConnectionRefusedError):
        return {"failure": "refused"}
    if isinstance(error, TimeoutError):
        return {"failure": "timeout"}
    return {"failure": errno.errorcode.get(error.errno or 0, "unknown")}


def opened(arguments: argparse.Namespace, *, once: bool = False) -> socket.socket:
    """An unconnected socket with the source asked for. `once`: for one datagram, so its port must be new."""
    family = socket.AF_INET6 if ":" in arguments.to else socket.AF_INET
    made = socket.socket(family, *KINDS[arguments.protocol])
    if once and arguments.protocol == "udp" and not arguments.source_port:
        bind_fresh(made, arguments.source)
        return made
    if arguments.source_port:
        # Only then: sockets with this option are given the same port now and then when they leave it open.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if arguments.source or arguments.source_port:
        made.bind((arguments.source, arguments.source_port))
    if arguments.source_port and arguments.protocol == "tcp":
        # Reset on close: the same source port can then be used again at once.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return made


def bind_fresh(made: socket.socket, source: str) -> None:
    """Give a socket a port that none had before: what was a flow a minute ago is one again with its port, and
    goes where that went. The kernel chooses from other ports, by chance."""
    for port in FRESH_PORTS:
        try:
            made.bind((source, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return


async def exchange(arguments: argparse.Namespace) -> Outcome:
    try:
        with opened(arguments, once=True) as flow:
            outcome = await _exchange(flow, arguments)
            return outcome | (resent(flow) if arguments.protocol == "tcp" else {})
    except OSError as error:
        return failure(error)


async def _exchange(flow: socket.socket, arguments: argparse.Namespace) -> Outcome:
    loop = asyncio.get_running_loop()
    try:
        flow.setblocking(False)
        async with asyncio.timeout(arguments.timeout):
            await loop.sock_connect(flow, (arguments.to, arguments.port))
            await loop.sock_sendall(flow, b"hello\n")
            answer = await loop.sock_recv(flow, 200)
    except OSError as error:
        return failure(error)
    return {"answer": answer.decode().strip()} if answer else {"failure": "closed"}


def resent(flow: socket.socket) -> Outcome:
    """How many segments were sent again; empty when none was."""
    info = flow.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RESENT_AT + 4)
    (number,) = struct.unpack_from("=I", info, RESENT_AT)
    return {"resent": str(number)} if number else {}


async def burst(arguments: argparse.Namespace) -> list[Outcome]:
    """`count` exchanges, `parallel` at a time; one at a time when they share a source port."""
    outcomes: list[Outcome] = []
    left = iter(range(arguments.count))

    async def work() -> None:
        for _ in left:
            outcomes.append(await exchange(arguments))

    workers = 1 if arguments.source_port else arguments.parallel
    await asyncio.gather(*(work() for _ in range(workers)))
    return outcomes


def flow(arguments: argparse.Namespace) -> None:
    """Keep one flow; send each line of standard input over it and print the outcome."""
    with opened(arguments) as kept:
        kept.settimeout(arguments.timeout)
        try:
            kept.connect((arguments.to, arguments.port))
        except OSError as error:
            print(json.dumps(failure(error)), flush=True)
            return
        print(json.dumps({"answer": "connected"}), flush=True)
        for line in sys.stdin:
            seconds, _, text = line.partition(" ")
            kept.settimeout(float(seconds) or arguments.timeout)
            try:
                kept.sendall(text.encode())
                answer = kept.recv(200)
                outcome = {"answer": answer.decode().strip()} if answer else {"failure": "closed"}
            except OSError as error:
                outcome = failure(error)
            print(json.dumps(outcome), flush=True)


def bursts() -> None:
    """A burst for each line of standard input: a process begun for each would cost more than most bursts."""
    for line in sys.stdin:
        signal.alarm(LONGEST_LIFE)
        arguments = parser().parse_args(["burst", *json.loads(line)])
        print(json.dumps({"outcomes": asyncio.run(burst(arguments))}), flush=True)
        signal.alarm(0)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Make flows to one address and print their outcomes.")
    made.add_argument("work", choices=("burst", "flow"))
    made.add_argument("--to", required=True, metavar="ADDRESS")
    made.add_argument("--port", type=int, required=True)
    made.add_argument("--protocol", choices=tuple(KINDS), default="tcp")
    made.add_argument("--count", type=int, default=1)
    made.add_argument("--parallel", type=int, default=32)
    made.add_argument("--source", default="", metavar="ADDRESS")
    made.add_argument("--source-port", type=int, default=0)
    made.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS")
    made.add_argument("--tally", action="store_true", help="count the answers of each backend")
    return made


def main() -> None:
    if sys.argv[1:] == ["bursts"]:
        bursts()
        return
    arguments = parser().parse_args()
    signal.alarm(LONGEST_LIFE)
    if arguments.work == "flow":
        flow(arguments)
        return
    outcomes = asyncio.run(burst(arguments))
    if arguments.tally:
        names = (o["answer"].split()[0] if "answer" in o else o["failure"] for o in outcomes)
        for name, times in sorted(collections.Counter(names).items()):
            print(name, times)
    else:
        print(json.dumps({"outcomes": outcomes}))


if __name__ == "__main__":
    main()
