from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from vipd.control.host import FORWARDING, LIBERAL, Host, restore_sysctls
from vipd.control.host_checks import HostChecks
from vipd.host.host_changes import FILE_NAME, HostChanges, RecordedChanges
from vipd.host.settings.settings import Settings, load_settings
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family, Masquerade, Protocol

SETTINGS: Settings = load_settings(flags={"vip_device": ""})
IPV4, IPV6 = FORWARDING[Family.IPV4], FORWARDING[Family.IPV6]


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A directory like /proc/sys on which nothing forwards."""
    root = tmp_path / "sys"
    for name in FORWARDING.values():
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("0\n")
    (root / LIBERAL).parent.mkdir(parents=True)
    (root / LIBERAL).write_text("1\n")
    return root


@pytest.fixture
def record(tmp_path: Path) -> HostChanges:
    """The record of a state directory that is not there yet."""
    return HostChanges(tmp_path / "state")


def value(proc: Path, name: str) -> str:
    """What a kernel setting holds."""
    return (proc / name).read_text().strip()


def prepare(host: Host, families: Iterable[Family]) -> tuple[str, ...]:
    """Prepare a host for a service in each of these families."""
    keys = [ForwardingKey("web", "", Protocol.TCP, family) for family in families]
    host.services_changed({key: Forwarding(key, (), 80, (), Masquerade.FORWARDED) for key in keys})
    return asyncio.run(host.prepare())


def test_only_families_in_use_are_turned_on(proc: Path, record: HostChanges) -> None:
    assert prepare(Host(SETTINGS, record, proc), [Family.IPV4]) == ()
    assert (value(proc, IPV4), value(proc, IPV6)) == ("1", "0")
    assert record.read().sysctls == {IPV4: {"was": "0", "set": "1"}}


def test_what_is_on_already_is_neither_written_nor_recorded(proc: Path, record: HostChanges) -> None:
    (proc / IPV4).write_text("1\n")
    prepare(Host(SETTINGS, record, proc), [Family.IPV4])
    assert record.read().sysctls == {}
    assert restore_sysctls(record, proc) == []
    assert value(proc, IPV4) == "1"


def test_a_restart_does_not_forget_the_value_to_go_back_to(proc: Path, record: HostChanges) -> None:
    for _ in range(2):
        prepare(Host(SETTINGS, record, proc), [Family.IPV4, Family.IPV6])
    assert restore_sysctls(record, proc) == ["net.ipv4.ip_forward = 0", "net.ipv6.conf.all.forwarding = 0"]
    assert value(proc, IPV4) == "0"


def test_the_record_is_on_disk_before_the_kernel_is_changed(
    proc: Path, record: HostChanges, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(HostChanges, "_write", lambda *_: seen.append(value(proc, IPV4)))
    prepare(Host(SETTINGS, record, proc), [Family.IPV4])
    assert seen == ["0"]


def test_a_record_that_cannot_be_written_leaves_the_kernel_alone(proc: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (warning,) = prepare(Host(SETTINGS, HostChanges(tmp_path / "file"), proc), [Family.IPV4])
    assert "net.ipv4.ip_forward" in warning
    assert value(proc, IPV4) == "0"


def test_flows_that_leave_the_window_are_kept_alive_while_any_service_is_there(
    proc: Path, record: HostChanges
) -> None:
    (proc / LIBERAL).write_text("0\n")
    prepare(Host(SETTINGS, record, proc), [])
    assert value(proc, LIBERAL) == "0"
    prepare(Host(SETTINGS, record, proc), [Family.IPV4])
    assert value(proc, LIBERAL) == "1"


async def nothing_amiss(*_: object) -> bool:
    """In place of the checks that run iptables."""
    return False


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of which nothing but kernel settings is looked at: other tests open ports on this one."""
    monkeypatch.setattr(HostChecks, "refresh", nothing_amiss)
    monkeypatch.setattr(Host, "refresh_claims", nothing_amiss)


def looked(host: Host) -> bool:
    """Whether a look at the host asks for another step."""
    return asyncio.run(host.refresh())


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize("name", [IPV4, LIBERAL])
def test_what_somebody_turns_off_is_seen_and_turned_on_again_with_a_warning(
    proc: Path, record: HostChanges, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    host = Host(SETTINGS.model_copy(update={"host_addresses": ("192.0.2.1",)}), record, proc)
    looked(host)
    prepare(host, [Family.IPV4])
    assert not looked(host)
    (proc / name).write_text("0\n")
    assert looked(host)
    prepare(host, [Family.IPV4])
    assert value(proc, name) == "1"
    assert not looked(host)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [name.replace("/", ".") in warning for warning in warnings] == [True]


@pytest.mark.usefixtures("still")
def test_a_setting_that_appears_later_was_turned_off_by_nobody(
    proc: Path, record: HostChanges, caplog: pytest.LogCaptureFixture
) -> None:
    (proc / LIBERAL).unlink()
    host = Host(SETTINGS.model_copy(update={"host_addresses": ("192.0.2.1",)}), record, proc)
    looked(host)
    prepare(host, [Family.IPV4])
    (proc / LIBERAL).write_text("0\n")
    assert looked(host)
    prepare(host, [Family.IPV4])
    assert value(proc, LIBERAL) == "1"
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.usefixtures("still")
def test_settings_that_vipd_leaves_alone_are_warned_of_while_they_are_off(
    proc: Path, record: HostChanges
) -> None:
    flags = {"manage_sysctls": False, "vip_device": "", "host_addresses": ["192.0.2.1"]}
    host = Host(load_settings(flags=flags), record, proc)
    looked(host)
    (warning,) = prepare(host, [Family.IPV4])
    assert warning.startswith("net.ipv4.ip_forward is 0, and manage_sysctls is false: ")
    assert value(proc, IPV4) == "0"
    assert not looked(host)
    (proc / IPV4).write_text("1\n")
    assert looked(host)
    assert prepare(host, [Family.IPV4]) == ()
    (proc / IPV4).write_text("0\n")
    assert looked(host)
    assert value(proc, IPV4) == "0"
    assert record.read().sysctls == {}


def test_a_missing_setting_is_a_warning_and_does_not_hold_back_the_other(
    proc: Path, record: HostChanges
) -> None:
    (proc / IPV6).unlink()
    (warning,) = prepare(Host(SETTINGS, record, proc), [Family.IPV6, Family.IPV4])
    assert "net.ipv6.conf.all.forwarding" in warning
    assert value(proc, IPV4) == "1"


def test_what_somebody_changed_since_is_left_alone(proc: Path, record: HostChanges) -> None:
    prepare(Host(SETTINGS, record, proc), [Family.IPV4])
    (proc / IPV4).write_text("2\n")
    assert restore_sysctls(record, proc) == []
    assert value(proc, IPV4) == "2"


def test_the_record_keeps_tables_prefixes_and_settings_apart(record: HostChanges) -> None:
    record.record_rules("VIPD", ["ipv4 nat"])
    record.record_rules("VIPD", ["ipv4 nat", "ipv4 filter"])
    record.record_rules("LB", [])
    record.record_sysctl(IPV4, "0", "1")
    record.record_sysctl(IPV4, "0", "1")
    record.record_device("vipd0", "made")
    record.record_device("vipd0", "up")
    changes = record.read()
    assert changes.tables == ["ipv4 nat", "ipv4 filter"]
    assert changes.prefixes == ["VIPD", "LB"]
    assert changes.sysctls == {IPV4: {"was": "0", "set": "1"}}
    assert changes.devices == {"vipd0": "made"}
    record.forget_device("vipd0")
    record.forget_device("vipd0")
    changes = record.read()
    assert changes.devices == {}
    assert changes.prefixes == ["VIPD", "LB"]
    record.clear()
    record.clear()
    assert record.read() == RecordedChanges()


def test_a_record_without_devices_is_of_an_earlier_version(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text('{"sysctls": {}, "tables": ["ipv4 nat"], "prefixes": []}')
    assert HostChanges(tmp_path).read().tables == ["ipv4 nat"]


DAMAGED = ("", "{", "[]", "{}", '{"sysctls": {}}', "7", '{"sysctls": [], "tables": [], "prefixes": []}')


@pytest.mark.parametrize("text", [*DAMAGED, '{"sysctls": {"a": "1"}, "tables": [], "prefixes": []}'])
def test_a_record_that_is_damaged_is_kept_aside_and_told(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    record = HostChanges(tmp_path)
    assert record.read().sysctls == {}
    assert (tmp_path / FILE_NAME).read_text() == text, "to look changes nothing"
    (warning,) = record.warnings()
    assert "not known to vipctl cleanup" in warning
    record.record_rules("VIPD", [])
    assert HostChanges(tmp_path).read().prefixes == ["VIPD"]
    aside = tmp_path / f"{FILE_NAME}.damaged-1"
    assert aside.read_text() == text
    assert str(aside) in caplog.text
    assert str(aside) in record.warnings()[0]
    (tmp_path / FILE_NAME).write_text(text)
    record.clear()
    assert (tmp_path / f"{FILE_NAME}.damaged-2").read_text() == text
    assert not (tmp_path / FILE_NAME).exists()


def test_a_record_that_cannot_be_read_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()  # no file: root, too, cannot read it
    record = HostChanges(tmp_path)
    changes: tuple[Callable[[], None], ...] = (
        lambda: record.record_rules("VIPD", ["ipv4 nat"]),
        lambda: record.record_sysctl(IPV4, "0", "1"),
        record.clear,
    )
    for change in changes:
        with pytest.raises(OSError, match=r"cannot be read .*and is not overwritten"):
            change()
    assert len(record.warnings()) == 1


def test_a_directory_that_is_gone_for_good_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # as with a file system that cannot be written, nothing can be made below
    with pytest.raises(OSError, match=r"state is gone and cannot be made again .*; hint: systemctl restart"):
        HostChanges(tmp_path / "file" / "state").record_rules("VIPD", [])


def test_ipv6_that_is_disabled_is_told_while_services_need_it(proc: Path, record: HostChanges) -> None:
    for device, off in (("all", 1), ("lo", 0), ("eth0", 1)):
        (proc / f"net/ipv6/conf/{device}").mkdir(exist_ok=True)
        (proc / f"net/ipv6/conf/{device}/disable_ipv6").write_text(f"{off}\n")
    for managed in (True, False):
        host = Host(SETTINGS.model_copy(update={"manage_sysctls": managed}), record, proc)
        assert not any("disabled" in warning for warning in prepare(host, [Family.IPV4]))
        (warning,) = (each for each in prepare(host, [Family.IPV6]) if "disabled" in each)
        assert "net.ipv6.conf.all.disable_ipv6 is 1" in warning
        assert "hint: sysctl -w net.ipv6.conf.all.disable_ipv6=0" in warning
        (proc / "net/ipv6/conf/eth0/disable_ipv6").write_text("0\n")
        assert prepare(host, [Family.IPV6]) == ()
        (proc / "net/ipv6/conf/eth0/disable_ipv6").write_text("1\n")
