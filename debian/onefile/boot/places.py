"""Where the program is unpacked, and whom to trust with it.

Code is loaded from these directories, so that one that somebody else than root or this user can write to is
never used.
"""

import fcntl
import os
import stat

import contents

HOLD = "in-use"
"""File of a tree that each process running from it holds locked (shared). A tree gets its name by rename once
it is complete, so that this file being there says that all of it is."""

SHARED = "/var/cache/vipd"
"""Root's place. Other users run what root unpacked there, and never write."""

DIGITS = 16
"""Length of a digest."""

_held: list[int] = []


def bases() -> list[str]:
    """Directories that may hold the tree, best first. One that the environment names is the only one."""
    if "CACHE_DIRECTORY" in os.environ:
        found = [os.environ["CACHE_DIRECTORY"].split(":")[0]]
    else:
        user_cache = os.environ.get("XDG_CACHE_HOME", "")
        if os.geteuid() == 0 or not user_cache.startswith("/"):
            user_cache = os.path.expanduser("~/.cache")  # noqa: PTH111  (each start would import pathlib)
        # The last is for hosts whose disk is read-only or full; it is checked as the others are.
        found = [SHARED, f"{user_cache}/vipd", f"/tmp/vipd-{os.geteuid()}"]  # noqa: S108
    return [os.path.normpath(base) for base in found if base.startswith("/")]


def tree_name(part: str) -> str:
    """Name of the tree of a part: another one for other contents."""
    return f"{contents.VERSION}-{contents.DIGEST}-{part}"


def find(part: str) -> str | None:
    """The unpacked tree if there is one, held by this process from now on."""
    for base in bases():
        tree = f"{os.path.realpath(base)}/{tree_name(part)}"
        if enter(tree):
            return tree
    return None


def enter(tree: str) -> bool:
    """Hold a tree, if it is complete, nobody removes it just now, and only trusted users can write to it."""
    hold = f"{tree}/{HOLD}"
    try:
        status = os.lstat(hold)
        if fault(tree.rpartition("/")[0]) or fault(tree):
            return False
        if status.st_uid != os.geteuid():
            # Root's tree: its lock is not for others, who could hold up root by it.
            return os.access(f"{tree}/lib", os.R_OK | os.X_OK)
        descriptor = os.open(hold, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    _held.append(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return os.fstat(descriptor).st_nlink > 0


def fault(directory: str) -> str:
    """Why somebody else than root and this user could write here, or replace it; empty when nobody can.

    Above `directory`, a sticky directory such as /tmp will do. What does not exist is not judged.
    """
    path = directory
    while True:
        try:
            reason = _fault_of(path, sticky_will_do=path != directory)
        except FileNotFoundError:
            reason = ""
        if reason or path == "/":
            return reason
        path = path.rpartition("/")[0] or "/"


def _fault_of(path: str, sticky_will_do: bool) -> str:
    status = os.lstat(path)
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to uid {status.st_uid}"
    # The mode of a symbolic link says nothing.
    open_to_others = status.st_mode & 0o022 and not stat.S_ISLNK(status.st_mode)
    if open_to_others and not (sticky_will_do and status.st_mode & stat.S_ISVTX):
        return f"{path} can be written by others, mode {stat.S_IMODE(status.st_mode):04o}"
    return ""


def others(tree: str) -> list[str]:
    """Trees of other contents beside this one: of older versions, that is, seldom of newer ones."""
    base, _, own = tree.rpartition("/")
    found = []
    for name in os.listdir(base):  # noqa: PTH208  (as above)
        # As tree_name() makes it; nothing else in the directory is ours.
        _, digest, part = f"--{name}".rsplit("-", 2)
        if len(digest) == DIGITS and part.startswith("cp") and digest != own.rsplit("-", 2)[1]:
            found.append(f"{base}/{name}")
    return found
