"""`vipctl add`, `set` and `remove`: services as a whole."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click

from vipd.cli.argument_types import OWN_SERVICE_BACKEND, OWN_TARGET, WORDS, Word
from vipd.cli.changes import change_each, merged, print_change, rehearse_each, service_change_options
from vipd.cli.connection import connect
from vipd.cli.errors import NOT_FOUND, OK, USAGE, CliError, combine_errors
from vipd.cli.service_options import (
    ADDRESSES,
    FLAG,
    TRAFFIC_POLICY,
    GroupedOption,
    ServiceCommand,
    backup_option,
    described,
    fields_of,
    service_options,
)
from vipd.cli.words import (
    NO_ADDRESS,
    address_spec,
    backend_host,
    backend_name,
    backend_specs,
    frontend_spec,
    is_address_list,
    is_backend,
    is_frontend,
    number_or_none,
    single_backends,
    split_backend,
)
from vipd.model.formatting import counted
from vipd.observe.api_client import Json

NODE_PORT = "node_port"
_NAME = re.compile(r"(?!(?:dns|srv):)[A-Za-z][A-Za-z0-9_./-]*")
"""What may be the name of a service, and is no address."""


@click.command(cls=ServiceCommand)
@click.argument("words", metavar="[VIP[:PORT/PROTO]] [ADDR[:PORT][@WEIGHT]]...", nargs=-1)
@click.option(
    "--name",
    cls=GroupedOption,
    group=ADDRESSES,
    metavar="NAME",
    help="The service's name; default: VIP:PORT/PROTO.",
)
@click.option(
    "--target",
    cls=GroupedOption,
    group=ADDRESSES,
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="The backends' port for VIP:PORT, as in VIP:PORT:TARGET; default: PORT.",
)
@service_options
@backup_option
@service_change_options
@click.pass_context
def add(
    ctx: click.Context,
    /,
    *,
    words: tuple[str, ...],
    name: str | None,
    target: int | None,
    backup: tuple[str, ...],
    dry_run: bool,
    quiet: bool,
    form: str,
    confirm: int | None,
    **options: Any,
) -> int:
    """Add a service. It is stored, and survives a reboot. The same again changes nothing.

    VIP:PORT/PROTO is one address with one port. Else VIP is addresses with commas between, and -p names the
    ports. Beside --external there need be no VIP: it is none, or the only word is a backend. Commas may stand
    between backends, too. Where a file may have a mapping, a value may be one, in quotes:
    '{type: tcp, fall: 2}'.

    \b
    vipctl add 10.96.0.10:53/udp 10.244.0.5 10.244.2.21
    vipctl add [fd00::10]:443/tcp fd00:1::5@3 fd00:1::6 --name web
    vipctl add 10.96.0.53:53:5353/tcp,udp 10.244.0.5
    vipctl add 10.96.0.20,fd00::20 -p 80/tcp -p 443/tcp \\
        10.244.0.5 fd00:1::5 --backup 10.244.0.9 --check http:/healthz
    vipctl add 10.96.0.21:80/tcp dns:web.internal:8080
    vipctl add --external 203.0.113.10 -p 80/tcp 10.244.0.5
    """
    fields = fields_of(ctx.command, options)
    outside = fields.get("external_addresses") or fields.get("load_balancer_addresses")
    vip, backends = _vip_and_backends(words, without_vip=bool(outside and options["port"]))
    backup = tuple(single_backends(backup))
    spec: Json = {"name": name} if name else {}
    spec |= _addressed(vip, target, bool(options["port"]))
    if specs := [*backend_specs(backends), *backend_specs(backup, backup=True)]:
        spec["backends"] = specs
    # A new service starts from the defaults: an option that only clears a field has no effect.
    spec |= {key: value for key, value in fields.items() if value is not None}
    answer = connect().change("POST", "services", body={"service": spec}, dry_run=dry_run, confirm=confirm)
    if dry_run and form == "text" and not quiet and answer["changed"]:
        _print_difference(answer, None, spec)
    details = _backends_text(backends, backup, bool(options["fallback"]))
    if name or options["port"]:
        place = " ".join(word for word in (vip, *options["port"]) if word != NO_ADDRESS)
        details = f"{place}, {details}"
    code = print_change(answer, details, form=form, quiet=quiet, dry_run=dry_run, confirm=confirm)
    if form == "text" and not quiet and answer["changed"] and _unchecked(spec):
        check = f"--check {_check_for(spec)}"
        hint = check if dry_run else f"vipctl set {answer['results'][0]['name']} {check}"
        print(f"no check is set: dead backends get flows, too; hint: {hint}", file=sys.stderr)
    return code


def _unchecked(spec: Json) -> bool:
    """Whether it has backends, and a check neither for all of them nor for each."""
    own = [isinstance(backend, dict) and "check" in backend for backend in spec.get("backends", ())]
    return "check" not in spec and bool(own) and not all(own)


def _check_for(spec: Json) -> str:
    """The check that suits its ports."""
    ports = [
        (str(port["port"]), port.get("protocol", "tcp"))
        if isinstance(port, dict)
        else (port.partition("/")[0].partition(":")[0], port.partition("/")[2] or "tcp")
        for port in spec["ports"]
    ]
    protocols = {protocol for _, several in ports for protocol in several.split(",")}
    if "tcp" in protocols:
        return "tcp"
    if "udp" in protocols:
        return "dns:NAME" if any(number == "53" for number, _ in ports) else "udp:TEXT"
    return "exec:COMMAND"


def _vip_and_backends(words: Sequence[str], *, without_vip: bool) -> tuple[str, list[str]]:
    """The word for the VIP, and those for backends. `without_vip`: clients have another address, and so the
    first word may be a backend's: if there is no other, or if no VIP looks so."""
    first, *others = words or ("",)
    if without_vip and first != NO_ADDRESS and (not others or not is_address_list(first)):
        return NO_ADDRESS, single_backends(words)
    if not first:
        raise CliError("neither VIP nor backend is named", hint="vipctl add VIP:80/tcp ADDR", code=USAGE)
    if first != NO_ADDRESS:
        _refuse_other_order(first, others)
    return first, single_backends(others)


def _refuse_other_order(first: str, others: Sequence[str]) -> None:
    """Raises CliError with the command line that is meant by `web 10.96.0.12:80/tcp`, or by a backend before
    the VIP."""
    vip = next((word for word in others if is_frontend(word) and "/" in word), "")
    if _NAME.fullmatch(first) and (vip or (others and is_address_list(others[0]))):
        hint = f"vipctl add {' '.join(others)} --name {first}"
        raise CliError(f"{first} is no address", "the name of a service is an option", hint, code=USAGE)
    if vip and is_backend(first) and not ("/" in first and is_frontend(first)):
        rest = [word for word in (first, *others) if word != vip]
        hint = f"vipctl add {vip} {' '.join(rest)}"
        raise CliError("the VIP comes first, with its port and protocol", hint=hint, code=USAGE)


def _addressed(vip: str, target: int | None, ports: bool) -> Json:
    """The `address`, and the `ports` unless options name them."""
    if not ports and not vip.strip("0123456789."):
        hint = f"vipctl add {vip}:80/tcp, or for several ports: vipctl add {vip} -p 80/tcp -p 53/udp"
        raise CliError(f"{vip} has no port", hint=hint, code=USAGE)
    address, _, numbers = vip.rpartition(":")
    if not ports and is_address_list(address.strip("[]")) and "," in numbers.partition("/")[0]:
        hint = f"vipctl add {address.strip('[]')} -p {numbers.replace(',', ' -p ')}"
        raise CliError(f"{vip} has several ports", hint=hint, code=USAGE)
    if not ports and "," in vip.partition("/")[0]:
        hint = f"name the ports by -p: vipctl add {vip} -p 80/tcp"
        raise CliError(f"{vip} names several addresses, and no port for all of them", hint=hint, code=USAGE)
    if not ports:
        return frontend_spec(vip, target)
    if target is not None:
        raise CliError("--target is for VIP:PORT", hint="write -p PORT:TARGET", code=USAGE)
    return address_spec(vip)


def _backends_text(backends: Sequence[str], backup: Sequence[str], fallback: bool) -> str:
    if not (backends or backup):
        return "no backends: new flows " + ("meet the fallback" if fallback else "are refused")
    more = f", {counted(len(backup), 'backup')}" if backup else ""
    return counted(len(backends), "backend") + more


@click.command("set", cls=ServiceCommand)
@click.argument("target", metavar="TARGET[/BACKEND]", type=OWN_SERVICE_BACKEND)
@click.option(
    "--weight",
    cls=GroupedOption,
    group="Of TARGET/BACKEND",
    type=click.IntRange(0, 65535),
    metavar="N",
    help="The backend's weight; 0: no new flows.",
)
@click.option(
    "--backup",
    cls=GroupedOption,
    group="Of TARGET/BACKEND",
    type=click.Choice(FLAG),
    help="Whether the backend serves only while no others can.",
)
@click.option(
    "--max-connections",
    cls=GroupedOption,
    group="Of TARGET/BACKEND",
    type=Word(WORDS, ("none",)),
    metavar="N|none",
    help="The backend gets no new flows while it has so many.",
)
@click.option(
    "--address",
    "addresses",
    cls=GroupedOption,
    group=ADDRESSES,
    metavar="VIP,...|none",
    help="The addresses, in place of those it has.",
)
@service_options
@service_change_options
@click.pass_context
def set_fields(
    ctx: click.Context,
    /,
    *,
    target: str,
    weight: int | None,
    backup: str | None,
    max_connections: str | None,
    addresses: str | None,
    dry_run: bool,
    quiet: bool,
    form: str,
    confirm: int | None,
    **options: Any,
) -> int:
    """Change a service that vipctl added, or one of its backends. What is not named stays.

    A list, such as that of -p, replaces the one that the service has. vipctl edit changes anything else.

    \b
    vipctl set dns --affinity none --check dns:example.com
    vipctl set web -p 80/tcp -p 443/tcp
    vipctl set dns/10.244.2.21 --weight 5
    """
    fields = fields_of(ctx.command, options)
    told = described(ctx.command, options)
    if addresses is not None:
        fields["address"] = address_spec(addresses).get("address")
        told = ", ".join(filter(None, (f"address {addresses}", told)))
    if sum((weight is not None, backup is not None, max_connections is not None, bool(fields))) != 1:
        nothing = weight is None and backup is None and max_connections is None and not fields
        hint = "one of --weight, --backup and --max-connections for TARGET/BACKEND, or the others for TARGET"
        what = f"nothing to set for {target}" if nothing else "too much at once"
        raise CliError(what, hint=hint, code=USAGE)
    display: Json = {"form": form, "quiet": quiet, "dry_run": dry_run, "confirm": confirm}
    if weight is not None:
        service, backend = split_backend(target, f"vipctl set {{}} --weight {weight}")
        path, body = ("services", service, "backends", backend), {"weight": weight}
        answer = connect().change("PATCH", *path, body=body, dry_run=dry_run, confirm=confirm)
        return print_change(answer, f"{backend}: weight {weight}", **display)
    if backup is not None:
        service, backend = split_backend(target, f"vipctl set {{}} --backup {backup}")
        changed = partial(_with_backend_key, name=backend, backup=backup == "true")
        return _set(service, changed, f"{backend}: backup {backup}", display)
    if max_connections is not None:
        service, backend = split_backend(target, f"vipctl set {{}} --max-connections {max_connections}")
        most = number_or_none(max_connections)
        changed = partial(_with_backend_key, name=backend, max_connections=most)
        return _set(service, changed, f"{backend}: max_connections {max_connections}", display)
    if dry_run or fields.keys() & {TRAFFIC_POLICY, NODE_PORT}:
        return _set(target, partial(_combined, fields=fields), told, display)
    answer = connect().change("PATCH", "services", target, body={"service": fields}, confirm=confirm)
    return print_change(answer, told, **display)


def _set(target: str, fields_for: Callable[[Json], Json], told: str, display: Json) -> int:
    """Set fields that are made of the present Spec, unless somebody else changes it meanwhile."""
    daemon = connect(exact=True)  # what is sent back is the daemon's own text, not its displayed form
    found = daemon.get("services", target)
    before = found["service"]["spec"]
    fields = fields_for(found["service"])
    dry_run = display["dry_run"]
    answer = daemon.change(
        "PATCH",
        "services",
        found["service"]["name"],
        body={"service": fields},
        dry_run=dry_run,
        version=found["version"],
        confirm=display["confirm"],
    )
    if dry_run and display["form"] == "text" and not display["quiet"] and answer["changed"]:
        _print_difference(answer, before, {**before, **fields})
    return print_change(answer, told, **display)


def _combined(view: Json, fields: Json) -> Json:
    """The fields to send: with the traffic policy that is not named, and the node port at its port, where the
    daemon has it."""
    fields, before = dict(fields), view["spec"]
    if TRAFFIC_POLICY in fields:
        fields[TRAFFIC_POLICY] = {**before.get(TRAFFIC_POLICY, {}), **fields[TRAFFIC_POLICY]}
    if NODE_PORT in fields and "ports" not in fields and len(before["ports"]) == 1:
        (port,) = before["ports"]
        if isinstance(port, dict):
            fields["ports"] = [{key: value for key, value in port.items() if key != NODE_PORT}]
    return fields


def _with_backend_key(view: Json, name: str, **keys: object) -> Json:
    """The `backends` with keys of one of them set; None removes a key. Raises CliError."""
    specs = view["spec"].get("backends", [])
    name = _declared_backend(view, [*map(backend_name, specs)], name)
    changed = []
    for spec in specs:
        if backend_name(spec) == name:
            merged = {**({"address": spec} if isinstance(spec, str) else spec), **keys}
            changed.append({key: value for key, value in merged.items() if value is not None})
        else:
            changed.append(spec)
    return {"backends": changed}


def _declared_backend(view: Json, declared: Sequence[str], name: str) -> str:
    """The backend that is meant, as drain finds it: its port may be missing, or be that of the service."""
    if name in declared:
        return name
    host, service = backend_host(name), view["name"]
    same = [other for other in declared if backend_host(other) == host]
    if name == host and len(same) == 1:
        return same[0]
    endpoints = {each["endpoint"] for forwarding in view["forwardings"] for each in forwarding["endpoints"]}
    if host in declared and name in endpoints:
        return host
    number = "several backends" if same and name == host else "no backend"
    hint = f"did you mean {' or '.join(same)}?" if same else f"vipctl describe {service} shows them"
    raise CliError(f"{service} has {number} {name}", hint=hint, code=NOT_FOUND)


def _print_difference(answer: Json, before: Json | None, after: Json) -> None:
    # Imported here because it needs YAML.
    from vipd.cli.difference import canonical_spec, print_difference

    (result,) = answer["results"]
    print_difference(result["name"], result["action"], before, canonical_spec(after))


@click.command()
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True, type=OWN_TARGET)
@service_change_options
def remove(targets: tuple[str, ...], **display: Any) -> int:
    """Remove services that vipctl added: all, or none if one of them cannot be removed.

    \b
    vipctl remove dns 10.96.0.20:443/tcp
    """
    dry_run, confirm = display["dry_run"], display["confirm"]
    if confirm is not None and len(targets) > 1:
        hint = "vipctl export > FILE, delete them there, and vipctl apply -f FILE --prune --confirm"
        raise CliError("each removal is a change, and one at a time can wait", hint=hint, code=USAGE)
    daemon = connect()

    def removed(target: str, rehearsal: bool) -> Json:
        return daemon.change("DELETE", "services", target, dry_run=rehearsal, confirm=confirm)

    answers, failures, names = list[Json](), list[CliError](), [*targets]
    if dry_run or len(targets) > 1:
        answers = rehearse_each(targets, removed)
        # Two targets may be one service: by its name, and by a frontend.
        names = list(dict.fromkeys(result["name"] for answer in answers for result in answer["results"]))
    if not dry_run:
        answers, failures = change_each(names, removed)
    if answers:
        print_change(merged(answers), "", **display)
    if failures:
        raise combine_errors(failures)
    return OK
