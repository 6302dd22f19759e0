"""vipd's own files: they survive a crash at any moment, and other users' files in their place do no harm.

Files are written aside, synced, renamed over, and the directory synced. Root's tools (`vipctl cleanup`,
`vipd --once`) work in directories that belong to the daemon's user, which may put anything there. So each
file is reached from `/` by descriptors: a symbolic link is followed only if none but root or the own user can
create it, only regular files are opened, never one that blocks, and new files are really new.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 256 * 2**20
"""Maximum size of any file that is read."""
MAX_MOVED_ASIDE = 9
"""Copies of one file that are kept aside."""
_MOST_LINKS = 40
_PIECE = 2**18
"""Bytes of a large file that are read at once."""
_SAFELY = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def read_regular(path: Path, most: int = MAX_BYTES) -> bytes:
    """The content of a regular file that a user named; links to it are followed. Raises OSError, also for a
    directory, a pipe, which would block, or a file of more than `most` bytes."""
    return read_open(open_regular(path), most)


def read_open(descriptor: int, most: int) -> bytes:
    """The content of an open file, which is closed. Raises OSError for one that is not regular, or has more
    than `most` bytes."""
    with open(descriptor, "rb") as file:
        _require_room(descriptor, 0, most)
        data = file.read(most + 1)
        _require_room(descriptor, len(data), most)
        return data


def read_large(descriptor: int, most: int) -> bytearray:
    """The same of a file that may be large: it is read in pieces and never copied as a whole, so that other
    threads have their turn."""
    with open(descriptor, "rb") as file:
        data, piece = bytearray(), b"first"
        while piece:
            _require_room(descriptor, len(data), most)
            piece = file.read(_PIECE)
            data += piece
        return data


def _require_room(descriptor: int, read: int, most: int) -> None:
    found = os.fstat(descriptor)
    _require_regular(found)
    if max(found.st_size, read) > most:
        size = f"{most >> 20} MiB" if most >= 2**20 else f"{most} bytes"
        raise OSError(0, f"is larger than {size}")


def open_regular(path: Path) -> int:
    """A descriptor to read a regular file that a user named; links to it are followed. Raises OSError."""
    _require_regular(path.stat())  # before it is opened: opening a device may have effects
    descriptor = os.open(path, os.O_RDONLY | _SAFELY)
    try:
        _require_regular(os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_own(path: Path, most: int = MAX_BYTES) -> bytes:
    """The content of a file of vipd's own. Raises OSError, also for a link."""
    return read_open(open_own(path, os.O_RDONLY), most)


def open_own(path: Path, flags: int, mode: int = 0o640) -> int:
    """A descriptor of a file of vipd's own, which is regular, and no link. Raises OSError.

    A file that root creates in the directory of another user belongs to that user.
    """
    with _inside(path.parent) as directory:
        descriptor = os.open(path.name, flags | os.O_NOFOLLOW | _SAFELY, mode, dir_fd=directory)
        try:
            _require_own(os.fstat(descriptor), os.fstat(directory))
            if flags & os.O_CREAT:
                _chown_like_directory(descriptor, directory)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor


def remove_own(path: Path) -> None:
    """Remove a file of vipd's own, or a link in its place, if there is one. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), _inside(path.parent) as directory:
        os.unlink(path.name, dir_fd=directory)


def names_in(path: Path) -> list[str]:
    """The names in a directory of vipd's own, sorted. Raises OSError."""
    with _readable(path) as directory:
        return sorted(os.listdir(directory))  # noqa: PTH208 (a descriptor, not a path)


def rename_own(path: Path, name: str) -> None:
    """Give a file of vipd's own another name in its directory, which is replaced there. Raises OSError."""
    with _inside(path.parent) as directory:
        os.replace(path.name, name, src_dir_fd=directory, dst_dir_fd=directory)


def move_aside(path: Path, keep_original: bool = False) -> str:
    """Rename an unusable file, so that a new one does not replace it: to
    `NAME.unreadable`, then `NAME.unreadable-2`. If it `keep_original`, it gets that name besides its own.

    Returns the outcome in words; never raises.
    """
    names = [
        f"{path.name}.unreadable",
        *(f"{path.name}.unreadable-{n}" for n in range(2, MAX_MOVED_ASIDE + 1)),
    ]
    try:
        with _inside(path.parent) as directory:
            for name in names:
                if _kept_as(name, path.name, directory, keep_original):
                    return f"it is kept as {path.with_name(name)}"
    except OSError as error:
        return f"it cannot be kept aside: {error_text(error)}"
    return f"it is not kept aside, as there are {MAX_MOVED_ASIDE} such files already"


def error_text(error: Exception) -> str:
    """The error of a file, without its name."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def read_fault(path: Path, error: Exception, otherwise: str = "") -> str:
    """Why a file of vipd cannot be read, and what to do: `otherwise`, unless this user may not read it."""
    hint = otherwise
    if isinstance(error, PermissionError):
        hint = (
            f"hint: run this as root (sudo), or let its user read it: chown --reference={path.parent} {path}"
        )
    return f"{path}: cannot be read: {error_text(error)}" + (f"; {hint}" if hint else "")


def write_durably(path: Path, data: bytes | bytearray, mode: int = 0o640) -> None:
    """Replace a file by `data`; afterwards a power cut leaves the old content or the new, never a mix.

    Raises OSError; then the old content remains.
    """
    aside = f".{path.name}.new"
    with _inside(path.parent) as directory:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside, dir_fd=directory)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | _SAFELY
        with open(os.open(aside, flags, mode, dir_fd=directory), "wb") as file:  # noqa: PTH123
            _chown_like_directory(file.fileno(), directory)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path.name, src_dir_fd=directory, dst_dir_fd=directory)
    sync_directory(path.parent)


def make_directory(path: Path) -> None:
    """Create a directory of vipd's own if it is missing. Raises OSError, whose text says so if it was
    removed while vipd ran: a unit of systemd cannot create it again, and the system's text would mislead."""
    try:
        os.close(open_directory(path, make=0o750))
    except OSError as error:
        if path.exists():
            raise
        why = f"the directory {path} is gone and cannot be made again ({error.strerror})"
        raise OSError(error.errno, f"{why}; hint: systemctl restart vipd makes it") from None


def sync_directory(path: Path) -> None:
    """Make renames and removals in a directory last through a power cut."""
    with _readable(path) as directory:
        os.fsync(directory)


@contextlib.contextmanager
def _inside(path: Path) -> Iterator[int]:
    """A descriptor of a directory, for names in it. Raises OSError."""
    descriptor = open_directory(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[int]:
    """A descriptor that can be read and synced. Raises OSError."""
    with _inside(path) as directory:
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_directory(path: Path, make: int | None = None) -> int:
    """A descriptor of a directory, for access to its content; a missing one is
    created with the mode `make`. Raises OSError."""
    ahead, links = list(reversed(path.absolute().parts)), 0
    here = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while ahead:
            name = ahead.pop()
            inner = _step(here, name, 0o777 if ahead and make else make)
            if isinstance(inner, str):
                ahead += reversed(Path(inner).parts)
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                continue
            os.close(here)
            here = inner
        if not stat.S_ISDIR(os.fstat(here).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    except OSError:
        os.close(here)
        raise
    return here


def _step(here: int, name: str, mode: int | None) -> int | str:
    """A descriptor of a name in a directory, or the target of a link there. A missing directory is created
    with a `mode`. Raises OSError, also for a link that neither root nor the own user has created."""
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        inner = os.open(name, flags, dir_fd=here)
    except FileNotFoundError:
        if mode is None:
            raise
        _make(here, name, mode)
        inner = os.open(name, flags, dir_fd=here)
    found = os.fstat(inner)
    if not stat.S_ISLNK(found.st_mode):
        return inner
    try:
        if not {found.st_uid, os.fstat(here).st_uid} <= _trusted():
            raise OSError(errno.ELOOP, f"{name} is a symbolic link of another user, and is not followed")
        return os.readlink("", dir_fd=inner)
    finally:
        os.close(inner)


def _trusted() -> set[int]:
    """Users whose links are followed. In a user namespace the owner of `/` is the true root."""
    return {0, os.geteuid(), os.lstat("/").st_uid}


def _make(here: int, name: str, mode: int) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=here)
    made = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
    try:
        _chown_like_directory(made, here)
    finally:
        os.close(made)


def _chown_like_directory(descriptor: int, directory: int) -> None:
    """Give an object that root has created in a directory of another user to that user, which must work with
    it."""
    found, owner = os.fstat(descriptor), os.fstat(directory)
    if os.geteuid() == 0 == found.st_uid and owner.st_uid != 0:
        os.fchown(descriptor, owner.st_uid, owner.st_gid)


def _kept_as(name: str, own: str, directory: int, stays: bool) -> bool:
    """Whether a file now has another name in its directory, or had it already. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        return stays and os.path.samestat(found, os.stat(own, dir_fd=directory, follow_symlinks=False))
    if stays:
        os.link(own, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
    else:
        os.rename(own, name, src_dir_fd=directory, dst_dir_fd=directory)
    return True


def _require_own(found: os.stat_result, directory: os.stat_result) -> None:
    """Raises OSError for anything but a regular file, or for a second name of a file of another user."""
    _require_regular(found)
    if found.st_nlink > 1 and found.st_uid != directory.st_uid:
        raise OSError(errno.EMLINK, "is a hard link to a file of another user")


def _require_regular(found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(0, "is a directory")
    if not stat.S_ISREG(found.st_mode):
        raise OSError(0, "is not a regular file")
