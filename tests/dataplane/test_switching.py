"""A change of the dataplane in which programs fail leaves nothing of the new one, and the old one serves. And
what status says of the one in use."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dataplane.declared import backends
from tests.dataplane.namespace import Namespace
from tests.lab.daemon import Daemon
from tests.lab.flow import finish
from tests.lab.inside import written
from tests.lab.node import Node
from tests.lab.waiting import wait_until
from vipd.model.flow_limits import FlowLimits
from vipd.model.service import ExternalAddress, Protocol, Service, ServicePort, TrafficPolicy

pytestmark = pytest.mark.root

WEB = Service(
    "web",
    ("10.96.0.1", "fd00:96::1"),
    (ServicePort(80, Protocol.TCP, "http"),),
    backends("10.244.0.1", "fd00:244::1"),
)
NFT = """#!/bin/sh
# The second writing and all later ones meet what the test has put here.
if [ -e {place}/fault ] && [ "$1 $2" = "-f -" ]; then
    echo x >> {place}/writings
    if [ $(wc -l < {place}/writings) -gt 1 ]; then . {place}/fault; fi
fi
exec /usr/sbin/nft "$@"
"""
REFUSED = "Failed to list table names in /proc/net/ip_tables_names: Permission denied"


class Switching:
    """A daemon whose nft fails as a test says."""

    def __init__(self, place: Path, namespace: Namespace, **settings: str) -> None:
        self._place, self.do = place, namespace.do
        self.program("nft", NFT.format(place=place))
        self.node = Node(namespace.name, "host", "", "").with_environment(
            PATH=f"{place}:{os.environ['PATH']}"
        )
        self.daemon = Daemon(self.node, written([WEB]).partition("services:\n")[2], **settings)

    def program(self, name: str, text: str) -> None:
        """Put a program before those of the host."""
        (self._place / name).write_text(text)
        (self._place / name).chmod(0o755)

    def fault(self, *commands: str) -> None:
        """What the second and each later writing of nft does from now on; nothing: they are good."""
        (self._place / "writings").unlink(missing_ok=True)
        (self._place / "fault").write_text("; ".join(commands))
        if not commands:
            (self._place / "fault").unlink()

    @property
    def writings(self) -> int:
        """How often nft has written since the fault was there."""
        path = self._place / "writings"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def held(self) -> tuple[bool, bool]:
        """Whether there are rules of vipd in iptables, and tables of nftables'."""
        tables = self.do("nft", "list", "tables")
        saved = self.do("iptables-save") + self.do("iptables-legacy-save")
        return "VIPD-SVC-" in saved, "vipd" in tables


NFTABLES = {"dataplane": "nftables", "iptables_variant": "legacy"}


@pytest.fixture
def switching(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Switching]:
    settings = getattr(request, "param", {"dataplane": "iptables"})
    with Namespace() as namespace:
        made = Switching(tmp_path, namespace, **settings)
        with made.daemon:
            yield made


def test_what_fails_half_way_is_removed_and_the_next_change_works(switching: Switching) -> None:
    daemon = switching.daemon
    switching.fault("echo 'it said no' >&2", "exit 1")
    refused = daemon.vipctl("set-dataplane", "nftables", check=False)
    assert refused.returncode != 0
    assert "it said no" in refused.stderr
    assert switching.writings > 1
    # Nor can it be removed at once: that is told, and made good.
    assert daemon.status()["dataplane"]["name"] == "iptables"
    assert switching.held() == (True, True)
    said = "rules of the nftables dataplane are still there"

    def warned() -> bool:
        daemon.reload()  # status has the warnings of the last step
        return said in str(daemon.status()["warnings"])

    daemon.wait_until(warned, True)
    switching.fault()
    gone = "the rules of the nftables dataplane are removed; iptables has taken over"
    daemon.wait_until(lambda: gone in daemon.log, True)
    daemon.wait_until(warned, False)
    assert switching.held() == (True, False)
    daemon.vipctl("set-dataplane", "nftables")
    assert switching.held() == (False, True)


def test_a_vipd_that_ends_amid_a_change_serves_by_the_old_dataplane(switching: Switching) -> None:
    daemon = switching.daemon
    switching.fault("exec sleep 300")
    command = (sys.executable, "-m", "vipd.cli.main", "--socket", str(daemon.socket))
    asking = switching.node.start(*command, "set-dataplane", "nftables")
    wait_until(lambda: switching.writings > 1, "nft writes nothing")
    daemon.kill(signal.SIGTERM)
    finish(asking)
    switching.fault()
    daemon.start()
    assert daemon.status()["dataplane"]["name"] == "iptables"
    daemon.wait_until(switching.held, (True, False))


def test_a_confined_daemon_passes_over_legacy_tables_and_cleanup_does_not(switching: Switching) -> None:
    for stem in ("iptables", "ip6tables"):
        switching.program(f"{stem}-legacy-save", f"#!/bin/sh\necho '{REFUSED}' >&2\nexit 1\n")
    daemon = switching.daemon
    daemon.vipctl("set-dataplane", "nftables")
    assert switching.held() == (False, True)
    daemon.stop()
    failed = daemon.cleanup(check=False)
    assert failed.returncode != 0
    assert "Permission denied" in failed.stderr, "it would say that nothing is left"


def test_auto_without_an_nft_that_works_is_iptables_and_says_why(switching: Switching) -> None:
    daemon = switching.daemon
    daemon.stop()
    switching.program("nft", "#!/bin/sh\necho 'nothing is right' >&2\nexit 1\n")
    daemon.config.write_text(daemon.config.read_text().replace("dataplane: iptables", "dataplane: auto"))
    daemon.start()
    assert daemon.status()["dataplane"]["name"] == "iptables"
    assert "dataplane auto: iptables, for nftables cannot be tried: nft " in daemon.log


@pytest.mark.parametrize("switching", [NFTABLES], indirect=True)
def test_counters_that_cannot_be_read_hold_up_no_change(switching: Switching) -> None:
    for stem in ("iptables", "ip6tables"):
        name = f"{stem}-legacy-save"
        switching.program(name, f'#!/bin/sh\n[ "$1" = -c ] && exit 1\nexec /usr/sbin/{name} "$@"\n')
    daemon = switching.daemon
    for name, held in (("iptables", (True, False)), ("nftables", (False, True))):
        daemon.vipctl("set-dataplane", name)
        assert daemon.status()["dataplane"]["name"] == name
        assert switching.held() == held


DROPS = """table inet site {
    chain local { type filter hook input priority 0; policy drop; }
    chain away { type filter hook output priority 0; policy drop; }
}""".replace("; ", "\n")
LIMITED = replace(
    WEB,
    name="limited",
    addresses=("10.96.0.2",),
    ports=(replace(WEB.ports[0], node_port=30080),),
    backends=WEB.backends[:1],
    limits=FlowLimits(connections=9),
)
HEALTHY = replace(
    LIMITED,
    external_addresses=(ExternalAddress("203.0.113.1"),),
    external_policy=TrafficPolicy.LOCAL,
    health_port=32100,
)


@pytest.mark.parametrize("switching", [NFTABLES], indirect=True)
def test_status_warns_of_chains_that_drop_and_of_counts_that_will_be_missing(switching: Switching) -> None:
    daemon = switching.daemon

    def warnings() -> list[str]:
        return [text.partition(";")[0] for text in daemon.status()["warnings"]]

    switching.do("nft", "-f", "-", text=DROPS)
    drops = "chain local of table inet site drops by policy, questions to health ports too"
    for service, said in ((HEALTHY, [drops]), (LIMITED, [])):
        daemon.declare(written([service]).partition("services:\n")[2])
        daemon.wait_until(warnings, said)
    counts = [f"10.{n >> 16}.{n >> 8 & 255}.{n & 255} . tcp . 80" for n in range(59_000)]
    counts.append("10.96.0.2 . tcp . 80 counter packets 5 bytes 300")
    elements = f"add element ip vipd refused_connections {{ {', '.join(counts)} }}"
    switching.do("nft", "-f", "-", text=elements)
    daemon.wait_until(lambda: daemon.get("stats")["services"][0]["refused"]["connections"], 5)
    daemon.reload()  # status has the warnings of the last step
    (warning,) = warnings()
    assert warning.startswith(
        "the set refused_connections of the table ip vipd is nearly full, with 59001 counts: "
    )
