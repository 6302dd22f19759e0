"""What only the host can tell about a check: `vipd --check` says it beforehand, all of it at once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.root

PATIENCE = 120.0
WITH_ACCOUNTS = """
for file in passwd group nsswitch.conf; do
    mount --bind "$1/$file" "/etc/$file" || exit 99
done
shift
exec "$@"
"""
PASSWD = "root:x:0:0::/:/bin/sh\ndaemon:x:1:1::/:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n"
CHECK_USER = "vipd-check:x:500:500::/:/bin/sh\n"
GROUP = "root:x:0:\ndaemon:x:1:\nnogroup:x:65534:\n"
MAKE_ONE = "adduser --system --group --no-create-home vipd-check, and leave user out"
INSTALL = "no such file; install it on this host, or correct the path"
OTHER = "leave user out, for vipd-check"

Check = dict[str, Any]


def problems(
    directory: Path,
    checks: Mapping[str, Check],
    passwd: str | None = PASSWD + CHECK_USER,
    group: str = GROUP,
    *settings: str,
    before: Sequence[str] = (),
) -> dict[str, list[str]]:
    """The problems of services with these checks, by name, on a host with these accounts; without any the
    account database does not answer."""
    services = directory / "services.d"
    services.mkdir(exist_ok=True)
    declared = [
        {"name": name, "address": f"10.96.0.{n}", "ports": [80], "backends": ["10.244.0.1"], "check": check}
        for n, (name, check) in enumerate(checks.items(), 1)
    ]
    (services / "a.yaml").write_text(yaml.safe_dump({"apiVersion": "vipd/v1", "services": declared}))
    if passwd is None:
        os.mkfifo(directory / "passwd")
    else:
        (directory / "passwd").write_text(passwd)
    (directory / "group").write_text(group)
    (directory / "nsswitch.conf").write_text("passwd: files\ngroup: files\n")
    paths = [
        f"--services-dir={services}",
        f"--state-dir={directory / 'state'}",
        f"--socket={directory / 'sock'}",
    ]
    argv = ["unshare", "-m", "sh", "-c", WITH_ACCOUNTS, "sh", str(directory)]
    argv += [*before, sys.executable, "-m", "vipd", "--check", *paths, *settings]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert "Traceback" not in done.stderr
    shown: dict[str, list[str]] = defaultdict(list)
    for line in done.stderr.splitlines():
        place, _, text = line.partition(": ")
        assert place.startswith(f"{services / 'a.yaml'}:"), done.stderr
        name, _, what = text.partition(": ")
        shown[name].append(what)
    assert done.returncode == bool(shown), done.stderr
    return dict(shown)


def program(*command: str, user: str = "") -> Check:
    return {"type": "exec", "command": list(command), **({"user": user} if user else {})}


USERS = {
    "toor": ("0:100", "checks never run as root"),
    "in-root": ("601:0", "it is in root's group"),
    "also-root": ("602:100", "it is in root's group"),
    "admin": ("603:700", "it is in the group vipd-admin, which the API lets change services"),
    "also-admin": ("604:100", "it is in the group vipd-admin, which the API lets change services"),
    "owner": ("4000:100", "it owns STATE, where vipd keeps what it does"),
    "plain": ("605:100", ""),
}
GROUPS = "root:x:0:also-root\nothers:x:800:also-admin,plain\nvipd-admin:x:700:also-admin\n"


def test_programs_and_users_and_files_that_a_check_cannot_have(tmp_path: Path) -> None:
    """Of users those who may change services, by whatever name, and whatever group gives the right. Of
    certificates nothing that hangs, or fills memory."""
    checks: dict[str, Check] = {"tcp": {"type": "tcp"}, "https": {"type": "https"}}
    wanted: dict[str, str] = {}
    for name, (command, why) in programs(tmp_path).items():
        checks[name] = program(command)
        wanted |= {name: f"{command}: {why}"} if why else {}
    (tmp_path / "state").mkdir()
    os.chown(tmp_path / "state", 4000, -1)
    for name, (_, why) in {"root": ("", "checks never run as root"), **USERS}.items():
        checks[name] = program("/bin/true", user=name)
        why = why.replace("STATE", str(tmp_path / "state"))
        wanted |= {name: f"user {name}: {why}; {OTHER}"} if why else {}
    authorities = certificates(tmp_path)
    checks |= {name: {"type": "https", "ca": str(path)} for name, (path, _) in authorities.items()}
    checks["ca-unused"] = {"type": "https", "verify": False, "ca": str(tmp_path / "none")}
    checks["both"] = program("/none", user="nobody-here")

    passwd = PASSWD + CHECK_USER + "".join(f"{name}:x:{ids}::/:/bin/sh\n" for name, (ids, _) in USERS.items())
    shown = problems(tmp_path, checks, passwd, GROUPS, "--set", "socket_group=vipd-admin")
    assert shown.pop("both") == [
        f"/none: {INSTALL}",
        "user nobody-here: there is none; adduser --system nobody-here, or leave user out",
    ]
    for name, (path, why) in authorities.items():
        (text,) = shown.pop(name)
        assert text.startswith(f"ca {path}: {why}"), text
    assert shown == {name: [text] for name, text in wanted.items()}


def programs(directory: Path) -> dict[str, tuple[str, str]]:
    """Programs, and why each cannot be run."""
    plain, missing = directory / "plain", directory / "none"
    plain.write_text("")
    as_list = f"no such file; write each word as an item of the list: [{missing}, --quick]"
    return {
        "sound": ("/bin/true", ""),
        "missing": (str(missing), INSTALL),
        "below-a-file": ("/bin/true/x", INSTALL),
        "not-executable": (str(plain), f"not executable; chmod a+rx {plain}"),
        "directory": (str(directory), "not a file; name the program itself"),
        "one-word": (f"{missing} --quick", as_list),
        "long": ("/" + "x" * 300, "File name too long; its directories must be open to vipd"),
        "deep": ("/" + "x/" * 500 + "x", INSTALL),
    }


def certificates(directory: Path) -> dict[str, tuple[Path, str]]:
    """What is no plain file of certificates, and how the reason begins."""
    (directory / "large").write_bytes(b"x" * (1024 * 1024 + 1))
    (directory / "empty").touch()
    os.mkfifo(directory / "fifo")
    empty = "no certificates: TLS failed: no certificate in it; it must be a PEM file"
    return {
        "ca-missing": (directory / "none", "No such file or directory; name a file that vipd can read"),
        "ca-empty": (directory / "empty", empty),
        "ca-fifo": (directory / "fifo", ""),
        "ca-device": (Path("/dev/zero"), ""),
        "ca-directory": (directory, ""),
        "ca-large": (directory / "large", ""),
        "ca-endless": (Path("/proc/self/pagemap"), ""),
        "ca-long": (Path("/" + "x" * 300), ""),
    }


def test_a_program_that_names_no_user_runs_as_one_of_the_hosts(tmp_path: Path) -> None:
    """`nobody` as long as there is none for it. An unknown group admits nobody to the API."""
    root = "vipd-check:x:0:0::/:/bin/sh\n"
    missing = "user vipd-check: there is none; adduser --system vipd-check, or leave user out"
    for passwd, why in (("root:x:0:0::/:/bin/sh\n", missing), (root, "checks never run as root")):
        (text,) = problems(tmp_path, {"a": program("/bin/true")}, passwd)["a"]
        assert why in text
    checks = {name: program("/bin/true", user=name) for name in ("daemon", "root")} | {
        "unnamed": program("/bin/true")
    }
    found = problems(tmp_path, checks, PASSWD, GROUP, "--set", "socket_group=no-such-group")
    assert found == {"root": [f"user root: checks never run as root; {MAKE_ONE}"]}


def test_a_daemon_without_rights_runs_no_programs() -> None:
    """Nor one as the user that it is itself: the API lets that change services."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        as_daemon = ("setpriv", "--reuid=daemon", "--regid=daemon", "--clear-groups", "--inh-caps=-all")
        checks = {user: program("/bin/true", user=user) for user in ("daemon", "nobody")}
        found = problems(Path(name), checks, before=as_daemon)
    lacks = (
        "vipd may not become another user; add the drop-in exec-checks.conf of the package, which gives the"
    )
    itself = "vipd itself runs as this user, whom its API lets change services"
    assert {user: [text.partition(" rights")[0] for text in texts] for user, texts in found.items()} == {
        "daemon": [f"user daemon: {itself}; {OTHER}"],
        "nobody": [f"user nobody: {lacks}"],
    }


def test_accounts_that_do_not_answer_are_given_up(tmp_path: Path) -> None:
    checks = {"waits": program("/bin/true", user="someone"), "other": program("/none")}
    found = problems(tmp_path, checks, None)
    assert found["waits"] == [
        "user someone: cannot be looked up: the account database does not answer; see /etc/nsswitch.conf"
    ]
    assert found["other"][0].startswith("/none: no such file")
