"""The life of the installed package on a real systemd: each test goes on where the one before it ended."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.lab.steady_client import steady_client
from tests.system.conftest import SERVED_PORT, Prepared, install_vipd
from tests.system.machine import Machine

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1800)]

VIP, PORT = "10.96.40.1", 80
HIGHEST_EXPOSURE = 1.5
"""Of `systemd-analyze security`; 10 is a service without any protection."""
CAP_NET_ADMIN = 12
DROP_INS = "/etc/systemd/system/vipd.service.d"
NEXT_VERSION = "9.9"
MORE = "{name: more, address: 10.96.40.2, ports: [80], backends: [10.244.0.11]}"


def add_service(machine: Machine) -> None:
    if machine.run("vipctl", "describe", "kept", check=False).returncode:
        backends = [f"{backend.ipv4}:{SERVED_PORT}" for backend in machine.lab.backends]
        machine.run("vipctl", "add", f"{VIP}:{PORT}/tcp", *backends, "--name", "kept")


def serves(machine: Machine, timeout: float = 10.0) -> bool:
    return not machine.lab.client.send(VIP, PORT, timeout=timeout).failures


def wait_for_journal(machine: Machine, text: str) -> None:
    machine.wait_until(lambda: text in machine.journal("-n", "100").lower(), f"{text} in the journal")


@contextmanager
def drop_in(machine: Machine, name: str) -> Iterator[None]:
    """The service with one of the package's drop-ins, started anew before and after."""
    machine.run("mkdir", "-p", DROP_INS)
    machine.run("cp", f"/usr/lib/vipd/drop-ins/{name}.conf", DROP_INS)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "vipd")
    try:
        yield
    finally:
        machine.run("rm", "-r", DROP_INS)
        machine.run("systemctl", "daemon-reload")
        machine.run("systemctl", "restart", "vipd")


@contextmanager
def steady_traffic(machine: Machine) -> Iterator[None]:
    """A client that connects all the time; AssertionError unless every connection was answered."""
    with steady_client(machine.lab.client, VIP, PORT) as outcome:
        yield
    assert outcome.get("answered", 0) > 40, f"the client was not at work: {outcome}"
    assert outcome["failed"] == {}


def test_installed_it_idles_without_a_rule(machine: Machine, prepared: Prepared) -> None:
    install_vipd(machine, prepared.package)
    machine.run("systemctl", "enable", "--now", "vipd")
    assert machine.property("ActiveState") == "active"
    assert machine.property("UnitFileState") == "enabled"
    assert "in sync" in machine.property("StatusText")
    assert "VIPD" not in machine.rules()
    assert machine.rules() == ""
    assert machine.lab.host.sysctl("net.ipv4.ip_forward") == "0"
    running = machine.run("systemctl", "is-system-running", check=False).stdout.strip()
    assert running == "running", machine.run("systemctl", "--failed", "--no-pager", check=False).stdout


def test_the_service_is_confined(machine: Machine) -> None:
    said = machine.said("systemd-analyze", "security", "--no-pager", "vipd")
    found = re.search(r"Overall exposure level for vipd.service: ([\d.]+)", said)
    assert found, said
    assert float(found[1]) <= HIGHEST_EXPOSURE, said
    verified = machine.run("systemd-analyze", "verify", "--man=no", "vipd.service")
    assert "vipd.service" not in verified.stdout + verified.stderr
    assert machine.property("WatchdogUSec") == "30s"
    status = machine.said("cat", f"/proc/{machine.main_pid()}/status")
    for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb"):
        held = re.search(rf"(?m)^{name}:\s*(\S+)$", status)
        assert held is not None
        assert int(held[1], 16) == 1 << CAP_NET_ADMIN, name
    assert re.search(r"(?m)^NoNewPrivs:\s*1$", status)
    for name in ("MemoryMax", "TasksMax"):
        assert 0 < int(machine.property(name)) < 2**40, "infinity is 2^64 - 1"


def test_what_it_makes_is_for_its_group_only_where_that_is_said(machine: Machine) -> None:
    """UMask=0077 is for what nobody thought of; the socket has its own mode."""
    assert machine.said("stat", "--format", "%a %U %G", "/run/vipd/vipd.sock") == "660 vipd vipd"
    found = machine.said(
        "find", "/var/lib/vipd", "/run/vipd", "-not", "-type", "s", "-perm", "/o+rwx", "-printf", "%p "
    )
    assert found.split() in ([], ["/run/vipd"]), (
        "who is in the group goes through the directory of the socket"
    )


def test_an_upgrade_keeps_the_rights_that_this_host_uses(machine: Machine) -> None:
    """0.1.0 could read all files and listen on low ports. The postinst of an upgrade runs keep-rights."""
    keep = "/usr/lib/vipd/keep-rights"

    def kept() -> list[str]:
        return sorted(re.findall(r"([a-z-]+\.conf)$", machine.run(keep).stderr, re.MULTILINE))

    machine.run("iptables-legacy", "-t", "filter", "-F", "FORWARD")  # an empty table is nobody's
    assert kept() == []
    machine.run("iptables-legacy", "-A", "FORWARD", "-s", "192.0.2.1", "-j", "DROP")
    machine.write("/etc/vipd/key.pem", "")
    machine.run("chmod", "600", "/etc/vipd/key.pem")
    (machine.disk / DROP_INS.lstrip("/")).mkdir()
    machine.write(f"{DROP_INS}/exec-checks.conf", "[Service]\nAmbientCapabilities=CAP_SETUID\n")
    listening = "import socket, time; s = socket.socket(); s.bind(('', 81)); s.listen(); time.sleep(600)"
    machine.run(
        "systemd-run",
        "--unit",
        "low",
        "-p",
        "User=vipd",
        "-p",
        "AmbientCapabilities=CAP_NET_BIND_SERVICE",
        "python3",
        "-c",
        listening,
    )
    machine.wait_until(lambda: ":81 " in machine.said("ss", "-ltn"), "somebody who listens on a low port")
    names = ("legacy-iptables", "low-ports", "private-files", "see-programs")
    assert kept() == [f"{name}.conf" for name in names]
    assert kept() == [], "once is enough"
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "vipd")
    assert machine.property("ActiveState") == "active"
    machine.run("systemctl", "stop", "low")
    machine.run("iptables-legacy", "-F", "FORWARD")
    machine.run("rm", "-r", "/etc/vipd/key.pem", DROP_INS)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "vipd")


def test_requests_through_the_vip(machine: Machine) -> None:
    add_service(machine)
    answered = machine.lab.client.send(VIP, PORT, count=60).all_answered()
    assert set(answered.backends) == {"b1", "b2"}
    machine.wait_until(
        lambda: machine.property("StatusText").startswith("1 service,"), "status text with the service"
    )
    assert machine.lab.host.sysctl("net.ipv4.ip_forward") == "1", (
        "the service may not set what forwarding needs"
    )
    assert "vipd0" in machine.said("ip", "route", "get", VIP), "the service may not make routes"
    from_itself = f"exec 3<>/dev/tcp/{VIP}/{PORT} && echo hello >&3 && head -n 1 <&3"
    assert machine.said("timeout", "30", "bash", "-c", from_itself).startswith("b")


def test_active_means_that_the_rules_are_there(machine: Machine) -> None:
    machine.run("systemctl", "stop", "vipd")
    assert serves(machine), "the rules stay when the daemon is stopped"
    machine.lab.host.run("nft", "flush", "ruleset")
    assert not serves(machine, 1.0)
    machine.run("systemctl", "start", "vipd")
    assert serves(machine)


def test_no_connection_fails_over_restart_crash_and_upgrade(
    machine: Machine, prepared: Prepared, tmp_path: Path
) -> None:
    machine.offer(repacked(prepared.package, tmp_path))
    with steady_traffic(machine):
        machine.run("systemctl", "restart", "vipd")
        crashed = machine.main_pid()
        machine.run("systemctl", "kill", "--signal", "SIGKILL", "vipd")
        machine.wait_until(
            lambda: machine.property("NRestarts") == "1" and machine.property("ActiveState") == "active",
            "started again after SIGKILL",
        )
        assert machine.main_pid() != crashed
        machine.apt("install", "--no-install-recommends", "vipd")
        assert NEXT_VERSION in machine.said("vipctl", "version")
    assert NEXT_VERSION in machine.said("vipctl", "status"), "the upgrade did not restart the daemon"


def repacked(package: Path, directory: Path) -> Path:
    tree = directory / "tree"
    run = subprocess.run
    run(["dpkg-deb", "--raw-extract", str(package), str(tree)], check=True, timeout=60)
    control, module = tree / "DEBIAN/control", tree / "usr/lib/vipd/vipd/__init__.py"
    control.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {NEXT_VERSION}", control.read_text()))
    module.write_text(re.sub(r"__version__ = .*", f'__version__ = "{NEXT_VERSION}"', module.read_text()))
    made = directory / f"vipd_{NEXT_VERSION}_amd64.deb"
    run(["dpkg-deb", "-Znone", "--build", str(tree), str(made)], check=True, timeout=60, capture_output=True)
    return made


def test_reload_takes_good_files_and_refuses_bad_ones(machine: Machine) -> None:
    machine.write("/etc/vipd/services.d/more.yaml", f"apiVersion: vipd/v1\nservices: [{MORE}]\n")
    machine.run("systemctl", "reload", "vipd")
    assert "more" in machine.said("vipctl", "list")
    machine.write(
        "/etc/vipd/services.d/more.yaml", "apiVersion: vipd/v1\nservices: [{name: more, adress: 1}]\n"
    )
    assert machine.run("systemctl", "reload", "vipd", check=False).returncode != 0
    wait_for_journal(machine, "adress")
    assert machine.property("ActiveState") == "active"
    assert "10.96.40.2" in machine.said("vipctl", "list"), "the last good version serves on"
    assert serves(machine)
    (machine.disk / "etc/vipd/services.d/more.yaml").unlink()
    machine.wait_until(
        lambda: "10.96.40.2" not in machine.said("vipctl", "list"), "a deleted file is seen without a reload"
    )


@pytest.mark.nightly
def test_settings_beyond_use_end_it_without_restarts(machine: Machine) -> None:
    settings = (machine.disk / "etc/vipd/vipd.yaml").read_text()
    machine.write("/etc/vipd/vipd.yaml", settings + "mark_bit: 99\n")
    assert machine.run("systemctl", "reload", "vipd", check=False).returncode != 0
    assert machine.property("ActiveState") == "active"
    assert machine.run("systemctl", "restart", "vipd", check=False).returncode != 0
    assert machine.property("ActiveState") == "failed"
    assert machine.property("ExecMainStatus") == "78"
    wait_for_journal(machine, "mark_bit")
    assert serves(machine), "the rules stay"
    told_by_apt = machine.apt("install", "--reinstall", "vipd")
    assert "the new vipd did not start" in told_by_apt
    assert "vipd.yaml" in told_by_apt
    assert "mark_bit" in told_by_apt
    assert "vipd --check && systemctl restart vipd" in told_by_apt
    assert serves(machine), "the rules stay"
    # Mended, with a health port below 1024.
    machine.write("/etc/vipd/vipd.yaml", settings + "health_address: 127.0.0.1:81\n")
    machine.run("systemctl", "start", "vipd")
    wait_for_journal(machine, "low-ports.conf")
    machine.apt("install", "--no-install-recommends", "curl")
    with drop_in(machine, "low-ports"):
        asked = ("curl", "--silent", "--max-time", "30", "--retry", "9", "--retry-connrefused")
        assert "in-sync" in machine.said(*asked, "http://127.0.0.1:81/healthz")
    machine.write("/etc/vipd/vipd.yaml", settings)
    machine.run("systemctl", "restart", "vipd")


def test_who_may_do_what(machine: Machine) -> None:
    for name, groups in (("nobody-special", ""), ("reader", "vipd"), ("writer", "vipd,vipd-admin")):
        machine.run("useradd", *(("--groups", groups) if groups else ()), name)
    vip = "10.96.40.3:80/tcp"

    def code(user: str, *argv: str) -> int:
        return machine.run("runuser", "-u", user, "--", "vipctl", *argv, check=False).returncode

    assert code("nobody-special", "list") == 4
    assert code("reader", "list") == 0
    assert code("reader", "add", vip, "10.244.0.11") == 4
    assert code("writer", "add", vip, "10.244.0.11") == 0
    assert code("writer", "remove", vip) == 0


def test_a_flush_by_nftables_is_mended(machine: Machine) -> None:
    before = machine.main_pid()
    machine.run("systemctl", "restart", "nftables")
    machine.wait_until(lambda: serves(machine), "rules are back after a restart of nftables")
    machine.run("systemctl", "stop", "nftables")
    machine.wait_until(lambda: serves(machine), "rules are back after a stop of nftables")
    assert machine.main_pid() == before, "it need not be restarted for that"


def test_either_dataplane_works_confined(machine: Machine) -> None:
    for dataplane, own_table in (("nftables", True), ("iptables", False)):
        machine.run("vipctl", "set-dataplane", dataplane)
        assert machine.lab.client.send(VIP, PORT, count=20).all_answered()
        # The machine's own nft: an older one outside may crash at what a newer one wrote.
        assert ("table ip vipd" in machine.said("nft", "list", "tables")) == own_table
        status = machine.said("vipctl", "status")
        assert f"Dataplane    {dataplane}" in status
        # The service may not read the list of legacy tables, which exists where the kernel has ip_tables.
        assert "still there" not in status
        machine.run("nft", "flush", "ruleset")
        machine.wait_until(lambda: serves(machine, 3.0), f"{dataplane} is mended")


@pytest.mark.nightly
def test_a_daemon_that_hangs_is_replaced(machine: Machine) -> None:
    drop_in = machine.disk / "etc/systemd/system/vipd.service.d/quick.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nWatchdogSec=3s\nTimeoutAbortSec=1s\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "vipd")
    hung = machine.main_pid()
    machine.run("systemctl", "kill", "--signal", "SIGSTOP", "--kill-who", "main", "vipd")
    machine.wait_until(
        lambda: (
            machine.property("MainPID") not in ("0", str(hung))
            and machine.property("ActiveState") == "active"
        ),
        "replaced by the watchdog",
    )
    wait_for_journal(machine, "watchdog")
    drop_in.unlink()
    drop_in.parent.rmdir()
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "vipd")


def test_everything_is_back_after_a_reboot(machine: Machine) -> None:
    boot = machine.said("cat", "/proc/sys/kernel/random/boot_id")
    machine.stop()
    machine.forget_network()
    assert not serves(machine, 1.0)
    machine.start()
    assert machine.said("cat", "/proc/sys/kernel/random/boot_id") != boot
    machine.wait_until(lambda: machine.property("ActiveState") == "active", "started at boot")
    assert serves(machine)
    assert "kept" in machine.said("vipctl", "list")


@pytest.mark.nightly
def test_a_file_of_mode_0600_needs_its_drop_in(machine: Machine) -> None:
    private = "/etc/vipd/services.d/private.yaml"
    machine.write(private, f"apiVersion: vipd/v1\nservices: [{MORE}]\n")
    machine.run("chmod", "600", private)
    assert machine.run("systemctl", "reload", "vipd", check=False).returncode != 0
    wait_for_journal(machine, "private-files.conf")
    with drop_in(machine, "private-files"):
        assert "more" in machine.said("vipctl", "list")
    machine.run("rm", private)


@pytest.mark.nightly
def test_the_legacy_variant_works_confined_too(machine: Machine) -> None:
    machine.run("systemctl", "stop", "vipd")
    machine.run("vipctl", "cleanup")
    machine.run("rm", "-f", "/run/xtables.lock")
    for stem in ("iptables", "ip6tables"):
        machine.run("update-alternatives", "--set", stem, f"/usr/sbin/{stem}-legacy")
    machine.run("systemctl", "start", "vipd")
    machine.wait_until(
        lambda: "legacy-iptables.conf" in machine.run("vipctl", "status", check=False).stdout,
        "what is missing in the status",
    )
    with drop_in(machine, "legacy-iptables"):
        assert "(legacy)" in machine.said("vipctl", "status")
        assert serves(machine)
        assert "VIPD" in machine.lab.host.run("iptables-legacy-save").stdout
        machine.run("systemctl", "restart", "vipd")
        machine.lab.host.run("iptables-legacy", "-t", "nat", "-F")
        machine.wait_until(lambda: serves(machine), "rules in the legacy tables are mended")
        for stem in ("iptables", "ip6tables"):
            machine.run("update-alternatives", "--auto", stem)
        # With the drop-in still there: the rules in the legacy tables go.
        machine.run("systemctl", "restart", "vipd")
        assert serves(machine)
        assert "VIPD-" not in machine.lab.host.run("iptables-legacy-save").stdout
    assert serves(machine)


def test_python_iptables_where_it_can_be_used(machine: Machine) -> None:
    version = machine.said("iptables", "--version").split()[1]
    use = 'import sys; sys.path.insert(0, "/usr/lib/vipd"); import iptc; print(len(iptc.Table("nat").chains))'
    done = machine.run("python3", "-IS", "-c", use, check=False)
    if tuple(map(int, version.lstrip("v").split("."))) < (1, 8, 11):
        assert done.returncode == 0, done.stderr
    else:
        assert "ImportError: python-iptables is off" in done.stderr


@pytest.mark.nightly
def test_the_package_s_own_test(machine: Machine) -> None:
    machine.apt("install", "--no-install-recommends", "curl")
    script = Path(__file__).parents[2] / "debian/tests/through-a-vip"
    machine.write("/srv/through-a-vip", script.read_text())
    assert machine.said("bash", "/srv/through-a-vip").endswith("PASSED")


def test_removed_it_leaves_no_rule_and_purged_no_file(machine: Machine) -> None:
    add_service(machine)
    assert serves(machine)
    machine.lab.host.run("nft", "add", "table", "inet", "somebody-else")
    machine.write("/etc/vipd/services.d/kept.yaml", "apiVersion: vipd/v1\nservices: []\n")
    machine.apt("remove", "vipd")
    rules = machine.rules()
    assert "VIPD" not in rules
    assert "somebody-else" in rules
    assert machine.lab.host.sysctl("net.ipv4.ip_forward") == "0"
    assert "vipd0" not in machine.said("ip", "link")
    assert (machine.disk / "etc/vipd/vipd.yaml").exists()
    assert (machine.disk / "var/lib/vipd/state.db").exists()
    purged = machine.apt("purge", "--autoremove", "vipd", "curl")
    assert "warning" not in purged
    assert "removing /etc/vipd/services.d; files of declarations in it: 1" in purged
    own = ("/srv/packages/*", "/var/log/*", "/var/lib/apt/*", "/var/cache/*", "/var/lib/dpkg/*")
    apart = [word for path in own for word in ("-not", "-path", path)]
    left: list[str] = []

    def nothing() -> bool:
        left[:] = machine.said("find", "/", "/run", "-xdev", "-path", "*vipd*", *apart).splitlines()
        return not left

    # systemd forgets a unit that is gone when it has nothing else to do.
    with suppress(AssertionError):
        machine.wait_until(nothing, "nothing left", 30)
    assert left == []
