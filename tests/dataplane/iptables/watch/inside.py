"""Making sockets in another network namespace."""

from tests.dataplane.namespace import inside as inside
