"""Writes an initramfs that holds vipd, what it needs, and a kernel's modules:

    python -m tests.kernels.build_initramfs CACHE KERNEL OUTPUT [PROGRAMS]

Files of this machine keep their paths: Python with the dependencies of vipd, the programs of `PROGRAMS`, and
the libraries that `ldd` names. The files of the directory PROGRAMS become programs of the guest, too. Nothing
is compressed: an emulated processor unpacks slowly.
"""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import BinaryIO

PROJECT = Path(__file__).resolve().parents[2]
PROGRAMS = (
    *("sh", "cat", "mount", "unshare", "ip", "ss", "sysctl", "nft", "conntrack"),
    *("xtables-nft-multi", "xtables-legacy-multi"),
)
TABLES = [
    f"{family}tables{variant}{verb}"
    for family in ("ip", "ip6")
    for variant in ("", "-nft", "-legacy")
    for verb in ("", "-save", "-restore")
]
MODULE_FOLDERS = (
    *("net/netfilter", "net/ipv4", "net/ipv6", "net/bridge", "net/802", "net/llc", "net/sctp", "net/xfrm"),
    *("net/core", "net/sched", "lib", "crypto", "arch/x86/crypto"),
    *("drivers/net/veth.ko", "drivers/net/dummy.ko"),
)
NOT_OF_PYTHON = (
    *("test", "idlelib", "tkinter", "ensurepip", "lib2to3"),
    *("site-packages", "__pycache__", "config-*"),
)
"""Folders of the standard library that stay out: large, and not needed."""
DIRECTORIES = (
    *("proc", "sys", "dev", "run", "tmp", "usr/sbin", "usr/lib", "usr/lib64"),
    *("etc/vipd/services.d", "var/lib/vipd"),
)
LDD_SECONDS, COMPILE_SECONDS = 60, 300
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_LIBRARY = re.compile(r"(/\S+) \(0x")

INIT = """#!/bin/sh
export PATH=/usr/sbin HOME=/ PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/opt/vipd:/opt/vipd/packages
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs -o mode=755 run /run
exec >/dev/ttyS0 2>&1 </dev/null
{python} -m $VIPD_SET
echo 1 >/proc/sys/kernel/sysrq
echo b >/proc/sysrq-trigger
while :; do :; done
"""
"""`VIPD_SET` comes from the kernel's command line.
Without power management: the reset ends qemu (-no-reboot)."""


class Root:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._programs: list[Path] = []

    def at(self, path: Path | str) -> Path:
        """Where an absolute path of the guest lies; its folder is there then."""
        place = self.directory / str(path).lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def file(self, source: Path, path: Path | str | None = None) -> None:
        place = self.at(path or source)
        if not place.exists():
            shutil.copy2(source, place)
        if ".so" in source.name or source.stat().st_mode & stat.S_IXUSR:
            self._programs.append(source)

    def folder(self, source: Path, path: Path | str, without: Iterable[str] = ("__pycache__",)) -> None:
        ignore = shutil.ignore_patterns(*without)
        shutil.copytree(source, self.at(path), ignore=ignore, dirs_exist_ok=True)
        self._programs += (each for each in source.rglob("*.so*") if each.is_file())

    def link(self, path: str, target: str) -> None:
        self.at(path).symlink_to(target)

    def libraries(self, tools: Path) -> None:
        """What all programs so far are linked with: from this machine, else from unpacked packages."""
        besides = ":".join(str(tools / name / "x86_64-linux-gnu") for name in ("lib", "usr/lib"))
        found: set[str] = set()
        for each in set(self._programs):
            command = ["ldd", str(each)]
            environment = {"LD_LIBRARY_PATH": besides, "PATH": "/usr/bin:/bin"}
            ran = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=LDD_SECONDS, env=environment
            )
            found.update(_LIBRARY.findall(ran.stdout))
        for library in map(Path, sorted(found)):
            place = Path("/usr/lib") / library.name if library.is_relative_to(tools) else library
            if not self.at(place).exists():
                shutil.copy2(library, self.at(place))


def requirements(names: Iterable[str]) -> Iterator[metadata.Distribution]:
    left, seen = list(names), set()
    while left:
        match = _NAME.match(left.pop().strip())
        name = re.sub(r"[-_.]+", "-", match[0]).lower() if match else ""
        if not name or name in seen:
            continue
        seen.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another system or Python: pip would have installed it
        yield found
        left += (each for each in found.requires or () if "extra ==" not in each)


def add_python(root: Root) -> None:
    program, library = Path(sys.executable).resolve(), Path(sysconfig.get_path("stdlib"))
    root.file(program)
    root.folder(library, library, NOT_OF_PYTHON)
    with (PROJECT / "pyproject.toml").open("rb") as file:
        names = tomllib.load(file)["project"]["dependencies"]
    for distribution in requirements(names):
        for each in distribution.files or ():
            source = Path(str(distribution.locate_file(each)))
            if ".." not in each.parts and "__pycache__" not in each.parts and source.is_file():
                root.file(source, f"/opt/vipd/packages/{each}")
    root.folder(PROJECT / "vipd", "/opt/vipd/vipd")
    for name in ("kernels", "lab", "bench", "model"):
        root.folder(PROJECT / "tests" / name, f"/opt/vipd/tests/{name}")
    # To compile them again and again would be most of the guest's time.
    folders = [root.at(library), root.at("/opt/vipd")]
    command = [str(program), "-m", "compileall", "-q", "-j2", "--invalidation-mode", "unchecked-hash"]
    subprocess.run(
        [*command, "-s", str(root.directory), "-p", "/", *map(str, folders)],
        check=False,
        timeout=COMPILE_SECONDS,
    )


def add_programs(root: Root, tools: Path) -> None:
    for name in PROGRAMS:
        found = shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
        if found is None:
            raise SystemExit(f"{name} is not installed; hint: sudo bash tests/kernels/prepare.sh")
        root.file(Path(found).resolve(), f"/usr/sbin/{name}")
    for name in TABLES:
        variant = "legacy" if "legacy" in name else "nft"
        root.link(f"/usr/sbin/{name}", f"xtables-{variant}-multi")
    extensions = Path("/usr/lib/x86_64-linux-gnu/xtables")
    root.folder(extensions, extensions)
    root.file(tools / "bin/kmod", "/usr/sbin/kmod")
    root.file(tools / "sbin/ipvsadm", "/usr/sbin/ipvsadm")
    root.link("/usr/sbin/modprobe", "kmod")
    for name in ("bin", "sbin"):
        root.link(f"/{name}", "usr/sbin")
    root.link("/usr/bin", "sbin")
    root.link("/lib", "usr/lib")
    root.link("/lib64", "usr/lib64")


def add_modules(root: Root, kernel: Path, depmod: Path) -> None:
    above = kernel / "usr/lib/modules" if (kernel / "usr/lib/modules").exists() else kernel / "lib/modules"
    (modules,) = above.iterdir()
    target = root.at(f"/usr/lib/modules/{modules.name}/kernel")
    for name in MODULE_FOLDERS:
        source = modules / "kernel" / name
        for each in source.rglob("*.ko*") if source.is_dir() else source.parent.glob(f"{source.name}*"):
            place = target / each.relative_to(modules / "kernel")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(each, place)
    for name in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        shutil.copy2(modules / name, target.parent)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "depmod"  # kmod goes by its name
        program.symlink_to(depmod)
        library = {"LD_LIBRARY_PATH": str(depmod.parents[1] / "usr/lib/x86_64-linux-gnu")}
        command = [str(program), "-b", str(root.directory / "usr"), modules.name]
        subprocess.run(command, check=True, timeout=LDD_SECONDS, env=library)


def write_archive(directory: Path, output: BinaryIO) -> None:
    """Write a tree as the kernel reads it: cpio in the format `newc`, without owners and times."""
    for number, path in enumerate(sorted(directory.rglob("*")), 1):
        status = path.lstat()
        if path.is_symlink():
            body = str(path.readlink()).encode()
        else:
            body = path.read_bytes() if path.is_file() else b""
        _entry(output, str(path.relative_to(directory)), number, status.st_mode, body)
    _entry(output, "TRAILER!!!", 0, 0, b"")


def _entry(output: BinaryIO, name: str, number: int, mode: int, body: bytes) -> None:
    text = name.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(body), 0, 0, 0, 0, len(text), 0)
    head = b"070701" + b"".join(b"%08X" % each for each in fields) + text
    output.write(head + b"\0" * (-len(head) % 4) + body + b"\0" * (-len(body) % 4))


def build(cache: Path, kernel: str, output: Path, programs: Path | None = None) -> None:
    tools = cache / "tools"
    with tempfile.TemporaryDirectory(prefix="vipd-initramfs-") as folder:
        root = Root(Path(folder))
        for name in DIRECTORIES:
            (root.directory / name).mkdir(parents=True)
        add_programs(root, tools)
        for program in programs.iterdir() if programs else ():
            root.file(program, f"/usr/sbin/{program.name}")
        add_python(root)
        root.libraries(tools)
        add_modules(root, cache / kernel, tools / "bin/kmod")
        init = root.at("/init")
        init.write_text(INIT.format(python=Path(sys.executable).resolve()))
        init.chmod(0o755)
        root.at("/etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
        root.at("/etc/group").write_text("root:x:0:\n")
        for name in ("protocols", "services"):
            source = Path("/etc") / name
            if source.exists():
                shutil.copy2(source, root.at(source))
        with output.open("wb") as file:
            write_archive(root.directory, file)


if __name__ == "__main__":
    build(Path(sys.argv[1]), sys.argv[2], *map(Path, sys.argv[3:5]))
