"""The setting `etcd` is read as strictly as the rest, and every problem is reported at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from vipd.cli.main import cli
from vipd.host.settings.etcd import EtcdSettings
from vipd.host.settings.settings import Settings, load_settings
from vipd.host.settings.settings_file import SettingsError

URL = "http://10.0.0.1:2379"


def problems(**etcd: object) -> list[str]:
    with pytest.raises(SettingsError) as error:
        load_settings(flags={"etcd": etcd})
    return error.value.problems


def options(settings: Settings) -> EtcdSettings:
    assert settings.etcd is not None
    return settings.etcd


def test_everything_can_be_said(tmp_path: Path) -> None:
    file = tmp_path / "vipd.yaml"
    file.write_text(
        f"store: etcd\netcd: {{endpoints: [{URL}, 'https://[fd00::1]:2379'], prefix: /x/, ca: /ca,\n"
        "  cert: /cert, key: /key, user: u, password_file: /pw, timeout: 500ms,\n"
        "  max_removal: 30%, report_interval: 5s}\n"
    )
    settings = load_settings(file)
    wanted = EtcdSettings(
        (URL, "https://[fd00::1]:2379"),
        "/x/",
        Path("/ca"),
        Path("/cert"),
        Path("/key"),
        "u",
        Path("/pw"),
        0.5,
        30,
        5,
    )
    assert (options(settings), settings.store) == (wanted, "etcd")


def test_little_need_be_said() -> None:
    found = load_settings(environment={"VIPD_ETCD": f"{{endpoints: '{URL}, {URL}2'}}"})
    assert options(found) == EtcdSettings((URL, f"{URL}2"))
    assert (load_settings().etcd, load_settings().store) == (None, "file")


def test_every_problem_names_its_key() -> None:
    found = problems(endpoint=[URL], timeout="soon", max_removal="half", report_interval="1h", ca="relative")
    keys = {problem.partition(": ")[0] for problem in found}
    wanted = {"endpoint", "timeout", "max_removal", "report_interval", "ca"}
    assert keys == {f"etcd.{key}" for key in wanted}, found
    found = problems(
        endpoints=["10.0.0.1:2379"], prefix="/", user="u", cert="/c", timeout="2m", max_removal=101
    )
    assert len(found) == 6, found
    assert all(problem.startswith("etcd: ") for problem in found)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"store": "etcd"}, "store: etcd needs etcd; hint: name its endpoints"),
        ({"etcd": {}}, "etcd: endpoints: none; hint: name at least one"),
        ({"etcd": [URL]}, "etcd: must be a mapping; hint: {endpoints:"),
        ({"etcd": "{endpoints: [}"}, "etcd: the text: YAML syntax: "),
    ],
)
def test_what_cannot_be_used_says_the_way_out(flags: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(flags=flags)
    assert said in "\n".join(error.value.problems)


def test_who_registers_is_warned_of_a_password_that_goes_unencrypted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def keep(*_: object) -> None:
        """No etcd is asked."""

    monkeypatch.setattr("vipd.cli.register._keep", keep)
    (tmp_path / "pw").write_text("secret\n")
    words = ["register", "web", "10.0.0.5:80", "--endpoint", URL, "--user", "u"]
    words += ["--password-file", str(tmp_path / "pw")]
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    assert done.output == (
        f"vipctl: warning: etcd's password for u goes unencrypted to {URL}; hint: use https:// endpoints\n"
    )
    assert CliRunner().invoke(cli, [*words, "-q"], standalone_mode=False).output == ""
