"""What the doctor makes of facts that no test brings about in a real host, as other tests here do."""

from __future__ import annotations

from typing import Any

from tests.observe.doctor.facts import (
    IPTABLES,
    ROUTES,
    SAVED,
    SETTINGS,
    WEB,
    WEB6,
    Facts,
    counted,
    ruleset,
    status,
    sysctl,
    well,
)


def problem(*ids: str) -> dict[str, str]:
    return dict.fromkeys(ids, "problem")


def warning(*ids: str) -> dict[str, str]:
    return dict.fromkeys(ids, "warning")


def unchecked(*ids: str) -> dict[str, str]:
    return dict.fromkeys(ids, "unchecked")


OF_RULES = (
    "rules-readable",
    "mixed-variants",
    "rules-twice",
    "forward-policy",
    "foreign-refusals",
    "ufw",
    "firewalls",
    "kube-proxy",
    "other-vipd",
    "foreign-claims",
)
OF_NETWORK = (
    "network-readable",
    "vip-owned",
    "vip-foreign",
    "vip-in-subnet",
    "vip-route",
    "backend-route",
    "local-backend",
    "node-port-taken",
    "rp-filter",
    "bridge-hairpin",
    "bridge-replies",
)
OF_DAEMON = ("daemon-state", "daemon-warnings", "daemon-version", "quarantined", "name-servers", "names")


def feature(name: str) -> Facts:
    return {"missing_features": [{"family": "ipv4", "name": name, "required": False}]}


def address(text: str, device: str = "eth1") -> Facts:
    local, _, length = text.partition("/")
    return {"address": local, "length": int(length), "device": device}


def names(*faults: tuple[str, bool]) -> Facts:
    """The daemon's names: why each fails, and whether an earlier answer serves."""
    listed = [
        {"name": f"dns:n{n}.internal", "fault": why, "serves": ok} for n, (why, ok) in enumerate(faults)
    ]
    return status(names={"names": 5, "failing": len(listed), "held": 0, "lookups": {}, "faults": listed})


def listener(protocol: str, place: str, port: int, **more: Any) -> Facts:
    return {"protocol": protocol, "address": place, "port": port, **more}


def snat(flows: int, backends: int = 1) -> Facts:
    return {"snat": {("tcp", "10.244.0.1", f"10.244.0.{11 + n}:8080"): flows for n in range(backends)}}


JUMP = '-A FORWARD -m comment --comment "vipd translated flows" -j VIPD-FORWARD'


def forward(rules: str, chains: str = "") -> Facts:
    """These rules in FORWARD, in the place of vipd's jump."""
    return well(rulesets=[ruleset(SAVED.replace(JUMP, f"{chains}{rules}"))])


DROPS = "*filter\n:FORWARD DROP [0:0]\nCOMMIT\n"
CANARY = "*mangle\n:KUBE-PROXY-CANARY - [0:0]\nCOMMIT\n"
NFT_CHAIN = {"family": "inet", "table": "site", "name": "forward"}
OTHERS = {
    "10.96.0.1": "the default gateway",
    "10.96.0.7": "a neighbour on eth1",
    "10.96.0.0": "the address of the network 10.96.0.0/16",
    "10.96.255.255": "the broadcast address of 10.96.0.0/16",
    "10.96.0.9": "the next hop to 198.18.0.0/15",
}
NEAR = {"addresses": [address("10.96.0.2/16")], "foreign_addresses": OTHERS}
BRIDGE = [
    {"name": "eth1", "kind": "bridge"},
    {"name": "p1", "kind": "veth", "master": "eth1", "hairpin": False},
    {"name": "nic", "master": "eth1", "hairpin": False},
]
BRIDGED = {"settings": SETTINGS | {"net/bridge/bridge-nf-call-iptables": "1"}}
FACING = [address("192.0.2.1/24", "eth0"), address("10.244.0.1/24")]
NEIGHBOURS = sysctl(net__ipv4__neigh__default__gc_thresh3=1024)
NO_IPV6 = sysctl(net__ipv6__conf__all__disable_ipv6=1, net__ipv6__conf__all__forwarding=1)
ROUTES6 = {"routes": ROUTES | {"fd00:96::10": {}, "fd00:244::11": {}}}
ANNOUNCING = {
    "routes": 2,
    "table": 86,
    "addresses": ["203.0.113.10", "2001:db8::10"],
    "names": ["vipd"],
    "importers": ["bird"],
}


def links(**mtu: int) -> list[Facts]:
    return [{"name": name, "mtu": size} for name, size in mtu.items()]


OF_ONE_SECTION: dict[str, dict[str, tuple[Facts, dict[str, str]]]] = {
    "daemon": {
        "an older daemon": (status(version="0.0.1"), warning("daemon-version")),
        "a daemon that failed": (status(state="failed"), problem("daemon-state")),
        "a daemon that takes long": (status(state="pending"), warning("daemon-state")),
        "a warning of the daemon": (status(warnings=["health port 1 is taken"]), warning("daemon-warnings")),
        "a warning that a check tells better": (
            status(warnings=["affinity of web: each backend's list remembers 100 clients"]),
            {},
        ),
        "a daemon that does not let us in": (
            {"status": {}, "fault": "permission denied"},
            warning("daemon-running") | unchecked(*OF_DAEMON),
        ),
        "name servers that are silent, while earlier answers serve": (
            names(("no answer within 5 s from 10.0.0.53", True)),
            warning("name-servers"),
        ),
        "a name without any answer": (
            names(("10.0.0.53 cannot be reached: No route", False), ("NXDOMAIN", True)),
            problem("name-servers") | warning("names"),
        ),
        "a name that does not exist": (
            names(("the name does not exist (NXDOMAIN)", False)),
            problem("names"),
        ),
        "a fast path that this host cannot have": (
            status(fast_path={"active": False, "reason": "no module", "devices": []}),
            warning("fast-path"),
        ),
    },
    "state": {
        "a locked state directory": ({"writable": False}, problem("state-dir")),
        "a disk that is nearly full": ({"free": 2 << 20}, warning("state-dir-space")),
        "no inodes": ({"free_inodes": 0}, problem("state-dir-space")),
        "a broken store": ({"store_faults": ["line 1"]}, problem("store")),
        "a broken store with a copy": ({"store_faults": ["line 1"], "has_copy": True}, problem("store")),
    },
    "kernel": {
        "a table of flows that is 79% full": (sysctl(net__netfilter__nf_conntrack_count=799), {}),
        "a table of flows that is 80% full": (
            sysctl(net__netfilter__nf_conntrack_count=800),
            warning("conntrack-room"),
        ),
        "a table of flows that is 95% full": (
            sysctl(net__netfilter__nf_conntrack_count=950),
            problem("conntrack-room"),
        ),
        "dropped packets": (counted(drop=1), warning("conntrack-drops")),
        "early drops": (counted(early_drop=3), warning("conntrack-drops")),
        "lost races": (counted(insert_failed=2), warning("conntrack-races")),
        "drops and lost races of last year": (
            counted(drop=5, early_drop=9, insert_failed=2) | {"conntrack_new": {}},
            {},
        ),
        "a kernel that cannot list flows": (
            {"conntrack_fault": "cannot read: Invalid argument"},
            problem("conntrack-netlink"),
        ),
        "few source ports left": (snat(52_000), warning("snat-ports")),
        "no source ports left": (snat(64_000), problem("snat-ports")),
        "many source ports, of several backends": (snat(50_000, backends=9), {}),
        "a flow table that cannot be listed": ({"snat": None}, unchecked("snat-ports")),
        "short affinity lists": ({"affinity_limit": 100}, warning("affinity-limit")),
        "rp_filter for all devices": (
            sysctl(net__ipv4__conf__all__rp_filter=1, net__ipv4__conf__eth1__rp_filter=0),
            warning("rp-filter"),
        ),
        "a loose rp_filter under a strict one for all": (sysctl(net__ipv4__conf__all__rp_filter=1), {}),
        "a table of neighbours with room": (NEIGHBOURS | {"neighbours": 818}, {}),
        "no clock": ({"clock_synchronised": False}, warning("clock")),
    },
    "programs": {
        "no iptables": (
            {"iptables": [{"family": "ipv4", "text": "", "fault": "no such program", "fix": "apt"}]},
            problem("iptables"),
        ),
        "no ip6tables, and no need of it": ({"iptables": [IPTABLES[0], {"family": "ipv6", "text": ""}]}, {}),
        "no xt_recent, with affinity": (feature("affinity"), problem("kernel-features")),
        "no xt_REDIRECT": (feature("ping"), warning("kernel-features")),
        "no feature that the doctor has heard of": (feature("new_thing"), warning("kernel-features")),
    },
    "network": {
        "a virtual IP in a tunnel's network": (
            {
                "links": [{"name": "eth1", "uses_neighbour_discovery": False}],
                "addresses": [address("10.96.0.1/16"), address("10.96.0.2/32", "eth0")],
            },
            {},
        ),
        "a virtual IP that a device has": ({"addresses": [address("10.96.0.10/16")]}, problem("vip-owned")),
        "listeners on another address, and of another protocol": (
            {"listeners": [listener("tcp", "127.0.0.1", 30081), listener("udp", "0.0.0.0", 30080)]},
            {},
        ),
        "no route to a virtual IP": (
            {"routes": ROUTES | {"10.96.0.10": {"device": ""}}},
            problem("vip-route"),
        ),
        "no route to a backend": (
            {"routes": ROUTES | {"10.244.0.11": {"device": ""}}},
            problem("backend-route"),
        ),
        "larger packets towards backends than from clients": (
            {"links": links(eth0=1500, eth1=9000), "addresses": FACING[:1]},
            {},
        ),
        "a bridge of containers beside the way": (
            {
                "links": [{"name": "docker0", "kind": "bridge", "mtu": 1500}, *links(eth1=1450)],
                "addresses": [address("172.17.0.1/16", "docker0"), FACING[1]],
            },
            {},
        ),
        "a port of a bridge, of unknown MTU": (
            {"links": [{"name": "eth1", "kind": "bridge", "mtu": 1500}, {"name": "p1", "master": "eth1"}]},
            {},
        ),
    },
    "announcing": {
        "announced by BIRD": (ANNOUNCING, {}),
        "nothing announced yet": (ANNOUNCING | {"addresses": [], "importers": []}, {}),
        "routing daemons that cannot be seen": (ANNOUNCING | {"importers": None}, {}),
        "nobody announces": (ANNOUNCING | {"importers": []}, problem("announce-import")),
        "FRR does not import": (ANNOUNCING | {"importers": ["zebra"]}, problem("announce-import")),
        "FRR imports": (ANNOUNCING | {"importers": ["zebra"], "in_main": ["203.0.113.10"]}, {}),
        "a table with another name": (ANNOUNCING | {"names": ["lab", "vipd"]}, warning("announce-table")),
        "routes of others in the table": (ANNOUNCING | {"foreign": ["default"]}, warning("announce-table")),
        "packets looked up in the table": (ANNOUNCING | {"looked_up": True}, warning("announce-table")),
        "the last host": (ANNOUNCING | {"kept": ["203.0.113.10"]}, problem("announce-kept")),
    },
}
CASES: dict[str, tuple[Facts, dict[str, str]]] = {
    **{
        name: (well(**{section: value}), expected)
        for section, rows in OF_ONE_SECTION.items()
        for name, (value, expected) in rows.items()
    },
    "all is well": (well(), {}),
    "settings that cannot be used": (well(settings_faults=["loud: unknown"]), problem("settings")),
    "no daemon, and no rules": (
        well(
            daemon={"status": {}, "fault": "no such file", "prefix_in_use": False},
            rulesets=[],
            kernel=sysctl(net__ipv4__ip_forward=0),
        ),
        problem("daemon-running"),
    ),
    "a socket of root, and no group": (
        well(socket={"path": "/s", "mode": 0o660, "group": "root", "wanted_group": ""}),
        {},
    ),
    "short lists that nobody uses": (
        well(kernel={"affinity_limit": 100}, services=[WEB | {"affinity": False}]),
        {},
    ),
    "a router by advertisements that does not forward IPv6": (
        well(
            services=[WEB, WEB6],
            network={
                "routes": ROUTES | {"fd00:96::10": {"device": "eth1"}, "fd00:244::11": {"device": "eth1"}}
            },
            kernel=sysctl(
                net__ipv6__conf__all__forwarding=0,
                net__ipv6__conf__eth1__accept_ra=1,
                net__netfilter__nf_conntrack_tcp_be_liberal=0,
            ),
        ),
        problem("ip-forward") | warning("tcp-be-liberal"),
    ),
    "no IPv6 at all": (well(services=[WEB, WEB6], kernel=NO_IPV6, network=ROUTES6), problem("ipv6-disabled")),
    "IPv6 on one device alone": (
        well(
            services=[WEB, WEB6],
            network=ROUTES6 | {"links": links(lo=0, eth0=0, eth1=0)},
            kernel={"settings": NO_IPV6["settings"] | {"net/ipv6/conf/eth1/disable_ipv6": "0"}},
        ),
        problem("backend-route"),
    ),
    "more backends in a connected network than neighbours": (
        well(
            services=[WEB | {"backends": [(f"10.244.0.{n}", 80) for n in range(2, 12)]}],
            kernel=sysctl(net__ipv4__neigh__default__gc_thresh3=12),
            network={"routes": ROUTES | {f"10.244.0.{n}": {"device": "eth1"} for n in range(12)}},
        ),
        warning("neighbour-table"),
    ),
    "a bridge without hairpin": (well(kernel=BRIDGED, network={"links": BRIDGE}), warning("bridge-hairpin")),
    "a table of the other dataplane": (well(tables=["ipv4"]), problem("rules-twice")),
    "chains of the other dataplane": (well(dataplane="nftables", tables=["ipv4"]), problem("rules-twice")),
    "nftables, all well, lists and iptables being no matter": (
        well(
            dataplane="nftables",
            tables=["ipv4"],
            rulesets=[],
            kernel={"affinity_limit": 100},
            programs={"iptables": [{"family": "ipv4", "text": "", "fault": "none"}]},
        ),
        {},
    ),
    "nftables beside a FORWARD policy DROP": (
        well(dataplane="nftables", tables=["ipv4"], rulesets=[ruleset(DROPS)]),
        problem("forward-policy"),
    ),
    "no rules yet, policy DROP": (well(rulesets=[ruleset(DROPS)]), {}),
    "accept_forwarded off, policy DROP": (
        well(
            settings={"accept_forwarded": False}, rulesets=[ruleset(SAVED.replace("-j ACCEPT", "-j RETURN"))]
        ),
        problem("forward-policy"),
    ),
    **{
        f"policy DROP in the table {table}": (
            well(rulesets=[ruleset(f"{SAVED}*{table}\n:FORWARD DROP [0:0]\nCOMMIT\n")]),
            problem("forward-policy"),
        )
        for table in ("mangle", "security")
    },
    "a client refused before vipd's accept": (
        forward(f"-A FORWARD -s 10.10.0.9/32 -j DROP\n{JUMP}"),
        warning("foreign-refusals"),
    ),
    "a client refused behind vipd's accept": (
        forward(f"{JUMP}\n-A FORWARD -s 10.10.0.9/32 -j DROP"),
        warning("foreign-refusals"),
    ),
    "a backend of nobody's, packets of no flow, and another port refused": (
        forward(
            "-A FORWARD -d 10.244.0.99/32 -j DROP\n-A FORWARD -p tcp -m tcp --dport 443 -j DROP\n"
            f"-A FORWARD -m conntrack --ctstate INVALID -j DROP\n{JUMP}\n-A FORWARD -j REJECT"
        ),
        {},
    ),
    "an nft chain that does not, or lets pass what vipd translated": (
        well(forward_chains=[NFT_CHAIN | {"drops": False}]),
        {},
    ),
    "a port denied by ufw": (
        forward(JUMP, ":ufw-user-input - [0:0]\n-A ufw-user-input -p tcp --dport 80 -j DROP\n"),
        warning("ufw"),
    ),
    "ufw beside services": (forward(JUMP, ":ufw-user-input - [0:0]\n"), {}),
    "vipd's own flowtable": (well(flowtables=["inet vipd-fast-path flows"]), {}),
    "a kube-proxy under our prefix": (
        well(settings={"chain_prefix": "KUBE"}, rulesets=[ruleset(CANARY + SAVED.replace("VIPD", "KUBE"))]),
        problem("kube-proxy"),
    ),
    "our own rules under the prefix KUBE": (
        well(settings={"chain_prefix": "KUBE"}, rulesets=[ruleset(SAVED.replace("VIPD", "KUBE"))]),
        {},
    ),
    "addresses of others": (
        well(network=NEAR, services=[WEB | {"service": f"s{vip}", "addresses": [vip]} for vip in OTHERS]),
        problem("vip-foreign"),
    ),
    "an address of a backend": (
        well(
            network=NEAR,
            services=[WEB | {"addresses": ["10.96.0.50"]}, WEB | {"backends": [("10.96.0.50", 1)]}],
        ),
        problem("vip-foreign") | warning("vip-in-subnet"),
    ),
    "a virtual IP that may be the host's": (
        well(settings={"compat": "kube-proxy"}, network={"addresses": [address("10.96.0.10/32", "lo")]}),
        {},
    ),
    "more backends than are connected to": (well(contacts={"left_out": 3}), unchecked("backend-contact")),
}
