"""The setting `etcd` is read as strictly as the rest, and every problem is reported at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab.inside import Vipd, running
from tests.lab.node import Node
from tests.sources.etcd.register import registering
from tests.sources.host import namespace

URL = "http://10.0.0.1:2379"
EVERYTHING: dict[str, Any] = {
    "store": "etcd",
    "etcd": {
        "endpoints": [URL, "https://[fd00::1]:2379"],
        "prefix": "/x/",
        "ca": "/ca",
        "cert": "/cert",
        "key": "/key",
        "user": "u",
        "password_file": "/pw",
        "timeout": "500ms",
        "max_removal": "30%",
        "report_interval": "5s",
    },
}
BAD: dict[str, tuple[object, tuple[str, ...]]] = {
    "no endpoints": ({"endpoints": []}, ("etcd: endpoints: none; hint: name at least one",)),
    "nothing": ({}, ("etcd: endpoints: none; hint: name at least one",)),
    "no mapping": ([URL], ("etcd: must be a mapping; hint: {endpoints:",)),
    "no YAML": ("{endpoints: [}", ("etcd: the text: YAML syntax: ",)),
    "no scheme": ({"endpoints": ["10.0.0.1:2379"]}, ("must be scheme, host and port",)),
    "no port": ({"endpoints": ["https://10.0.0.1"]}, ("must be scheme, host and port",)),
    "port": ({"endpoints": ["https://10.0.0.1:99999"]}, ("Port out of range",)),
    "login in the URL": (
        {"endpoints": ["https://u:p@10.0.0.1:2379"]},
        ("user and password have settings",),
    ),
    "prefix": ({"endpoints": URL, "prefix": "/vipd"}, ("must end in a slash",)),
    "cert without key": ({"endpoints": URL, "cert": "/c"}, ("cert and key: only one",)),
    "user without password": ({"endpoints": URL, "user": "u"}, ("user and password_file: only one",)),
    "no time": ({"endpoints": URL, "timeout": 0}, ("timeout: 0 s",)),
    "share": ({"endpoints": URL, "max_removal": 101}, ("max_removal: 101%",)),
    "every key": (
        {"endpoint": [URL], "timeout": "soon", "max_removal": "half", "report_interval": "1h", "ca": "here"},
        tuple(f"etcd.{key}: " for key in ("endpoint", "timeout", "max_removal", "report_interval", "ca")),
    ),
    "every value": (
        {
            "endpoints": ["10.0.0.1:2379"],
            "prefix": "/",
            "user": "u",
            "cert": "/c",
            "timeout": "2m",
            "max_removal": 101,
        },
        ("endpoints", "prefix", "user and", "cert and", "timeout", "max_removal"),
    ),
}


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with namespace() as made:
        yield made


def checked(node: Node, directory: Path, settings: object) -> str:
    """What `vipd --check` says of settings."""
    config = directory / "vipd.yaml"
    services = directory / "services.d"
    services.mkdir(exist_ok=True)
    paths = {"services_dir": str(services), "state_dir": str(directory / "state")}
    config.write_text(yaml.safe_dump({**paths, **settings}))  # type: ignore[dict-item]
    done = node.run(sys.executable, "-m", "vipd", "--config", str(config), "--check", check=False)
    return done.stdout + done.stderr


@pytest.mark.root
def test_every_problem_is_told_with_its_key(node: Node, tmp_path: Path) -> None:
    missing = {}
    for case, (etcd, words) in BAD.items():
        said = checked(node, tmp_path, {"etcd": etcd})
        if [text for text in words if text not in said] or said.count("etcd") < len(words):
            missing[case] = said
    assert missing == {}
    assert "store: etcd needs etcd; hint: name its endpoints" in checked(node, tmp_path, {"store": "etcd"})
    assert "ok: 0 services" in checked(node, tmp_path, EVERYTHING)


def test_everything_can_be_said_and_little_need_be() -> None:
    async def shown(vipd: Vipd) -> dict[str, object]:
        return dict((await vipd.status())["settings"])

    settings = running(shown, **EVERYTHING)
    etcd = {
        "endpoints": [URL, "https://[fd00::1]:2379"],
        "timeout": 0.5,
        "max_removal": 30,
        "report_interval": 5,
    }
    assert settings["store"] == "etcd"
    assert settings["etcd"] == {**EVERYTHING["etcd"], **etcd}
    little = running(shown, etcd=f"{{endpoints: '{URL}, {URL}2'}}")
    assert little["store"] == "file"
    found = little["etcd"]
    assert isinstance(found, dict)
    assert (found["endpoints"], found["prefix"], found["user"]) == ([URL, f"{URL}2"], "/vipd/v1/", "")
    assert running(shown)["etcd"] is None


UNENCRYPTED = "etcd's password for u goes unencrypted to"


WARNED = {
    ("u", "http://10.0.0.1:2379"): True,
    ("u", "http://etcd.example:2379"): True,
    ("u", "https://10.0.0.1:2379"): False,
    ("u", "http://127.0.0.1:2379"): False,
    ("u", "http://[::1]:2379"): False,
    ("u", "http://localhost:2379"): False,
    ("", "http://10.0.0.1:2379"): False,
}


@pytest.mark.root
def test_a_password_that_goes_unencrypted_is_warned_of(node: Node, tmp_path: Path) -> None:
    found = {}
    for user, endpoint in WARNED:
        login = {"user": user, "password_file": "/pw"} if user else {}
        etcd = {"endpoints": ["https://10.0.0.9:2379", endpoint], **login}
        said = checked(node, tmp_path, {"etcd": etcd})
        found[user, endpoint] = f"{UNENCRYPTED} {endpoint}" in said
        assert "10.0.0.9" not in said
        assert "ok: 0 services" in said, "a warning refuses nothing"
    assert found == WARNED


def test_a_host_and_who_registers_are_warned_of_it_too(tmp_path: Path) -> None:
    (tmp_path / "pw").write_text("secret\n")
    login = {"user": "u", "password_file": str(tmp_path / "pw")}

    async def warned(vipd: Vipd) -> str:
        return str((await vipd.status())["warnings"]) + str([r.getMessage() for r in vipd.journal])

    assert running(warned, etcd={"endpoints": [URL], **login}).count(UNENCRYPTED) >= 2
    (tmp_path / "log").mkdir()
    options = ("--endpoint", URL, "--user", "u", "--password-file", str(tmp_path / "pw"))
    with registering(tmp_path / "log", *options) as process:
        process.until_said(f"vipctl: warning: {UNENCRYPTED} {URL}; hint: use https:// endpoints\n")
