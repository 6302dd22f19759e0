"""Reads a file to which symbolic links may lead, without giving other users vipd's right to read.

vipd reads with its own user's rights, and problems quote content. A user other than root who may create links
in the directory of declarations can disclose only files of that user: every link on the path must belong
to root, or to the owner of the file that is read. The path is walked from one open directory to the next, so
that nothing can be exchanged in between.

`durable.open_directory` follows another rule, so there are two walks: starting from `/`, it judges each link
by its owner and that of its directory, before it follows it. Here the owner of the file decides, which is
known only at the end of the path, and any link may lead to the directory in the file's name.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import ExitStack
from pathlib import Path

from vipd.host.durable import read_large

MAX_LINKS = 40
"""Maximum number of followed links, as in Linux."""

_ROOT = 0
_PATH_ONLY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY


class LinkOwnerError(OSError):
    """A link on the path belongs neither to root nor to the owner of the file."""

    def __init__(self, owner: int, file_owner: int) -> None:
        what = f"it is a symbolic link of user {owner} to a file of user {file_owner}"
        super().__init__(errno.EPERM, what)
        self.hint = "let the link belong to root or to the owner of the file (chown -h)"


def read_followed(path: Path, most: int) -> bytearray:
    """The content of a regular file of `most` bytes at most. Links to it are followed as described above; any
    link may lead to its directory.

    Raises OSError; LinkOwnerError for a link that is not followed.
    """
    with ExitStack() as opened:
        walk = _Walk(opened, path)
        descriptor = walk.open_file()
        owner = os.fstat(descriptor).st_uid
        strangers = walk.owners - {_ROOT, owner}
        if strangers:
            os.close(descriptor)
            raise LinkOwnerError(min(strangers), owner)
        return read_large(descriptor, most)


class _Walk:
    """One path, followed name by name. `owners`: those of the links on it."""

    def __init__(self, opened: ExitStack, path: Path) -> None:
        self._opened = opened
        self._at = self._keep(os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        self._left = [path.name]
        self._links = 0
        self.owners: set[int] = set()

    def open_file(self) -> int:
        """A descriptor to read the file. Raises OSError, also for anything but a regular file."""
        while True:
            name = self._left.pop()
            found = self._keep(os.open(name, _PATH_ONLY, dir_fd=self._at))
            about = os.fstat(found)
            if stat.S_ISLNK(about.st_mode):
                self._follow(found, about.st_uid)
            elif self._left:
                self._at = found
            elif stat.S_ISREG(about.st_mode):
                return os.open(name, _READ, dir_fd=self._at)
            elif stat.S_ISDIR(about.st_mode):
                raise IsADirectoryError(0, "is a directory")
            else:
                raise OSError(0, "is not a regular file")

    def _follow(self, link: int, owner: int) -> None:
        self._links += 1
        if self._links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        self.owners.add(owner)
        target = os.readlink("", dir_fd=link)
        if target.startswith("/"):
            self._at = self._keep(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        names = [name for name in target.split("/") if name not in ("", ".")]
        self._left += reversed(names or ["."])

    def _keep(self, descriptor: int) -> int:
        self._opened.callback(os.close, descriptor)
        return descriptor
