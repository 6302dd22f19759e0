"""`vipctl ready`: whether this host serves a service, as an exit code for keepalived and others."""

from __future__ import annotations

import click

from vipd.cli.argument_types import TARGET
from vipd.cli.connection import connect
from vipd.cli.errors import FAILED, OK
from vipd.cli.output import document, output_option, socket_option


@click.command()
@click.argument("target", metavar="TARGET", type=TARGET)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@output_option("text", "json", "yaml")
@socket_option
def ready(target: str, quiet: bool, form: str) -> int:
    """Exit with 0 if this host can serve TARGET to clients elsewhere, with 1 if not.

    It cannot without a backend that serves (on this host, where the external policy is local), and in
    maintenance. Exit code 3: there is no such service, 4: vipd does not answer. For a vrrp_script of
    keepalived, where no etcd elects who has an address; see keepalived.conf among the examples.

    \b
    vipctl ready --quiet web
    """
    told = connect().get("services", target, "ready")
    if form != "text":
        print(document(told, form))
    elif not quiet:
        print(f"{told['service']}: {'ready' if told['ready'] else 'not ready: ' + told['why']}")
    return OK if told["ready"] else FAILED
