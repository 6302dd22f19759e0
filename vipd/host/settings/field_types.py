"""Types of settings: they parse the text of a value, each with a hint in its error. Pure but for names."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Tag
from pydantic_settings import NoDecode

from vipd.declaration.dns_names import parse_dns_name
from vipd.declaration.syntax import MAX_PORT, InvalidTextError, parse_address, parse_frontend
from vipd.host.settings.etcd import EtcdSettings, comma_list
from vipd.host.settings.settings_file import read_settings_text
from vipd.model.claim_limits import ANY_NAME, ANY_PORT, SourceName
from vipd.model.service import socket_text

MAX_COMMAND = 4096
"""Characters of a command."""

MIN_CHECK_UID, MAX_CHECK_UID = 60_001, 2**31 - 1
"""systemd and kernel drivers take larger numbers of users for negative ones."""
_NOBODY = 65534


def _off_word(value: object) -> object:
    """For YAML 1.1 `off` without quotes is false."""
    return "off" if value is False else value


def _network(value: object) -> str:
    try:
        return str(ipaddress.ip_network(str(value)))
    except ValueError as error:
        raise ValueError(f"{error}; hint: a network such as 10.244.0.0/16 or fd00:244::/56") from None


def _port_range(value: object) -> str:
    """`LOW-HIGH`."""
    text = ANY_PORT if value == "any" else str(value)
    low, dash, high = (part.strip() for part in text.partition("-"))
    ends = [int(end) for end in ((low, high) if dash else (low, low)) if end.isascii() and end.isdecimal()]
    if len(ends) != 2 or not 1 <= ends[0] <= ends[1] <= MAX_PORT:
        raise ValueError(f"{text!r} is no range of ports; hint: 30000-32767, a port, or any")
    return f"{ends[0]}-{ends[1]}" if ends[0] < ends[1] else f"{ends[0]}"


def _uid_range(value: object) -> str:
    """`LOW-HIGH`, or `off`. Numbers below 60001 are for accounts; 65534 is nobody, and 65535 nobody's."""
    text = str(_off_word(value))
    low, dash, high = (part.strip() for part in text.partition("-"))
    ends = [int(end) for end in (low, high) if end.isascii() and end.isdecimal()]
    usable = dash and len(ends) == 2 and MIN_CHECK_UID <= ends[0] <= ends[1] <= MAX_CHECK_UID
    if text != "off" and not (usable and (ends[1] < _NOBODY or ends[0] > _NOBODY + 1)):
        raise ValueError(
            f"{text!r} is no range of users that no account may have; "
            f"hint: LOW-HIGH from {MIN_CHECK_UID} up, without {_NOBODY} and {_NOBODY + 1}, or off"
        )
    return f"{ends[0]}-{ends[1]}" if usable else text


def _listed_ports(value: object) -> object:
    listed = [value] if isinstance(value, int) and not isinstance(value, bool) else comma_list(value)
    if listed == []:
        raise ValueError("names no port; hint: 30000-32767, or any")
    return listed


def _name_suffix(value: object) -> str:
    """A DNS name; that of the root for `any`, as every name ends in it."""
    text = str(value)
    if text in ("any", ANY_NAME):
        return ANY_NAME
    try:
        return parse_dns_name(text.removeprefix("."))
    except InvalidTextError as error:
        raise ValueError(f"{error.what}; hint: a name such as svc.internal, any, or off") from None


def _listed_names(value: object) -> object:
    return [] if value is False or value == "off" else comma_list(value)


def _name_server(value: object) -> str:
    """An address, with a port unless that is 53."""
    text = str(value)
    try:
        try:
            return socket_text(parse_address(text), 53)
        except InvalidTextError:
            return _listen_address(text)
    except ValueError:
        hint = "hint: an address such as 10.0.0.53, 10.0.0.53:5353 or [fd00::53]:53"
        raise ValueError(f"{text!r} is not the address of a name server; {hint}") from None


def _read_mapping(value: object) -> object:
    """Parses a mapping by source from the text of the environment."""
    braced = isinstance(value, str) and value.startswith("{")
    return read_settings_text(str(value), "the text") if braced else value


def _command(value: object) -> object:
    """A program and its arguments: a list, its text from the environment, or a path alone."""
    words = _words(value) if isinstance(value, str) else value
    if not isinstance(words, list | tuple):
        hint = "hint: [/usr/local/bin/notify, --short]"
        raise ValueError(f"must be a list, a program and its arguments; {hint}")
    for word in words:
        if not isinstance(word, str) or "\0" in word:
            raise ValueError(f"{word!r} is no text; hint: put it in quotes")
    if words and not words[0].startswith("/"):
        raise ValueError(f"{words[0]!r} is no absolute path; hint: vipd uses no shell and searches no PATH")
    if sum(map(len, words)) > MAX_COMMAND:
        raise ValueError(f"is longer than {MAX_COMMAND} characters; hint: put it into a script")
    return words


def _words(text: str) -> object:
    text = text.strip()
    if text.startswith("["):
        return read_settings_text(f"command: {text}", "the text")["command"]
    if " " in text:
        raise ValueError(f"{text!r} is one word; hint: write a list, such as [{', '.join(text.split())}]")
    return [text] if text else []


def _form_of(value: object) -> str:
    """The written form of a setting by source."""
    return ":source" if isinstance(value, Mapping) else ":all"


def _address(value: object) -> str:
    try:
        return str(ipaddress.ip_address(str(value)))
    except ValueError as error:
        raise ValueError(f"{error}; hint: an address such as 192.0.2.1") from None


def _listen_address(value: object) -> str:
    text = str(value)
    if "/" in text:
        raise ValueError(f"{text} has a protocol; hint: write it like 127.0.0.1:10256")
    frontend = parse_frontend(text)
    return socket_text(frontend.address, frontend.port)


def _local_listen_address(value: object) -> str:
    """A port alone is a port of the loopback address: nothing is open to other hosts unless an address is
    given."""
    text = str(value)
    return _listen_address(f"127.0.0.1:{text}" if text.isdecimal() else text)


def _etcd_mapping(value: object) -> object:
    """Parses a mapping from the text of the environment."""
    found = read_settings_text(value, "the text") if isinstance(value, str) else value
    if found is not None and not isinstance(found, Mapping | EtcdSettings):
        raise ValueError("must be a mapping; hint: {endpoints: [https://10.0.0.1:2379]}")
    return found


def _usable_etcd(value: EtcdSettings | None) -> EtcdSettings | None:
    """Raises ValueError with one problem a line."""
    if value is not None and (problems := value.problems()):
        raise ValueError("\n".join(problems))
    return value


Etcd = Annotated[EtcdSettings | None, NoDecode, BeforeValidator(_etcd_mapping), AfterValidator(_usable_etcd)]

AcceptForwarded = bool | Literal["first"]
FastPathChoice = Annotated[Literal["auto", "off"], BeforeValidator(_off_word)]

Network = Annotated[str, BeforeValidator(_network)]
Networks = Annotated[tuple[Network, ...], NoDecode, BeforeValidator(comma_list)]

PortRange = Annotated[str, BeforeValidator(_port_range)]
PortRanges = Annotated[tuple[PortRange, ...], NoDecode, BeforeValidator(_listed_ports)]

UID_RANGE = BeforeValidator(_uid_range)
UidRange = Annotated[str, UID_RANGE]

BY_SOURCE = (NoDecode, Discriminator(_form_of), BeforeValidator(_read_mapping))
NetworksBySource = Annotated[
    Annotated[Networks, Tag(":all")] | Annotated[dict[SourceName, Networks], Tag(":source")], *BY_SOURCE
]
"""Networks for all sources, or by source."""
PortRangesBySource = Annotated[
    Annotated[PortRanges, Tag(":all")] | Annotated[dict[SourceName, PortRanges], Tag(":source")], *BY_SOURCE
]

NameSuffix = Annotated[str, BeforeValidator(_name_suffix)]
NameSuffixes = Annotated[tuple[NameSuffix, ...], NoDecode, BeforeValidator(_listed_names)]
NamesBySource = Annotated[
    Annotated[NameSuffixes, Tag(":all")] | Annotated[dict[SourceName, NameSuffixes], Tag(":source")],
    *BY_SOURCE,
]
"""Endings of DNS names for all sources, or by source."""
NameServer = Annotated[str, BeforeValidator(_name_server)]
NameServers = Annotated[tuple[NameServer, ...], NoDecode, BeforeValidator(comma_list)]

Command = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_command)]
"""A program's absolute path, and its arguments."""

Group = Annotated[str, "a group"]
Address = Annotated[str, BeforeValidator(_address)]
Addresses = Annotated[tuple[Address, ...], NoDecode, BeforeValidator(comma_list)]

ListenAddress = Annotated[str, BeforeValidator(_listen_address)]
LocalListenAddress = Annotated[str, BeforeValidator(_local_listen_address)]
