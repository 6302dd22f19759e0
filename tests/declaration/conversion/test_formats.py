"""Which format a text has, and that no text is too odd or too large."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.declaration.conversion.test_conversion import FORMS, table
from tests.declaration.strategies import PATIENT
from tests.lab.inside import declare, written
from vipd.model.limits import ALL_PROBLEMS

TEXTS: dict[str, str] = {form: table(form)["cases"][0]["text"] for form in FORMS}


@pytest.mark.parametrize(
    ("text", "form"),
    [
        *((text, form) for form, text in TEXTS.items()),
        ("#!/sbin/ipvsadm-restore\n\n  -A -f 1 -s rr\n", "ipvsadm"),
        ("virtual_server fd00::1 80 {\n}\n", "keepalived"),
        ("vrrp_instance A {\n}\nvirtual_server 10.0.0.1 80 {\n}\n", "keepalived"),
        ("listen web\n bind :80\n", "haproxy"),
        ("defaults # all\n", "haproxy"),
        ("upstream a {\n server 10.0.0.1:80;\n}\n", "nginx"),
        ("apiVersion: vipd/v1\ndefaults: {check: tcp}\nservices: []\n", "kubernetes"),
        ("---\nkind: Service\napiVersion: v1\n", "kubernetes"),
        ('\n{"kind": "List"}', "kubernetes"),
        ("# listen web\n", ""),
        ("", ""),
        ("hello\n", ""),
    ],
)
def test_the_format_of_a_text(text: str, form: str) -> None:
    recognised = declare(text, form="auto", addresses=["10.96.0.10"])
    assert recognised == declare(text, form=form, addresses=["10.96.0.10"])
    others = {*TEXTS, ""} - {form or "", "" if form == "kubernetes" else form}
    assert recognised not in [declare(text, form=other, addresses=["10.96.0.10"]) for other in others]


WORDS = (
    *("{", "}", ";", '"', "'", "\\", "$A", "${A}", "@b", "~", "", "[::]:80", "0", "99999999999", "\0"),
    *("include", "stick on src", "option httpchk", "health_check", "UDP_CHECK {", "payload", "-b"),
)
PIECES = st.sampled_from([*(word for text in TEXTS.values() for word in text.split()), *WORDS])
ODD = st.lists(st.tuples(PIECES, st.sampled_from([" ", "\n", ""])).map("".join), max_size=40).map("".join)


@PATIENT
@given(st.sampled_from(list(TEXTS)), ODD, st.integers(0, 1000), st.booleans())
def test_no_text_is_too_odd(form: str, odd: str, place: int, amid: bool) -> None:
    before, after = TEXTS[form][:place], TEXTS[form][place:]
    text = f"{before}{odd}{after}" if amid else odd
    found = declare(text, form=form, addresses=["10.96.0.10"])
    assert not [each for each in found.problems if each.internal]
    again = declare(written(found.services), "printed")
    assert (again.services, again.problems) == (found.services, ())
    assert found.services or found.problems


@pytest.mark.parametrize("form", list(TEXTS))
@pytest.mark.parametrize("piece", ["{", "a {", "'", "\\", " ", "-", "server ", "listen a #"])
def test_a_long_text_takes_time_in_proportion(form: str, piece: str) -> None:
    def seconds(number: int) -> float:
        text = piece * number
        started = time.thread_time()  # not what else the machine does
        declare(text, form="auto")
        declare(text, form=form)
        return time.thread_time() - started

    short, long = (min(seconds(number) for _ in range(2)) for number in (2_000, 16_000))
    assert long < 24 * short + 0.1


def test_further_problems_are_counted() -> None:
    text = "".join(f"-A -f {number} -s rr\n" for number in range(1, ALL_PROBLEMS + 500))
    found = declare(text, form="ipvsadm")
    assert len(found.problems) == ALL_PROBLEMS + 1
    assert "and 499 more problems" in found.problems[-1].what
