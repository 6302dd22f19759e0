"""What cannot be used is told before anything is tried."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from vipd.host.settings.etcd import EtcdSettings
from vipd.sources.etcd.endpoints import Endpoints
from vipd.sources.etcd.messages import KeyRange

GOOD = EtcdSettings(("https://10.0.0.1:2379", "http://[fd00::1]:2379"))


def test_good_settings_have_no_problem() -> None:
    assert GOOD.problems() == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (EtcdSettings(()), "endpoints: none"),
        (EtcdSettings(("10.0.0.1:2379",)), "must be scheme, host and port"),
        (EtcdSettings(("https://10.0.0.1",)), "must be scheme, host and port"),
        (EtcdSettings(("https://10.0.0.1:99999",)), "Port out of range"),
        (EtcdSettings(("https://u:p@10.0.0.1:2379",)), "user and password have settings"),
        (EtcdSettings(GOOD.endpoints, prefix="/vipd"), "must end in a slash"),
        (EtcdSettings(GOOD.endpoints, cert=Path("/c")), "cert and key: only one"),
        (EtcdSettings(GOOD.endpoints, user="u"), "user and password_file: only one"),
        (EtcdSettings(GOOD.endpoints, timeout=0), "timeout: 0 s"),
        (EtcdSettings(GOOD.endpoints, max_removal=101), "max_removal: 101%"),
    ],
)
def test_each_problem_is_told(settings: EtcdSettings, words: str) -> None:
    (problem,) = settings.problems()
    assert words in problem


def test_endpoints_take_turns_and_the_one_that_works_is_kept() -> None:
    endpoints = Endpoints(("a", "b", "c", "a"), Random(1))
    first, second, third = endpoints.round()
    assert {first, second, third} == {"a", "b", "c"}
    endpoints.mark_failed(first)
    endpoints.mark_failed(first)
    assert endpoints.current == second, "one failure told twice moves on once"
    assert list(endpoints.round()) == [second, third, first]
    assert endpoints.current == second, "the one that works is kept"


def test_a_prefix_holds_its_keys_and_no_others() -> None:
    keys = KeyRange.prefix(b"/a/")
    assert keys.contains(b"/a/")
    assert keys.contains(b"/a/\xff\xff")
    assert not keys.contains(b"/a")
    assert not keys.contains(b"/a0")
    assert [str(keys), str(KeyRange(b"/a")), str(KeyRange(b"a", b"c"))] == ["/a/*", "/a", "[a, c)"]


@pytest.mark.parametrize(
    ("user", "endpoint", "warned"),
    [
        ("u", "http://10.0.0.1:2379", True),
        ("u", "http://etcd.example:2379", True),
        ("u", "https://10.0.0.1:2379", False),
        ("u", "http://127.0.0.1:2379", False),
        ("u", "http://[::1]:2379", False),
        ("u", "http://localhost:2379", False),
        ("", "http://10.0.0.1:2379", False),
    ],
)
def test_a_password_that_goes_unencrypted_is_warned_of(user: str, endpoint: str, warned: bool) -> None:
    settings = EtcdSettings(("https://10.0.0.9:2379", endpoint), user=user, password_file=Path("/pw"))
    assert [endpoint in warning and "10.0.0.9" not in warning for warning in settings.warnings()] == [
        True
    ] * warned
