"""`vipctl add-backend` and `remove-backend`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from vipd.cli.argument_types import BACKEND, OWN_TARGET
from vipd.cli.changes import print_change, service_change_options
from vipd.cli.connection import Daemon, connect
from vipd.cli.errors import USAGE, CliError
from vipd.cli.service_options import backup_option
from vipd.cli.words import backend_names, backend_specs, is_backend, single_backends
from vipd.declaration.dns_names import is_named
from vipd.model.service import NameKind, socket_text
from vipd.observe.api_client import Json


@click.command("add-backend")
@click.argument("target", metavar="TARGET", type=OWN_TARGET)
@click.argument("backends", metavar="[ADDR[:PORT][@WEIGHT]]...", nargs=-1)
@backup_option
@service_change_options
def add_backend(target: str, backends: tuple[str, ...], backup: tuple[str, ...], **display: Any) -> int:
    """Add backends to a service. One that is there already stays as it is.

    Without :PORT a backend gets the port that all others of the service have, if they have one of their own.

    \b
    vipctl add-backend dns 10.244.3.9 10.244.3.10@2
    vipctl add-backend dns --backup 10.244.9.9
    vipctl add-backend web dns:web.internal:8080
    """
    target, backends = _split_target(target, backends)
    if not (backends or backup):
        raise CliError("no backend to add", hint=f"vipctl add-backend {target} ADDR", code=USAGE)
    backends, backup = tuple(single_backends(backends)), tuple(single_backends(backup))
    specs, daemon = [*backend_specs(backends), *backend_specs(backup, backup=True)], connect()
    ported, port = _with_port_of_others(daemon, target, specs)
    answer = daemon.change(
        "POST",
        "services",
        target,
        "backends",
        body={"backends": ported},
        dry_run=display["dry_run"],
        confirm=display["confirm"],
    )
    shared = f" on port {port}, as all its others" if port else ""
    added = [*backends, *(f"{word} as a backup" for word in backup)]
    return print_change(answer, f"with {', '.join(added)}{shared}", **display)


def _with_port_of_others(
    daemon: Daemon, target: str, specs: Sequence[str | Json]
) -> tuple[Sequence[str | Json], int | None]:
    """The specs, with the backends' common port added to those without one; and that port.

    Raises CliError if the backends have no common port, so that it is ambiguous.
    """
    if all(_port(spec) or _has_ports(spec) for spec in specs):
        return specs, None
    listed = daemon.get("services", target)["service"]["spec"].get("backends", [])
    others = [other for other in listed if not _is_srv(other)]
    known = {_address(other) for other in others if _port(other) is None}
    open_ones = [
        spec for spec in specs if not (_port(spec) or _has_ports(spec)) and _address(spec) not in known
    ]
    ports = {_port(other) for other in others}
    if not open_ones or not ports or ports == {None}:
        return specs, None
    if len(ports) > 1:
        shown = ", ".join(str(port) if port else "none of their own" for port in sorted(ports, key=_number))
        hint = f"say which: {_with_port(_address(open_ones[0]), max(ports, key=_number) or 0)}"
        raise CliError(f"the backends of {target} have different ports: {shown}", hint=hint, code=USAGE)
    (port,) = ports
    return [_on(spec, port) if spec in open_ones else spec for spec in specs], port


def _split_target(target: str, backends: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """TARGET and backends; both may be one word, as for drain: TARGET/BACKEND."""
    service, slash, backend = target.rpartition("/")
    return (service, (backend,)) if slash and not backends and is_backend(backend) else (target, backends)


def _port(spec: str | Json) -> int | None:
    return None if isinstance(spec, str) else spec.get("port")


def _has_ports(spec: str | Json) -> bool:
    """Whether it names a port for each of the service's, or its records do."""
    return not isinstance(spec, str) and ("ports" in spec or _is_srv(spec))


def _is_srv(spec: str | Json) -> bool:
    return not isinstance(spec, str) and NameKind.SRV in spec


def _address(spec: str | Json) -> str:
    """Its address, or its name as `dns:NAME`."""
    if isinstance(spec, str):
        return spec
    return f"{NameKind.DNS}:{spec[NameKind.DNS]}" if NameKind.DNS in spec else str(spec.get("address", ""))


def _with_port(address: str, port: int) -> str:
    return f"{address}:{port}" if is_named(address) else socket_text(address, port)


def _on(spec: str | Json, port: int | None) -> Json:
    return {"port": port, **({"address": spec} if isinstance(spec, str) else spec)}


def _number(port: int | None) -> int:
    return port or 0


@click.command("remove-backend")
@click.argument("target", metavar="TARGET", type=OWN_TARGET)
@click.argument("backends", metavar="ADDR[:PORT]...", nargs=-1, type=BACKEND)
@service_change_options
def remove_backend(target: str, backends: tuple[str, ...], **display: Any) -> int:
    """Remove backends from a service. Established UDP flows to them end.

    \b
    vipctl remove-backend dns 10.244.3.9
    """
    target, backends = _split_target(target, backends)
    if not backends:
        raise CliError("no backend to remove", hint=f"vipctl remove-backend {target} ADDR", code=USAGE)
    names = backend_names(single_backends(backends))
    answer = connect().change(
        "DELETE",
        "services",
        target,
        "backends",
        body={"backends": names},
        dry_run=display["dry_run"],
        confirm=display["confirm"],
    )
    return print_change(answer, f"without {', '.join(names)}", **display)
