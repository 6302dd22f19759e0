"""`vipctl add-backend` and `remove-backend`."""

from __future__ import annotations

from typing import Any

import click

from vipd.cli.changes import service_change_options, tell
from vipd.cli.completion import BACKEND, OWN_TARGET
from vipd.cli.connection import connect
from vipd.cli.words import backend_names, backend_specs


@click.command("add-backend")
@click.argument("target", metavar="TARGET", type=OWN_TARGET)
@click.argument("backends", metavar="ADDR[:PORT][@WEIGHT]...", nargs=-1, required=True)
@service_change_options
def add_backend(target: str, backends: tuple[str, ...], **telling: Any) -> int:
    """Add backends to a service. One that is there already stays as it is.

    \b
    vipctl add-backend dns 10.244.3.9 10.244.3.10@2
    """
    body = {"backends": backend_specs(backends)}
    answer = connect().change("POST", "services", target, "backends", body=body, dry_run=telling["dry_run"])
    return tell(answer, f"with {', '.join(backends)}", **telling)


@click.command("remove-backend")
@click.argument("target", metavar="TARGET", type=OWN_TARGET)
@click.argument("backends", metavar="ADDR[:PORT]...", nargs=-1, required=True, type=BACKEND)
@service_change_options
def remove_backend(target: str, backends: tuple[str, ...], **telling: Any) -> int:
    """Remove backends from a service. Established UDP flows to them end.

    \b
    vipctl remove-backend dns 10.244.3.9
    """
    names = backend_names(backends)
    answer = connect().change(
        "DELETE", "services", target, "backends", body={"backends": names}, dry_run=telling["dry_run"]
    )
    return tell(answer, f"without {', '.join(names)}", **telling)
