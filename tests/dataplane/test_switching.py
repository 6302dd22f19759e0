"""A change of the dataplane in which programs fail leaves nothing of the new one, and the old one serves."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dataplane.declared import backends
from tests.dataplane.namespace import Namespace
from tests.lab.daemon import Daemon
from tests.lab.flow import finish
from tests.lab.inside import written
from tests.lab.node import Node
from tests.lab.waiting import wait_until
from vipd.model.service import Protocol, Service, ServicePort

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
    """A daemon of the iptables dataplane whose nft fails as a test says."""

    def __init__(self, place: Path, namespace: Namespace) -> None:
        self._place, self._namespace = place, namespace
        self.program("nft", NFT.format(place=place))
        self.node = Node(namespace.name, "host", "", "").with_environment(
            PATH=f"{place}:{os.environ['PATH']}"
        )
        self.daemon = Daemon(self.node, written([WEB]).partition("services:\n")[2], dataplane="iptables")

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
        tables = self._namespace.do("nft", "list", "tables")
        return "VIPD-SVC-" in self._namespace.do("iptables-save"), "vipd" in tables


@pytest.fixture
def switching(tmp_path: Path) -> Iterator[Switching]:
    with Namespace() as namespace:
        made = Switching(tmp_path, namespace)
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
