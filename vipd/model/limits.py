"""What vipd reads at most of declarations, etcd and JSON that others wrote, each number with its reason.
docs/declaration.md lists them; those of requests stand in vipd/api/request_bodies.py and docs/api.md.

Each is far above what a site has: docs/performance.md measures 100,000 services of five backends, and one
service of 5,000 backends. What is above one is a problem of its author; everything else goes on.
What two numbers make together, as ports times backends, is limited before it is multiplied out. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vipd.model.service import Service

MIB = 2**20

FILE_BYTES = 64 * MIB
"""Of one file of declarations: three times the text of 100,000 services with five backends each."""

FILES = 10_000
"""Of declarations in the directory: each is asked for its time of change every two seconds."""

DIRECTORY_BYTES = 256 * MIB
"""Of all files of declarations together, whose text stays in memory to find out what changes."""

SERVICES = 250_000
"""In one file, or one store: twice and a half what is measured."""

PORTS = 5_000
"""Of one service: each has rules of its own in each family."""

BACKENDS = 10_000
"""Of one service, fallback and registered ones included: twice what is measured."""

SERVICE_ENDPOINTS = 50_000
"""Of one service: its ports times its backends, and its ports times its addresses. It is selected and
compiled as a whole, which takes a second for so many."""

ADDRESS_ENDPOINTS = 500_000
"""Of one service: its endpoints, at each of its addresses. nftables has an element for each, of which one
takes some hundred bytes in vipd and in the kernel."""

NAMED_REACHES = 500_000
"""Of one service: the ports that its backends name, times its ports. Each name is looked for in each port."""

UNIT_ENDPOINTS = 1_500_000
"""Of one file, or one store: ports times backends and addresses of each service, added up. 100,000 services
of five backends have 600,000."""

ALL_ENDPOINTS = 3_000_000
"""Of all files, stores and keys together, added up in the same way: some gigabytes in memory."""

TEXT = 4_096
"""Characters of one text in a declaration: a path has as many at most (PATH_MAX), and nothing is longer."""

YAML_DEPTH = 32
"""Deepest nesting that is read; declarations and Kubernetes manifests need a dozen levels."""

YAML_ALIASED = 100_000
"""Values that all aliases of a file together stand for: the end of "billion laughs"."""

YAML_VALUES = 6_000_000
"""Of one file, in all: while it is read each takes some hundred bytes. 100,000 services of five backends,
with each key of a backend written out, have 4.4 million."""

YAML_ENTRIES = 100_000
"""Of one mapping, or of one list but that of services: twice what any may have. A larger table is made, and
what it holds is freed, in one go, in which no other thread runs."""

YAML_VALUE_BYTES = 2 * MIB
"""Of one value with the comments before it: no object of Kubernetes is larger than 1.5 MiB."""

PROBLEMS = 100
"""That are kept of one file, store or key; the rest is counted. Nobody reads more at once."""

NOTES = 1_000
"""Of one file: one for each Service of Kubernetes that is left out."""

ALL_PROBLEMS = 1_000
"""That are kept in all, beside the first of each file or key, and shown by one answer."""

ETCD_SERVICE_BYTES = MIB
"""Of a service's value: some ten thousand backends. etcd itself takes no request above 1.5 MiB."""

ETCD_NOTE_BYTES = 16 * 1024
"""Of the value of a registered backend, an override or a host's report: each is some hundred bytes, a check
with all its texts some thousand."""

ETCD_KEYS = 1_000_000
"""That are followed."""

ETCD_BYTES = 128 * MIB
"""Of all keys and values that are followed: four times 100,000 services. etcd's own default is 2 GiB for
everything."""

REGISTERED_CHECK_SECONDS = 1.0
"""Shortest interval of a registered backend's own check, which every host of a fleet asks. What asks oftener
is the service's own check, of its administrator."""

JSON_DEPTH = 64
"""Deepest nesting of JSON that others wrote; the API's answers have a dozen levels."""

JSON_DIGITS = 40
"""Of one number in JSON: 64 bits need 20, and a fraction in full 24."""

ANSWER_BYTES = 512 * MIB
"""Of one answer of the API that vipctl reads: five times the list of 100,000 services."""


def size_of(service: Service) -> int:
    """Its ports times its backends and addresses, as the limits on units and on all of them count it; of many
    addresses, the backends at each. With an address in both families, each has half of the backends."""
    backends = len(service.backends) + len(service.fallback)
    addresses = len(service.addresses) + len(service.external_addresses)
    return len(service.ports) * max(addresses + backends, addresses * backends // 2)
