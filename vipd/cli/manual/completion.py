"""The scripts by which bash, zsh and fish complete `vipctl`. Pure.

Verbs, options and choices stand in them; only for names that the daemon knows they ask `vipctl complete`.
The scripts that click makes run the program for every word: 118 ms of processor time where these take 2 ms.
They have no static form, and cut 10.96.0.10:53/udp at its colons.
"""

from __future__ import annotations

from vipd.cli.manual import bash, fish, zsh
from vipd.cli.manual.settings_reference import settings
from vipd.cli.manual.verbs import group_options, verbs

FILES = {"bash": "bash/vipctl", "zsh": "zsh/_vipctl", "fish": "fish/vipctl.fish"}
"""Each shell's script, as it must be called in the directory where that shell looks for it."""

_WRITERS = {"bash": bash.script, "zsh": zsh.script, "fish": fish.script}


def script(shell: str) -> str:
    """The script for `bash`, `zsh` or `fish`."""
    return _WRITERS[shell](group_options(), verbs(), [setting.name for setting in settings()])
