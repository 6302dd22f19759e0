"""Kernel settings that services need: turned on, recorded, watched, and put back by `vipctl cleanup`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.daemon import Daemon
from tests.lab.node import Node
from tests.lab.waiting import wait_until
from tests.sources.host import namespace

pytestmark = pytest.mark.root

IPV4, IPV6 = "net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"
LIBERAL = "net.netfilter.nf_conntrack_tcp_be_liberal"
RECORD = "host-changes.json"
WEB4 = "  - {name: web4, address: 10.96.0.1, ports: [80], backends: [10.244.0.1]}\n"
WEB6 = "  - {name: web6, address: 'fd00:96::1', ports: [80], backends: ['fd00:244::1']}\n"


@pytest.fixture
def host() -> Iterator[Node]:
    """A host of each test's own, on which nothing forwards."""
    with namespace() as node:
        for name in (IPV4, IPV6, LIBERAL):
            node.sysctl(name, 0)
        yield node


def value(host: Node, name: str) -> str:
    with host.entered():
        return Path("/proc/sys", *name.split(".")).read_text().strip()


def values(host: Node) -> tuple[str, ...]:
    return tuple(value(host, name) for name in (IPV4, IPV6, LIBERAL))


def recorded(daemon: Daemon) -> set[str]:
    """The settings that the record names, with what they were."""
    changes = json.loads((daemon.state_dir / RECORD).read_text())["sysctls"]
    assert all(change == {"was": "0", "set": "1"} for change in changes.values())
    return {name.replace("/", ".") for name in changes}


def test_what_families_in_use_need_is_turned_on_and_put_back(host: Node) -> None:
    """A restart does not forget the value to go back to."""
    with Daemon(host) as daemon:
        assert values(host) == ("0", "0", "0")
        daemon.declare(WEB4)
        assert (values(host), recorded(daemon)) == (("1", "0", "1"), {IPV4, LIBERAL})
        daemon.declare(WEB4 + WEB6)
        assert (values(host), recorded(daemon)) == (("1", "1", "1"), {IPV4, IPV6, LIBERAL})
        daemon.kill()
        daemon.start()
        daemon.stop()
        shown = daemon.cleanup().stdout
        assert values(host) == ("0", "0", "0")
        assert all(f"{name} = 0" in shown for name in (IPV4, IPV6, LIBERAL))


def test_what_is_on_already_or_was_changed_since_is_left_alone(host: Node) -> None:
    host.sysctl(IPV4, 1)
    with Daemon(host, WEB4 + WEB6) as daemon:
        assert recorded(daemon) == {IPV6, LIBERAL}
        daemon.stop()
        host.sysctl(IPV6, 2)
        daemon.cleanup()
    assert values(host) == ("1", "2", "0")


def test_what_somebody_turns_off_is_turned_on_again_with_a_warning(host: Node) -> None:
    with Daemon(host, WEB4 + WEB6) as daemon:
        for name in (IPV4, IPV6, LIBERAL):
            host.sysctl(name, 0)
            daemon.wait_until(lambda: values(host), ("1", "1", "1"))
            warned = f"WARNING {name} "
            daemon.wait_until(lambda warned=warned: daemon.log.count(warned), 1)  # type: ignore[misc]
        assert "Traceback" not in daemon.log


def test_settings_that_vipd_leaves_alone_are_warned_of_while_they_are_off(host: Node) -> None:
    with Daemon(host, WEB4, manage_sysctls=False, vip_device="") as daemon:

        def warned() -> set[str]:
            return {
                text.split()[0] for text in daemon.status()["warnings"] if "manage_sysctls is false: " in text
            }

        assert warned() == {IPV4}
        for number in (1, 0):
            host.sysctl(IPV4, number)
            daemon.wait_until(warned, set() if number else {IPV4})
        assert value(host, IPV4) == "0"
        assert not (daemon.state_dir / RECORD).exists() or recorded(daemon) == set()


def test_ipv6_that_is_disabled_is_told_while_services_need_it(host: Node) -> None:
    host.sysctl("net.ipv6.conf.all.disable_ipv6", 1)
    with Daemon(host, WEB4, vip_device="") as daemon:

        def disabled() -> list[str]:
            return [text for text in daemon.status()["warnings"] if "disable_ipv6 is 1" in text]

        assert disabled() == []
        daemon.write(WEB4 + WEB6)
        wait_until(disabled, "a warning")
        assert "hint: sysctl -w net.ipv6.conf.all.disable_ipv6=0" in disabled()[0]
        host.sysctl("net.ipv6.conf.all.disable_ipv6", 0)
        daemon.wait_until(disabled, [])


def test_where_no_record_can_be_kept_the_kernel_is_left_alone(host: Node) -> None:
    daemon = Daemon(host, WEB4)
    (daemon.state_dir / RECORD).mkdir(parents=True)
    once = host.run(sys.executable, "-m", "vipd", "--config", str(daemon.config), "--once", check=False)
    assert once.returncode == 1
    assert (
        f"what is done to this host cannot be recorded: {daemon.state_dir / RECORD} cannot be read"
        in once.stderr
    )
    assert values(host) == ("0", "0", "0")
    (daemon.state_dir / RECORD).rmdir()
    with daemon:
        assert values(host) == ("1", "0", "1")


OTHER_KEYS, OTHER_VALUES = '{"sysctls": {}}', '{"sysctls": {"a": "1"}, "tables": [], "prefixes": []}'
DAMAGED = ("{", "[]", OTHER_KEYS, OTHER_VALUES, "[" * 100_000)


def test_a_record_that_is_damaged_is_kept_aside_and_told(host: Node) -> None:
    """To look changes nothing; a change keeps what it was."""
    daemon = Daemon(host)
    daemon.state_dir.mkdir()
    record = daemon.state_dir / RECORD
    for number, text in enumerate(DAMAGED, 1):
        record.write_text(text)
        daemon.cleanup("--dry-run", check=False)
        assert record.read_text() == text
        daemon.cleanup(check=False)
        assert (daemon.state_dir / f"{RECORD}.damaged-{number}").read_text() == text
        assert not record.exists()
    record.write_text(DAMAGED[0])
    with daemon:
        warnings = [text for text in daemon.status()["warnings"] if "not known to vipctl cleanup" in text]
        assert any(f"{RECORD}.damaged-" in text for text in warnings), warnings
