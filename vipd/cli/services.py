"""`vipctl add`, `set` and `remove`: services as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from vipd.cli.argument_types import OWN_SERVICE_BACKEND, OWN_TARGET, WORDS, Word
from vipd.cli.changes import merged, print_change, service_change_options
from vipd.cli.connection import connect
from vipd.cli.errors import OK, USAGE, CliError, combine_errors
from vipd.cli.words import (
    FALLBACK_WORDS,
    affinity_spec,
    backend_specs,
    fallback_spec,
    frontend_spec,
    split_backend,
)
from vipd.model.formatting import counted
from vipd.model.service import Balance
from vipd.observe.api_client import Json

MASQUERADE_MODES = ("auto", "always", "forwarded", "off-cluster", "hairpin")


def _policy_options(command: Callable[..., int]) -> Callable[..., int]:
    for option in (
        click.option(
            "--fallback",
            multiple=True,
            metavar="reject|drop|keep|ADDR",
            type=Word(WORDS, FALLBACK_WORDS),
            help="What new flows meet while no backend is ready; ADDR: that backend; repeatable.",
        ),
        click.option(
            "--balance",
            type=click.Choice([balance.value for balance in Balance]),
            help="How a new flow's backend is chosen; source-hash needs the nftables dataplane.",
        ),
        click.option(
            "--registrations",
            type=click.Choice(["true", "false"]),
            help="Whether backends that register themselves in etcd take part.",
        ),
        click.option(
            "--masquerade",
            type=click.Choice(MASQUERADE_MODES),
            help="Which new flows get this host's address as their source; auto: as vipd.yaml says.",
        ),
        click.option(
            "--affinity",
            metavar="TIME|client-ip|none",
            type=Word(WORDS, ("client-ip", "none")),
            help="How long a client keeps its backend, like 10m; client-ip: 3h; none: it does not.",
        ),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("vip", metavar="VIP:PORT/PROTO")
@click.argument("backends", metavar="[ADDR[:PORT][@WEIGHT]]...", nargs=-1)
@click.option("--name", metavar="NAME", help="The service's name; default: VIP:PORT/PROTO.")
@click.option(
    "--target",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="The backends' port, as in VIP:PORT:TARGET/PROTO; default: PORT.",
)
@_policy_options
@service_change_options
def add(
    *,
    vip: str,
    backends: tuple[str, ...],
    name: str | None,
    target: int | None,
    affinity: str | None,
    masquerade: str | None,
    balance: str | None,
    fallback: tuple[str, ...],
    registrations: str | None,
    **display: Any,
) -> int:
    """Add a service. It is stored, and survives a reboot. The same again changes nothing.

    \b
    vipctl add 10.96.0.10:53/udp 10.244.0.5 10.244.2.21
    vipctl add [fd00::10]:443/tcp fd00:1::5@3 fd00:1::6 --name web
    vipctl add 10.96.0.53:53:5353/tcp,udp 10.244.0.5
    """
    spec: Json = {"name": name} if name else {}
    spec |= frontend_spec(vip, target)
    if backends:
        spec["backends"] = backend_specs(backends)
    # A new service starts from the defaults: an option that only clears a field has no effect.
    policy = _policy(affinity, masquerade, balance, fallback, registrations)
    spec |= {key: value for key, value in policy.items() if value is not None}
    answer = connect().change("POST", "services", body={"service": spec}, dry_run=display["dry_run"])
    details = counted(len(backends), "backend")
    if not backends:
        details = "no backends: new flows " + ("meet the fallback" if fallback else "are refused")
    return print_change(answer, f"{vip}, {details}" if name else details, **display)


@click.command("set")
@click.argument("target", metavar="TARGET[/BACKEND]", type=OWN_SERVICE_BACKEND)
@click.option(
    "--weight", type=click.IntRange(0, 65535), metavar="N", help="The backend's weight; 0: no new flows."
)
@_policy_options
@service_change_options
def set_fields(
    *,
    target: str,
    weight: int | None,
    affinity: str | None,
    masquerade: str | None,
    balance: str | None,
    fallback: tuple[str, ...],
    registrations: str | None,
    **display: Any,
) -> int:
    """Change a service that vipctl added, or the weight of one of its backends. What is not named stays.

    \b
    vipctl set dns --affinity none
    vipctl set dns/10.244.2.21 --weight 5
    """
    policy = _policy(affinity, masquerade, balance, fallback, registrations)
    if (weight is None) == (not policy):
        hint = "either --weight for TARGET/BACKEND, or the other options for TARGET"
        raise CliError(
            f"nothing to set for {target}" if weight is None else "too much at once", hint=hint, code=USAGE
        )
    if weight is None:
        told = {
            "affinity": affinity,
            "masquerade": masquerade,
            "balance": balance,
            "fallback": " ".join(fallback),
            "registrations": registrations,
        }
        details = ", ".join(f"{name} {word}" for name, word in told.items() if word)
        return _patch((target,), {"service": policy}, details, display)
    service, backend = split_backend(target, f"vipctl set {{}} --weight {weight}")
    return _patch((service, "backends", backend), {"weight": weight}, f"{backend}: weight {weight}", display)


def _patch(path: tuple[str, ...], body: Json, details: str, display: Json) -> int:
    answer = connect().change("PATCH", "services", *path, body=body, dry_run=display["dry_run"])
    return print_change(answer, details, **display)


def _policy(
    affinity: str | None,
    masquerade: str | None,
    balance: str | None,
    fallback: tuple[str, ...],
    registrations: str | None,
) -> Json:
    """The named fields of a Spec; None if the option means the default."""
    policy: Json = {}
    if affinity is not None:
        policy["affinity"] = affinity_spec(affinity)
    if masquerade is not None:
        policy["masquerade"] = None if masquerade == "auto" else masquerade
    if balance is not None:
        policy["balance"] = balance
    if fallback:
        policy["fallback"] = fallback_spec(fallback)
    if registrations is not None:
        policy["registrations"] = registrations == "true"
    return policy


@click.command()
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True, type=OWN_TARGET)
@service_change_options
def remove(targets: tuple[str, ...], **display: Any) -> int:
    """Remove services that vipctl added. One that cannot be removed does not keep the others.

    \b
    vipctl remove dns 10.96.0.20:443/tcp
    """
    daemon = connect()
    answers: list[Json] = []
    failures: list[CliError] = []
    for target in targets:
        try:
            answers.append(daemon.change("DELETE", "services", target, dry_run=display["dry_run"]))
        except CliError as err:
            failures.append(err)
    if answers:
        print_change(merged(answers), "", **display)
    if failures:
        raise combine_errors(failures)
    return OK
