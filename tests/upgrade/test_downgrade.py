"""A daemon that finds what a later release left in the state directory: unknown keys, and files of another
format. docs/operations.md, "Upgrade", promises what is tested here."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.upgrade.folder import folders, place
from tests.upgrade.scene import DEAD_PORT, VIPS, assert_known, daemon_on, host, knowledge

pytestmark = [pytest.mark.root, pytest.mark.slow]

NEWEST = folders()[-1]
LATER = "of_a_later_version"
STORE = ("state.db", "state.db.last-good")
EXTENDING = (
    "update service set text = json_set(text, '$.of_a_later_version', 1) where name = 'api'",
    "update override set text = json_set(text, '$.of_a_later_version', 1) where target like 'address %'",
    "update override set text = json_set(text, '$.of_a_later_version', 1) where target = 'this host'",
)
EXTENDING_CACHE = (
    "update entry set value = json_set(value, '$.of_a_later_version', 1) where bucket = 'event'",
    """update entry set value = cast(
         replace(cast(value as text), 'name: named', 'name: named' || char(10) || '    of_a_later_version: 1')
         as blob) where bucket = 'accepted'""",
)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with host() as lab:
        lab.backends[1].serve(tcp=[DEAD_PORT])
        yield lab


def change(daemon: Daemon, name: str, new: Callable[[str], str]) -> None:
    """Put another text in place of one of the state directory; `name` ends the path."""
    (path,) = (path for path in daemon.state_dir.rglob("*") if str(path).endswith(name))
    before = path.read_text()
    path.write_text(new(before))
    assert path.read_text() != before


def in_databases(daemon: Daemon, names: Sequence[str], *statements: str) -> None:
    for name in names:
        with closing(sqlite3.connect(daemon.state_dir / name, isolation_level=None)) as database:
            for statement in statements:
                database.execute(statement)


def declare_accepted(daemon: Daemon) -> None:
    """The files of declarations are those of the copies, newer keys too."""
    with closing(sqlite3.connect(daemon.state_dir / "cache.db")) as database:
        rows = database.execute("select key, value from entry where bucket = 'accepted' and key != x''")
        for path, text in rows:
            (daemon.services_dir / Path(path.decode()).name).write_bytes(text)


def kept_aside(daemon: Daemon) -> set[str]:
    found = daemon.state_dir.rglob("*.unreadable")
    return {str(path.relative_to(daemon.state_dir)).removesuffix(".unreadable") for path in found}


def test_unknown_keys(lab: Lab) -> None:
    """They end the one service or override that has them, and nothing else."""
    daemon = daemon_on(lab)
    before = place(NEWEST, daemon)
    change(daemon, "host-changes.json", lambda text: json.dumps({**json.loads(text), LATER: {"a": [1]}}))
    in_databases(daemon, STORE, *EXTENDING)
    in_databases(daemon, ["cache.db"], *EXTENDING_CACHE)
    declare_accepted(daemon)
    with daemon:
        after = knowledge(daemon)
        del before["backends"]["named"], before["backends"]["api"]
        del before["new flows"]["named"], before["new flows"]["api"]
        assert set(before.pop("events")) <= set(after.pop("events"))
        assert len(before["overrides"]) == len(after["overrides"]) + 1
        disabled = before["overrides"].pop()
        assert disabled["admin"] == "disabled"
        (freed,) = (each for each in before["backends"]["web"] if each.startswith(disabled["backend"]))
        before["backends"]["web"][freed] = after["backends"]["web"][freed]
        assert before.pop("maintenance")
        assert after.pop("maintenance") == "the stored one cannot be read"
        assert_known(before, after)
        assert after["backends"].keys() == before["backends"].keys()
        for name in set(VIPS) - {"named"}:
            lab.client.send(VIPS[name], 80, count=4).all_answered()
        assert not kept_aside(daemon)
        assert json.loads((daemon.state_dir / "host-changes.json").read_text())["sysctls"]
        status = daemon.vipctl("status", check=False).stdout
        for what in (
            "shop.yaml:11: services[1]",
            "service api: ",
            "stored for this host",
            "stored for address",
        ):
            assert re.search(rf"{re.escape(what)}.*{LATER}", status), what
        assert "host-changes.json" not in status
        daemon.vipctl("disable", "--address", disabled["backend"])
        daemon.vipctl("host", "resume")
        assert "stored for" not in daemon.vipctl("status", check=False).stdout
        daemon.vipctl("confirm")
        daemon.vipctl("add", f"{VIPS['web']}:81/tcp", "10.244.0.11:80", "--name", "api")
        assert "service api: " not in daemon.vipctl("status", check=False).stdout
        # What can be done at any time: the key goes, and everything serves.
        shop = daemon.services_dir / "shop.yaml"
        shop.write_text(re.sub(rf" +{LATER}: 1\n", "", shop.read_text()))
        daemon.wait_until(lambda: bool(daemon.endpoints("named")), True)


def test_another_format(lab: Lab) -> None:
    """The file counts as unusable; what it was for begins anew, or waits for an operator."""
    daemon = daemon_on(lab)
    before = place(NEWEST, daemon)
    declare_accepted(daemon)
    in_databases(daemon, ["cache.db", *STORE], "pragma user_version = 2")
    change(daemon, "dataplane", lambda _: "ebpf\n")
    late = daemon.services_dir / "late.yaml"
    late.write_text(late.read_text().replace("vipd/v1", "vipd/v2"))
    with daemon:
        assert daemon.endpoints("shop") == list(before["backends"]["shop"])
        for lost in ("late", "web", "api", "fleet", "named"):
            assert not daemon.endpoints(lost), lost
        assert kept_aside(daemon) == {"dataplane"}
        for name in kept_aside(daemon):
            assert re.search(rf"{name}: .*it is kept as", daemon.log), name
        for name in ("state.db", "cache.db"):
            assert f"{name}: cannot be read: a newer version of vipd wrote it (form 2, " in daemon.log
        assert daemon.status()["dataplane"]["name"] == "iptables"
        refused = daemon.vipctl("add", "10.96.1.9:80", "10.244.0.11:80", check=False)
        assert (refused.returncode, "move the file aside" in refused.stderr) == (1, True), refused
        lab.client.send(VIPS["shop"], 80, count=4).all_answered()
