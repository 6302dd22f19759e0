"""Settings from files, the environment and the command line: all that is wrong is told, by its line."""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.daemon_process import ConfiguredHost, host
from tests.lab.inside import vipctl
from tests.lab.node import Node
from tests.model.samples import HEAD, block


def told(directory: Path, text: str | bytes | None, *assignments: str) -> str:
    """What `vipctl check` says of a file of settings; None: there is none."""
    (directory / "services.d").mkdir(exist_ok=True)
    file = directory / "vipd.yaml"
    file.unlink(missing_ok=True)
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    argv = ["check", str(directory / "services.d"), "--settings", str(file)]
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        code = vipctl([*argv, *(word for each in assignments for word in ("--set", each))])
    said = stderr.getvalue()
    assert bool(said) == bool(code), said
    return said.replace(f"{file}:", "FILE:").removesuffix("vipctl: unusable settings\n")


WRONG_VALUES = [
    ("log_level: loud\n", 'log_level: must be one of debug, info, warning, error, not "loud"'),
    (
        "log_level: warn\n",
        'log_level: must be one of debug, info, warning, error, not "warn"; hint: did you mean warning?',
    ),
    ("manage_sysctls: maybe\n", 'manage_sysctls: must be true or false, not "maybe"'),
    ("mark_bit: often\n", 'mark_bit: must be a whole number, not "often"'),
    ("mark_bit: 32\n", "mark_bit: must be at most 31, not 32"),
    ("mark_bit: -1\n", "mark_bit: must be at least 0, not -1"),
    ("zone: 7\n", "zone: must be text, not 7"),
    ("zone:\n", "zone: must be text, not nothing"),
    ("services_dir: [a]\n", "services_dir: must be a path, not a list"),
    ("cluster_cidrs: 7\n", "cluster_cidrs: must be a list, not 7"),
    ("chain_prefix: v\n", 'chain_prefix: "v" is not in the form wanted; hint: man vipd.yaml'),
    (
        "notify: logger -t vipd\n",
        "notify: 'logger -t vipd' is one word; hint: write a list, such as [logger, -t, vipd]",
    ),
    (
        "notify: [logger]\n",
        "notify: 'logger' is no absolute path; hint: vipd uses no shell and searches no PATH",
    ),
    ("notify: [/bin/a, 5]\n", "notify: 5 is no text; hint: put it in quotes"),
    (
        "notify: {a: b}\n",
        "notify: must be a list, a program and its arguments; hint: [/usr/local/bin/notify, --short]",
    ),
    ("markbit: 3\n", "markbit: unknown setting; hint: did you mean mark_bit?"),
    ("weather: fair\n", "weather: unknown setting; hint: man vipd.yaml tells them all"),
]


def test_wrong_values_are_told_in_our_own_words(tmp_path: Path) -> None:
    shown = {text: told(tmp_path, text) for text, _ in WRONG_VALUES}
    assert shown == {text: f"FILE:1: {said}\n" for text, said in WRONG_VALUES}


LINES = [
    ("# a\n\nsocket: x\nmark_bit: 99\n", [":3: socket: must be an absolute path", ":4: mark_bit: must be"]),
    ("etcd:\n  endpoints: [https://a:1]\n  colour: red\n", [":3: etcd.colour: unknown setting"]),
    ("cluster_cidrs:\n  - 10.0.0.0/8\n  - 10.0.0.0/33\n", [":3: cluster_cidrs: "]),
    ("zone: a\n\tnode: b\n", [":2: YAML syntax: ", "; hint: indent with spaces, not tabs"]),
    ("zone: a\nmetrics_address: [::1]:9090\n", [":2: YAML syntax: ", 'put IPv6 in quotes: "[::1]:9090"']),
    ("mark_bit: 3\nzone: a\nmark_bit: 4\n", [':3: the key "mark_bit" stands twice']),
    ("zone: a\n---\nzone: b\n", [": more than one document; hint: keep one"]),
]


def test_a_problem_of_the_file_names_its_line(tmp_path: Path) -> None:
    for text, words in LINES:
        shown = told(tmp_path, text)
        assert "\nin " not in shown
        missing = [each for each in words if (f"FILE{each}" if each.startswith(":") else each) not in shown]
        assert missing == [], (text, shown)


REFUSED = [
    ("- a\n", "mapping"),
    ("a: [\n", "vipd.yaml:2: YAML syntax: "),
    ("masquerade: off-cluster\n", "cluster_cidrs"),
    ("dataplane: ipvs\n", "dataplane"),
    ("chain_prefix: VIPDVIPD\n", "chain_prefix"),
    ("chain_prefix: V-D\n", "chain_prefix"),
    ("log_level: !!python/object/apply:os.getcwd []\n", "vipd.yaml:1: the YAML tag"),
    ("[a]: 1\n", ""),
    ("{a: 1}: 2\n", ""),
    ("log_level: 2026-13-45\n", ""),
]


def test_a_file_that_cannot_be_used_is_refused_with_its_name(tmp_path: Path) -> None:
    for text, said in REFUSED:
        shown = told(tmp_path, text)
        assert said in shown.replace("FILE", "vipd.yaml"), (text, shown)
        assert "FILE:" in shown
        assert "Traceback" not in shown
    assert "No such file" in told(tmp_path, None)
    assert "UTF-8" in told(tmp_path, b"\xff\xfe")
    assert told(tmp_path, "# nothing\n") == ""


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    text = "colour: red\nmark_bit: 32\nchain_prefix: vipd-long\nservices_dir: etc/x\n"
    text += "cluster_cidrs: [10.0.0.1/8]\n"
    shown = told(tmp_path, text, "log_level=loud")
    for name in ("colour", "mark_bit", "chain_prefix", "services_dir", "cluster_cidrs", "log_level"):
        assert name in shown
    assert "absolute" in shown
    assert "unknown setting" in shown
    assert "10.244.0.0/16" in shown, "the hint shows what a network looks like"


def test_assignments_on_the_command_line_have_no_line(tmp_path: Path) -> None:
    assert told(tmp_path, "", "mark_bit=5", "cluster_cidrs=[10.0.0.0/8]", "socket_group= a=b ") == ""
    assert told(tmp_path, "", "cluster_cidrs=[10.0.0.0/8").startswith(
        "--set cluster_cidrs=[10.0.0.0/8: YAML syntax: "
    )
    for wrong in ("mark_bit", "a=[", "=5", f"notify=[/bin/a, {'x' * 4096}]"):
        assert told(tmp_path, "", wrong)
    assert "longer than 4096 characters" in told(tmp_path, "", f"notify=[/bin/a, {'x' * 4096}]")


class WithEnvironment(ConfiguredHost):
    """A host whose daemon has these variables and flags."""

    flags: tuple[str, ...] = ()

    def __init__(self, namespace: str, root: Path) -> None:
        super().__init__(namespace, root)
        self.environment: dict[str, str] = {}
        self._node = Node(namespace, "host", "", "", environment=self.environment)

    def argv(self, *arguments: str, module: str = "vipd") -> list[str]:
        return [*super().argv(*arguments, module=module), *self.flags]


@pytest.fixture
def configured() -> Iterator[WithEnvironment]:
    with host() as made:
        (made.root / "other").mkdir()
        yield WithEnvironment(made.namespace, made.root / "other")


@pytest.mark.root
def test_environment_wins_over_the_file_and_flags_over_both(configured: WithEnvironment) -> None:
    """Empty means the default, and a name under the prefix that is no setting is told."""
    configured.settings |= {"log_level": "error", "mark_bit": 3, "node_name": "file"}
    configured.environment |= {
        "VIPD_LOG_LEVEL": "info",
        "VIPD_MARK_BIT": "4",
        "VIPD_FLOW_MARK_BIT": "",
        "LOG_LEVEL": "x",
        "VIPD_MARKBIT": "5",
        "VIPD_CLUSTER_CIDRS": " 10.0.0.0/8 , FD00:0::/8 ,",
        "VIPD_NOTIFY": "[/bin/true, '-x, y', \"7\"]",
    }
    configured.write("a.yaml", HEAD + block("10.96.0.1", "a", "10.244.0.1"))
    configured.flags = ("--set", "mark_bit=6")
    configured.start()
    settings = configured.get("status")["settings"]
    configured.end(signal.SIGTERM)
    assert (settings["log_level"], settings["mark_bit"], settings["node_name"]) == ("info", 6, "file")
    assert (settings["flow_mark_bit"], settings["cluster_cidrs"]) == (13, ["10.0.0.0/8", "fd00::/8"])
    assert settings["notify"] == ["/bin/true", "-x, y", "7"]
    assert "VIPD_MARKBIT" in configured.log()


@pytest.mark.root
def test_a_fault_of_the_environment_is_not_blamed_on_the_file(configured: WithEnvironment) -> None:
    configured.environment |= {"VIPD_LOG_LEVEL": "loud", "VIPD_NOTIFY": "bin/a"}
    done = configured.vipd("--check")
    assert done.returncode == 78
    assert "VIPD_LOG_LEVEL" in done.stderr or "log_level" in done.stderr
    assert "vipd.yaml" not in done.stderr
