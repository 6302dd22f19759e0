"""A host without room for another watch of files: that is told, and files are followed all the same."""

from __future__ import annotations

import subprocess
import sys

from tests.lab.inside import Vipd, running
from tests.model.samples import block

STORY = """
from tests.host.test_no_file_watch import followed
followed()
"""
NO_WATCH = 'echo 0 >/proc/sys/user/max_inotify_instances && exec "$@"'


def followed() -> None:
    """What a vipd does that gets no watch."""

    async def story(vipd: Vipd) -> None:
        status = await vipd.until_status(lambda status: "cannot be watched" in str(status["warnings"]))
        (warning,) = [text for text in status["warnings"] if "cannot be watched" in text]
        assert f"{vipd.services_dir} cannot be watched: " in warning
        assert "looking every few seconds" in warning
        vipd.declare(block("10.96.0.11", "web", "10.244.0.6"))
        await vipd.until(lambda: vipd.kernel.names() == {"web"})

    running(story, lambda vipd: vipd.declare(block("10.96.0.10", "dns", "10.244.0.5")))


def test_files_are_followed_where_there_is_no_room_for_a_watch() -> None:
    """In a user namespace, whose limit is its own."""
    shell = ("unshare", "--user", "--map-root-user", "sh", "-c", NO_WATCH, "sh")
    argv = [*shell, sys.executable, "-c", STORY]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
