"""The values and the meaning of each key of vipd/v1, for the manual page vipd-services(5), for
docs/declaration.md and for docs/declaration.schema.json. Pure.

Each key that a reader accepts has one line here, and the same words in its row of docs/declaration.md; tests
compare all three. Words in backquotes are literal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from vipd.declaration import value_forms as forms
from vipd.declaration.backend_reader import BACKEND_KEYS
from vipd.declaration.check_reader import CHECK_KEYS, DNS_TYPES
from vipd.declaration.external_reader import EXTERNAL_KEYS, TRAFFIC_KEYS
from vipd.declaration.limits_reader import LIMIT_RANGES
from vipd.declaration.native import API_VERSION, DOCUMENT_KEYS
from vipd.declaration.policy_reader import (
    AFFINITY_KEYS,
    ANNOUNCE_KEYS,
    ANNOUNCED_ADDRESSES,
    FALLBACK_KEYS,
    WEIGHT_FROM,
)
from vipd.declaration.port_reader import PORT_KEYS
from vipd.declaration.service_reader import ON_REMOVE, SERVICE_KEYS
from vipd.declaration.value_forms import Schema, ValueForm
from vipd.model.check import MAX_COUNT, InitialHealth
from vipd.model.flow_limits import MAX_CONNECTIONS
from vipd.model.service import MAX_WEIGHT, AnnounceMethod, Balance, TrafficDistribution, TrafficPolicy


class KeyDoc(NamedTuple):
    """One key: its possible values, its default (empty: it is required, or its absence has no
    consequence), and its meaning.
    """

    value: ValueForm
    default: str
    meaning: str

    @property
    def form(self) -> str:
        """Its possible values, in words."""
        return self.value.words

    @property
    def required(self) -> bool:
        """Whether its mapping must have it."""
        return self.meaning.startswith("Required")


class ModeDoc(NamedTuple):
    """A masquerade mode: the new flows that it masquerades, and where to choose it."""

    flows: str
    choose_it_when: str


class KeyGroup(NamedTuple):
    """The keys of one mapping. `title`: its heading in manual and docs; `keys`: those that its reader
    accepts; `text`: the schema of a short form that may replace the mapping."""

    title: str
    keys: Collection[str]
    docs: Mapping[str, KeyDoc]
    text: Schema = MappingProxyType({})

    def described(self) -> Iterator[tuple[str, KeyDoc]]:
        """Every key in the reader's order; raises LookupError for one without a meaning here."""
        for key in self.keys:
            if key not in self.docs:
                raise LookupError(f"{self.title}: no meaning of {key}; hint: vipd/declaration/key_docs.py")
            yield key, self.docs[key]


DOCUMENT = {
    "apiVersion": KeyDoc(
        forms.choice(API_VERSION), "", "Required. A document of another version is not read on."
    ),
    "defaults": KeyDoc(
        forms.DEFAULTS,
        "",
        "Defaults for all services in this document.",
    ),
    "services": KeyDoc(forms.SERVICES, "", "May be missing or empty."),
}

SERVICE = {
    "name": KeyDoc(
        forms.NAME,
        "the first frontend, `10.96.0.10:53/udp`",
        "1 to 128 of `A-Z a-z 0-9 . _ / -`, a letter or digit at both ends. Unique on the host.",
    ),
    "address": KeyDoc(forms.ADDRESSES, "none", "The virtual IPs."),
    "ports": KeyDoc(forms.PORTS, "", "Required. What clients connect to."),
    "backends": KeyDoc(forms.BACKENDS, "none", "Who serves."),
    "affinity": KeyDoc(forms.AFFINITY, "`none`", "Whether a client keeps its backend."),
    "masquerade": KeyDoc(forms.MASQUERADE, "`auto`", "Which flows get this host's address as their source."),
    "fallback": KeyDoc(
        forms.FALLBACK,
        "`reject`",
        "What a new flow meets while no backend can serve. `keep`: while all are unhealthy, all serve.",
    ),
    "external_addresses": KeyDoc(forms.EXTERNAL_ADDRESSES, "none", "Addresses for clients from outside."),
    "load_balancer_addresses": KeyDoc(
        forms.EXTERNAL_ADDRESSES, "none", "The same, called a load balancer's in rules and by Kubernetes."
    ),
    "allow_from": KeyDoc(
        forms.NETWORKS,
        "`any`",
        "Who may use the service at its addresses and node ports. Packets of others are dropped.",
    ),
    "node_port": KeyDoc(forms.PORT_NUMBER, "none", "Short for `node_port` of the only port."),
    "health_port": KeyDoc(
        forms.PORT_NUMBER,
        "none",
        "TCP port of this host that tells outer load balancers whether to send traffic here.",
    ),
    "traffic_policy": KeyDoc(
        forms.TRAFFIC_POLICIES, "`cluster` for both", "Whether only backends on this host serve."
    ),
    "traffic_distribution": KeyDoc(
        forms.choice(*TrafficDistribution),
        "`prefer-same-zone`",
        "Which ready backends serve first under the policy `cluster`: those for this host's zone, or those "
        "on this host and then those for its zone.",
    ),
    "on_remove": KeyDoc(
        forms.choice(*ON_REMOVE),
        "`keep`",
        "Whether established TCP and SCTP flows to a backend that is removed or `down` go on or are "
        "ended; also when the port or the whole service is removed. A TCP client gets a reset with "
        "the next packet that it sends, for ten minutes after a frontend was removed. UDP flows "
        "always end.",
    ),
    "respond_to_ping": KeyDoc(
        forms.FLAG,
        "`true`",
        "Whether the addresses in `address` answer ICMP echo while a backend serves; this host answers. "
        "Never with the prefix KUBE or `compat: kube-proxy`.",
    ),
    "registrations": KeyDoc(
        forms.FLAG,
        "`true` in etcd, else `false`",
        "Whether backends that register themselves in etcd take part.",
    ),
    "flow_takeover": KeyDoc(
        forms.FLAG,
        "`false`",
        "Whether established TCP flows go on through this host when the host that they went through is lost. "
        "Needs `balance: source-hash` and `masquerade: hairpin`. Do not set it where clients also connect to "
        "the backends' ports directly.",
    ),
    "balance": KeyDoc(
        forms.choice(*Balance),
        "`random`",
        "How a new flow's backend is chosen, by weight. `source-hash`: by the client's address, the same on "
        "every host; nftables dataplane only. Made for up to 3,000 backends: their table takes about one "
        "second to make, beside all other work, and 30 MB meanwhile. `least-connections`: at random, by "
        "weights that follow the live flows of each backend through this host, about once a second.",
    ),
    "check": KeyDoc(forms.CHECK, "`none`", "Health check for backends that define none of their own."),
    "slow_start": KeyDoc(
        forms.SLOW_START,
        "`0s`",
        "How long the share of a backend that has become healthy again takes to grow to its full.",
    ),
    "weight_from": KeyDoc(
        forms.choice(*WEIGHT_FROM),
        "`declaration`",
        "`check`: a backend may say its weight in the header `X-Vipd-Weight` of its answer to an HTTP"
        " check: 0 to 65535, or a percentage of its declared one, 0% to 100%. Digits are those of "
        "ASCII; zeros in front count for nothing. With anything else the declared weight counts, and "
        "`vipctl describe` says what came.",
    ),
    "announce": KeyDoc(
        forms.ANNOUNCE,
        "`none`",
        "How hosts elsewhere learn where its addresses are. `routes`: a routing daemon announces each from "
        "every host that serves it; `l2`: one host at a time answers ARP and neighbour discovery for it. "
        "Meant are external and load balancer addresses; if the service has none, `address`, unless "
        "only `defaults` says it. See `announce_addresses` in the settings.",
    ),
    "limits": KeyDoc(
        forms.LIMITS,
        "`none`",
        "How many flows the service and each client may begin and have. A new flow over a limit is refused "
        "as `fallback` says: `drop` in silence, else at once. Never with the prefix KUBE or "
        "`compat: kube-proxy`.",
    ),
}

PORT = {
    "name": KeyDoc(
        forms.PORT_LABEL,
        "none",
        "1 to 63 of `a-z 0-9 -`, at least one letter or digit. Needed only for `ports` of a backend.",
    ),
    "port": KeyDoc(forms.PORT_NUMBER, "", "Required. What clients connect to."),
    "protocol": KeyDoc(forms.PROTOCOL, "`tcp`", "Of clients and backends."),
    "target": KeyDoc(forms.PORT_NUMBER, "`port`", "The backends' port."),
    "node_port": KeyDoc(forms.PORT_NUMBER, "none", "Port on this host's own addresses that leads here too."),
}

BACKEND = {
    "address": KeyDoc(
        forms.ADDRESS,
        "",
        "Of a family that the service has an address of; not loopback, and no service's `address`. A backend "
        "has this, `dns` or `srv`.",
    ),
    "dns": KeyDoc(
        forms.BACKEND_NAME,
        "",
        "A name in place of `address`: each of its addresses is a backend.",
    ),
    "srv": KeyDoc(
        forms.BACKEND_NAME,
        "",
        "A name in place of `address` whose SRV records say the backends, their ports, weights and which are "
        "backups. Only in services of one port; not beside `port`, `ports` or `weight`.",
    ),
    "port": KeyDoc(
        forms.PORT_NUMBER, "the port's `target`", "The backend's own port, for all ports of the service."
    ),
    "ports": KeyDoc(
        forms.NAMED_PORTS,
        "all ports",
        "The only ports that it serves, each with its own number. Not beside `port`.",
    ),
    "weight": KeyDoc(
        forms.whole_number(0, MAX_WEIGHT),
        "1",
        "Its share of new flows is its weight over the sum of all. 0: no new flows.",
    ),
    "state": KeyDoc(
        forms.STATE,
        "`up`",
        "`drain`: new flows only while nothing that is up can serve. "
        "`down`: none, and flows are treated as if it were removed.",
    ),
    "node": KeyDoc(
        forms.NODE,
        "none",
        "The host it runs on, for the policy `local`. Compared with the setting `node_name`.",
    ),
    "zone": KeyDoc(
        forms.ZONES, "none", "Zones whose clients it should serve. Compared with the setting `zone`."
    ),
    "backup": KeyDoc(forms.FLAG, "`false`", "Serves only while no backend that is none can."),
    "check": KeyDoc(forms.CHECK, "the service's", "How this backend is checked."),
    "max_connections": KeyDoc(
        forms.whole_number(1, MAX_CONNECTIONS),
        "no limit",
        "With so many live flows of the service through this host it gets no new ones, until a twentieth of "
        "them has ended. vipd counts about once a second, so that more may come within a second.",
    ),
}

AFFINITY = {
    "by": KeyDoc(forms.choice("client-ip"), "", "Required in a mapping."),
    "timeout": KeyDoc(forms.AFFINITY_TIMEOUT, "`3h`", "Counts from the client's last new flow."),
}

FALLBACK = {
    "backends": KeyDoc(
        forms.FALLBACK_BACKENDS,
        "",
        "Required. Serve while no backend of the service can, on any host. If they cannot either, the flow "
        "is refused.",
    ),
}

ANNOUNCE = {
    "by": KeyDoc(forms.choice(*AnnounceMethod), "", "Required in a mapping."),
    "addresses": KeyDoc(
        forms.choice(*ANNOUNCED_ADDRESSES),
        "as the short form",
        "`all`: its `address`, too, besides the external and load balancer addresses.",
    ),
}

_PER_PORT = "of each port, in each address family by itself"
LIMITS = {
    "connections": KeyDoc(
        forms.whole_number(*LIMIT_RANGES["connections"]),
        "no limit",
        f"Flows at the same time, {_PER_PORT}.",
    ),
    "connections_per_client": KeyDoc(
        forms.whole_number(*LIMIT_RANGES["connections_per_client"]), "no limit", "The same of one client."
    ),
    "new_per_second": KeyDoc(
        forms.whole_number(*LIMIT_RANGES["new_per_second"]),
        "no limit",
        f"New flows in a second, {_PER_PORT}.",
    ),
    "burst": KeyDoc(
        forms.whole_number(*LIMIT_RANGES["burst"]),
        "`new_per_second`",
        "New flows that may come at once after a pause; each second makes room for `new_per_second` more.",
    ),
    "new_per_client": KeyDoc(
        forms.whole_number(*LIMIT_RANGES["new_per_client"]),
        "no limit",
        "New flows of one client in a second.",
    ),
    "client_burst": KeyDoc(
        forms.whole_number(*LIMIT_RANGES["client_burst"]), "`new_per_client`", "`burst` of one client."
    ),
    "client_ipv6_prefix": KeyDoc(
        forms.whole_number(*LIMIT_RANGES["client_ipv6_prefix"]),
        "64",
        "Length of the IPv6 prefix whose addresses count as one client. With IPv4 each address does.",
    ),
}

EXTERNAL_ADDRESS = {
    "address": KeyDoc(forms.ADDRESS, "", "Required."),
    "allow_from": KeyDoc(
        forms.NETWORKS,
        "the service's `allow_from`",
        "Sources that may use it. Packets of others are dropped.",
    ),
}

TRAFFIC_POLICY = {
    "internal": KeyDoc(forms.choice(*TrafficPolicy), "`cluster`", "For traffic to `address`."),
    "external": KeyDoc(
        forms.choice(*TrafficPolicy), "`cluster`", "For traffic to external addresses and node ports."
    ),
}

CHECK = {
    "type": KeyDoc(forms.CHECK_TYPE, "", "Required in a mapping."),
    "interval": KeyDoc(
        forms.period("a duration, 100ms to 60m"),
        "`5s`",
        "From one question to the next. At least 1s for a backend that registers itself.",
    ),
    "timeout": KeyDoc(forms.period("a duration, 100ms to `interval`"), "`2s`", "Longest time for an answer."),
    "rise": KeyDoc(
        forms.whole_number(1, MAX_COUNT), "2", "Good answers in a row that make an unhealthy backend healthy."
    ),
    "fall": KeyDoc(
        forms.whole_number(1, MAX_COUNT), "3", "Bad answers in a row that make a healthy backend unhealthy."
    ),
    "start": KeyDoc(forms.choice(*InitialHealth), "`healthy`", "What it counts as until the first verdict."),
    "jitter": KeyDoc(forms.JITTER, "`10%`", "By how much pauses are shortened at random."),
    "port": KeyDoc(forms.PORT_NUMBER, "the backend's own", "The port that is asked."),
    "method": KeyDoc(forms.METHOD, "`GET`", "http, https: of the request."),
    "path": KeyDoc(forms.URL_PATH, "`/`", "http, https: of the request."),
    "host": KeyDoc(forms.HOST, "the address and port", "http, https: the Host header."),
    "status": KeyDoc(
        forms.STATUS,
        "`200-399`",
        "http, https: good ones. Redirections are not followed.",
    ),
    "body": KeyDoc(forms.BODY, "any body", "http, https: found in the answer's first 64 KiB."),
    "verify": KeyDoc(forms.FLAG, "`true`", "https: whether the certificate must be valid."),
    "ca": KeyDoc(
        forms.FILE,
        "the host's",
        "https: certificates to trust, in a regular file of at most 1 MiB. Not in etcd, where nothing names "
        "files of hosts.",
    ),
    "server_name": KeyDoc(forms.HOST, "`host`, else the address", "https: name sent (SNI) and verified."),
    "send": KeyDoc(forms.PAYLOAD, "", "udp: the datagram. Required."),
    "expect": KeyDoc(
        forms.PAYLOAD,
        "silence is good",
        "udp: what the answer begins with. Without it only an ICMP refusal is bad.",
    ),
    "query": KeyDoc(forms.DNS_NAME, "`.`", "dns: the name that is asked for."),
    "record": KeyDoc(forms.choice(*DNS_TYPES), "`A`", "dns: the type of record."),
    "rcode": KeyDoc(forms.RCODE, "`NOERROR`", "dns: of a good answer."),
    "answer": KeyDoc(forms.RECORD_TEXT, "any or none", "dns: must be among the answers."),
    "command": KeyDoc(
        forms.COMMAND,
        "",
        "exec: a program's absolute path and its arguments, each word by itself. No shell. Required.",
    ),
    "user": KeyDoc(
        forms.USER,
        "one for each author",
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
        KeyGroup("A port", PORT_KEYS, PORT, forms.PORT_TEXT),
        KeyGroup("A backend", BACKEND_KEYS, BACKEND, forms.BACKEND_TEXT),
        KeyGroup("Affinity", AFFINITY_KEYS, AFFINITY),
        KeyGroup("Fallback", FALLBACK_KEYS, FALLBACK),
        KeyGroup("Announce", ANNOUNCE_KEYS, ANNOUNCE),
        KeyGroup("Flow limits", LIMIT_RANGES, LIMITS),
        KeyGroup("An external address", EXTERNAL_KEYS, EXTERNAL_ADDRESS, forms.EXTERNAL_TEXT),
        KeyGroup("Traffic policies", TRAFFIC_KEYS, TRAFFIC_POLICY),
        KeyGroup("A check", CHECK_KEYS, CHECK),
    )
}
"""Every mapping of the language, in the order of the manual."""
