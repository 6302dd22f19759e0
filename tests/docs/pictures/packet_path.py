"""The way of a packet through a host with vipd, as an SVG for light and dark screens. Pure.

The addresses are those of the lab in which the documentation's commands run (`tests/lab/topology.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.docs.pictures.svg import element, picture, text
from tests.lab.topology import CLIENT_SOURCES, HOST_TOWARDS_BACKENDS

SIZE = (840.0, 250.0)
TITLE = (
    "A packet's way: the kernel finds the virtual IP, chooses a backend and translates; vipd writes the rules"
)
VIP = "10.96.0.10:80"
CLIENT, HOST = CLIENT_SOURCES[0], HOST_TOWARDS_BACKENDS[4]
BACKENDS = ("10.244.0.11", "10.244.0.12", "10.244.0.13")
"""The first is dead, the second gets the packet."""

THEME = {
    "edge": ("#8c959f", "#6e7681"),
    "quiet": ("#59636e", "#9198a1"),
    "box": ("#f6f8fa", "#151b23"),
    "there": ("#0969da", "#4493f8"),
    "back": ("#1a7f37", "#3fb950"),
    "dead": ("#cf222e", "#f85149"),
}
STYLE = """\
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: var(--ink) }
.small { font-size: 11.5px; fill: var(--quiet) } .name { font-weight: 600 } .middle { text-anchor: middle }
.end { text-anchor: end } text.there { fill: var(--there) } text.back { fill: var(--back) }
text.dead { fill: var(--dead) } rect { fill: var(--box); stroke: var(--edge) }
rect.ground { fill: var(--paper); stroke: none } rect.frame { fill: none }
rect.dead { stroke: var(--dead); stroke-dasharray: 5 4 }
path { fill: none; stroke-width: 2 } path.there { stroke: var(--there) } path.back { stroke: var(--back) }
path.quiet { stroke: var(--quiet); stroke-width: 1.2; stroke-dasharray: 4 3 }
marker path.there { fill: var(--there); stroke: none } marker path.back { fill: var(--back); stroke: none }
marker path.quiet { fill: var(--quiet); stroke: none }
"""


def draw() -> str:
    ground = element("rect", width=SIZE[0], height=SIZE[1], rx=8, class_="ground")
    heads = map(_arrow_head, ("there", "back", "quiet"))
    return picture(SIZE, TITLE, THEME, STYLE, [*heads, ground, *_machines(), *_host(), *_arrows()])


def _machines() -> Iterator[str]:
    yield _box((10, 106, 96, 50), "client", CLIENT)
    for number, (address, top) in enumerate(zip(BACKENDS, (18, 106, 180), strict=True), 1):
        yield _box((710, top, 120, 50), f"b{number}", f"{address}:8080", "dead" if number == 1 else "")


def _host() -> Iterator[str]:
    yield element("rect", x=206, y=8, width=400, height=234, rx=8, class_="frame")
    yield text("host", x=218, y=28, class_="name")
    yield text("user space", x=594, y=28, class_="small end")
    yield _box((326, 18, 160, 50), "vipd", "files, vipctl, etcd")
    yield element("path", d="M206 80H606", class_="quiet")
    yield text("kernel", x=594, y=96, class_="small end")
    yield _box((218, 106, 117, 50), "virtual IP?", VIP)
    yield _box((347, 106, 118, 50), "choose", "weight, affinity")
    yield _box((477, 106, 117, 50), "translate", f"{BACKENDS[1]}:8080")
    yield _box((218, 180, 376, 50), "connection tracking", "translates later packets and replies by itself")


def _arrows() -> Iterator[str]:
    there, back, quiet = (partial(_arrow, kind) for kind in ("there", "back", "quiet"))
    for way in ("M106 131H214", "M335 131H343", "M465 131H473", "M594 131H706"):
        yield there(way)
    yield text("first packet to", x=156, y=122, class_="small there middle")
    yield text(VIP, x=156, y=148, class_="small there middle")
    yield text(f"from {HOST}", x=658, y=122, class_="small there middle")
    yield back("M710 146H658V205H598")
    yield back("M218 205H58V160")
    yield text("reply from", x=132, y=196, class_="small back middle")
    yield text(VIP, x=132, y=222, class_="small back middle")
    yield quiet("M406 68V102")
    yield text("writes rules", x=414, y=96, class_="small")
    yield quiet("M486 43H706")
    yield text("check fails", x=658, y=35, class_="small dead middle")


def _box(place: tuple[int, int, int, int], name: str, more: str, kind: str = "") -> str:
    """A box at (x, y, width, height) with a name, and a line below it."""
    x, y, width, height = place
    middle, centre = x + width / 2, y + height / 2
    return "".join(
        (
            element("rect", x=x, y=y, width=width, height=height, rx=6, class_=kind),
            text(name, x=middle, y=centre - 4, class_=f"name middle {kind}".strip()),
            text(more, x=middle, y=centre + 14, class_="small middle"),
        )
    )


def _arrow(kind: str, way: str) -> str:
    return element("path", d=way, class_=kind, marker_end=f"url(#{kind})")


def _arrow_head(kind: str) -> str:
    head = element("path", d="M0 0L8 4.5L0 9z", class_=kind)
    return element(
        "marker",
        head,
        id=kind,
        orient="auto",
        markerUnits="userSpaceOnUse",
        markerWidth=9,
        markerHeight=9,
        refX=4,
        refY=4.5,
    )
