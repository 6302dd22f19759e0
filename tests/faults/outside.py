"""The outside things that a running vipd touches, and how each is made to fail. The one table of them.

`test_outside.py` compares it with what a daemon is seen to touch, and has what has an error here fail: see
`supervised_vipd.py` for the language of `touched`. DIR is the daemon's directory, and PID any process."""

from __future__ import annotations

from typing import NamedTuple


class Thing(NamedTuple):
    """Something outside."""

    name: str
    touched: str
    """A regular expression that fits what is seen of it."""
    error: str = ""
    """The errno with which it fails in `test_outside.py`; empty: see `elsewhere`."""
    culprit: str = ""
    """A regular expression, found in status while it fails."""
    elsewhere: str = ""
    """The test that has it fail, or why its failure is nobody's loss."""
    dataplane: str = ""
    """The one that touches it; empty: both."""


V, W = "(python|vipd)", "vipd-worker"
_STATE = rf"{V} write DIR/state/"

GROUPS = {
    "beside": (
        Thing("addresses and links", rf"{V} send netlink 0 (18|22)", "ENOBUFS", "watching addresses"),
        Thing("neighbours", rf"{V} send netlink 0 30", "EPERM", "this host cannot be looked at"),
        Thing("routes", rf"{V} send netlink 0 (16|24|26)", "ENOBUFS", "no route to VIPs"),
        Thing("connection tracking", rf"{V} send netlink 12 1", "ENOBUFS", "balancing connections fails"),
        Thing("ports of vipd's own", rf"{V} bind inet6? .*:31\d+", "EADDRNOTAVAIL", "cannot listen"),
        Thing("service manager", rf"{V} send unix DIR/notify", "ECONNREFUSED", "the service manager cannot be notified"),
        Thing("notify program", rf"{V} exec /bin/true", "EACCES", "notify: /bin/true"),
    ),
    "file": (Thing("a declaration", rf"{V} open DIR/services\.d/watched\.yaml", "EIO", r"watched\.yaml"),),
    "directory": (Thing("declarations", rf"{V} open DIR/services\.d", "EIO", r"services\.d: cannot be read"),),
    "store": (
        Thing("what vipctl stores", rf"{_STATE}\.(services\.yaml(\.last-good)?|history\.jsonl|services-dir\.json)\.new",
              "EIO"),
        Thing("last good versions", rf"{V} (open|write) DIR/state/accepted(/.*)?", "ENOSPC", "cannot keep a copy"),
    ),
    "etcd": (
        Thing("etcd", rf"{V} connect inet 127\.0\.0\.1:2379", "ECONNREFUSED", "last known services go on serving"),
        Thing("etcd's keys on disk", rf"{V} (open|write) DIR/state/(\.?etcd.*)", "EIO", "snapshot: cannot be written"),
    ),
    "programs": (
        Thing("programs that write rules", rf"{V} exec .*/(nft|ip6?tables(-(nft|legacy))?(-save|-restore)?)", "EACCES",
              "cannot be run"),
        Thing("changes of elements", rf"{V} send netlink 12 16", "ENOBUFS", "cannot be run", dataplane="nftables"),
    ),
    "threads": (Thing("threads", rf"({V}|{W}) start thread", "EAGAIN", "can't start new thread"),),
    "processes": (Thing("processes", rf"{V} start process", "EAGAIN", "(?i)resource temporarily unavailable"),),
    "stalls": (
        Thing("a stalled file system", rf"{V} open DIR/services\.d/watched\.yaml", "stall"),
        Thing("a stalled conntrack", rf"{V} send netlink 12 1", "stall"),
        Thing("stalled neighbours", rf"{V} send netlink 0 30", "stall", "this host cannot be looked at"),
    ),
}  # fmt: skip
"""What fails together: what comes after something that fails is not touched."""
ELSEWHERE = (
    Thing("code and what comes with it", rf"({V}|{W}) ((open|write|exec) PYTHON.*|open (/usr/.*|/lib/.*|/etc/(ld\.so|localtime|ssl).*|//?\w*))",
          elsewhere="it is read before anything is served, and again when it is needed"),
    Thing("settings and other declarations", rf"{V} open DIR(/vipd\.yaml|/services\.d/\w+\.yaml)?", elsewhere="tests/host/test_settings.py"),
    Thing("state", rf"{V} (open|write) DIR/state(/.*)?", elsewhere="tests/faults/test_full_disk.py"),
    Thing("lock of a namespace", rf"{V} (open|write) /run/vipd(/netns-PID-VIPD\.lock)?", elsewhere="tests/faults/test_lock.py"),
    Thing("users and groups", rf"{V} (open (/etc/(group|passwd|nsswitch\.conf)|/(etc|run|run/host|run/systemd)(/userdb.*)?)"
          r"|connect unix /var/run/nscd/socket)", elsewhere="tests/health/test_host_problems.py"),
    Thing("other processes", rf"{V} open (/sys/fs/cgroup/.*|/proc(/(PID|self)/.*|/stat|/PID)?)", elsewhere="it is for messages alone"),
    Thing("sysctls", rf"{V} (open|write) /(proc/sys|sys/module)/.*", elsewhere="tests/host/test_preflight.py"),
    Thing("tables of iptables", rf"{V} open /proc/net/(ip6?_tables_names|xt_recent/.*)", elsewhere="tests/faults/test_quarantine.py"),
    Thing("sockets of other programs", rf"{V} send netlink 4 20", elsewhere="tests/host/network/test_claims.py"),
    Thing("rules", rf"{V} send netlink (0 34|12 10)", elsewhere="tests/faults/test_drift.py"),
    Thing("sockets", rf"({V}|{W}) (socket (unix|inet6?|netlink) \w+|bind netlink.*)", elsewhere="tests/faults/test_no_descriptors.py"),
    Thing("API", rf"{V} bind unix DIR/vipd\.sock", elsewhere="tests/faults/test_no_descriptors.py"),
    Thing("ports of the settings", rf"{V} bind inet 127\.0\.0\.1:910[123]", elsewhere="tests/observe/health_ports/test_daemon.py"),
    Thing("backends", rf"({V}|{W}) connect inet6? 10\.244\.0\.1[12]:8080", elsewhere="tests/faults/test_worker.py"),
    Thing("name servers", rf"{W} (send|connect) inet 127\.0\.0\.1:5353", elsewhere="tests/faults/test_worker.py"),
    Thing("what kills first", rf"({V}|{W}) write /(proc/self/oom_score_adj|dev/null)", elsewhere="nobody's loss"),
)  # fmt: skip
"""What is made to fail by other tests, and what need not be."""
OUTSIDE = (*(thing for things in GROUPS.values() for thing in things), *ELSEWHERE)
