"""A recording as an SVG that plays by itself, without scripts, as GitHub shows pictures. Pure.

Each row is drawn once, on a sheet that moves up behind the window as the terminal scrolls. A row appears at
its moment; a typed one lies under a cover that moves to the right, key by key. Without animations (print, a
reader who prefers less motion) it shows the end.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.docs.pictures.cast import Recording, Row, rows
from tests.docs.pictures.svg import element, picture, text

CHARACTER, LINE = 7.6, 16.5
"""Width and height of a character, in pixels."""
BASELINE = 0.72 * LINE
MARGIN, BAR = 14.0, 30.0
AT_THE_END = 7.0
"""Seconds for which the last screen stays, before it begins anew."""

THEME = {
    "edge": ("#d1d9e0", "#3d444d"),
    "bar": ("#f6f8fa", "#151b23"),
    "grey": ("#59636e", "#9198a1"),
    "cyan": ("#0969da", "#4493f8"),
    "green": ("#1a7f37", "#3fb950"),
    "yellow": ("#9a6700", "#d29922"),
    "red": ("#cf222e", "#f85149"),
}
STYLE = """\
text { font: 12.6px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  fill: var(--ink); white-space: pre }
.bold { font-weight: 700 } .dim { fill: var(--grey) } .red { fill: var(--red) } .green { fill: var(--green) }
.yellow { fill: var(--yellow) } .cyan { fill: var(--cyan) } .cover { fill: var(--paper) }
.window { fill: var(--paper); stroke: var(--edge) } .bar { fill: var(--bar); stroke: var(--edge) }
"""
PRESERVED = {"xml:space": "preserve"}
"""Runs of spaces stay, also where style sheets do not say so of SVG."""
NO_MOTION = "@media (prefers-reduced-motion: reduce) { * { animation: none !important } }\n"


def draw(recording: Recording, title: str) -> str:
    """The recording as a picture; pauses are cut as it says."""
    played = recording.shortened()
    sheet = _Sheet(played)
    across, down = played.width * CHARACTER, played.height * LINE
    width, height = across + 2 * MARGIN, BAR + MARGIN + down + MARGIN
    edge = f"M.5 {BAR:g}V8.5a8 8 0 0 1 8-8H{width - 8.5:g}a8 8 0 0 1 8 8V{BAR:g}z"
    screen = element("rect", x=MARGIN, width=across, y=BAR + MARGIN, height=down)
    rolled = element("g", *sheet.drawn(), id="sheet", **PRESERVED)
    moved = element("g", rolled, transform=f"translate({MARGIN:g} {BAR + MARGIN:g})")
    parts = [
        element("clipPath", screen, id="screen"),
        element("rect", x=0.5, y=0.5, width=width - 1, height=height - 1, rx=8, class_="window"),
        element("path", d=edge, class_="bar"),
        text(title, x=width / 2, y=20, text_anchor="middle", class_="dim"),
        element("g", moved, clip_path="url(#screen)"),
    ]
    style = STYLE + "".join(sheet.animations()) + NO_MOTION
    return picture((width, height), title, THEME, style, parts)


class _Sheet:
    """All rows, one below the other, and how they move."""

    def __init__(self, recording: Recording) -> None:
        self._height = recording.height
        self._seconds = recording.outputs[-1].at + AT_THE_END
        self._rows = rows(recording)

    def drawn(self) -> Iterator[str]:
        """The rows that have text, a line each."""
        for number, row in enumerate(self._rows):
            if row.cells:
                yield f"\n{element('g', *_texts(number, row), id=f'r{number}')}"

    def animations(self) -> Iterator[str]:
        """Keyframes of the sheet and of every row. All last as long as the recording, and repeat."""
        yield f"g, rect {{ animation: {self._seconds:.1f}s step-end infinite }}\n"
        last = max(0, len(self._rows) - self._height)
        frames = "".join(
            f"{self._moment(row.at)}{{{_moved('Y', -up * LINE)}}}"
            for up, row in enumerate(self._rows[self._height :], 1)
        )
        yield f"#sheet {{ {_moved('Y', -last * LINE)}; animation-name: sheet }}\n"
        yield f"@keyframes sheet {{0%{{transform:none}}{frames}}}\n"
        for number, row in enumerate(self._rows):
            if row.cells:
                yield f"#r{number} {{ animation-name: r{number} }} "
                shown = f"{self._moment(row.cells[0].at)}{{opacity:1}}"
                yield f"@keyframes r{number} {{0%{{opacity:0}}{shown}}}\n"
                yield from self._typing(number, row)

    def _typing(self, number: int, row: Row) -> Iterator[str]:
        typed = len(row.cells) - row.typed_from
        if typed:
            first, last = self._moment(row.cells[row.typed_from].at), self._moment(row.cells[-1].at)
            away = _moved("X", typed * CHARACTER)
            steps = f"{first}{{transform:none;animation-timing-function:steps({typed})}}"
            yield f"#c{number} {{ {away}; animation-name: c{number} }} "
            yield f"@keyframes c{number} {{0%{{transform:none}}{steps}{last},100%{{{away}}}}}\n"

    def _moment(self, at: float) -> str:
        """A moment as the name of a keyframe."""
        return f"{100 * at / self._seconds:.3f}".rstrip("0").rstrip(".") + "%"


def _texts(number: int, row: Row) -> Iterator[str]:
    top = number * LINE
    for column, said, styles in row.runs():
        shown = said.strip(" ")
        if shown:
            start = column + len(said) - len(said.lstrip(" "))
            # With its length said, columns stay below each other whatever font there is.
            yield text(
                shown,
                x=start * CHARACTER,
                y=top + BASELINE,
                textLength=len(shown) * CHARACTER,
                class_=" ".join(sorted(styles)),
            )
    typed = len(row.cells) - row.typed_from
    if typed:
        left, width = row.typed_from * CHARACTER, (typed + 1) * CHARACTER
        yield element("rect", id=f"c{number}", class_="cover", x=left, y=top, width=width, height=LINE)


def _moved(axis: str, pixels: float) -> str:
    return f"transform:translate{axis}({pixels:.1f}px)"
