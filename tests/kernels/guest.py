"""Runs inside the guest, as the only program of a kernel that has just started; the standard library alone.

Each result is one line on the console: `VIPD ok NAME: what was seen`, `VIPD FAIL ...`, `VIPD known ...` for
what vipd does not do yet, `VIPD info ...`. The last line is `VIPD done ...`.

    client 10.10.0.2 ---- 10.10.0.1 host 10.244.1.1 ---- 10.244.1.2 b1
           fd00:10::2     fd00:10::1     10.244.2.1 ---- 10.244.2.2 b2

The host is the guest's first namespace: the limit of connection tracking and IPVS are as on a machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
SCTP = 132
WIRES = {
    "client": ("10.10.0", "fd00:10:"),
    "b1": ("10.244.1", "fd00:244:1:"),
    "b2": ("10.244.2", "fd00:244:2:"),
}
BACKENDS = ("b1", "b2")
STREAM, DATAGRAM = 8080, 5353
WEB, STICKY, ASSOCIATED, MANY, CHECKED = 10, 20, 30, 40, 50
"""Last part of each service's virtual IP."""
COMMAND_SECONDS, SOON_SECONDS, START_SECONDS, REPLY_SECONDS = 120.0, 120.0, 180.0, 10.0
WHOLE_SECONDS = 1300
FLOWS = 16
"""To two backends: that one of them gets none happens once in 32,768 runs."""
SOCKET = "/run/vipd/vipd.sock"
LOG = Path("/run/vipd.log")
PROC = Path("/proc/sys")

_libc = ctypes.CDLL(None, use_errno=True)
_begun = time.monotonic()
_counts = {"ok": 0, "FAIL": 0, "known": 0, "info": 0}


def say(word: str, name: str, seen: object = "") -> None:
    _counts[word] += 1
    text = " ".join(str(seen).split())[:600]
    print(f"VIPD {word} {name}: {text} [{time.monotonic() - _begun:.0f} s]", flush=True)


@contextlib.contextmanager
def result(name: str) -> Iterator[list[str]]:
    """A block that is one result: what it appends is shown; an exception is a failure."""
    seen: list[str] = []
    try:
        yield seen
    except Exception as error:
        say("FAIL", name, f"{type(error).__name__}: {error}; {'; '.join(seen)}")
    else:
        say("ok", name, "; ".join(seen))


def run(*command: str, check: bool = True, seconds: float = COMMAND_SECONDS) -> str:
    """The output of a program, both streams. With `check` raises AssertionError unless it exits with 0."""
    ran = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=seconds
    )
    assert ran.returncode == 0 or not check, f"{' '.join(command)}: {ran.returncode}: {ran.stdout[-400:]}"
    return ran.stdout


def until(condition: Callable[[], object], what: str, seconds: float = SOON_SECONDS) -> float:
    """Wait for a condition; returns the seconds it took, raises AssertionError after `seconds`."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)
    return time.monotonic() - begun


def modules() -> set[str]:
    return {line.split()[0] for line in Path("/proc/modules").read_text().splitlines()}


# Namespaces and sockets in them


def enter(namespace: str) -> None:
    with Path(f"/run/netns/{namespace}" if namespace else "/proc/1/ns/net").open() as file:
        if _libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


def socket_in(namespace: str, family: int, kind: int, protocol: int = 0) -> socket.socket:
    """A socket stays in the namespace where it was made."""
    enter(namespace)
    try:
        made = socket.socket(socket.AF_INET if family == 4 else socket.AF_INET6, kind, protocol)
    finally:
        enter("")
    made.settimeout(REPLY_SECONDS)
    return made


def wire() -> None:
    run("ip", "link", "set", "lo", "up")
    for name, (four, six) in WIRES.items():
        run("ip", "netns", "add", name)
        run("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "uplink", "netns", name)
        run("ip", "address", "add", f"{four}.1/24", "dev", f"to-{name}")
        run("ip", "address", "add", f"{six}:1/64", "dev", f"to-{name}", "nodad")
        run("ip", "link", "set", f"to-{name}", "up")
        inside = ("ip", "-n", name)
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "address", "add", f"{four}.2/24", "dev", "uplink")
        run(*inside, "address", "add", f"{six}:2/64", "dev", "uplink", "nodad")
        run(*inside, "link", "set", "uplink", "up")
        run(*inside, "route", "add", "default", "via", f"{four}.1")
        run(*inside, "-6", "route", "add", "default", "via", f"{six}:1")


def listener_in(name: str, port: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
    """A socket of a backend that takes what comes to a port, in both families."""
    made = socket_in(name, 6, kind, protocol)
    made.settimeout(None)
    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("::", port))
    if kind == socket.SOCK_STREAM:
        made.listen(256)
    return made


def serve(name: str, protocol: str) -> None:
    stream = protocol != "udp"
    kind = socket.SOCK_STREAM if stream else socket.SOCK_DGRAM
    port = STREAM if stream else DATAGRAM
    listener = listener_in(name, port, kind, SCTP if protocol == "sctp" else 0)
    kept: list[socket.socket] = []

    def streams() -> None:
        while True:
            flow, _ = listener.accept()
            with contextlib.suppress(OSError):  # a check resets what it has opened
                flow.sendall(name.encode())
                kept.append(flow)  # the client ends it

    def datagrams() -> None:
        while True:
            _, client = listener.recvfrom(100)
            with contextlib.suppress(OSError):
                listener.sendto(name.encode(), client)

    threading.Thread(target=streams if stream else datagrams, daemon=True).start()


def vip(number: int, family: int) -> str:
    return f"10.96.0.{number}" if family == 4 else f"fd00:96::{number}"


def flow(number: int, protocol: str, family: int) -> tuple[str, socket.socket]:
    """One new flow of the client: the backend that answered, and the open socket. Raises OSError."""
    stream = protocol != "udp"
    kind = socket.SOCK_STREAM if stream else socket.SOCK_DGRAM
    made = socket_in("client", family, kind, SCTP if protocol == "sctp" else 0)
    try:
        made.connect((vip(number, family), STREAM if stream else DATAGRAM))
        if not stream:
            made.send(b"?")
        return made.recv(100).decode(), made
    except BaseException:
        made.close()
        raise


def answers(number: int, protocol: str, family: int, flows: int = FLOWS) -> dict[str, int]:
    counted: dict[str, int] = {}
    for _ in range(flows):
        name, made = flow(number, protocol, family)
        made.close()
        counted[name] = counted.get(name, 0) + 1
    return counted


def deliver(flows: list[socket.socket]) -> None:
    """Send on established flows; raises AssertionError unless the backends acknowledge all of it."""
    for each in flows:
        each.sendall(b"more")

    def unacknowledged() -> int:
        left = [
            int.from_bytes(fcntl.ioctl(each, termios.TIOCOUTQ, bytes(4)), sys.byteorder) for each in flows
        ]
        return sum(left)

    until(lambda: unacknowledged() == 0, "all is acknowledged")


def works(number: int = WEB, protocol: str = "tcp", family: int = 4) -> bool:
    try:
        answers(number, protocol, family, 1)
    except OSError:
        return False
    return True


# vipd


class Daemon:
    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> float:
        with LOG.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "vipd", *arguments], stderr=log)
        return self.wait_in_sync(START_SECONDS)

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(COMMAND_SECONDS)
            self.process = None

    def status(self) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(COMMAND_SECONDS)
            connection.connect(SOCKET)
            client = http.client.HTTPConnection("vipd")
            client.sock = connection
            client.request("GET", "/v1/status")
            answer: dict[str, Any] = json.loads(client.getresponse().read())
            return answer

    def state(self) -> str:
        try:
            return str(self.status()["state"])
        except OSError:
            return "silent"

    def wait_in_sync(self, seconds: float = SOON_SECONDS) -> float:
        try:
            return until(lambda: self.state() == "in-sync", "in-sync", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; {log_end()}") from None


def log_end() -> str:
    return " | ".join(LOG.read_text().splitlines()[-6:])


def vipctl(*arguments: str, check: bool = True) -> str:
    return run(sys.executable, "-m", "vipd.cli.main", *arguments, check=check)


def switch(daemon: Daemon, dataplane: str) -> str:
    """Output of `vipctl set-dataplane`. Tries again what vipd refuses because a program is too slow for its
    limits: the first run of nft loads many modules, on an emulated processor."""
    for left in (2, 1, 0):
        text = vipctl("set-dataplane", dataplane, check=not left)
        if "hangs" not in text:
            break
    daemon.wait_in_sync()
    assert daemon.status()["dataplane"]["name"] == dataplane
    return text


def findings() -> dict[str, list[str]]:
    """What the doctor finds that is not in order: by check, as text."""
    text = vipctl("doctor", "-o", "json", check=False)
    found: dict[str, list[str]] = {}
    for each in json.loads(text[text.index("{") :])["diagnosis"]["findings"]:
        if each.get("severity") in ("problem", "warning"):
            found.setdefault(str(each.get("check") or each.get("id")), []).append(json.dumps(each))
    return found


def declare(sctp: bool) -> None:
    stream, both = f"{STREAM}/tcp", f"{STREAM}/tcp, {DATAGRAM}/udp"
    services = [("web", WEB, both, ""), ("many", MANY, stream, "")]
    services.append(("sticky", STICKY, both, "affinity: {by: client-ip, timeout: 10m}"))
    services.append(("checked", CHECKED, stream, "check: {type: tcp, interval: 2s, timeout: 1s}"))
    if sctp:
        services.append(("associated", ASSOCIATED, f"{STREAM}/sctp", ""))
    write((*service, BACKENDS) for service in services)


def write(services: Iterable[tuple[str, int, str, str, Iterable[str]]]) -> None:
    """Declare services: name, number, ports, what else there is, and backends of each."""
    lines = ["apiVersion: vipd/v1", "services:"]
    for name, number, ports, more, backends in services:
        places = ", ".join(f'{WIRES[each][0]}.2, "{WIRES[each][1]}:2"' for each in backends)
        lines += [f"  - name: {name}", f'    address: [{vip(number, 4)}, "{vip(number, 6)}"]']
        lines += [f"    ports: [{ports}]", f"    backends: [{places}]"]
        lines += [f"    {more}"] * bool(more)
    Path("/etc/vipd/services.d/set.yaml").write_text("\n".join(lines) + "\n")


# The set


def check_start(daemon: Daemon) -> None:
    """The first start: nothing of connection tracking is loaded, and there is no device."""
    loaded = sorted(each for each in modules() if each.startswith(("nf", "x_", "xt_", "ip")))
    say("info", "modules before", ", ".join(loaded) or "none of netfilter")
    with result("start without nf_conntrack") as seen:
        assert "nf_conntrack" not in loaded, "it is loaded"
        seen.append(f"in sync after {daemon.start():.0f} s")
        status = daemon.status()
        seen.append(f"warnings {status.get('warnings')}")
        for name in ("net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"):
            assert (PROC / name).read_text().strip() == "1", name
        liberal = PROC / "net/netfilter/nf_conntrack_tcp_be_liberal"
        until(lambda: liberal.read_text().strip() == "1", "nf_conntrack_tcp_be_liberal is set")
    with result("vipd0 is a dummy device") as seen:
        seen.append(run("ip", "-d", "-o", "link", "show", "vipd0"))
        assert "dummy" in seen[0].split("vipd0", 1)[1]
        seen.append(run("ip", "route", "show", "dev", "vipd0"))


def check_packets(kind: str, protocols: list[str]) -> None:
    for protocol in protocols:
        for family in (4, 6):
            number = ASSOCIATED if protocol == "sctp" else WEB
            with result(f"{kind}: {protocol} ipv{family}") as seen:
                counted = answers(number, protocol, family)
                seen.append(str(counted))
                assert set(counted) == set(BACKENDS)
            if protocol != "sctp":
                with result(f"{kind}: affinity {protocol} ipv{family}") as seen:
                    counted = answers(STICKY, protocol, family)
                    seen.append(str(counted))
                    assert len(counted) == 1


def check_drift(kind: str, *command: str) -> None:
    with result(f"{kind}: repaired after {' '.join(command)}") as seen:
        run(*command)
        seen.append(f"flows after {until(works, 'flows'):.1f} s")
        seen.append(f"in sync after {Daemon().wait_in_sync():.1f} s more")
        assert set(answers(WEB, "tcp", 6)) == set(BACKENDS)


def number_of(name: str) -> int:
    return int((PROC / f"net/netfilter/nf_conntrack_{name}").read_text())


def check_full_table(daemon: Daemon) -> None:
    """Established flows fill a small table; new ones are dropped until there is room."""
    before, kept = number_of("max"), []
    with result("table full: new flows are dropped") as seen:
        run("conntrack", "-F")
        run("sysctl", "-qw", "net.netfilter.nf_conntrack_max=60")
        assert number_of("max") == 60
        try:
            for _ in range(200):
                kept.append(flow(MANY, "tcp", 4)[1])
        except OSError as error:
            seen.append(f"flow {len(kept) + 1}: {error}")
        else:
            raise AssertionError("200 flows passed")
        seen.append(f"count {number_of('count')} of {number_of('max')}")
    with result("table full: established flows stay") as seen:
        deliver(kept)
        seen.append(f"{len(kept)} flows")
    with result("table full: the doctor says so") as seen:
        found = findings()
        seen.append(f"{sorted(found)}")
        assert "full" in found["conntrack-room"][0], found["conntrack-room"]
    with result("table full: vipd stays in sync") as seen:
        daemon.wait_in_sync()
        seen.append(f"warnings {daemon.status().get('warnings')}")
        say("info", "table full: a service with a check", vipctl("list", "checked"))
    with result("table full: flows recover when there is room") as seen:
        for each in kept[: len(kept) // 2]:
            each.close()
        run("sysctl", "-qw", f"net.netfilter.nf_conntrack_max={before}")
        seen.append(f"after {until(works, 'flows'):.1f} s")
        seen.append(f"with a check after {until(lambda: works(CHECKED), 'checked flows'):.1f} s more")
        deliver(kept[len(kept) // 2 :])
    for each in kept:
        each.close()


def check_ipvs(daemon: Daemon) -> None:
    """IPVS beside vipd: flows pass; the doctor finds a virtual server of a service's address."""
    with result("ipvs: flows pass beside it") as seen:
        run("ipvsadm", "-A", "-t", f"{vip(WEB, 4)}:{STREAM}", "-s", "rr")
        run("ipvsadm", "-a", "-t", f"{vip(WEB, 4)}:{STREAM}", "-r", f"10.244.1.2:{STREAM}", "-m")
        seen.append(f"ip_vs {'loaded' if 'ip_vs' in modules() else 'built in'}")
        seen.append(str(answers(WEB, "tcp", 4)))
        daemon.wait_in_sync()  # backends of `checked` may come back just now
    found = findings()
    named = [name for name, texts in found.items() if any("ipvs" in text.lower() for text in texts)]
    say("ok" if named else "known", "ipvs: the doctor finds it", named or f"it names only {sorted(found)}")
    run("ipvsadm", "-C")


def the_set() -> None:
    say("info", "kernel", f"{os.uname().release} {os.uname().version}")
    daemon = Daemon()
    LOG.touch()
    wire()
    protocols = ["tcp", "udp"]
    with result("sctp sockets"):
        socket_in("b1", 4, socket.SOCK_STREAM, SCTP).close()
        protocols.append("sctp")
    for name in BACKENDS:
        for protocol in protocols:
            serve(name, protocol)
    declare("sctp" in protocols)
    check_start(daemon)
    check_packets("iptables-nft", protocols)
    check_drift("iptables-nft", "iptables", "-t", "nat", "-F")
    with result("switch to nftables") as seen:
        seen.append(switch(daemon, "nftables"))
        seen.append(run("nft", "list", "tables"))
    check_packets("nftables", protocols)
    check_drift("nftables", "nft", "flush", "ruleset")
    check_full_table(daemon)
    check_ipvs(daemon)
    with result("iptables-legacy: start with nf_conntrack loaded") as seen:
        switch(daemon, "iptables")
        daemon.stop()
        seen.append(f"in sync after {daemon.start('--set', 'iptables_variant=legacy'):.0f} s")
        assert "-A" in run("iptables-legacy", "-t", "nat", "-S")
    check_packets("iptables-legacy", protocols)
    check_drift("iptables-legacy", "iptables-legacy", "-t", "nat", "-F")
    with result("cleanup leaves nothing") as seen:
        daemon.stop()
        seen.append(vipctl("cleanup"))
        rules = run("nft", "list", "ruleset") + run("iptables-legacy", "-t", "nat", "-S") + run("ip", "link")
        assert "vipd" not in rules.lower(), rules


def too_long(*_: object) -> None:
    """End the set, from a signal: no part of it catches this."""
    raise SystemExit(f"more than {WHOLE_SECONDS} s")


def main(whole: Callable[[], None] = the_set) -> None:
    """Run a set; nothing keeps it from printing its end."""
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(WHOLE_SECONDS)
    try:
        whole()
    except BaseException as error:
        say("FAIL", "the set ended early", f"{type(error).__name__}: {error}; {log_end()}")
    signal.alarm(0)
    if _counts["FAIL"]:
        with contextlib.suppress(OSError):
            print(LOG.read_text()[-6000:], flush=True)
    counts = ", ".join(f"{number} {word}" for word, number in _counts.items())
    print(f"VIPD done {counts} [{time.monotonic() - _begun:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
