"""HTTP from a namespace of the lab, and what a daemon's `/metrics` says."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.lab.node import Node

PATIENCE_SECONDS = 60.0
CLOSED = 0
"""The status where nobody listens."""

Series = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


class Answer(NamedTuple):
    """What a server said; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The decoded body."""
        return json.loads(self.body)


def ask(node: Node, url: str, method: str = "GET", **headers: str) -> Answer:
    """One request over a connection of its own, read to its end. `Accept_Language` is `Accept-Language`."""
    parts = urlsplit(url)
    with node.entered():
        connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port or 80, timeout=PATIENCE_SECONDS
        )
        with contextlib.closing(connection):
            try:
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                connection.request(method, f"{parts.path or '/'}?{parts.query}".rstrip("?"), headers=named)
                reply = connection.getresponse()
            except ConnectionRefusedError:
                return Answer(CLOSED, {}, b"{}")
            fields = {name.lower(): value for name, value in reply.getheaders()}
            return Answer(reply.status, fields, reply.read())


def samples(text: bytes) -> Series:
    """Every sample by name and labels, as Prometheus' own library reads the text."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def scrape(node: Node, port: int = 9253) -> Series:
    """The samples of a daemon's `metrics_address` on loopback."""
    answer = ask(node, f"http://127.0.0.1:{port}/metrics")
    assert answer.status == 200, answer
    return samples(answer.body)


def value(series: Series, name: str, **labels: str) -> float:
    """One sample; AssertionError when it is not there."""
    key = (name, frozenset(labels.items()))
    assert key in series, f"no {name}{labels}"
    return series[key]


def names(series: Series) -> set[str]:
    """The names of all samples."""
    return {name for name, _ in series}
