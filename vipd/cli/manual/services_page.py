"""vipd-services(5): the declaration language, each key from the reader's own tables."""

from __future__ import annotations

from collections.abc import Iterator

from vipd.cli.manual.pages import Block, Example, Page, Paragraph, Section, Subsection, entry
from vipd.cli.manual.schemas import DECLARATION, INSTALLED
from vipd.declaration.service import GROUPS, MASQUERADE_MODES, STATES
from vipd.declaration.values import Key

INTRODUCTIONS = {
    "A document": "A file may hold several documents, separated by `---`; Kubernetes objects (Service, "
    "EndpointSlice, Endpoints, List) may stand among them. An empty file declares nothing and is no fault.",
    "A service": "Needs `ports`, and one of `address`, `external_addresses` and `load_balancer_addresses`.",
    "A port": "Short: `53/udp`, or `443`, which is TCP; `80:8080/tcp` with a target; `53/tcp,udp` for "
    "both, in quotes within brackets. A mapping says more:",
    "A backend": "Short: `10.244.0.5`, `10.244.0.5:5353` or `[fd00::5]:5353`, each with `@3` for a weight. "
    "A mapping says more:",
    "Affinity": "With `client-ip` each client address keeps the backend that it was given, for each port, "
    "until it has opened no new flow for `timeout`. The kernel remembers 100 clients for each port and "
    "backend, unless its module xt_recent is loaded with a larger `ip_list_tot`.",
    "Fallback": "`reject` refuses a new flow at once: TCP by a reset, others by an ICMP error. `drop` is "
    "silence. Backends for this case stand alone, `fallback: 10.244.9.9`, or in a mapping:",
    "An external address": "An address for clients from outside of the cluster. A mapping limits who may "
    "use it:",
    "Traffic policies": "Under `cluster` every backend serves. Under `local` only those on this host do; if "
    "there are none, but some elsewhere, new flows are dropped.",
    "A check": "A type may stand alone: `check: tcp`. What is said of a key begins with the types that know "
    "it, if not all do.",
}
"""The text above the keys of a mapping; a mapping that is not listed needs none."""


EXAMPLES = (
    (
        "DNS in both families; the second backend gets twice the share:",
        """\
apiVersion: vipd/v1
services:
  - name: dns
    address: [10.96.0.10, "fd00:96::10"]
    ports: [53/udp, 53/tcp]
    backends: [10.244.0.5, 10.244.2.21@2, "fd00:244::5"]
    affinity: {by: client-ip, timeout: 3h}""",
    ),
    (
        "A service for clients from outside, with names for its ports and backends for emergencies:",
        """\
apiVersion: vipd/v1
defaults: {masquerade: forwarded}
services:
  - name: shop/web
    address: 10.96.0.20
    external_addresses: [203.0.113.10]
    allow_from: [198.51.100.0/24, 10.0.0.0/8]
    ports:
      - {name: http, port: 80, target: 8080}
      - {name: admin, port: 8000, node_port: 30800}
    backends:
      - {address: 10.244.0.6, weight: 3}
      - {address: 10.244.0.7, ports: {http: 8081}}
      - {address: 10.244.0.8, state: drain}
    fallback: {backends: [10.244.9.9]}
    on_remove: reset""",
    ),
    (
        "Backends that are asked every two seconds; the last one serves only in an emergency:",
        """\
apiVersion: vipd/v1
services:
  - name: api
    address: 10.96.0.40
    ports: 8080
    backends:
      - 10.244.0.5
      - 10.244.2.21
      - {address: 10.244.9.9, backup: true}
    check: {type: http, path: /healthz, interval: 2s}
    slow_start: 30s
    fallback: keep""",
    ),
    (
        "Only backends on this host serve clients from outside, who are seen with their own addresses:",
        """\
apiVersion: vipd/v1
services:
  - name: edge
    external_addresses: 203.0.113.12
    ports: 443
    backends:
      - {address: 10.244.0.5, node: host-a}
      - {address: 10.244.2.21, node: host-b}
    traffic_policy: {external: local}
    health_port: 30100""",
    ),
)
"""The subject of each example, and the declaration."""


def services_page() -> Page:
    """The page."""
    return Page(
        "vipd-services",
        5,
        "declaration of the services of the load balancer vipd",
        (
            Section("SYNOPSIS", (Paragraph("`/etc/vipd/services.d/`*NAME*`.yaml`"),)),
            Section("DESCRIPTION", _description()),
            Section("NOTATION", _short_form()),
            Section("KEYS", tuple(_keys())),
            Section("MASQUERADE MODES", _modes()),
            Section("STRICTNESS", _strictness()),
            Section("FILES", _files()),
            Section("EXAMPLES", _examples()),
            Section("SEE ALSO", (Paragraph("`vipctl`(1), `vipd.yaml`(5), `vipd`(8)"),)),
        ),
    )


def _description() -> tuple[Block, ...]:
    return (
        Paragraph(
            "A declaration says which services a host has: virtual addresses with ports, and the backends "
            "that serve them. It is YAML or JSON in the language vipd/v1. `vipd`(8) reads every `*.yaml`, "
            "`*.yml` and `*.json` in its directory of declarations, but not names that begin with a dot, "
            "nor directories below. A save is seen at once. Save by renaming a new file over the old one, "
            "as most editors do, and a half-written file is never read."
        ),
        Paragraph(
            "A file is taken as a whole or not at all. While it has a problem, its last good version serves "
            "on, also over a restart, and `vipctl status` lists the problems. `vipctl check` finds them "
            "beforehand. Names and frontends (address, port and protocol) are unique over all files and "
            "what `vipctl` added; of two claims the one that already serves stands. Of Kubernetes "
            "objects each Service is taken or not by itself."
        ),
        Paragraph(
            "A file that is empty, or all files gone together, remove nothing: the last good versions serve "
            "on. To remove services, delete their file, write `services: []`, or, if all of it is meant, say "
            "`vipctl accept-removal`."
        ),
    )


def _short_form() -> tuple[Block, ...]:
    return (
        entry(
            "address",
            "`10.96.0.10` or `fd00::10`: alone, without port, prefix length, zone or name. Quote IPv6 within "
            "brackets and braces, where YAML may take a colon for the end of a key.",
        ),
        entry("frontend", "`10.96.0.10:53/udp` or `[fd00::10]:53/udp`; without a protocol: TCP."),
        entry(
            "backend",
            "`10.244.0.5`, `10.244.0.5:5353@2` or `[fd00::5]:5353@2`, port and weight being optional.",
        ),
        entry("network", "`10.0.0.0/8` or `fd00::/8`, without bits beyond its length; or an address alone."),
        entry(
            "duration",
            "`90s`, `10m`, `3h`, `1d`, or a number of seconds. Those of checks may be `500ms` or `2.5s`, "
            "too.",
        ),
        entry("list", "A single item may stand without the list."),
    )


def _keys() -> Iterator[Block]:
    for group in GROUPS.values():
        yield Subsection(group.title)
        if group.title in INTRODUCTIONS:
            yield Paragraph(INTRODUCTIONS[group.title])
        for name, key in group.keys.items():
            yield entry(f"`{name}:` {key.kind.words}", _key_text(key))
        if group.title == "A backend":
            yield Paragraph(f"Other words for states: {_other_words()}.")


def _key_text(key: Key) -> str:
    return key.meaning.removesuffix(" Default: none.")


def _other_words() -> str:
    others = [(word, state.value) for word, state in STATES.items() if word != state.value]
    return ", ".join(f"`{word}` for `{state}`" for word, state in others)


def _modes() -> tuple[Block, ...]:
    return (
        Paragraph(
            "A masqueraded flow reaches the backend with this host's address as its source, so that the "
            "replies come back this way; they must. A flow from a backend to itself is masqueraded always; "
            "flows to external addresses and node ports are in every mode but `hairpin`, unless the policy "
            "for them is `local`. Other new flows are masqueraded:"
        ),
        *(
            entry(f"`{mode}`", f"{flows[:1].upper()}{flows[1:]}. Choose it when {when}.")
            for mode, (flows, when) in MASQUERADE_MODES.items()
        ),
    )


def _strictness() -> tuple[Block, ...]:
    return (
        Paragraph(
            "Every problem of a file is reported at once, as *file*:*line*: *path*: *what*; *hint*. Unknown "
            "keys, keys given twice and values of the wrong type are problems. So is what YAML readers do "
            "not agree on: text that looks like a number, a date or a boolean needs quotes where text is "
            'meant, `name: "123"`, '
            "and numbers are plain decimal. Tags, merge keys and nesting of more than 32 levels are not "
            "accepted. Keys that begin with `x-` are passed over: they hold what YAML anchors name."
        ),
    )


def _files() -> tuple[Block, ...]:
    return (
        entry("`/etc/vipd/services.d`", "The directory of declarations; setting `services_dir`."),
        entry(
            "`/var/lib/vipd/state.db`",
            "What `vipctl` added. The daemon writes it.",
        ),
        entry(
            f"`{INSTALLED}/{DECLARATION}`",
            "A JSON Schema of this language, by which editors complete and check it: a file whose first line "
            f"is `# yaml-language-server: $schema={INSTALLED}/{DECLARATION}`.",
        ),
    )


def _examples() -> tuple[Block, ...]:
    return tuple(block for about, text in EXAMPLES for block in (Paragraph(about), Example(text, "yaml")))
