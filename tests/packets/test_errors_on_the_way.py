"""ICMP errors and segments out of window: connection tracking must translate them like the flow's own."""

from __future__ import annotations

import sys

import pytest

from tests.lab.daemon import Daemon
from tests.lab.flow import finish, read_line
from tests.lab.topology import Lab
from tests.packets.services import SERVED_PORT, Services
from vipd.model.service import Frontend, socket_text

pytestmark = pytest.mark.root

SMALL_MTU = 1300
CLOSED_PORT = 8099
LARGE_REQUEST = """if True:
    import socket, sys
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60) as flow:
        flow.sendall(b"x" * 200_000 + b"\\n")
        print(flow.recv(100).decode().split()[0])
"""
OUT_OF_WINDOW = """if True:
    import socket, struct, sys
    source, port, destination, destination_port = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    addresses = socket.inet_aton(source) + socket.inet_aton(destination)
    ACK = 0x10
    def header(number, checksum):
        ports = struct.pack("!HH", port, destination_port)
        return ports + struct.pack("!IIBBHHH", number, number, 5 << 4, ACK, 512, checksum, 0)
    def segment(number):
        total = sum(struct.unpack("!16H", addresses + struct.pack("!BBH", 0, 6, 20) + header(number, 0)))
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        return header(number, ~total & 0xFFFF)
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP) as sender:
        sender.bind((source, 0))
        for number in (0x7FFFFFFF, 0xFFFFFFFF):
            sender.sendto(segment(number), (destination, 0))
"""
"""Two bare acknowledgements with sequence numbers far away, as segments that were delayed for long have them.
One is above the window and one below it; the kernel takes only the former for invalid."""
CAPTURE = """if True:
    import socket
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800)) as packets:
        print("ready", flush=True)
        found = []
        while len(found) < 2:
            packet = packets.recv(2048)
            if packet[9] == 6 and packet[25:28] == b"\\xff" * 3:
                found.append(socket.inet_ntoa(packet[12:16]))
        print(*found, flush=True)
"""


@pytest.mark.parametrize("family", [4, 6])
def test_path_mtu_discovery_works_through_a_vip(lab: Lab, services: Services, family: int) -> None:
    backend, prefix = lab.backends[0], {4: 32, 6: 128}[family]
    vip = services.add([backend], family=family)
    route = (f"{backend.address(family)}/{prefix}", "dev", "cluster", "mtu", str(SMALL_MTU))
    lab.host.run("ip", f"-{family}", "route", "add", *route)
    try:
        done = lab.client.run(sys.executable, "-I", "-c", LARGE_REQUEST, vip.address, str(vip.port))
        assert done.stdout.strip() == backend.name
        cached = lab.client.run("ip", f"-{family}", "route", "get", vip.address).stdout
        assert f"mtu {SMALL_MTU}" in cached, "the ICMP error names the VIP, which the client knows"
    finally:
        lab.host.run("ip", f"-{family}", "route", "delete", *route)


@pytest.mark.parametrize("family", [4, 6])
def test_a_backend_s_icmp_error_reaches_the_client(
    lab: Lab, daemon: Daemon, services: Services, family: int
) -> None:
    vip = services.vip(family, "udp")
    daemon.vipctl("add", str(vip), socket_text(lab.backends[0].address(family), CLOSED_PORT))
    lab.client.send(*vip, count=3).all_failed("refused")


def test_a_segment_out_of_window_is_translated(lab: Lab, daemon: Daemon, services: Services) -> None:
    """Untranslated it comes from an address that the client does not know, and the client resets the flow
    (kubernetes #74839)."""
    vip = services.add(lab.backends[:1], "--masquerade", "hairpin")
    assert lab.host.sysctl("net.netfilter.nf_conntrack_tcp_be_liberal") == "1"
    assert sources_of_stray_segments(lab, vip) == {vip.address}
    daemon.stop()  # it would turn the setting on again
    try:
        lab.host.sysctl("net.netfilter.nf_conntrack_tcp_be_liberal", 0)
        assert lab.backends[0].ipv4 in sources_of_stray_segments(lab, vip), "so it is without that setting"
    finally:
        daemon.start()
    daemon.wait_until(lambda: lab.host.sysctl("net.netfilter.nf_conntrack_tcp_be_liberal"), "1")


def sources_of_stray_segments(lab: Lab, vip: Frontend) -> set[str]:
    """The source addresses that the client sees of segments out of window that its flow's backend sends."""
    backend = lab.backends[0]
    with lab.client.open(*vip) as flow:
        answer = flow.ask()
        capture = lab.client.start(sys.executable, "-I", "-c", CAPTURE)
        assert read_line(capture) == "ready"
        places = (backend.ipv4, str(SERVED_PORT), answer.source, str(answer.source_port))
        backend.run(sys.executable, "-I", "-c", OUT_OF_WINDOW, *places)
        sources = set(read_line(capture).split())
        finish(capture)
        return sources
