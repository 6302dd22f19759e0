from __future__ import annotations

from pathlib import Path

import pytest

from vipd.host.settings.settings import Settings, load_settings, unknown_environment
from vipd.host.settings.settings_file import SettingsError, parse_assignments
from vipd.model.service import Family, Masquerade


def problems(*args: object, text: str | None = None, tmp_path: Path | None = None, **kwargs: object) -> str:
    """The lines of the SettingsError that loading raises."""
    if text is not None and tmp_path is not None:
        (tmp_path / "vipd.yaml").write_text(text)
        args = (tmp_path / "vipd.yaml",)
    with pytest.raises(SettingsError) as caught:
        load_settings(*args, **kwargs)  # type: ignore[arg-type]  # as each test says
    return "\n".join(caught.value.problems)


def test_environment_wins_over_the_file_and_flags_over_both(tmp_path: Path) -> None:
    config = tmp_path / "vipd.yaml"
    config.write_text("log_level: error\nmark_bit: 3\nsocket_group: file\n")
    settings = load_settings(
        config, {"log_level": "debug"}, {"VIPD_LOG_LEVEL": "info", "VIPD_MARK_BIT": "4", "LOG_LEVEL": "x"}
    )
    assert (settings.log_level, settings.mark_bit, settings.socket_group) == ("debug", 4, "file")
    assert settings.flow_mark_bit == Settings.model_fields["flow_mark_bit"].default


def test_the_process_environment_counts_only_when_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIPD_LOG_LEVEL", "debug")
    assert load_settings().log_level == "info"


def test_an_empty_environment_variable_means_the_default() -> None:
    assert load_settings(environment={"VIPD_MARK_BIT": ""}).mark_bit == 14


@pytest.mark.parametrize("given", ["10.0.0.0/8,fd00::/8", " 10.0.0.0/8 , fd00::/8 ,"])
def test_lists_in_the_environment_are_separated_by_commas(given: str) -> None:
    settings = load_settings(environment={"VIPD_CLUSTER_CIDRS": given})
    assert settings.cluster_cidrs == ("10.0.0.0/8", "fd00::/8")
    assert settings.cluster_cidrs_of(Family.IPV6) == ("fd00::/8",)


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ("/bin/a", ("/bin/a",)),
        ("[/bin/a, '-x, y', \"7\"]", ("/bin/a", "-x, y", "7")),
        ("", ()),
    ],
)
def test_a_command_in_the_environment_is_a_path_or_a_list(given: str, command: tuple[str, ...]) -> None:
    assert load_settings(environment={"VIPD_NOTIFY": given}).notify == command


def test_a_command_is_limited_in_length() -> None:
    with pytest.raises(SettingsError, match="longer than 4096 characters"):
        load_settings(flags={"notify": ["/bin/a", "x" * 4096]})


def test_lists_in_the_file_are_lists_and_networks_get_their_usual_spelling(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("cluster_cidrs: [10.0.0.0/8, 'FD00:0::/8']\n")
    assert load_settings(tmp_path / "c").cluster_cidrs == ("10.0.0.0/8", "fd00::/8")


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    text = "colour: red\nmark_bit: 32\nchain_prefix: vipd-long\nservices_dir: etc/x\n"
    text += "cluster_cidrs: [10.0.0.1/8]\n"
    told = problems(text=text, tmp_path=tmp_path, flags={"log_level": "loud"})
    for name in ("colour", "mark_bit", "chain_prefix", "services_dir", "cluster_cidrs", "log_level"):
        assert name in told
    assert "absolute" in told
    assert "unknown setting" in told
    assert "10.244.0.0/16" in told, "the hint shows what a network looks like"
    assert str(tmp_path / "vipd.yaml") in told


@pytest.mark.parametrize(
    ("text", "said"),
    [
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
    ],
)
def test_wrong_values_are_told_in_our_own_words(tmp_path: Path, text: str, said: str) -> None:
    assert problems(text=text, tmp_path=tmp_path) == f"{tmp_path}/vipd.yaml:1: {said}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "# a\n\nsocket: x\nmark_bit: 99\n",
            [":3: socket: must be an absolute path", ":4: mark_bit: must be"],
        ),
        ("etcd:\n  endpoints: [https://a:1]\n  colour: red\n", [":3: etcd.colour: unknown setting"]),
        ("cluster_cidrs:\n  - 10.0.0.0/8\n  - 10.0.0.0/33\n", [":3: cluster_cidrs: "]),
        ("zone: a\n\tnode: b\n", [":2: YAML syntax: ", "; hint: indent with spaces, not tabs"]),
        ("zone: a\nmetrics_address: [::1]:9090\n", [":2: YAML syntax: ", 'put IPv6 in quotes: "[::1]:9090"']),
        ("mark_bit: 3\nzone: a\nmark_bit: 4\n", [':3: the key "mark_bit" stands twice']),
        ("zone: a\n---\nzone: b\n", [": more than one document; hint: keep one"]),
    ],
)
def test_a_problem_of_the_file_names_its_line(tmp_path: Path, text: str, said: list[str]) -> None:
    told = problems(text=text, tmp_path=tmp_path)
    assert "\nin " not in told
    for words in said:
        assert f"{tmp_path}/vipd.yaml{words}" in told if words.startswith(":") else words in told


def test_what_stands_on_the_command_line_has_no_line() -> None:
    with pytest.raises(SettingsError) as caught:
        parse_assignments(["cluster_cidrs=[10.0.0.0/8"])
    assert caught.value.problems[0].startswith("--set cluster_cidrs=[10.0.0.0/8: YAML syntax: ")


def test_a_fault_of_the_environment_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    (tmp_path / "vipd.yaml").write_text("log_level: info\n")
    with pytest.raises(SettingsError) as caught:
        load_settings(tmp_path / "vipd.yaml", {}, {"VIPD_LOG_LEVEL": "loud"})
    assert "vipd.yaml" not in caught.value.problems[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("log_level: info\nlog_level: debug\n", "twice"),
        ("- a\n", "mapping"),
        ("a: [\n", "vipd.yaml:2: YAML syntax: "),
        ("socket: run/x\n", "absolute"),
        ("mark_bit: often\n", "mark_bit"),
        ("masquerade: off-cluster\n", "cluster_cidrs"),
        ("dataplane: ipvs\n", "dataplane"),
        ("chain_prefix: VIPDVIPD\n", "chain_prefix"),
        ("chain_prefix: V-D\n", "chain_prefix"),
        ("log_level: !!python/object/apply:os.getcwd []\n", "vipd.yaml:1: the YAML tag"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_name(tmp_path: Path, text: str, said: str) -> None:
    told = problems(text=text, tmp_path=tmp_path)
    assert said in told
    assert "vipd.yaml" in told


@pytest.mark.parametrize(
    "text", ["[a]: 1\n", "{a: 1}: 2\n", "log_level: 2026-13-45\n"], ids=["list key", "mapping key", "date"]
)
def test_odd_yaml_is_refused_and_not_a_crash(tmp_path: Path, text: str) -> None:
    assert "vipd.yaml" in problems(text=text, tmp_path=tmp_path)


def test_files_that_are_missing_empty_or_not_text(tmp_path: Path) -> None:
    assert "No such file" in problems(tmp_path / "none.yaml")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert "UTF-8" in problems(tmp_path / "bytes")
    (tmp_path / "empty").write_text("# nothing\n")
    assert load_settings(tmp_path / "empty") == load_settings()


def test_assignments_are_read_as_in_the_file() -> None:
    given = ["mark_bit=5", "cluster_cidrs=[10.0.0.0/8]", "accept_forwarded=false", "socket_group= a=b "]
    settings = load_settings(flags=parse_assignments(given))
    assert settings.mark_bit == 5
    assert settings.cluster_cidrs == ("10.0.0.0/8",)
    assert settings.accept_forwarded is False
    assert settings.socket_group == "a=b"


@pytest.mark.parametrize("given", ["mark_bit", "a=[", "=5"])
def test_what_is_no_assignment_is_refused_with_its_text(given: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags=parse_assignments([given]))
    assert "\n".join(caught.value.problems)


def test_names_under_our_prefix_that_are_no_setting_are_told() -> None:
    environment = {"VIPD_LOG_LEVEL": "x", "VIPD_LOGLEVEL": "x", "VIPD_": "", "HOME": "/"}
    assert unknown_environment(environment) == ["VIPD_", "VIPD_LOGLEVEL"]


def test_masquerade_auto_depends_on_the_cluster_networks_of_the_family() -> None:
    settings = load_settings(flags={"cluster_cidrs": ["10.0.0.0/8"]})
    assert settings.masquerade_for(Family.IPV4) is Masquerade.OFF_CLUSTER
    assert settings.masquerade_for(Family.IPV6) is Masquerade.FORWARDED
    compatible = load_settings(flags={"compat": "kube-proxy", "cluster_cidrs": ["10.244.0.0/16"]})
    assert compatible.masquerade_for(Family.IPV4) is Masquerade.OFF_CLUSTER
    assert compatible.masquerade_for(Family.IPV6) is Masquerade.HAIRPIN
    assert load_settings(flags={"masquerade": "always"}).masquerade_for(Family.IPV6) is Masquerade.ALWAYS
