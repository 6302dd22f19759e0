"""What of a service makes another version of its declaration."""

from dataclasses import replace

from tests.model.samples import service
from vipd.declaration.operations import version_of
from vipd.model.service import Backend


def test_a_backend_that_registered_itself_is_no_other_version() -> None:
    dns = service("dns", "10.96.0.10")
    joined = replace(dns, backends=(*dns.backends, Backend("10.244.0.9", registered=True)))
    assert version_of(joined) == version_of(dns)
    assert version_of(replace(dns, backends=(Backend("10.244.0.9"),))) != version_of(dns)
