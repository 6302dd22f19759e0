"""What a reload says that it came to, and what the log says of services that come, change and go."""

from __future__ import annotations

import logging

import pytest

from tests.lab.inside import Vipd, running
from tests.model.samples import block

DNS, WEB = block("10.96.0.10", "dns", "10.244.0.5"), block("10.96.0.11", "web", "10.244.0.6", "10.244.0.7")
BROKEN = "services:\n  - {address: 10.0.0.300, ports: [80]}\n"


def said(vipd: Vipd, beginning: str = "") -> list[str]:
    """Lines of the log so far, which is empty from then on."""
    lines = [record.getMessage() for record in vipd.journal]
    vipd.journal.clear()
    return [line for line in lines if line.startswith(beginning)]


def fields(record: logging.LogRecord) -> dict[str, tuple[str, ...]]:
    """Those that the journal gets."""
    return next(v for v in vars(record).values() if isinstance(v, dict) and "VIPD_EVENT" in v)


async def reloaded(vipd: Vipd, *blocks: str) -> list[str]:
    """What the log says of a reload of these services."""
    vipd.declare(*blocks)
    said(vipd)
    answer = await vipd.reload()
    assert answer.status == 200, answer
    return said(vipd)


def test_what_is_not_as_before_is_named_with_what_is_different() -> None:
    async def story(vipd: Vipd) -> None:
        path = vipd.services_dir / "services.yaml"
        assert [line.split(" after")[0] for line in said(vipd) if "in the kernel" in line] == [
            "1 service in the kernel"
        ]
        vipd.declare(DNS, WEB)
        said(vipd)
        await vipd.reload()
        (added,) = [record for record in vipd.journal if " added: " in record.getMessage()]
        assert added.getMessage() == f"service web added: 2 backends, 2 unchecked; by file {path}:4"
        assert fields(added) == {
            "VIPD_EVENT": ("service-added",),
            "VIPD_SERVICE": ("web",),
            "VIPD_UNIT": (f"file:{path}",),
            "VIPD_CAUSE": (f"file {path}:4",),
            "VIPD_REASON": ("2 backends, 2 unchecked",),
        }
        assert "reloaded: 2 services, 1 created" in "\n".join(said(vipd))
        other = block("10.96.0.11", "web", "{address: 10.244.0.7, weight: 5}", "10.244.0.8")
        vipd.declare(DNS, other.replace("name: web", "name: web, affinity: 60s"))
        await vipd.reload()
        (changed,) = [record for record in vipd.journal if " changed: " in record.getMessage()]
        what = "affinity, backends +10.244.0.8 -10.244.0.6 ~10.244.0.7"
        assert changed.getMessage() == f"service web changed: {what}; by file {path}:4"
        assert set(fields(changed)["VIPD_BACKEND"]) == {"10.244.0.6", "10.244.0.7", "10.244.0.8"}
        lines = await reloaded(vipd, block("10.96.0.12", "new", "10.244.0.9"))
        assert [line for line in lines if "removed; was" in line] == [
            f"service {name} removed; was by file {path}:{number}"
            for name, number in (("dns", 3), ("web", 4))
        ]
        assert "reloaded: 1 service, 1 created, 2 removed" in "\n".join(lines)
        again = await reloaded(vipd, block("10.96.0.12", "new", "10.244.0.9"))
        assert again == ["reloaded: 1 service, none changed"]

    running(story, lambda vipd: vipd.declare(DNS), simulated=True)


def test_a_bulk_is_one_line() -> None:
    async def story(vipd: Vipd) -> None:
        many = [block(f"10.97.0.{n}", f"s{n}", "10.244.0.5") for n in range(1, 21)]
        lines = await reloaded(vipd, *many)
        assert "services: 20 added, 0 changed, 1 removed" in lines
        assert not any(" added: " in line for line in lines)

    running(story, lambda vipd: vipd.declare(DNS), simulated=True)


@pytest.mark.parametrize(
    ("files", "serves", "what"),
    [
        ({"a": DNS}, {"dns"}, "problems: 1, the last good version of the file serves on: "),
        ({"b": DNS}, {"dns"}, "problems: 1, nothing of the file serves: "),
        ({"a": DNS, "b": WEB}, {"dns", "web"}, "problems: 2, the last good versions go on serving: "),
        ({}, set(), "problems: 2, nothing of what is refused serves: "),
        ({"a": DNS}, {"dns"}, "problems: 2, of 2 refused files and keys serve 1 in the last good version, "),
    ],
)
def test_the_log_says_what_serves_of_what_is_refused(
    files: dict[str, str], serves: set[str], what: str
) -> None:
    """With each problem and its line."""

    def prepare(vipd: Vipd) -> None:
        for name, text in files.items():
            vipd.declare(text, name=f"{name}.yaml")

    async def story(vipd: Vipd) -> None:
        broken = ("a", "b") if "problems: 2" in what else ("a",)
        for name in broken:
            (vipd.services_dir / f"{name}.yaml").write_text("apiVersion: vipd/v1\n" + BROKEN)
        said(vipd)
        await vipd.reload()
        assert vipd.kernel.names() == serves
        (record,) = [record for record in vipd.journal if record.getMessage().startswith("reloaded: ")]
        assert record.levelno == logging.WARNING
        assert what in record.getMessage()
        assert f"{vipd.services_dir}/a.yaml:3" in record.getMessage()

    running(story, prepare)
