"""`vipctl set-dataplane`: switches the daemon to the other dataplane."""

from __future__ import annotations

import click

from vipd.cli.connection import connect
from vipd.cli.errors import OK
from vipd.cli.output import document, output_option, socket_option


@click.command("set-dataplane")
@click.argument("name", metavar="NAME", type=click.Choice(["iptables", "nftables"]))
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@output_option("text", "json", "yaml")
@socket_option
def set_dataplane(name: str, quiet: bool, form: str) -> int:
    """Change what programs the kernel to NAME, iptables or nftables, without a failed new connection.

    The new rules are written first, then the old ones are removed; open connections go on. The choice is kept
    over restarts, whatever vipd.yaml says.
    """
    told = connect(timeout=300.0).change("POST", "dataplane", body={"name": name})
    if form != "text":
        print(document(told, form))
    elif quiet:
        return OK
    elif told["changed"]:
        print(f"changed from {told['before']} to {name}; open connections go on")
    else:
        print(f"unchanged: {name} is in use")
    return OK
