"""Limits on the input that vipd reads: declarations, etcd, and JSON that others wrote. Each has its reason.
docs/declaration.md lists them; limits on requests are in vipd/api/request_bodies.py and docs/api.md.

Each limit is far above what a site needs: docs/performance.md measures 100,000 services of five backends, and
one service of 5,000 backends. vipd reports input above a limit as a problem and continues with all other
input. It checks a product of two numbers, such as ports times backends, before it builds the entries. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vipd.model.service import Service

MIB = 2**20

FILE_BYTES = 64 * MIB
"""Bytes of one declarations file: three times the text of 100,000 services with five backends each."""

FILES = 10_000
"""Files in the directory of declarations: vipd reads the modification time of each every two seconds."""

DIRECTORY_BYTES = 256 * MIB
"""Bytes of all declarations files together: their text stays in memory to detect changes."""

SERVICES = 250_000
"""Services in one file, or one store: two and a half times the measured number."""

PORTS = 5_000
"""Ports of one service: each has its own rules in each family."""

BACKENDS = 10_000
"""Backends of one service, including fallback and registered ones: twice the measured number."""

SERVICE_ENDPOINTS = 50_000
"""Ports times backends of one service, and ports times addresses. vipd selects the backends of a service and
compiles its rules as a whole, which takes a second at this size."""

ADDRESS_ENDPOINTS = 500_000
"""Endpoints of one service times its addresses. nftables has an element for each pair, which takes some
hundred bytes in vipd and in the kernel."""

NAMED_PORT_LOOKUPS = 500_000
"""Port names in the backends of one service, times its ports: vipd looks up each name in each port."""

MAX_UNIT_SIZE = 1_500_000
"""Sum of `declared_size` over the services of one file, or one store. 100,000 services of five backends have
600,000."""

MAX_TOTAL_SIZE = 3_000_000
"""The same sum over all files, stores and keys together: some gigabytes in memory."""

TEXT = 4_096
"""Characters of one text in a declaration: the longest text is a path, of at most PATH_MAX."""

YAML_DEPTH = 32
"""Levels of nesting in YAML; declarations and Kubernetes manifests need a dozen."""

YAML_ALIASED = 100_000
"""Values that all aliases of a file expand to: stops a "billion laughs" attack."""

YAML_VALUES = 6_000_000
"""YAML values in one file: each takes some hundred bytes while vipd reads the file. 100,000 services of five
backends, with each key of a backend written out, have 4.4 million."""

YAML_ENTRIES = 100_000
"""Entries of one mapping, or of one list except that of services: twice what any may have. While Python
builds a larger table or frees its content, no other thread runs."""

YAML_VALUE_BYTES = 2 * MIB
"""Bytes of one YAML value with the comments before it: no Kubernetes object is larger than 1.5 MiB."""

PROBLEMS = 100
"""Problems that vipd keeps for one file, store or key; it counts the rest. Nobody reads more at once."""

NOTES = 1_000
"""Notes on one file: there is one for each Kubernetes Service that vipd leaves out."""

ALL_PROBLEMS = 1_000
"""Problems that vipd keeps in total, besides the first of each file or key, and shows in one answer."""

ETCD_SERVICE_BYTES = MIB
"""Bytes of a service's value in etcd: some ten thousand backends. etcd itself rejects requests above
1.5 MiB."""

ETCD_SMALL_VALUE_BYTES = 16 * 1024
"""Bytes of the value of a registered backend, an override or a host's report: each has some hundred bytes,
and a check with all its texts some thousand."""

ETCD_KEYS = 1_000_000
"""Keys in etcd that vipd watches."""

ETCD_BYTES = 128 * MIB
"""Bytes of all watched keys and values: four times 100,000 services. etcd's own default limit is 2 GiB for
everything."""

ETCD_FOLDER_BYTES = 16 * MIB
"""Bytes of the keys and values below one folder of services or registrations in etcd, such as
`backends/web/`: some 100,000 registrations."""

ETCD_FOLDER_KEYS = 50_000
"""Keys below such a folder: each takes a kilobyte in memory, however small it is."""

ETCD_OVERRIDES_BYTES = 2 * MIB
"""Of the keys and values of overrides for the fleet: some ten thousand."""

ETCD_KEY_BYTES = 512
"""Bytes of a key in etcd that is kept whole; names of services have 128 at most."""

MIN_REGISTERED_CHECK_SECONDS = 1.0
"""Shortest interval of a registered backend's own check, because every host of a fleet runs that check.
Only the service's own check, which its administrator sets, may have a shorter interval."""

JSON_DEPTH = 64
"""Levels of nesting in JSON that others wrote; the API's answers have a dozen."""

JSON_DIGITS = 40
"""Digits of one number in JSON: a 64-bit integer needs 20, and a fraction in full precision 24."""

ANSWER_BYTES = 512 * MIB
"""Bytes of one API answer that vipctl reads: five times the list of 100,000 services."""


def declared_size(service: Service) -> int:
    """The size of a service, as `MAX_UNIT_SIZE` and `MAX_TOTAL_SIZE` count it: its ports times its backends
    and addresses. With several addresses, each address has an entry for each backend; half of them count,
    because with addresses in both families each address has half of the backends."""
    backends = len(service.backends) + len(service.fallback) + len(service.names)
    addresses = len(service.addresses) + len(service.external_addresses)
    return len(service.ports) * max(addresses + backends, addresses * backends // 2)


STATE_DIR_FULL_BYTES = 1 << 20
"""Below this room the state directory counts as full. A change may need as much: ten thousand services are a
few megabytes, one is a few hundred bytes."""
STATE_DIR_LOW_BYTES = 50 << 20
"""Below this room it counts as nearly full."""
