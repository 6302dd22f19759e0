"""Limits on what vipd reads of declarations, etcd and JSON that others wrote, each number with its reason.
docs/declaration.md lists them; limits on requests are in vipd/api/request_bodies.py and docs/api.md.

Each is far above what a site has: docs/performance.md measures 100,000 services of five backends, and one
service of 5,000 backends. Input above a limit is a problem of its author; everything else continues.
A product of two numbers, as ports times backends, is limited before it is multiplied out. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vipd.model.service import Service

MIB = 2**20

FILE_BYTES = 64 * MIB
"""In one declarations file: three times the text of 100,000 services with five backends each."""

FILES = 10_000
"""In the directory of declarations: vipd reads the modification time of each every two seconds."""

DIRECTORY_BYTES = 256 * MIB
"""In all declarations files together, whose text stays in memory to detect changes."""

SERVICES = 250_000
"""In one file, or one store: two and a half times what is measured."""

PORTS = 5_000
"""In one service: each has its own rules in each family."""

BACKENDS = 10_000
"""In one service, fallback and registered ones included: twice what is measured."""

SERVICE_ENDPOINTS = 50_000
"""In one service: its ports times its backends, and its ports times its addresses. A service is selected and
compiled as a whole, which takes a second at this size."""

ADDRESS_ENDPOINTS = 500_000
"""In one service: its endpoints, at each of its addresses. nftables has an element for each, which takes
some hundred bytes in vipd and in the kernel."""

NAMED_PORT_LOOKUPS = 500_000
"""In one service: the ports that its backends name, times its ports. Each name is looked up in each port."""

UNIT_ENDPOINTS = 1_500_000
"""In one file, or one store: ports times backends and addresses of each service, added up. 100,000 services
of five backends have 600,000."""

ALL_ENDPOINTS = 3_000_000
"""In all files, stores and keys together, added up in the same way: some gigabytes in memory."""

TEXT = 4_096
"""Characters of one text in a declaration: the maximum of a path (PATH_MAX), and nothing is longer."""

YAML_DEPTH = 32
"""Deepest nesting that is read; declarations and Kubernetes manifests need a dozen levels."""

YAML_ALIASED = 100_000
"""Values that all aliases of a file expand to: stops "billion laughs"."""

YAML_VALUES = 6_000_000
"""In one file: each takes some hundred bytes while the file is read. 100,000 services of five backends,
with each key of a backend written out, have 4.4 million."""

YAML_ENTRIES = 100_000
"""In one mapping, or in one list except that of services: twice what any may have. Python builds a larger
table, and frees its content, in one step in which no other thread runs."""

YAML_VALUE_BYTES = 2 * MIB
"""In one value with the comments before it: no object of Kubernetes is larger than 1.5 MiB."""

PROBLEMS = 100
"""Kept for one file, store or key; the rest is counted. More is not readable at once."""

NOTES = 1_000
"""In one file: one for each Service of Kubernetes that is left out."""

ALL_PROBLEMS = 1_000
"""Kept in all, besides the first of each file or key, and shown by one answer."""

ETCD_SERVICE_BYTES = MIB
"""In a service's value: some ten thousand backends. etcd itself rejects requests above 1.5 MiB."""

ETCD_SMALL_VALUE_BYTES = 16 * 1024
"""In the value of a registered backend, an override or a host's report: each is some hundred bytes, a check
with all its texts some thousand."""

ETCD_KEYS = 1_000_000
"""Keys that vipd follows."""

ETCD_BYTES = 128 * MIB
"""In all followed keys and values: four times 100,000 services. etcd's own default is 2 GiB for
everything."""

REGISTERED_CHECK_SECONDS = 1.0
"""Shortest interval of a registered backend's own check, which every host of a fleet runs. Shorter intervals
are for the service's own check, which its administrator sets."""

JSON_DEPTH = 64
"""Deepest nesting of JSON that others wrote; the API's answers have a dozen levels."""

JSON_DIGITS = 40
"""In one number in JSON: 64 bits need 20, and a fraction in full 24."""

ANSWER_BYTES = 512 * MIB
"""In one API answer that vipctl reads: five times the list of 100,000 services."""


def declared_size(service: Service) -> int:
    """Its ports times its backends and addresses, as the limits on units and on their sum count it; for
    several addresses, the backends at each. With addresses in both families, each has half of the
    backends."""
    backends = len(service.backends) + len(service.fallback)
    addresses = len(service.addresses) + len(service.external_addresses)
    return len(service.ports) * max(addresses + backends, addresses * backends // 2)
