"""The outside things that a running vipd touches, and how each is made to fail. The one table of them.

`test_outside.py` compares it with what a daemon is seen to touch, in the words of `supervised_vipd.py`, and
has each thing fail. DIR is the daemon's directory, PID any process, PYTHON the interpreter and this
project."""

from __future__ import annotations

from typing import NamedTuple


class Thing(NamedTuple):
    """Something outside that fails in `test_outside.py`."""

    name: str
    touched: str
    """A regular expression that fits what is seen of it."""
    error: str
    """The errno with which it fails; `stall`: it does not answer."""
    culprit: str = ""
    """A regular expression, found in status while it fails; empty: whoever asks is told."""
    dataplane: str = ""
    """The one that touches it; empty: both."""


_STORED = r"state\.db(\.last-good|\.new)?(-journal)?"
_CACHED = r"cache\.db(-journal)?"
_TOOL = "(nft|ip6?tables(-(nft|legacy))?(-save|-restore)?)"

GROUPS = {
    "beside": (
        Thing("addresses, links", "vipd send netlink 0 (18|22)", "ENOBUFS", "watching addresses"),
        Thing("neighbours", "vipd send netlink 0 30", "EPERM", "this host cannot be looked at"),
        Thing("routes, devices", "vipd send netlink 0 (16|24|26)", "ENOBUFS", "no route to VIPs"),
        Thing("conntrack", "vipd send netlink 12 1", "ENOBUFS", "balancing connections fails"),
        Thing("health ports", "vipd bind inet6? .*:31[0-9]+", "EADDRNOTAVAIL", "cannot listen"),
        Thing("service manager", "vipd send unix DIR/notify", "ECONNREFUSED", "manager cannot be notified"),
        Thing("program of notify", "vipd exec /bin/true", "EACCES", "notify: /bin/true"),
    ),
    "file": (Thing("declaration", r"vipd open DIR/services\.d/watched\.yaml", "EIO", r"watched\.yaml"),),
    "directory": (Thing("declarations", r"vipd open DIR/services\.d", "EIO", "services.d: cannot be read"),),
    "store": (
        Thing("what vipctl stores", rf"vipd write DIR/state/{_STORED}", "EIO"),
        Thing(
            "what the next start has",
            rf"vipd (open|write) DIR/state/{_CACHED}",
            "ENOSPC",
            r"cache\.db: cannot be written: No space left",
        ),
    ),
    "etcd": (
        Thing(
            "etcd",
            r"vipd connect inet 127\.0\.0\.1:2379",
            "ECONNREFUSED",
            "last known services go on serving",
        ),
    ),
    "programs": (
        Thing("programs that write rules", f"vipd exec .*/{_TOOL}", "EACCES", "cannot be run"),
        Thing("changes of elements", "vipd send netlink 12 16", "ENOBUFS", "cannot be run", "nftables"),
    ),
    "descriptors": (Thing("descriptors", "vipd (open|write|socket) .*", "EMFILE", "Too many open files"),),
    "threads": (Thing("threads", "vipd(-worker)? start thread", "EAGAIN", "can't start new thread"),),
    "processes": (Thing("processes", "vipd start process", "EAGAIN", "[Rr]esource temporarily unavailable"),),
    "stalls": (
        Thing("stalled file system", r"vipd open DIR/services\.d/watched\.yaml", "stall"),
        Thing("stalled conntrack", "vipd send netlink 12 1", "stall"),
        Thing("stalled neighbours", "vipd send netlink 0 30", "stall", "this host cannot be looked at"),
    ),
}
"""What fails together: what comes after something that fails is not touched."""

_KEPT = (
    rf"lock|{_STORED}|{_CACHED}|services\.yaml|overrides\.json|maintenance\.json|"
    r"dataplane|host-changes\.json"
)
_ACCOUNTS = r"/etc/(group|passwd|nsswitch\.conf)|/(etc|run|run/host|run/systemd)(/userdb.*)?"

ELSEWHERE = {
    "tests/faults/test_full_disk.py": (rf"vipd (open|write) DIR/state(/\.?({_KEPT})(\.new)?)?",),
    "tests/faults/test_lock.py": (r"vipd (open|write) /run/vipd(/netns-PID-VIPD\.lock)?",),
    "tests/faults/test_quarantine.py": ("vipd open /proc/net/(ip6?_tables_names|xt_recent/.*)",),
    "tests/faults/test_drift.py": ("vipd send netlink (0 34|12 10)",),
    "tests/faults/test_no_descriptors.py": (
        r"vipd bind unix DIR/vipd\.sock",
        r"vipd(-worker)? (socket (unix|inet6?|netlink) \w+|bind netlink.*)",
    ),
    "tests/faults/test_worker.py": (
        r"vipd(-worker)? connect inet6? 10\.244\.0\.1[12]:8080",
        r"vipd-worker (send|connect) inet 127\.0\.0\.1:5353",
    ),
    "tests/health/test_host_problems.py": (
        f"vipd open ({_ACCOUNTS})",
        "vipd connect unix /var/run/nscd/socket",
    ),
    "tests/host/network/test_claims.py": ("vipd send netlink 4 20",),
    "tests/host/test_preflight.py": ("vipd (open|write) /(proc/sys|sys/module)/.*",),
    "tests/host/test_settings.py": (r"vipd open DIR(/vipd\.yaml|/services\.d/o\.yaml)?",),
    "tests/observe/health_ports/test_daemon.py": (r"vipd bind inet 127\.0\.0\.1:910[123]",),
    "libraries, and what they read": (
        "vipd(-worker)? (open|write|exec) PYTHON.*",
        r"vipd(-worker)? open (/dev/urandom|/usr/.*|/lib/.*|/etc/(ld\.so|localtime|ssl).*|//?\w*)",
    ),
    "messages name other processes": ("vipd open (/sys/fs/cgroup/.*|/proc(/(PID|self)/.*|/stat|/PID)?)",),
    "nobody's loss": ("vipd(-worker)? write /(proc/self/oom_score_adj|dev/null)",),
}
"""By the test that has it fail, or why its failure is no matter: what else is seen."""
