"""The options of `vipctl add` and `set`: one for each key of a service, in the groups of the help."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from vipd.cli.argument_types import WORDS, Word
from vipd.cli.words import (
    CHECK_ARGUMENTS,
    FALLBACK_WORDS,
    affinity_spec,
    check_spec,
    fallback_spec,
    limits_spec,
    list_spec,
    number_or_none,
    port_specs,
)
from vipd.model.flow_limits import Limit
from vipd.model.service import AnnounceMethod, Balance, TrafficDistribution, TrafficPolicy
from vipd.observe.api_client import Json

MASQUERADE_MODES = ("auto", "always", "forwarded", "off-cluster", "hairpin")
FLAG = ("true", "false")
TRAFFIC_POLICY = "traffic_policy"

ADDRESSES = "Addresses and ports"
BACKENDS = "Backends and checks"
FLOWS = "Flows"

Command = Callable[..., int]


class GroupedOption(click.Option):
    """An option that the help shows in a group."""

    group = ""

    def __init__(self, *args: Any, group: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.group = group


class ServiceOption(GroupedOption):
    """An option that sets a key of a service; `read` makes the key's value of the word, or of all words of a
    repeatable option. None is the default."""

    def __init__(self, *args: Any, key: str, read: Callable[[Any], object], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.key, self.read = key, read


class ServiceCommand(click.Command):
    """A command whose help shows its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The groups in the order of their first options, then the options without a group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups.setdefault(getattr(parameter, "group", ""), []).append(record)
        others = groups.pop("", [])
        for title, records in (*groups.items(), ("Other options", others)):
            with formatter.section(title):
                formatter.write_dl(records)


def _same(word: object) -> object:
    return word


def _is_true(word: str) -> bool:
    return word == "true"


def _traffic(side: str) -> Callable[[str], Json]:
    return lambda policy: {side: policy}


def _choices(*words: str) -> click.Choice[str]:
    return click.Choice(words)


POLICIES = _choices(*(policy.value for policy in TrafficPolicy))


def service_options(command: Command) -> Command:
    """Give a command the options that set keys of a service; `fields_of` reads their values."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def backup_option(command: Command) -> Command:
    """Give a command `--backup ADDR`, repeatable, as `backup`."""
    option = click.option(
        "--backup",
        cls=GroupedOption,
        group=BACKENDS,
        multiple=True,
        metavar="ADDR[:PORT][@WEIGHT]",
        help="Backend that serves only while no others can; repeatable.",
    )
    return option(command)


def fields_of(command: click.Command, options: Mapping[str, Any]) -> Json:
    """The fields of a Spec that these values of `service_options` set; None if an option means the default.

    Both traffic policies are in one field. Raises CliError.
    """
    fields: Json = {}
    for option, value in _given(command, options):
        found = option.read(value)
        if option.key == TRAFFIC_POLICY:
            found = {**fields.get(TRAFFIC_POLICY, {}), **_mapping(found)}
        fields[option.key] = found
    return fields


def described(command: click.Command, options: Mapping[str, Any]) -> str:
    """The named options and their words: `affinity 10m, check http:/healthz`."""
    return ", ".join(
        f"{option.opts[-1].removeprefix('--')} {value if isinstance(value, str) else ' '.join(value)}"
        for option, value in _given(command, options)
    )


def _given(command: click.Command, options: Mapping[str, Any]) -> Sequence[tuple[ServiceOption, Any]]:
    return [
        (option, options[option.name])
        for option in command.params
        if isinstance(option, ServiceOption) and option.name and options.get(option.name) not in (None, ())
    ]


def _mapping(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _option(*names: str, **settings: Any) -> Callable[[Command], Command]:
    return click.option(*names, cls=ServiceOption, **settings)


_OPTIONS = (
    _option(
        "-p",
        "--port",
        group=ADDRESSES,
        key="ports",
        read=port_specs,
        multiple=True,
        metavar="PORT[:TARGET][/PROTO]",
        help="What clients connect to, and the backends' port; repeatable. Without PROTO: tcp.",
    ),
    _option(
        "--description",
        group=ADDRESSES,
        key="description",
        read=lambda text: text or None,
        metavar="TEXT",
        help="What the service is for, or whose it is.",
    ),
    _option(
        "--node-port",
        group=ADDRESSES,
        key="node_port",
        read=number_or_none,
        metavar="PORT|none",
        type=Word(WORDS, ("none",)),
        help="Port of this host that leads to the only port, too.",
    ),
    _option(
        "--external",
        group=ADDRESSES,
        key="external_addresses",
        read=lambda words: list_spec(words, clear="none"),
        multiple=True,
        metavar="ADDR|none",
        type=Word(WORDS, ("none",)),
        help="Address for clients from outside; repeatable.",
    ),
    _option(
        "--load-balancer",
        group=ADDRESSES,
        key="load_balancer_addresses",
        read=lambda words: list_spec(words, clear="none"),
        multiple=True,
        metavar="ADDR|none",
        type=Word(WORDS, ("none",)),
        help="The same, called a load balancer's; repeatable.",
    ),
    _option(
        "--allow-from",
        group=ADDRESSES,
        key="allow_from",
        read=lambda words: list_spec(words, clear="any"),
        multiple=True,
        metavar="NETWORK|any",
        type=Word(WORDS, ("any",)),
        help="Who may use the service; packets of others are dropped; repeatable.",
    ),
    _option(
        "--health-port",
        group=ADDRESSES,
        key="health_port",
        read=number_or_none,
        metavar="PORT|none",
        type=Word(WORDS, ("none",)),
        help="Port of this host that tells outer load balancers whether it has a ready backend.",
    ),
    _option(
        "--respond-to-ping",
        group=ADDRESSES,
        key="respond_to_ping",
        read=_is_true,
        type=_choices(*FLAG),
        help="Whether the VIP answers ping while a backend serves.",
    ),
    _option(
        "--announce",
        group=ADDRESSES,
        key="announce",
        read=lambda method: None if method == "none" else method,
        type=_choices(*(method.value for method in AnnounceMethod), "none"),
        help="How hosts elsewhere learn its addresses: by a routing daemon, or by ARP from one host.",
    ),
    _option(
        "--check",
        group=BACKENDS,
        key="check",
        read=check_spec,
        metavar="TYPE[:WHAT]",
        type=Word(WORDS, tuple(CHECK_ARGUMENTS)),
        help="Health check: none, tcp:PORT, http:PATH, http:PORT/PATH, https, udp:SEND, dns:QUERY, "
        "exec:COMMAND; what is behind the type may be missing where it has a default.",
    ),
    _option(
        "--slow-start",
        group=BACKENDS,
        key="slow_start",
        read=_same,
        metavar="TIME",
        help="How long the share of a recovered backend takes to grow to its full; 0s: it does not.",
    ),
    _option(
        "--weight-from",
        group=BACKENDS,
        key="weight_from",
        read=_same,
        type=_choices("declaration", "check"),
        help="Whether answers to HTTP checks may set weights.",
    ),
    _option(
        "--registrations",
        group=BACKENDS,
        key="registrations",
        read=_is_true,
        type=_choices(*FLAG),
        help="Whether backends that register themselves in etcd take part.",
    ),
    _option(
        "--balance",
        group=FLOWS,
        key="balance",
        read=_same,
        type=_choices(*(balance.value for balance in Balance)),
        help="How a new flow's backend is chosen; source-hash needs the nftables dataplane.",
    ),
    _option(
        "--flow-takeover",
        group=FLOWS,
        key="flow_takeover",
        read=_is_true,
        type=_choices(*FLAG),
        help="Whether TCP flows of a lost host go on here; needs source-hash and --masquerade hairpin.",
    ),
    _option(
        "--affinity",
        group=FLOWS,
        key="affinity",
        read=affinity_spec,
        metavar="TIME|client-ip|none",
        type=Word(WORDS, ("client-ip", "none")),
        help="How long a client keeps its backend, like 10m; client-ip: 3h; none: it does not.",
    ),
    _option(
        "--masquerade",
        group=FLOWS,
        key="masquerade",
        read=lambda mode: None if mode == "auto" else mode,
        type=_choices(*MASQUERADE_MODES),
        help="Which new flows get this host's address as their source; auto: as vipd.yaml says.",
    ),
    _option(
        "--fallback",
        group=FLOWS,
        key="fallback",
        read=fallback_spec,
        multiple=True,
        metavar="reject|drop|keep|BACKEND",
        type=Word(WORDS, FALLBACK_WORDS),
        help="What new flows meet while no backend is ready; BACKEND: that one, such as 10.0.0.9:80 or "
        "dns:NAME; repeatable.",
    ),
    _option(
        "--internal-policy",
        group=FLOWS,
        key=TRAFFIC_POLICY,
        read=_traffic("internal"),
        type=POLICIES,
        help="Backends for traffic to the VIP: all, or those of this host.",
    ),
    _option(
        "--external-policy",
        group=FLOWS,
        key=TRAFFIC_POLICY,
        read=_traffic("external"),
        type=POLICIES,
        help="The same for other addresses and node ports.",
    ),
    _option(
        "--traffic-distribution",
        group=FLOWS,
        key="traffic_distribution",
        read=_same,
        type=_choices(*(each.value for each in TrafficDistribution)),
        help="Which ready backends serve first under the policy cluster.",
    ),
    _option(
        "--on-remove",
        group=FLOWS,
        key="on_remove",
        read=_same,
        type=_choices("keep", "reset"),
        help="Whether TCP and SCTP flows to a removed backend go on or are ended.",
    ),
    _option(
        "--limit",
        group=FLOWS,
        key="limits",
        read=limits_spec,
        multiple=True,
        metavar="KEY=NUMBER|none",
        type=Word(WORDS, ("none", *(f"{key}=" for key in Limit))),
        help="Most flows, like connections_per_client=100 or new_per_second=50; repeatable.",
    ),
)
