"""vipd.yaml(5): every setting of the daemon."""

from __future__ import annotations

from collections.abc import Iterator

from vipd.cli.manual.pages import Block, Example, Page, Paragraph, Section, entry
from vipd.cli.manual.schemas import INSTALLED, SETTINGS
from vipd.cli.manual.settings_reference import etcd_settings, settings
from vipd.host.settings.layers import ENVIRONMENT_PREFIX
from vipd.host.settings.settings_file import DEFAULT_CONFIG


def settings_page() -> Page:
    """The page."""
    return Page(
        "vipd.yaml",
        5,
        "settings of the load balancer vipd",
        (
            Section("SYNOPSIS", (Paragraph(f"`{DEFAULT_CONFIG}`"),)),
            Section("DESCRIPTION", _description()),
            Section("OPTIONS", tuple(_settings())),
            Section("ETCD", tuple(_etcd())),
            Section("FILES", _files()),
            Section("ENVIRONMENT", _environment()),
            Section("EXAMPLES", _examples()),
            Section("SEE ALSO", (Paragraph("`vipd`(8), `vipctl`(1), `vipd-services`(5)"),)),
        ),
    )


def _description() -> tuple[Block, ...]:
    return (
        Paragraph(
            "The settings of `vipd`(8): a mapping in YAML, which JSON is too. The file may be missing or "
            "empty. Services are declared elsewhere, see `vipd-services`(5)."
        ),
        Paragraph(
            "Settings are taken from this file, then from the environment, then from the daemon's options; "
            "the last that names a setting decides. They are read at the start only: after a change, "
            "restart the daemon with `systemctl restart vipd`, which interrupts no flow."
        ),
        Paragraph(
            "Unknown settings and wrong values are told all at once; then the daemon ends with exit code 78. "
            "`vipd --check` looks for them and does nothing else."
        ),
        Paragraph(
            "A list is a YAML list, or text with commas. A network is written as `10.244.0.0/16` or "
            "`fd00:244::/56`. Where a setting is unset by default, leave it out to have that."
        ),
    )


def _settings() -> Iterator[Block]:
    for each in settings():
        yield entry(f"`{each.name}:` {each.values}", f"{each.meaning} Default: {each.default}.")


def _etcd() -> Iterator[Block]:
    yield Paragraph("The keys of `etcd`:")
    for each in etcd_settings():
        yield entry(f"`{each.name}:` {each.values}", f"{each.meaning} Default: {each.default}.")


def _files() -> tuple[Block, ...]:
    return (
        entry(f"`{DEFAULT_CONFIG}`", "Read when `vipd` is started without `--config`."),
        entry(f"`{INSTALLED}/{SETTINGS}`", "A JSON Schema, by which editors complete and check it."),
    )


def _environment() -> tuple[Block, ...]:
    return (
        entry(
            f"`{ENVIRONMENT_PREFIX}`*NAME*",
            f"Every setting, its name in capitals: `{ENVIRONMENT_PREFIX}LOG_LEVEL=debug`. A list has commas "
            "between its items. An empty variable counts as not set, and an unknown one is a warning in "
            "the log.",
        ),
    )


def _examples() -> tuple[Block, ...]:
    return (
        Paragraph(
            "Clients in two networks get their replies without masquerade, and services stay in theirs:"
        ),
        Example(
            'cluster_cidrs: [10.244.0.0/16, "fd00:244::/56"]\n'
            "allowed_addresses: 10.96.0.0/16, fd00:96::/112\n"
            "log_level: warning",
            "settings",
        ),
        Paragraph("The rules of kube-proxy, down to the names of its chains:"),
        Example("chain_prefix: KUBE\ncompat: kube-proxy", "settings"),
    )
