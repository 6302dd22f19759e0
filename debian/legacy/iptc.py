"""Gives python-iptables (the extra `legacy`) to whoever imports `iptc`, where it reads rules rightly.

Raises ImportError elsewhere: python-iptables knows the option tables of libxtables as they were before
iptables 1.8.11, and takes later ones for something else (issue 353 of ldx/python-iptables), so that most
matches and targets fail with "no such parameter". vipd itself does not import it.
"""

import importlib
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

UNREADABLE_SINCE = (1, 8, 11)


def _iptables_version() -> tuple[int, ...]:
    try:
        said = subprocess.run(
            ["/usr/sbin/iptables", "--version"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise ImportError(f"python-iptables is off: iptables cannot be run: {error.strerror}") from None
    found = re.search(r"v(\d+)\.(\d+)\.(\d+)", said.stdout)
    if not found:
        raise ImportError(
            f"python-iptables is off: iptables --version is not understood: {said.stdout.strip()!r}"
        )
    return tuple(map(int, found.groups()))


def _become_real() -> None:
    version = _iptables_version()
    if version >= UNREADABLE_SINCE:
        raise ImportError(
            f"python-iptables is off: iptables here is {'.'.join(map(str, version))}, and from 1.8.11 on it "
            "reads most matches and targets wrongly; hint: iptables-legacy-save shows the legacy rules"
        )
    # Without it python-iptables runs ldconfig at each import.
    architecture = sysconfig.get_config_var("MULTIARCH") or ""
    os.environ.setdefault("XTABLES_LIBDIR", f"/usr/lib/{architecture}/xtables")
    sys.path.insert(0, str(Path(__file__).parent / "legacy"))
    del sys.modules[__name__]
    importlib.import_module(__name__)


_become_real()
