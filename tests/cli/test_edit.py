"""`vipctl edit`, with scripts in place of an editor, against a vipd in this process."""

from __future__ import annotations

import io
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.cli.conftest import Spawn
from tests.cli.documents import DNS, changed, one
from tests.cli.fake_daemon import FakeDaemon
from tests.lab.inside import Output, Vipd, running
from tests.lab.stories import story_of
from tests.model.samples import block

WEB = {"name": "web", "address": "10.96.0.11", "ports": ["80/tcp"], "backends": ["10.244.0.7"]}
PATIENCE_SECONDS = 60.0
Story = Callable[["Desk"], Awaitable[None]]

FILE = '"$1"'
EMPTY = ": > FILE"
ADD_BACKEND = "sed -i 's/- 10.244.0.7/&\\n      - 10.244.0.8@3/' FILE"
BREAK = "sed -i 's/80.tcp/80\\/tpc/' FILE"
MEND = "sed -i 's/80.tpc/81\\/tcp/' FILE"


class Desk:
    """The API with the service `web`, and a user with an editor."""

    def __init__(self, vipd: Vipd, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.vipd, self.path = vipd, path
        self._patch = monkeypatch
        self.store_path = vipd.state_dir / "state.db"
        self.drafts = path / "tmp"
        self.drafts.mkdir()
        monkeypatch.setenv("TMPDIR", str(self.drafts))
        monkeypatch.setattr("tempfile.tempdir", None)
        monkeypatch.delenv("VISUAL", raising=False)

    def at_a_terminal(self) -> None:
        """There is somebody who may edit again."""

        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        self._patch.setattr("sys.stdin", Terminal())

    def editor(self, *scripts: str) -> None:
        """The n-th time that the editor is opened it does the n-th of these. FILE is the edited file."""
        program, here = self.path / "my editor", shlex.quote(str(self.path))
        count = f"$(ls {here} | grep -c seen)"
        cases = [f"{number}) {script.replace('FILE', FILE)} ;;\n" for number, script in enumerate(scripts, 1)]
        copy = f'cp "$1" {here}/seen.{count}'
        program.write_text(f"#!/bin/sh\n{copy}\ncase {count} in\n{''.join(cases)}*) exit 9 ;;\nesac\n")
        program.chmod(0o755)
        self._patch.setenv("EDITOR", f"'{program}'")

    def seen(self, number: int) -> str:
        """What the editor was opened with the n-th time."""
        return (self.path / f"seen.{number - 1}").read_text()

    def times(self) -> int:
        """How often the editor was opened."""
        return len(list(self.path.glob("seen.*")))

    async def vipctl(self, *words: str) -> Output:
        """Run a command line in a thread."""
        # Handlers of signals can be set in the main thread only.
        self._patch.setattr("signal.signal", lambda *_: signal.SIG_DFL)
        return await self.vipd.vipctl(*words)

    async def stored(self) -> set[str]:
        """The services that are stored."""
        entries = (await self.vipd.ask("GET", "/v1/services")).body["services"]
        return {view["name"] for view in entries if view["owner"] == "cli"}

    async def spec(self, name: str = "web") -> dict[str, object]:
        """The service as the daemon has it."""
        found: dict[str, object] = (await self.vipd.ask("GET", f"/v1/services/{name}")).body["service"][
            "spec"
        ]
        return found

    def kept(self) -> list[Path]:
        """The files that were not removed."""
        return [path for path in self.drafts.rglob("*") if path.is_file()]


def at_a_desk(story: Story) -> None:
    async def whole(vipd: Vipd) -> None:
        assert (await vipd.add(WEB)).status == 200
        with TemporaryDirectory() as path, pytest.MonkeyPatch.context() as monkeypatch:
            await story(Desk(vipd, Path(path), monkeypatch))

    running(whole)


@story_of(at_a_desk)
async def test_what_is_saved_is_applied(desk: Desk) -> None:
    desk.editor(ADD_BACKEND)
    ended = await desk.vipctl("edit", "10.96.0.11:80/tcp")
    stored = f"; stored in {desk.store_path}; survives reboot"
    assert ended == (0, f"changed web (backends){stored}\n", "")
    assert (await desk.spec())["backends"] == ["10.244.0.7", {"address": "10.244.0.8", "weight": 3}]
    assert await desk.stored() == {"web"}
    assert desk.kept() == []
    assert desk.seen(1).splitlines()[2:] == [
        "apiVersion: vipd/v1",
        "services:",
        "  - name: web",
        "    address: 10.96.0.11",
        "    ports: [80/tcp]",
        "    backends:",
        "      - 10.244.0.7",
    ]


@story_of(at_a_desk)
async def test_a_key_that_is_gone_is_cleared(desk: Desk) -> None:
    assert (await desk.vipd.ask("PATCH", "/v1/services/web", {"service": {"check": "tcp"}})).status == 200
    desk.editor("sed -i '/check:/d' FILE")
    assert (await desk.vipctl("edit", "web")).stdout.startswith("changed web (check); ")
    assert "check" not in await desk.spec()


@pytest.mark.parametrize(
    "script",
    [":", EMPTY, "echo '# nothing' > FILE", "echo '# remark' >> FILE", "sed -i 's/: web/: \"web\"/' FILE"],
)
@story_of(at_a_desk)
async def test_an_unchanged_or_empty_file_changes_nothing(desk: Desk, *, script: str) -> None:
    desk.editor(script)
    before = desk.store_path.stat().st_mtime_ns
    assert await desk.vipctl("edit", "web") == (0, "unchanged web\n", "")
    assert desk.store_path.stat().st_mtime_ns == before
    assert desk.kept() == []


@story_of(at_a_desk)
async def test_a_refused_text_is_edited_again_with_its_problems_on_top(desk: Desk) -> None:
    desk.at_a_terminal()
    desk.editor(f"{BREAK}; sed -i 's/10.244.0.7/10.244.0.700/' FILE", f"sed -i 's/0.700/0.7/' FILE; {MEND}")
    assert (await desk.vipctl("edit", "web")).code == 0
    assert (await desk.spec())["ports"] == ["81/tcp"]
    again = desk.seen(2).splitlines()
    problems = [line for line in again if line.startswith("# line ")]
    assert len(problems) == 2
    for problem, text in zip(problems, ("tpc", "700"), strict=True):
        number = int(problem.split()[2].rstrip(":"))
        assert text in problem
        assert text in again[number - 1], "the line that it names"
    assert "services[0].ports[0]: " in problems[0]
    assert again.count("apiVersion: vipd/v1") == 1
    assert desk.kept() == []


@story_of(at_a_desk)
async def test_what_the_daemon_refuses_is_edited_again(desk: Desk) -> None:
    assert (await desk.vipd.add({**WEB, "name": "other", "address": "10.96.0.12"})).status == 200
    desk.at_a_terminal()
    desk.editor("sed -i 's/0.11/0.12/' FILE", "sed -i 's/0.12$/0.13/' FILE")
    assert (await desk.vipctl("edit", "web")).stdout.startswith("changed web (address)")
    assert "# 10.96.0.12:80/tcp already belongs to other" in desk.seen(2)
    assert (await desk.spec())["address"] == "10.96.0.13"


@story_of(at_a_desk)
async def test_who_gives_up_has_the_text_in_a_file(desk: Desk) -> None:
    desk.at_a_terminal()
    desk.editor(BREAK, ":")
    ended = await desk.vipctl("edit", "web")
    (kept,) = desk.kept()
    line = kept.read_text().splitlines().index("    ports: [80/tpc]") + 1
    problem, place, what = ended.stderr.splitlines()
    assert (ended.code, ended.stdout, desk.times()) == (1, "", 2)
    assert problem.startswith(f'{kept}:{line}: services[0].ports[0]: "tpc" is not a protocol; ')
    assert place == f"vipctl: the edited text is in {kept}"
    assert what == f"vipctl: web: not changed: 1 problem; hint: mend the file, then vipctl apply -f {kept}"
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    assert (await desk.spec())["ports"] == ["80/tcp"]
    kept.write_text(kept.read_text().replace("tpc", "udp"))
    assert (await desk.vipctl("apply", "-f", str(kept))).code == 0


@story_of(at_a_desk)
async def test_an_editor_that_changes_comments_alone_has_given_up(desk: Desk) -> None:
    """A script in place of an editor changes the problems on top, too: it would be run for ever."""
    desk.at_a_terminal()
    desk.editor(*["sed -i 's/web/net/g' FILE"] * 4)
    ended = await desk.vipctl("edit", "web")
    assert (ended.code, desk.times()) == (1, 2)
    assert "a service cannot be renamed" in ended.stderr


@story_of(at_a_desk)
async def test_without_a_terminal_nothing_is_edited_twice(desk: Desk) -> None:
    desk.editor(BREAK, MEND)
    assert (await desk.vipctl("edit", "web")).code == 1
    assert desk.times() == 1


@pytest.mark.parametrize(
    ("script", "hint"),
    [
        ("sed -i 's/: web/: net/' FILE", "keep name: web, or remove the service and add it anew"),
        ("sed -i '/services/,$d' FILE; echo 'services: []' >> FILE", "vipctl remove web removes it"),
        (
            "echo '  - {name: b, address: 10.96.0.50, ports: 80}' >> FILE",
            "vipctl apply -f FILE takes several",
        ),
    ],
)
@story_of(at_a_desk)
async def test_it_stays_one_service_of_that_name(desk: Desk, *, script: str, hint: str) -> None:
    desk.editor(script)
    ended = await desk.vipctl("edit", "web")
    assert ended.code == 1
    assert hint in ended.stderr.splitlines()[0]
    assert await desk.stored() == {"web"}


@story_of(at_a_desk)
async def test_a_change_by_somebody_else_meanwhile_is_not_undone(desk: Desk) -> None:
    socket = desk.vipd.socket
    other = f"{sys.executable} -m vipd.cli.main --socket {socket} set web --affinity 10m >/dev/null"
    desk.at_a_terminal()
    desk.editor(f"{ADD_BACKEND}; {other}")
    ended = await desk.vipctl("edit", "web")
    (kept,) = desk.kept()
    assert (ended.code, desk.times()) == (1, 1)
    assert ended.stderr == (
        f"vipctl: the edited text is in {kept}\n"
        "vipctl: service web was changed by somebody else meanwhile; "
        "hint: vipctl describe web shows it as it is now\n"
    )
    spec = await desk.spec()
    assert (spec["backends"], spec["affinity"]) == (["10.244.0.7"], {"by": "client-ip", "timeout": "10m"})
    assert "10.244.0.8@3" in kept.read_text()


@story_of(at_a_desk)
async def test_a_service_that_is_gone_meanwhile_stays_so(desk: Desk) -> None:
    other = f"{sys.executable} -m vipd.cli.main --socket {desk.vipd.socket} remove web >/dev/null"
    desk.editor(f"{ADD_BACKEND}; {other}")
    ended = await desk.vipctl("edit", "web")
    assert (ended.code, await desk.stored(), len(desk.kept())) == (3, set(), 1)


@story_of(at_a_desk)
async def test_a_service_of_a_file_is_refused_before_the_editor_opens(desk: Desk) -> None:
    desk.vipd.declare(block("10.96.0.20", "filed", "10.244.0.9"), name="f.yaml")
    assert (await desk.vipd.reload()).status == 200
    desk.editor(":")
    ended = await desk.vipctl("edit", "filed")
    assert (ended.code, desk.times(), desk.kept()) == (1, 0, [])
    assert f"hint: edit {desk.vipd.services_dir}/f.yaml, line 3" in ended.stderr
    assert (await desk.vipctl("edit", "nope")).code == 3


@pytest.mark.parametrize(
    ("script", "told", "code"),
    [("exit 3", "exit code 3", 1), ("kill -INT $$", "SIGINT", 130), ("kill -HUP $$", "SIGHUP", 1)],
)
@story_of(at_a_desk)
async def test_an_editor_that_fails_changes_nothing(desk: Desk, *, script: str, told: str, code: int) -> None:
    desk.editor(f"{ADD_BACKEND}; {script}")
    ended = await desk.vipctl("edit", "web")
    assert (ended.code, ended.stdout) == (code, "")
    assert ended.stderr.endswith(f"my editor failed: {told}; nothing was changed\n")
    assert (await desk.spec())["backends"] == ["10.244.0.7"]
    (kept,) = desk.kept()
    assert f"the edited text is in {kept}\n" in ended.stderr


@story_of(at_a_desk)
async def test_an_editor_that_fails_without_a_change_leaves_no_file(desk: Desk) -> None:
    for script in ("exit 1", "rm FILE; exit 1", "rm FILE"):
        desk.editor(script)
        ended = await desk.vipctl("edit", "web")
        assert (ended.code, desk.kept()) == (1, [])
        assert "the edited text" not in ended.stderr
        for seen in desk.path.glob("seen.*"):
            seen.unlink()


@story_of(at_a_desk)
async def test_a_dry_run_shows_what_would_change_and_keeps_the_text(desk: Desk) -> None:
    desk.editor(ADD_BACKEND)
    ended = await desk.vipctl("edit", "web", "--dry-run")
    (kept,) = desk.kept()
    assert ended.stderr == f"the edited text is in {kept}; hint: vipctl apply -f {kept}\n"
    assert ended.stdout.splitlines() == [
        "# web: would be changed",
        "  name: web",
        "  address: 10.96.0.11",
        "  ports: [80/tcp]",
        "- backends: [10.244.0.7]",
        "+ backends:",
        "+ - 10.244.0.7",
        "+ - {address: 10.244.0.8, weight: 3}",
        "changed web (backends); dry run: nothing was done",
    ]
    assert (await desk.spec())["backends"] == ["10.244.0.7"]


@story_of(at_a_desk)
async def test_text_that_is_no_utf_8_is_a_problem_and_not_lost(desk: Desk) -> None:
    desk.at_a_terminal()
    desk.editor("printf '# caf\\351\\n' >> FILE", f"{ADD_BACKEND}; LC_ALL=C sed -i '$d' FILE")
    assert (await desk.vipctl("edit", "web")).code == 0
    assert "UTF-8" in (desk.path / "seen.1").read_bytes().decode("latin-1")
    assert len((await desk.spec())["backends"]) == 2  # type: ignore[arg-type]


def opened(spawn: Spawn, daemon: FakeDaemon, tmp_path: Path, script: str) -> subprocess.Popen[bytes]:
    """A vipctl of its own, whose editor is that script; FILE is the edited file."""
    daemon.answer("GET /v1/services/web", one(DNS | {"name": "web", "spec": WEB}))
    daemon.answer("PATCH /v1/services/web", changed(("changed", "web")))
    program = tmp_path / "editor"
    program.write_text(f"#!/bin/sh\n{script.replace('FILE', FILE)}\n")
    program.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    return spawn("edit", "web", EDITOR=str(program), VISUAL="", TMPDIR=str(tmp_path / "tmp"))


def changes(daemon: FakeDaemon) -> list[object]:
    """What was to be changed, dry runs left out."""
    return [each.body for each in daemon.requests if each.method == "PATCH" and "dry_run" not in each.query]


def test_ctrl_c_in_the_editor_is_for_the_editor(spawn: Spawn, daemon: FakeDaemon, tmp_path: Path) -> None:
    may_end_by_it = "sh -c 'kill -INT $$' && exit 7"
    script = f"{may_end_by_it}; trap : INT; kill -INT $PPID $$; kill -QUIT $PPID; {ADD_BACKEND}"
    process = opened(spawn, daemon, tmp_path, script)
    assert process.wait(PATIENCE_SECONDS) == 0
    backends = ["10.244.0.7", {"address": "10.244.0.8", "weight": 3}]
    assert changes(daemon) == [{"service": {"backends": backends}}]


def test_a_session_that_is_lost_changes_nothing(spawn: Spawn, daemon: FakeDaemon, tmp_path: Path) -> None:
    process = opened(spawn, daemon, tmp_path, f"{ADD_BACKEND}; kill -HUP $PPID")
    assert process.wait(PATIENCE_SECONDS) == -signal.SIGHUP
    assert changes(daemon) == []
    (kept,) = (tmp_path / "tmp").rglob("*.yaml")
    assert "10.244.0.8@3" in kept.read_text()


@pytest.mark.parametrize(
    ("visual", "editor", "told"),
    [
        ("sh -c 'exit 3'", "cat", "sh failed: exit code 3"),
        (" ", "sh -c 'exit 4'", "sh failed: exit code 4"),
        ("", "no-such-editor -x", "no-such-editor"),
        ("", "vi '", "quotation"),
    ],
)
@story_of(at_a_desk)
async def test_visual_comes_before_editor_and_no_other_replaces_it(
    desk: Desk, *, monkeypatch: pytest.MonkeyPatch, visual: str, editor: str, told: str
) -> None:
    monkeypatch.setenv("VISUAL", visual)
    monkeypatch.setenv("EDITOR", editor)
    ended = await desk.vipctl("edit", "web")
    assert (ended.code != 0, told in ended.stderr) == (True, True), ended


@story_of(at_a_desk)
async def test_else_the_first_installed_is_opened(desk: Desk, *, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDITOR", raising=False)
    monkeypatch.setenv("PATH", str(desk.path))
    ended = await desk.vipctl("edit", "web")
    assert "no editor: none of editor, vi, nano is installed" in ended.stderr
    for code, name in enumerate(("nano", "vi", "editor"), 5):
        (desk.path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (desk.path / name).chmod(0o755)
        assert f"{name} failed: exit code {code}" in (await desk.vipctl("edit", "web")).stderr
