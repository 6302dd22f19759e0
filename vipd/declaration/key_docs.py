"""The meaning of each key of vipd/v1, for the manual page vipd-services(5) and for docs/declaration.md. Pure.

Each key that a reader accepts has one line here, and the same words in its row of docs/declaration.md; tests
compare all three. Words in backquotes are literal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from vipd.declaration.backend_reader import BACKEND_KEYS
from vipd.declaration.check_reader import CHECK_KEYS
from vipd.declaration.external_reader import EXTERNAL_KEYS, TRAFFIC_KEYS
from vipd.declaration.native import DOCUMENT_KEYS
from vipd.declaration.policy_reader import AFFINITY_KEYS, FALLBACK_KEYS
from vipd.declaration.port_reader import PORT_KEYS
from vipd.declaration.service_reader import SERVICE_KEYS


class KeyDoc(NamedTuple):
    """One key: its possible values, its default (empty: it is required, or its absence has no
    consequence), and its meaning.
    """

    form: str
    default: str
    meaning: str


class ModeDoc(NamedTuple):
    """A masquerade mode: the new flows that it masquerades, and where to choose it."""

    flows: str
    choose_it_when: str


class KeyGroup(NamedTuple):
    """The keys of one mapping. `title`: its heading in manual and docs; `keys`: those that its reader
    accepts."""

    title: str
    keys: Collection[str]
    docs: Mapping[str, KeyDoc]

    def described(self) -> Iterator[tuple[str, KeyDoc]]:
        """Every key in the reader's order; raises LookupError for one without a meaning here."""
        for key in self.keys:
            if key not in self.docs:
                raise LookupError(f"{self.title}: no meaning of {key}; hint: vipd/declaration/key_docs.py")
            yield key, self.docs[key]


DOCUMENT = {
    "apiVersion": KeyDoc("`vipd/v1`", "", "Required. A document of another version is not read on."),
    "defaults": KeyDoc(
        "a mapping of `affinity`, `masquerade`, `fallback`, `balance`, `check`, `slow_start`, `weight_from`",
        "",
        "Defaults for all services in this document.",
    ),
    "services": KeyDoc("a list", "", "May be missing or empty."),
}

SERVICE = {
    "name": KeyDoc(
        "text",
        "the first frontend, `10.96.0.10:53/udp`",
        "1 to 128 of `A-Z a-z 0-9 . _ / -`, a letter or digit at both ends. Unique on the host.",
    ),
    "address": KeyDoc("an IPv4 or IPv6 address, or a list", "none", "The virtual IPs."),
    "ports": KeyDoc("a port or a list, at least one", "", "Required. What clients connect to."),
    "backends": KeyDoc("a backend or a list, may be empty", "none", "Who serves."),
    "affinity": KeyDoc(
        "`none`, `client-ip`, `true`, a duration, or a mapping",
        "`none`",
        "Whether a client keeps its backend.",
    ),
    "masquerade": KeyDoc("a mode", "`auto`", "Which flows get this host's address as their source."),
    "fallback": KeyDoc(
        "`reject`, `drop`, `keep`, a backend, a list of them, or a mapping",
        "`reject`",
        "What a new flow meets while no backend can serve. `keep`: while all are unhealthy, all serve.",
    ),
    "external_addresses": KeyDoc(
        "an external address or a list", "none", "Addresses for clients from outside."
    ),
    "load_balancer_addresses": KeyDoc(
        "the same", "none", "The same, called a load balancer's in rules and by Kubernetes."
    ),
    "allow_from": KeyDoc(
        "a network, an address, a list, or `any`",
        "`any`",
        "Who may use the external addresses that do not say so themselves.",
    ),
    "node_port": KeyDoc("1 to 65535", "none", "Short for `node_port` of the only port."),
    "health_port": KeyDoc(
        "1 to 65535",
        "none",
        "TCP port of this host that tells outer load balancers whether to send traffic here.",
    ),
    "traffic_policy": KeyDoc("a mapping", "`cluster` for both", "Whether only backends on this host serve."),
    "traffic_distribution": KeyDoc(
        "`prefer-same-zone` or `prefer-same-node`",
        "`prefer-same-zone`",
        "Which ready backends serve first under the policy `cluster`: those for this host's zone, or those "
        "on this host and then those for its zone.",
    ),
    "on_remove": KeyDoc(
        "`keep` or `reset`",
        "`keep`",
        "Whether established TCP and SCTP flows to a backend that is removed or `down` go on or are "
        "ended; also when the port or the whole service is removed. A TCP client gets a reset with "
        "the next packet that it sends, for ten minutes after a frontend was removed. UDP flows "
        "always end.",
    ),
    "respond_to_ping": KeyDoc(
        "`true` or `false`",
        "`true`",
        "Whether the addresses in `address` answer ICMP echo while a backend serves; this host answers. "
        "Never with the prefix KUBE or `compat: kube-proxy`.",
    ),
    "registrations": KeyDoc(
        "`true` or `false`",
        "`true` in etcd, else `false`",
        "Whether backends that register themselves in etcd take part.",
    ),
    "balance": KeyDoc(
        "`random`, `round-robin` or `source-hash`",
        "`random`",
        "How a new flow's backend is chosen, by weight. `source-hash`: by the client's address, the same on "
        "every host; nftables dataplane only. Made for up to 3,000 backends: their table takes about one "
        "second to make, beside all other work, and 30 MB meanwhile.",
    ),
    "check": KeyDoc(
        "a type of check, or a mapping", "`none`", "Health check for backends that define none of their own."
    ),
    "slow_start": KeyDoc(
        "a duration, up to 1h",
        "`0s`",
        "How long the share of a backend that has become healthy again takes to grow to its full.",
    ),
    "weight_from": KeyDoc(
        "`declaration` or `check`",
        "`declaration`",
        "`check`: a backend may say its weight in the header `X-Vipd-Weight` of its answer to an HTTP"
        " check: 0 to 65535, or a percentage of its declared one, 0% to 100%. Digits are those of "
        "ASCII; zeros in front count for nothing. With anything else the declared weight counts, and "
        "`vipctl describe` says what came.",
    ),
}

PORT = {
    "name": KeyDoc(
        "text", "none", "1 to 63 of `a-z 0-9 -`, at least one letter. Needed only for `ports` of a backend."
    ),
    "port": KeyDoc("1 to 65535", "", "Required. What clients connect to."),
    "protocol": KeyDoc("`tcp`, `udp` or `sctp`", "`tcp`", "Of clients and backends."),
    "target": KeyDoc("1 to 65535", "`port`", "The backends' port."),
    "node_port": KeyDoc("1 to 65535", "none", "Port on this host's own addresses that leads here too."),
}

BACKEND = {
    "address": KeyDoc(
        "an IPv4 or IPv6 address",
        "",
        "Required. Of a family that the service has an address of; not loopback, and no service's `address`.",
    ),
    "port": KeyDoc(
        "1 to 65535", "the port's `target`", "The backend's own port, for all ports of the service."
    ),
    "ports": KeyDoc(
        "a mapping of port names to numbers",
        "all ports",
        "The only ports that it serves, each with its own number. Not beside `port`.",
    ),
    "weight": KeyDoc(
        "0 to 65535", "1", "Its share of new flows is its weight over the sum of all. 0: no new flows."
    ),
    "state": KeyDoc(
        "`up`, `drain` or `down`",
        "`up`",
        "`drain`: new flows only while nothing that is up can serve. "
        "`down`: none, and flows are treated as if it were removed.",
    ),
    "node": KeyDoc(
        "text", "none", "The host it runs on, for the policy `local`. Compared with the setting `node_name`."
    ),
    "zone": KeyDoc(
        "text or a list", "none", "Zones whose clients it should serve. Compared with the setting `zone`."
    ),
    "backup": KeyDoc("`true` or `false`", "`false`", "Serves only while no backend that is none can."),
    "check": KeyDoc("a type of check, or a mapping", "the service's", "How this backend is checked."),
}

AFFINITY = {
    "by": KeyDoc("`client-ip`", "", "Required in a mapping."),
    "timeout": KeyDoc("a duration, 1s to 1d", "`3h`", "Counts from the client's last new flow."),
}

FALLBACK = {
    "backends": KeyDoc(
        "as for a service, at least one",
        "",
        "Serve while no backend of the service can, on any host. If they cannot either, the flow is refused.",
    ),
}

EXTERNAL_ADDRESS = {
    "address": KeyDoc("an IPv4 or IPv6 address", "", "Required."),
    "allow_from": KeyDoc(
        "a network, an address, a list, or `any`",
        "the service's `allow_from`",
        "Sources that may use it. Packets of others are dropped.",
    ),
}

TRAFFIC_POLICY = {
    "internal": KeyDoc("`cluster` or `local`", "`cluster`", "For traffic to `address`."),
    "external": KeyDoc(
        "`cluster` or `local`", "`cluster`", "For traffic to external addresses and node ports."
    ),
}

CHECK = {
    "type": KeyDoc("`none`, `tcp`, `http`, `https`, `udp`, `dns` or `exec`", "", "Required in a mapping."),
    "interval": KeyDoc(
        "a duration, 100ms to 60m",
        "`5s`",
        "From one question to the next. At least 1s for a backend that registers itself.",
    ),
    "timeout": KeyDoc("a duration, 100ms to `interval`", "`2s`", "Longest time for an answer."),
    "rise": KeyDoc("1 to 100", "2", "Good answers in a row that make an unhealthy backend healthy."),
    "fall": KeyDoc("1 to 100", "3", "Bad answers in a row that make a healthy backend unhealthy."),
    "start": KeyDoc("`healthy` or `unhealthy`", "`healthy`", "What it counts as until the first verdict."),
    "jitter": KeyDoc("`0%` to `50%`", "`10%`", "By how much pauses are shortened at random."),
    "port": KeyDoc("1 to 65535", "the backend's own", "The port that is asked."),
    "method": KeyDoc("an HTTP method", "`GET`", "http, https: of the request."),
    "path": KeyDoc("a path", "`/`", "http, https: of the request."),
    "host": KeyDoc("a host name", "the address and port", "http, https: the Host header."),
    "status": KeyDoc(
        "a status, a range, or a list",
        "`200-399`",
        "http, https: good ones. Redirections are not followed.",
    ),
    "body": KeyDoc(
        "text, or a regular expression", "any body", "http, https: found in the answer's first 64 KiB."
    ),
    "verify": KeyDoc("`true` or `false`", "`true`", "https: whether the certificate must be valid."),
    "ca": KeyDoc(
        "a file's path",
        "the host's",
        "https: certificates to trust, in a regular file of at most 1 MiB. Not in etcd, where nothing names "
        "files of hosts.",
    ),
    "server_name": KeyDoc("a host name", "`host`, else the address", "https: name sent (SNI) and verified."),
    "send": KeyDoc("text, or `hex:` and digits", "", "udp: the datagram. Required."),
    "expect": KeyDoc(
        "text, or `hex:` and digits",
        "silence is good",
        "udp: what the answer begins with. Without it only an ICMP refusal is bad.",
    ),
    "query": KeyDoc("a domain name", "`.`", "dns: the name that is asked for."),
    "record": KeyDoc(
        "`A`, `AAAA`, `NS`, `SOA`, `TXT`, `MX`, `SRV`, `CNAME` or `PTR`", "`A`", "dns: the type of record."
    ),
    "rcode": KeyDoc("a response code", "`NOERROR`", "dns: of a good answer."),
    "answer": KeyDoc("the text of a record", "any or none", "dns: must be among the answers."),
    "command": KeyDoc(
        "a list of text",
        "",
        "exec: a program's absolute path and its arguments, each word by itself. No shell. Required.",
    ),
    "user": KeyDoc(
        "a user's name",
        "`vipd-check`, or `nobody` where there is no such user",
        "exec: the user that runs it. Never root, nor a user that may change what vipd does.",
    ),
}

MASQUERADE_MODES = {
    "auto": ModeDoc(
        "as the setting `masquerade` says; if that is `auto` too: `off-cluster` where `cluster_cidrs` names "
        "a network of the family, else `forwarded` (with `compat: kube-proxy`: no flow to `address`)",
        "you have no reason for another",
    ),
    "always": ModeDoc(
        "all", "programs of this host, too, use a source address that backends have no route to"
    ),
    "forwarded": ModeDoc(
        "those that come from other hosts", "backends would answer clients directly, past this host"
    ),
    "off-cluster": ModeDoc(
        "those from outside the setting `cluster_cidrs`; if that names no network of the family, all",
        "replies to clients in those networks come back through this host anyway",
    ),
    "hairpin": ModeDoc(
        "no others; also not those to external addresses and node ports",
        "this host is the backends' route to all clients, and backends must see the client",
    ),
}

GROUPS = {
    group.title: group
    for group in (
        KeyGroup("A document", DOCUMENT_KEYS, DOCUMENT),
        KeyGroup("A service", SERVICE_KEYS, SERVICE),
        KeyGroup("A port", PORT_KEYS, PORT),
        KeyGroup("A backend", BACKEND_KEYS, BACKEND),
        KeyGroup("Affinity", AFFINITY_KEYS, AFFINITY),
        KeyGroup("Fallback", FALLBACK_KEYS, FALLBACK),
        KeyGroup("An external address", EXTERNAL_KEYS, EXTERNAL_ADDRESS),
        KeyGroup("Traffic policies", TRAFFIC_KEYS, TRAFFIC_POLICY),
        KeyGroup("A check", CHECK_KEYS, CHECK),
    )
}
"""Every mapping of the language, in the order of the manual."""
