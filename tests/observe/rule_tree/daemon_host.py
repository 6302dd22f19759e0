"""A host with a real daemon and the services that test_commands.py asks about."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

from tests.api.daemon_process import ConfiguredHost, host

SERVICES = """\
  - name: shop/web
    address: [10.96.0.20, "fd00:96::20"]
    ports: [{name: http, port: 80, protocol: tcp, target: 8080, node_port: 30080}]
    backends: [10.244.0.7, {address: 10.244.0.8, weight: 2}, 10.244.0.9, "fd00:244:1111:2222:3333:4444:5:6"]
  - name: dns
    address: 10.96.0.10
    ports: [53/udp]
    backends: [10.244.0.5, 10.244.0.6]
    affinity: {by: client-ip, timeout: 10m}
  - name: empty
    address: 10.96.0.30
    ports: [80/tcp]
    backends: []
"""
MANY = "".join(
    f"  - {{name: many/s{number}, address: 10.97.0.{number}, ports: [80/tcp], backends: [10.244.1.1]}}\n"
    for number in range(1, 22)
)


class DaemonHost:
    """A host with a daemon, and vipctl in its namespace."""

    def __init__(self, made: ConfiguredHost, dataplane: str, variant: str) -> None:
        self.host, self.dataplane, self.variant = made, dataplane, variant

    def vipctl(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """`vipctl rules WORDS`; AssertionError for another exit code."""
        done = self.host.run("--socket", str(self.host.socket), "rules", *words, module="vipd.cli.main")
        assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
        return done

    def argv(self, *words: str) -> list[str]:
        """The command line of `vipctl rules` in the namespace."""
        return self.host.argv("--socket", str(self.host.socket), "rules", *words, module="vipd.cli.main")

    def rules(self, *words: str) -> dict[str, Any]:
        """What is said of them as JSON."""
        found: dict[str, Any] = json.loads(self.vipctl(*words, "-o", "json").stdout)["rules"]
        return found

    def tool(self, *argv: str) -> str:
        """A program of the variant, in the namespace."""
        program = argv[0].replace("iptables", f"iptables-{self.variant}") if self.variant else argv[0]
        return self.host.tool(program, *argv[1:])


def started(dataplane: str, variant: str) -> Iterator[DaemonHost]:
    with host() as made:
        made.settings |= {"dataplane": dataplane, "vip_device": ""}
        made.settings |= {"iptables_variant": variant} if variant else {}
        made.declare("services.yaml", SERVICES, MANY if dataplane == "nftables" else "")
        # Everything is at home: nothing leaves the namespace.
        made.tool("ip", "link", "set", "lo", "up")
        for network in ("10.96.0.0/15", "10.244.0.0/16"):
            made.tool("ip", "route", "add", "local", network, "dev", "lo")
        made.start()
        yield DaemonHost(made, dataplane, variant)


KINDS = (("iptables", "nft"), ("iptables", "legacy"), ("nftables", ""))
