"""A doctor whose view of its host a test changes from outside: what is below /proc, and what programs say."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.observe.doctor.patient import Doctor, Patient

PROGRAMS = (
    "ip",
    "nft",
    "unshare",
    *(f"{stem}{kind}" for stem in ("iptables", "ip6tables") for kind in ("", "-save", "-nft", "-nft-save")),
)
_SCRIPT = """\
#!/bin/bash
# Does as the real program, unless its command line begins with a line of the table of faults.
here={here}
if [ -d $here/later ]; then /bin/cp -r $here/later/. $here/net/; fi
while IFS=$'\\t' read -r -u 3 start fault; do
    [[ "{name} $*" == "$start"* ]] || continue
    case $fault in
        failing) echo no >&2; exit 1 ;;
        babbling) printf '\\0\\177 [] lorem * ipsum\\n:x\\n'; exit 0 ;;
        odd) echo '[3, "x", null]'; exit 0 ;;
        cut) said=$(exec -a {name} {real} "$@"); printf %s "${{said:0:${{#said}}/2}}"; exit 0 ;;
        hanging) exec /bin/sleep 60 ;;
        *) exec /bin/cat "$fault" ;;
    esac
done 3<$here/faults
exec -a {name} {real} "$@"
"""
LISTS = ("tcp", "tcp6", "udp", "udp6", "netstat", "if_inet6", "ip_tables_names", "ip6_tables_names", "stat")
"""What of /proc/net the doctor reads."""


class Deceived:
    """A doctor beside a patient's daemon. Its /proc/net is the directory `net`, /proc/sys/net is `sys`,
    /proc/locks is the file `locks`, and the parameters of xt_recent are in `recent`."""

    def __init__(self, patient: Patient, directory: Path) -> None:
        self._here, self._bin = directory, directory / "bin"
        self._bin.mkdir()
        self.text("faults", "")
        for place in ("sbin", "bin"):
            for program in Path("/usr", place).iterdir():
                # Links, such as those of alternatives, would lead to what is put in their place.
                real = program.resolve()
                inside = real.parent in (Path("/usr/sbin"), Path("/usr/bin"))
                self._put(program.name, directory / "real" / real.relative_to("/usr") if inside else real)
        self.patient = patient
        self.doctor = Doctor(patient.lab.host, patient.daemon.socket, apart=True)
        assert self.doctor.run("version")[0] == 0
        net = f"/proc/{self._pid}/net"
        self.shell(
            f"cd {directory}; mkdir -p net real/sbin real/bin; "
            "cp -r --no-preserve=all /proc/sys/net sys 2>/dev/null; cat /proc/locks >locks; "
            f"(cd {net} && cp -r --no-preserve=all {' '.join(LISTS)} {directory}/net); "
            "cp -r /sys/module/xt_recent/parameters recent; echo 4095 >recent/ip_list_tot; "
            f"mount --bind net {net} && mount --bind sys /proc/sys/net && mount --bind locks /proc/locks && "
            "mount --bind recent /sys/module/xt_recent/parameters && "
            "mount --bind /usr/sbin real/sbin && mount --bind /usr/bin real/bin && "
            "mount --bind bin /usr/sbin && mount --bind bin /usr/bin"
        )

    def _put(self, name: str, real: Path) -> None:
        if name not in PROGRAMS:
            if not (self._bin / name).is_symlink():
                (self._bin / name).symlink_to(real)
        elif not (self._bin / name).exists():
            (self._bin / name).write_text(_SCRIPT.format(here=self._here, name=name, real=real))
            (self._bin / name).chmod(0o755)

    @property
    def _pid(self) -> int:
        return self.doctor.pid

    def shell(self, command: str) -> None:
        """Run a command where the doctor is."""
        self.patient.lab.host.run("nsenter", "--mount", f"--target={self._pid}", "sh", "-c", command)

    @contextmanager
    def without_daemon(self) -> Iterator[tuple[str, ...]]:
        """For a while no daemon answers; the words that name the settings."""
        before = self.doctor.socket
        self.doctor.socket = before.with_name("nobody")
        try:
            yield ("--settings", str(self.patient.daemon.config))
        finally:
            self.doctor.socket = before

    def path(self, name: str) -> Path:
        """What stands for a file: `net/tcp`, `sys/ipv4/ip_forward`, `locks`, `recent/ip_list_tot`."""
        return self._here / name

    def text(self, name: str, text: str | bytes) -> None:
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        self.path(name).write_bytes(text if isinstance(text, bytes) else text.encode())

    @contextmanager
    def files(self, texts: Mapping[str, str | bytes | None]) -> Iterator[None]:
        """For a while, files with other texts. None: a directory is in their place."""
        before = {name: self.path(name).read_bytes() if self.path(name).exists() else None for name in texts}
        for name, text in texts.items():
            if text is None:
                self.path(name).unlink(missing_ok=True)
                self.path(name).mkdir()
            else:
                self.text(name, text)
        try:
            yield
        finally:
            for name, old in before.items():
                if self.path(name).is_dir():
                    self.path(name).rmdir()
                # In place: a mount of the file goes on to have it.
                if old is not None:
                    self.text(name, old)
                else:
                    self.path(name).unlink(missing_ok=True)

    @contextmanager
    def grows(self, texts: Mapping[str, str]) -> Iterator[None]:
        """For a while, files of `net` have other texts once the doctor has asked a program."""
        later = self._here / "later"
        for name, text in texts.items():
            self.text(f"later/{name}", text)
        try:
            yield
        finally:
            shutil.rmtree(later)

    @contextmanager
    def programs(self, faults: Mapping[str, str]) -> Iterator[None]:
        """For a while, programs are faulty: beginning of a command line -> what is wrong, or what it prints.

        `missing` and `forbidden` are of a program alone, not of its arguments.
        """
        table, said = [], 0
        for start, fault in faults.items():
            program = self._bin / start.split()[0]
            if fault == "missing":
                program.rename(program.with_name(f".{program.name}"))
            elif fault == "forbidden":
                program.chmod(0o644)
            elif fault in ("failing", "babbling", "odd", "cut", "hanging"):
                table.append(f"{start}\t{fault}\n")
            else:
                said += 1
                self.text(f"said{said}", fault)
                table.append(f"{start}\t{self.path(f'said{said}')}\n")
        self.text("faults", "".join(table))
        try:
            yield
        finally:
            self.text("faults", "")
            for hidden in self._bin.glob(".*"):
                hidden.rename(hidden.with_name(hidden.name[1:]))
            for name in PROGRAMS:
                (self._bin / name).chmod(0o755)
