"""Where metrics and status page are served, as the settings say it."""

from __future__ import annotations

import pytest

from vipd.host.settings.settings import Settings, load_settings
from vipd.host.settings.settings_file import SettingsError

NAMES = ("metrics_address", "status_page")


def place(name: str, given: object) -> tuple[str, int] | None:
    settings = load_settings(flags={name: given})
    return settings.metrics_socket_address() if name == "metrics_address" else settings.page_socket_address()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("given", "found"),
    [
        (9254, ("127.0.0.1", 9254)),
        ("9254", ("127.0.0.1", 9254)),
        ("127.0.0.1:9254", ("127.0.0.1", 9254)),
        ("0.0.0.0:9254", ("0.0.0.0", 9254)),
        ("[::1]:9254", ("::1", 9254)),
    ],
)
def test_a_port_alone_is_on_loopback(name: str, given: object, found: tuple[str, int]) -> None:
    assert place(name, given) == found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("given", ["", "lb1:9254", "127.0.0.1", "127.0.0.1:9254/tcp", "0", "70000", -1])
def test_what_is_no_place_is_refused(name: str, given: object) -> None:
    with pytest.raises(SettingsError, match=name):
        load_settings(flags={name: given})


def test_both_are_off_unless_set() -> None:
    assert (Settings().metrics_socket_address(), Settings().page_socket_address()) == (None, None)
