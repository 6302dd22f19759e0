"""The fast path with packets, in a guest of its own: what offloaded flows skip, and that all else is right.

Runs in the guest beside `guest.py`, whose namespaces and functions it uses. The kernel takes flows past the
rules; each result says what vipd shows and does with such a flow.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.kernels import guest
from tests.kernels.guest import Daemon, result, run, say, switch, until, vip, vipctl

PORT, SENT = 8081, 2_000_000
PLAIN, RESETTING, STICKY = 60, 70, 80
TABLE = ("inet", "vipd-fast-path")
ROUNDS, MEASURED = 5, 20_000_000
LINUX = tuple(int(part) for part in os.uname().release.split(".")[:2])
CAN_RESET = LINUX >= (6, 4)
WATCH = """add table inet watch
add chain inet watch forward { type filter hook forward priority 0; policy accept; }
add rule inet watch forward tcp dport 8081 counter
"""


def listen(name: str) -> None:
    """A backend: it sends its name, counts what it gets, and answers each `?` at the end with `!`."""
    listener = guest.listener_in(name, PORT)

    def answer(flow: socket.socket) -> None:
        with contextlib.suppress(OSError), flow:
            flow.settimeout(None)
            flow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            flow.sendall(name.encode())
            while data := flow.recv(1 << 16):
                if data.endswith(b"?"):
                    flow.sendall(b"!")

    def accept() -> None:
        while True:
            threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def connect(number: int, family: int = 4, namespace: str = "client") -> tuple[str, socket.socket]:
    """A flow of the client, past its first packets: the backend, and the socket."""
    made = guest.socket_in(namespace, family, socket.SOCK_STREAM)
    made.connect((vip(number, family), PORT))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    name = made.recv(100).decode()
    for _ in range(3):
        ask(made)
    return name, made


def ask(flow: socket.socket, data: bytes = b"?") -> None:
    flow.sendall(data)
    if flow.recv(1) != b"!":
        raise ConnectionError("it was closed")


def asked(flow: socket.socket) -> bool:
    """As `ask`, to wait for something that only happens while packets pass."""
    ask(flow)
    return True


def declare(resetting: bool, only: str = "") -> None:
    services = [("plain", PLAIN, ""), ("sticky", STICKY, "affinity: {by: client-ip, timeout: 10m}")]
    services += [("resetting", RESETTING, "on_remove: reset")] if resetting else []
    guest.write(
        (name, number, f"{PORT}/tcp", more, (only,) if only and name == "resetting" else guest.BACKENDS)
        for name, number, more in services
    )


def there() -> bool:
    return TABLE[1] in run("nft", "list", "tables")


def devices() -> set[str]:
    listed = run("nft", "-j", "list", "flowtable", *TABLE, "flows", check=False)
    items = json.loads(listed)["nftables"] if listed.startswith("{") else []
    return {name for item in items if "flowtable" in item for name in item["flowtable"].get("dev", [])}


def passed() -> int:
    items = json.loads(run("nft", "-j", "list", "table", "inet", "watch"))["nftables"]
    found: Any = next(item["rule"]["expr"] for item in items if "rule" in item)
    return int(next(part["counter"]["packets"] for part in found if "counter" in part))


def offloaded(number: int) -> bool:
    text = run("conntrack", "-L", "-d", vip(number, 4))
    return "[OFFLOAD]" in text


def skipped(flow: socket.socket, trips: int = 50) -> tuple[int, int]:
    """Packets of some round trips that passed the forward hook, and their number."""
    before = passed()
    for _ in range(trips):
        ask(flow)
    return passed() - before, trips


def check_offloaded(kind: str) -> None:
    """A flow skips the chains; its bytes, its state, and its end are right."""
    with result(f"{kind}: established flows skip the rules") as seen:
        _, flow = connect(PLAIN)
        until(lambda: asked(flow) and offloaded(PLAIN), "a flow in the flowtable", 30)
        count, trips = skipped(flow)
        seen.append(f"{count} of {trips} round trips passed the forward hook")
        assert count == 0
    with result(f"{kind}: flows and bytes of an offloaded flow") as seen:
        before = traffic()
        flow.sendall(b"x" * SENT)
        ask(flow)
        shown = json.loads(vipctl("flows", "plain", "-o", "json"))["flows"]
        seen.append(str(shown[0]))
        assert any(each["state"] == "ESTABLISHED" and each["bytes_in"] >= SENT for each in shown)
        until(lambda: traffic() - before >= SENT, "traffic of a live flow", 30)
        seen.append(f"stats: {traffic() - before} bytes in for {SENT} sent")
        assert traffic() - before < 1.2 * SENT
    with result(f"{kind}: the end of an offloaded flow is counted") as seen:
        live = traffic()
        flow.close()
        until(lambda: "_WAIT" in run("conntrack", "-L", "-d", vip(PLAIN, 4)), "the end", 60)
        run("conntrack", "-D", "-d", vip(PLAIN, 4), check=False)
        time.sleep(2)
        seen.append(f"{live} bytes before, {traffic()} after")
        assert live <= traffic() < live + SENT / 10


def traffic() -> int:
    found = json.loads(vipctl("stats", "plain", "-o", "json"))
    item = found["services"][0] if "services" in found else found
    return int(item["bytes_in"])


def check_kinds_of_flows() -> None:
    with result("ipv6: established flows skip the rules") as seen:
        _, flow = connect(PLAIN, 6)
        until(lambda: skipped(flow)[0] == 0, "no packet passes the forward hook", 30)
        seen.append("0 packets passed the forward hook")
        flow.close()
    with result("a flow of this host is not offloaded"):
        run("conntrack", "-D", "-d", vip(PLAIN, 4), check=False)
        _, flow = connect(PLAIN, 4, "")
        for _ in range(20):
            ask(flow)
        assert not offloaded(PLAIN)
        flow.close()
    with result("trace: the first packets of a new flow") as seen:
        target = f"{vip(PLAIN, 4)}:{PORT}"
        command = [sys.executable, "-m", "vipd.cli.main", "trace", target, "--count", "1", "--timeout", "60s"]
        tracing = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        flows: list[socket.socket] = []
        while tracing.poll() is None and len(flows) < 100:
            flows.append(connect(PLAIN)[1])
            time.sleep(0.5)
        text = tracing.communicate(timeout=60)[0]
        seen.append(text[-300:])
        assert any(f"{guest.WIRES[name][0]}.2" in text for name in guest.BACKENDS)
        for flow in flows:
            flow.close()


def check_drain() -> None:
    with result("drain: an offloaded flow is live, and goes on") as seen:
        name, flow = connect(PLAIN)
        until(lambda: asked(flow) and offloaded(PLAIN), "a flow in the flowtable", 30)
        backend = f"plain/{guest.WIRES[name][0]}.2"
        text = vipctl("drain", backend, "--wait", "--timeout", "3s", check=False)
        seen.append(text)
        ask(flow)
        assert "1 flow left" in text
        assert all(connect(PLAIN)[0] != name for _ in range(6))
        flow.close()
        seen.append(vipctl("drain", backend, "--wait", "--timeout", "60s"))
        vipctl("resume", backend)


def check_affinity() -> None:
    """An affinity entry is refreshed by new flows, as without a fast path."""
    with result("affinity beside an offloaded flow") as seen:
        name, flow = connect(STICKY)
        until(lambda: asked(flow) and offloaded(STICKY), "a flow in the flowtable", 30)
        names = {connect(STICKY)[0] for _ in range(8)}
        seen.append(f"{names}, kept {name}")
        assert names == {name}
        flow.close()


def check_devices() -> None:
    """Devices come and go; offloaded flows stay, and so does the table."""
    with result("a new device joins, a vanished one leaves") as seen:
        _, flow = connect(PLAIN)
        until(lambda: asked(flow) and offloaded(PLAIN), "a flow in the flowtable", 30)
        run("ip", "link", "add", "late0", "type", "veth", "peer", "name", "late1")
        run("ip", "link", "set", "late0", "up")
        until(lambda: "late0" in devices(), "late0 in the flowtable", 60)
        joined = skipped(flow)[0]
        run("ip", "link", "delete", "late0")
        until(lambda: "late0" not in devices(), "late0 is out", 60)
        seen.append(f"packets past the rules: all but {joined}, then all but {skipped(flow)[0]}")
        # A changed device makes the kernel look up routes anew, for which a packet passes the rules.
        assert max(joined, skipped(flow)[0]) <= 2
        seen.append(", ".join(sorted(devices())))
        assert not devices() & {"vipd0", "lo"}
        flow.close()
    with result("a flushed ruleset: the fast path is back, flows go on") as seen:
        _, flow = connect(PLAIN)
        run("nft", "flush", "ruleset")
        # Not before: without any nat chain the kernel translates no flow, offloaded or not.
        seen.append(f"after {until(there, 'the table', 60):.1f} s")
        Daemon().wait_in_sync()
        ask(flow)
        flow.close()
    run_text(WATCH)


def check_reset(daemon: Daemon) -> None:
    """`on_remove: reset` reaches offloaded flows, or there is no fast path."""
    declare(resetting=True)
    with result("on_remove: reset ends an offloaded flow") as seen:
        until(lambda: "resetting" in vipctl("list"), "the service", 60)
        if not CAN_RESET:
            until(lambda: not there(), "no fast path", 60)
            seen.append(str(daemon.status().get("warnings")))
            assert "cannot end an offloaded flow" in seen[0]
        name, flow = connect(RESETTING)
        if CAN_RESET:
            until(lambda: asked(flow) and offloaded(RESETTING), "a flow in the flowtable", 30)
        other = next(each for each in guest.BACKENDS if each != name)
        declare(resetting=True, only=other)
        until(lambda: not alive(flow), "the flow ends", 60)
        seen.append("reset")
        declare(resetting=False)
        until(there, "the fast path is back", 60)


def alive(flow: socket.socket) -> bool:
    try:
        ask(flow)
    except OSError as error:
        return not isinstance(error, ConnectionError)
    return True


def run_text(text: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True, timeout=60)


def measure() -> None:
    """Time of a transfer with and without the table, in turn, each packet one segment; the daemon does not
    run. It includes both ends' work, so the forwarding itself differs more."""
    run("ip", "-n", "client", "link", "set", "uplink", "gso_max_segs", "1")
    saved = run("nft", "list", "table", *TABLE)
    with result("time of a transfer, with : without") as seen:
        _, flow = connect(PLAIN)

        def cost() -> float:
            began = time.perf_counter()
            flow.sendall(b"x" * MEASURED)
            ask(flow)
            return time.perf_counter() - began

        costs = []
        for _ in range(ROUNDS):
            assert skipped(flow, 10)[0] == 0
            fast = cost()
            run("nft", "delete", "table", *TABLE)
            until(lambda: skipped(flow, 10)[0] >= 10, "the rules again", 30)
            costs.append((fast, cost()))
            run_text(saved)
            until(lambda: skipped(flow, 10)[0] == 0, "the flowtable again", 30)
        seen.append(
            ", ".join(sorted(f"{fast / slow:.2f} ({fast:.2f} s : {slow:.2f} s)" for fast, slow in costs))
        )
        flow.close()


def the_set() -> None:
    say("info", "kernel", os.uname().release)
    daemon = Daemon()
    guest.LOG.touch()
    guest.wire()
    for name in guest.BACKENDS:
        listen(name)
    declare(resetting=False)
    with result("start with fast_path: auto") as seen:
        seen.append(f"in sync after {daemon.start('--set', 'fast_path=auto'):.0f} s")
        until(lambda: len(devices()) == len(guest.WIRES), "the flowtable with its devices", 60)
        seen.append(", ".join(sorted(devices())))
        assert not [each for each in daemon.status()["warnings"] if "fast path" in each]
    run_text(WATCH)
    run("sysctl", "-qw", "net.netfilter.nf_conntrack_acct=1")
    check_offloaded("iptables")
    with result("switch to nftables"):
        switch(daemon, "nftables")
    for check in (
        lambda: check_offloaded("nftables"),
        check_kinds_of_flows,
        check_drain,
        check_affinity,
        check_devices,
    ):
        guarded(check)
    guarded(lambda: check_reset(daemon))
    with result("the doctor names it") as seen:
        found = json.loads((text := vipctl("doctor", "-o", "json", check=False))[text.index("{") :])
        named = [each for each in found["diagnosis"]["findings"] if "fast-path" in json.dumps(each)]
        seen.append(str(named))
        assert [each["severity"] for each in named] == ["ok"]
    with result("stop: the fast path stays, as the rules do"):
        daemon.stop()
        assert there()
    guarded(measure)
    with result("cleanup leaves nothing") as seen:
        seen.append(vipctl("cleanup"))
        assert "vipd" not in run("nft", "list", "ruleset").lower()


def guarded(check: Callable[[], object]) -> None:
    """One part; the next ones run also if it ends early."""
    try:
        check()
    except Exception as error:
        say("FAIL", "a part ended early", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    guest.main(the_set)
