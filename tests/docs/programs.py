"""What vipctl says of texts of the documentation."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from pathlib import Path

from tests.lab.inside import Output, vipctl


def said(*arguments: str) -> Output:
    """Run vipctl in this process."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = vipctl(arguments)
    return Output(code, stdout.getvalue(), stderr.getvalue())


def settings_problems(text: str) -> list[str]:
    """What is wrong with a settings file of this text; each problem begins with the name of its setting."""
    with tempfile.TemporaryDirectory() as place:
        settings, nothing = Path(place, "vipd.yaml"), Path(place, "nothing.yaml")
        settings.write_text(text, encoding="utf-8")
        nothing.touch()
        ended = said("check", str(nothing), "--settings", str(settings))
        if ended.code == 0:
            return []
        lines = ended.stderr.removesuffix("vipctl: unusable settings\n").splitlines()
        return [re.sub(rf"^{re.escape(str(settings))}:(\d+:)? ", "", line) for line in lines]
