"""Unpacks the program: all or nothing, by one process at a time; mends and removes what was unpacked."""

import ctypes
import fcntl
import hashlib
import io
import json
import os
import py_compile
import shutil
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import contents
import places

SUMS = "sha256.json"
"""In a tree: the checksum of every file of `lib`, by its path there."""

NEW = ".new-"
"""Prefix of what is being unpacked or removed. Who holds the lock finds only leftovers by it."""


class UnusableError(Exception):
    """Why a directory is not used."""


def unpack(part: str) -> str:
    """The tree of a part, unpacked to the first place that allows it; ends with a message when none does."""
    reasons: list[str] = []
    for named in _own_bases():
        try:
            tree = _unpack_into(named, part)
        except UnusableError as reason:
            reasons.append(f"  {named}: {str(reason).removeprefix(f'{named} ')}")
            continue
        if reasons:
            _say(f"vipd: unpacked to {tree.parent}, because not to:", *reasons)
        return str(tree)
    _say("vipd: cannot unpack the program to:", *(reasons or ["  CACHE_DIRECTORY: not an absolute path"]))
    _say(
        f"hint: mend that, or name a place with {contents.MEGABYTES} MB free: CACHE_DIRECTORY=/some/directory"
    )
    sys.exit(1)


def unpack_and_check(part: str) -> str:
    """As `unpack`, and every file of the tree is known to be as it should be."""
    tree = places.find(part) or unpack(part)
    mend(tree)
    return tree


def mend(tree: str) -> bool:
    """Unpack a tree anew if it is damaged: whether it was. Ends with a message when that does not work."""
    place = Path(tree)
    if not _damaged(place):
        return False
    try:
        with _locked(place.parent):
            # Another process may have mended it meanwhile.
            if _damaged(place):
                _make(place, place.name.rpartition("-")[2])
    except OSError as error:
        _say(f"vipd: {tree} is damaged, and cannot be unpacked anew: {error.strerror}")
        _say("hint: whoever it belongs to can mend it: vipd.pyz --unpack")
        sys.exit(1)
    return True


def remove_unused(tree: str) -> None:
    """Remove the trees beside this one that no process runs from."""
    with suppress(OSError), _locked(Path(tree).parent):
        _remove_unused(tree)


def _own_bases() -> list[str]:
    """Where this user may write."""
    shared_is_not_ours = os.geteuid() != 0 and "CACHE_DIRECTORY" not in os.environ
    return places.bases()[1 if shared_is_not_ours else 0 :]


def _unpack_into(named: str, part: str) -> Path:
    try:
        base = _prepared(Path(named))
        with _locked(base):
            tree = base / places.tree_name(part)
            if not places.enter(str(tree)):
                _remove_leftovers(base)
                _make(tree, part)
                _remove_unused(str(tree))
                places.enter(str(tree))
            return tree
    except OSError as error:
        raise UnusableError(error.strerror or str(error)) from None


def _prepared(named: Path) -> Path:
    """The directory without symbolic links, made if need be, and fit to hold code."""
    # First as it is written: nobody else's link may say where something is made.
    if reason := places.fault(str(named)):
        raise UnusableError(reason)
    with _umask(0o022 if os.geteuid() == 0 else 0o077):
        named.mkdir(parents=True, exist_ok=True)
    base = named.resolve()
    if reason := places.fault(str(base)):
        raise UnusableError(reason)
    if os.statvfs(base).f_flag & os.ST_NOEXEC:
        raise UnusableError("on a file system mounted noexec")
    return base


@contextmanager
def _locked(base: Path) -> Iterator[None]:
    """Nobody else unpacks or removes in `base` meanwhile; waits for who does."""
    descriptor = os.open(base / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def _make(tree: Path, part: str) -> None:
    """Write a tree beside its place, and to the disk, before it takes that place."""
    new = Path(tempfile.mkdtemp(prefix=NEW, dir=tree.parent))
    try:
        with _umask(0o022):
            lib = new / "lib"
            written = _write(part, lib)
            written += _compile(written, lib, tree / "lib")
            (new / SUMS).write_text(json.dumps({path: _sha256(lib / path) for path in written}))
        (new / places.HOLD).touch(0o600)
        new.chmod(0o755)
        # A power cut must not leave a tree that has its name but not all of its bytes.
        _sync(new)
        if os.path.lexists(tree):
            tree.rename(Path(tempfile.mkdtemp(prefix=NEW, dir=tree.parent)) / "damaged")
        new.rename(tree)
    finally:
        _remove_leftovers(tree.parent)


def _sync(directory: Path) -> None:
    """Bring the file system of a directory to its disk: that one alone, as others may have much to write."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(descriptor)


def _write(part: str, lib: Path) -> list[str]:
    """Write the files of a part; their paths below `lib`."""
    written = []
    for name in ("common", "vipd", part):
        with tarfile.open(fileobj=io.BytesIO(_packed(f"{name}.tar.xz"))) as archive:
            for member in archive:
                content = archive.extractfile(member)
                target = lib / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read() if content else b"")
                written.append(member.name)
    return written


def _packed(name: str) -> bytes:
    data: bytes = __spec__.loader.get_data(name)  # type: ignore[union-attr]  # the zip importer has it
    if hashlib.sha256(data).hexdigest() != contents.SHA256[name]:
        _say("vipd: this file is damaged: a checksum is wrong; hint: copy it here once more")
        sys.exit(1)
    return data


def _compile(written: list[str], lib: Path, final: Path) -> list[str]:
    """Compile modules for this Python, so that no start does; the paths of the bytecode below `lib`."""
    made = []
    mode = py_compile.PycInvalidationMode.TIMESTAMP
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in (path for path in written if path.endswith(".py")):
            # A module for later Pythons may not compile; nothing imports it then.
            with suppress(py_compile.PyCompileError):
                source, shown = str(lib / path), str(final / path)
                done = py_compile.compile(source, dfile=shown, doraise=True, invalidation_mode=mode)
                made.append(str(Path(done or source).relative_to(lib)))
    return made


def _damaged(tree: Path) -> bool:
    try:
        sums = json.loads((tree / SUMS).read_text())
        return any(_sha256(tree / "lib" / path) != known for path, known in sums.items())
    except (OSError, ValueError, AttributeError):
        return True


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _remove_unused(tree: str) -> None:
    for other in map(Path, places.others(tree)):
        with suppress(OSError):
            descriptor = os.open(other / places.HOLD, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                # Refused while a process runs from it: that one may still import from there.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # In one step, so that what is half removed is never taken for complete.
                shutil.rmtree(other.rename(other.with_name(NEW + other.name)))
            finally:
                os.close(descriptor)


def _remove_leftovers(base: Path) -> None:
    for leftover in base.glob(f"{NEW}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _say(*lines: str) -> None:
    sys.stderr.writelines(f"{line}\n" for line in lines)
