"""A server whose behaviour is set over standard input: TCP (HTTP or a line) and UDP on one port.

Stand-alone program, standard library only: NAME ADDRESS PORT. Commands: `serve`, `hang`, `fail`, `weigh N`;
it prints `done` after each. It answers `NAME PEER:PORT`, as the lab's servers do.
"""

from __future__ import annotations

import socket
import sys
import threading


class State:
    order = "serve"
    weight = ""


def answer_http(head: bytes, reply: bytes) -> bytes:
    status = b"500 Sorry" if State.order == "fail" else b"200 OK"
    weight = f"X-Vipd-Weight: {State.weight}\r\n".encode() if State.weight else b""
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n%s\r\n%s" % (status, len(reply), weight, reply)


def serve(flow: socket.socket, reply: bytes) -> None:
    with flow:
        flow.settimeout(30)
        try:
            while data := flow.recv(4096):
                if State.order == "hang":
                    threading.Event().wait(30)
                http = data.startswith((b"GET ", b"HEAD "))
                flow.sendall(answer_http(data, reply) if http else reply)
                if http:
                    return
        except OSError:
            return


def reply_text(name: str, peer: tuple[str, int]) -> bytes:
    return f"{name} {peer[0]}:{peer[1]}\n".encode()


def listen_tcp(name: str, listener: socket.socket) -> None:
    while True:
        flow, peer = listener.accept()
        threading.Thread(target=serve, args=(flow, reply_text(name, peer)), daemon=True).start()


def listen_udp(name: str, server: socket.socket) -> None:
    while True:
        _, peer = server.recvfrom(4096)
        server.sendto(reply_text(name, peer), peer)


def main() -> None:
    name, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    tcp = socket.create_server((address, port), backlog=128)
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind((address, port))
    threading.Thread(target=listen_tcp, args=(name, tcp), daemon=True).start()
    threading.Thread(target=listen_udp, args=(name, udp), daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        order, _, value = line.strip().partition(" ")
        if order == "weigh":
            State.weight = value
        else:
            State.order = order
        print("done", flush=True)


if __name__ == "__main__":
    main()
