"""What is unpacked: whom it is trusted from, who may do it at once, and what becomes of it in bad times."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.onefile.built import NOBODY, TIMEOUT_SECONDS, FreshHost, altered

pytestmark = pytest.mark.nightly

HELP = ("vipctl", "--help")
HELP_STARTS = "Usage: vipctl"


def unpacked(host: FreshHost, warm: FreshHost) -> FreshHost:
    """A host where the file has been unpacked, to be changed at will."""
    shutil.copytree(warm.cache, host.cache, symlinks=True)
    return host


def test_processes_that_start_at_once_unpack_once(host: FreshHost) -> None:
    environment = {"CACHE_DIRECTORY": str(host.cache)}
    pipe = subprocess.PIPE
    argv = [str(host.file), *HELP]
    racing = [subprocess.Popen(argv, env=environment, stdout=pipe, stderr=pipe, text=True) for _ in range(8)]
    results = [(*process.communicate(timeout=TIMEOUT_SECONDS), process.returncode) for process in racing]
    for out, err, code in results:
        assert (code, err, out.startswith(HELP_STARTS)) == (0, "", True)
    assert sorted(path.name for path in host.cache.iterdir()) == [".lock", host.trees[0].name]


@pytest.mark.root
@pytest.mark.parametrize(("owner", "mode"), [(NOBODY, 0o755), (0, 0o777), (0, 0o1777), (0, 0o775)])
def test_directory_of_others_is_refused(host: FreshHost, warm: FreshHost, owner: int, mode: int) -> None:
    cache = host.give("cache", owner, mode)
    trap = cache / warm.trees[0].name
    (trap / "lib").mkdir(parents=True)
    (trap / "lib" / "vipd.py").write_text("print('caught')\n")
    (trap / "in-use").touch(0o600)
    for path in (trap, trap / "lib", trap / "lib" / "vipd.py", trap / "in-use"):
        shutil.chown(path, owner, owner)
    done = host.run(*HELP)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{cache}" in done.stderr
    assert ("belongs to uid" if owner else "can be written by others") in done.stderr
    assert "hint: " in done.stderr
    assert sorted(cache.iterdir()) == [trap]


@pytest.mark.root
def test_directory_below_one_of_others_is_refused(host: FreshHost) -> None:
    host.give("home", NOBODY, 0o755)
    (host.directory / "home" / "own").mkdir()
    done = host.run(*HELP, CACHE_DIRECTORY=host.directory / "home" / "own" / "cache")
    assert (done.returncode, f"{host.directory / 'home'} belongs to uid {NOBODY}" in done.stderr) == (1, True)
    assert not list((host.directory / "home" / "own").iterdir())


@pytest.mark.root
def test_link_of_others_leads_nowhere(host: FreshHost) -> None:
    open_to_all = host.give("sticky", 0, 0o1777)
    target = host.give("target")
    link = open_to_all / "cache"
    link.symlink_to(target)
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    done = host.run(*HELP, CACHE_DIRECTORY=link)
    assert (done.returncode, f"{link}: belongs to uid {NOBODY}" in done.stderr) == (1, True), done.stderr
    assert not list(target.iterdir())


@pytest.mark.root
def test_others_use_what_root_has_unpacked(host: FreshHost, warm: FreshHost) -> None:
    home = host.give("home", NOBODY, 0o700)
    # Root's usual place, seen by this command alone.
    mounts = f"""
    mount -t tmpfs -o mode=755 none /var/cache
    mkdir /var/cache/vipd
    mount --bind {warm.cache} /var/cache/vipd
    """
    as_nobody = f'set -- setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups "$@"'
    done = host.in_mounts(f"{mounts}\n{as_nobody}", *HELP, HOME=home)
    assert done.stdout.startswith(HELP_STARTS), done.stderr
    assert not list(home.iterdir())


@pytest.mark.root
def test_full_disk_is_an_error_with_a_hint_and_leaves_nothing(host: FreshHost) -> None:
    small = host.give("small")
    mounts = f"mount -t tmpfs -o size=9M,mode=755 none {small}\ntrap 'ls {small}' EXIT"
    done = host.in_mounts(mounts, *HELP, CACHE_DIRECTORY=small)
    assert done.returncode == 1
    assert f"{small}: No space left on device" in done.stderr
    assert "hint: " in done.stderr
    assert "MB free: CACHE_DIRECTORY=" in done.stderr
    assert done.stdout == ""


@pytest.mark.root
def test_host_that_is_read_only_says_where_it_unpacks_instead(host: FreshHost) -> None:
    # The file itself is below the machine's /tmp.
    mounts = f"""
    mount -t tmpfs -o ro none /var/cache
    exec 9<{host.file}
    mount -t tmpfs -o mode=1777 none /tmp
    cp /proc/self/fd/9 /tmp/vipctl
    chmod +x /tmp/vipctl
    set -- /tmp/vipctl --help
    """
    done = host.in_mounts(mounts, HOME="/proc")
    assert done.stdout.startswith(HELP_STARTS), done.stderr
    assert "unpacked to /tmp/vipd-0, because not to:" in done.stderr
    assert "/var/cache/vipd: Read-only file system" in done.stderr


@pytest.mark.root
@pytest.mark.parametrize(
    ("options", "reason"), [("ro,mode=755", "Read-only file system"), ("noexec,mode=755", "noexec")]
)
def test_named_place_that_cannot_serve_is_an_error(host: FreshHost, options: str, reason: str) -> None:
    place = host.give("place")
    done = host.in_mounts(f"mount -t tmpfs -o {options} none {place}", *HELP, CACHE_DIRECTORY=place)
    assert (done.returncode, reason in done.stderr, "hint: " in done.stderr) == (1, True, True), done.stderr


def test_module_that_is_damaged_is_mended_before_it_runs(host: FreshHost, warm: FreshHost) -> None:
    unpacked(host, warm)
    for path in (host.lib / "vipd" / "cli").rglob("main*"):
        path.write_bytes(path.read_bytes()[:100])
    done = host.run(*HELP)
    assert (done.returncode, done.stdout.startswith(HELP_STARTS)) == (0, True), done.stderr
    assert host.run("--unpack").returncode == 0


def test_module_that_is_missing_in_the_middle_is_mended_for_the_next_run(
    host: FreshHost, warm: FreshHost
) -> None:
    unpacked(host, warm)
    shutil.rmtree(host.lib / "yaml")
    check = ("vipctl", "check", "/dev/null")
    first, second = host.run(*check), host.run(*check)
    assert first.returncode == 1
    assert "damaged" in first.stderr
    assert "hint: run the command again" in first.stderr
    assert second.returncode == 0, second.stderr


def test_unpack_mends_what_no_import_would_notice(host: FreshHost, warm: FreshHost) -> None:
    unpacked(host, warm)
    victim = next((host.lib / "pydantic_core").glob("*.so"))
    good = victim.read_bytes()
    victim.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    done = host.run("--unpack")
    assert (done.returncode, done.stdout.strip()) == (0, str(host.trees[0]))
    assert victim.read_bytes() == good


@pytest.mark.parametrize("part", ["common", "vipd"])
def test_damaged_file_says_so(host: FreshHost, part: str) -> None:
    def flip(data: bytes) -> bytes:
        return data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]

    broken = altered(host.file, host.directory / "broken.pyz", f"{part}.tar.xz", flip)
    done = host.command(str(broken), *HELP, CACHE_DIRECTORY=host.cache)
    assert (done.returncode, "this file is damaged" in done.stderr) == (1, True)
    assert [path.name for path in host.cache.iterdir()] == [".lock"]
