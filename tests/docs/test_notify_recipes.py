"""The scripts that docs/operations.md has for `notify`: run with an event, and a curl that
keeps what it gets."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT

EVENT = {
    "id": 1767225600000000,
    "time": "2026-01-01T00:00:00.000Z",
    "event": "backend-health",
    "level": "warning",
    "services": ["shop/web"],
    "backends": ["10.244.0.11:8080"],
    "unit": "",
    "cause": "check http",
    "reason": 'unhealthy: status 500 "no \\ way"',
    "count": 1,
    "first": 1767225600000000,
    "since": "2026-01-01T00:00:00.000Z",
}
LINE = f"{json.dumps(EVENT)}\n"
CURL = '#!/bin/sh\necho "$*" > "$OUT/arguments"\ncat > "$OUT/body"\n'

pytestmark = pytest.mark.skipif(not shutil.which("jq"), reason="no jq here; hint: apt install jq")


def recipes() -> list[str]:
    """The scripts, in the order of the page: mail, webhook, chat."""
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page.partition("### A program for each event")[2].partition("\n## ")[0]
    return re.findall(r"```\n(#!/bin/sh\n.*?)```", section, re.DOTALL)


def sent(recipe: str, directory: Path, level: str = "warning", event: str = "backend-health") -> str | None:
    """What a recipe gives to curl; None if it calls none."""
    for name, text in (("curl", CURL), ("notify", recipe)):
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    environment = {"PATH": f"{directory}:/usr/bin:/bin", "OUT": str(directory)}
    environment |= {"VIPD_NODE": "lb1", "VIPD_LEVEL": level, "VIPD_EVENT": event}
    notify = [directory / "notify"]
    done = subprocess.run(notify, input=LINE, env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    body = directory / "body"
    return body.read_text() if body.exists() else None


def test_mail(tmp_path: Path) -> None:
    mail = sent(recipes()[0], tmp_path)
    assert mail is not None
    head, _, body = mail.partition("\n\n")
    assert "Subject: [vipd] lb1: backend-health" in head
    assert body.splitlines() == [
        "2026-01-01T00:00:00.000Z backend-health",
        "shop/web 10.244.0.11:8080",
        'unhealthy: status 500 "no \\ way"',
        "by check http",
    ]
    assert "-T - smtp://127.0.0.1" in (tmp_path / "arguments").read_text()


def test_a_webhook_gets_the_event_as_it_is(tmp_path: Path) -> None:
    assert sent(recipes()[1], tmp_path) == LINE


def test_a_chat_gets_one_line(tmp_path: Path) -> None:
    message = json.loads(sent(recipes()[2], tmp_path) or "")
    text = 'lb1: backend-health shop/web 10.244.0.11:8080: unhealthy: status 500 "no \\ way"'
    assert message == {"text": text}


@pytest.mark.parametrize("number", [0, 2])
def test_what_is_only_information_is_left_out(number: int, tmp_path: Path) -> None:
    assert sent(recipes()[number], tmp_path, "info", "service-added") is None
