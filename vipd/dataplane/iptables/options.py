"""The settings for the rules of one family, as a value. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vipd.dataplane.iptables.names import ChainId, Names
from vipd.dataplane.options import FamilyOptions
from vipd.model.service import Family

if TYPE_CHECKING:  # pydantic is slow to import and not needed to compile
    from vipd.host.settings.settings import Settings

KUBE_PREFIX = "KUBE"
"""The prefix with which chains are named, and commented, like kube-proxy's."""


@dataclass(frozen=True, slots=True)
class RuleOptions(FamilyOptions):
    """Everything besides the forwardings that shapes the rules."""

    accept_forwarded: bool = True
    accept_first: bool = False
    """Accept in FORWARD before any rule of another program (`accept_forwarded: first`)."""
    flow_marks: bool = True
    """The kernel can mark connections (xt_connmark)."""
    dispatch: str = "auto"
    """`auto`, `flat` or `grouped`: how shared chains find an address (`dispatch.py`)."""

    @classmethod
    def of(
        cls,
        settings: Settings,
        family: Family,
        random_fully: bool,
        host_addresses: frozenset[str] = frozenset(),
    ) -> RuleOptions:
        """The options for the daemon's settings; `random_fully`: whether the tool supports it."""
        return cls.of_settings(
            settings,
            family,
            host_addresses,
            random_fully=random_fully if settings.random_fully is None else settings.random_fully,
            accept_forwarded=settings.accept_forwarded is not False,
            accept_first=settings.accept_forwarded == "first",
            dispatch="flat" if settings.compat == "kube-proxy" else settings.dispatch,
        )

    @property
    def beyond_kube_proxy(self) -> bool:
        """Whether there are rules that kube-proxy lacks; with the prefix KUBE its chains stay as known."""
        return not self.kube_proxy and self.prefix != KUBE_PREFIX

    @property
    def chains_to_be_first(self) -> frozenset[ChainId]:
        """The built-in chains in which vipd's jumps stay at the head."""
        return frozenset({ChainId("filter", "FORWARD")}) if self.accept_first else frozenset()

    @property
    def names(self) -> Names:
        """The chain names of this prefix."""
        return Names(self.prefix)
