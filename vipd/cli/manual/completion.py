"""The scripts by which bash, zsh and fish complete `vipctl`. Pure.

They contain verbs, options and choices; only for the daemon's names they call `vipctl complete`. The scripts
that click generates run the program for every word: 118 ms of processor time where these take 2 ms. They have
no static form, and split 10.96.0.10:53/udp at its colons.
"""

from __future__ import annotations

from vipd.cli.manual import bash, fish, zsh
from vipd.cli.manual.settings_reference import settings
from vipd.cli.manual.verbs import group_options, verbs

FILES = {"bash": "bash/vipctl", "zsh": "zsh/_vipctl", "fish": "fish/vipctl.fish"}
"""Each shell's script, with the file name that the shell requires in its directory."""

_WRITERS = {"bash": bash.script, "zsh": zsh.script, "fish": fish.script}


def script(shell: str) -> str:
    """The script for `bash`, `zsh` or `fish`."""
    return _WRITERS[shell](group_options(), verbs(), [setting.name for setting in settings()])
