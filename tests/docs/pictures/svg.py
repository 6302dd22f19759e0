"""SVG as text: elements, and a picture whose colours are those of the reader's screen. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from xml.sax.saxutils import escape, quoteattr

Theme = Mapping[str, tuple[str, str]]
"""Names of colours, and what they are on a light and on a dark screen. Used as `var(--NAME)`."""

SCREEN: Theme = {"paper": ("#ffffff", "#0d1117"), "ink": ("#1f2328", "#e6edf3")}
"""What every picture needs: it brings its own ground, so that it is readable on any page."""


def element(name: str, *content: str, **attributes: float | str) -> str:
    """An element with content that is markup already. `class_` is the attribute `class`, `stroke_width` is
    `stroke-width`; a number has at most one decimal place; an empty text is no attribute."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(_value(value))}"
        for key, value in attributes.items()
        if value != ""
    )
    inner = "".join(content)
    return f"<{name}{written}>{inner}</{name}>" if inner else f"<{name}{written}/>"


def text(said: str, **attributes: float | str) -> str:
    return element("text", escape(said), **attributes)


def picture(size: tuple[float, float], title: str, theme: Theme, style: str, parts: Iterable[str]) -> str:
    """A whole picture. `title` is what a screen reader says."""
    width, height = size
    drawn = element(
        "svg",
        "\n",
        *(f"{part}\n" for part in (element("title", escape(title)), _style(theme, style), *parts)),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_value(width)} {_value(height)}",
        width=width,
        height=height,
        role="img",
    )
    return f"{drawn}\n"


def _style(theme: Theme, rules: str) -> str:
    light, dark = (
        " ".join(f"--{name}: {colours[dark]};" for name, colours in {**SCREEN, **theme}.items())
        for dark in (False, True)
    )
    dark_rule = f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}"
    return element("style", f"\nsvg {{ {light} }}\n{dark_rule}\n{rules}")


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
