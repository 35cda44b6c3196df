# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Drawings as SVG text: the same bytes for the same drawing, in the reader's theme."""

from __future__ import annotations

from html import escape

# of a class: light, dark; then its edge's
_COLOURS = """
ink    #1c2331 #e8ebf2
soft   #566074 #a9b2c3
paper  #ffffff #14171f
ours   #dbe9f8 #173a5c #2f6fae #6aa9e6
theirs #eceef2 #2b303b #8a93a5 #737d91
memory #fbe7c6 #574012 #b07d1f #d8a94a
seen   #cfeade #14503c #2f8f6d #4cb98f
good   #0a7f5f #38b48c
bad    #c2571a #e58a4e
"""
_ROWS = [row.split() for row in _COLOURS.split("\n") if row]
FILLS = {name: colours[:2] for name, *colours in _ROWS}
EDGES = {name: colours[2:] for name, *colours in _ROWS if colours[2:]}


def _style(theme: int) -> str:
    """0: light, 1: dark."""
    inks = [f".{name}{{fill:{colours[theme]}}}" for name, colours in FILLS.items()]
    edges = [f".e-{name}{{stroke:{colours[theme]}}}" for name, colours in EDGES.items()]
    line = f".line{{stroke:{FILLS['soft'][theme]}}}"
    return "".join([*inks, *edges, line])


class Picture:
    """A drawing of `width` by `height`, made for a column of 700 pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size, self._title, self._parts = (width, height), title, list[str]()

    def box(
        self, x: float, y: float, w: float, h: float, kind: str, *, dashed: bool = False
    ) -> None:
        edge = f' class="{kind} e-{kind}"' if kind in EDGES else f' class="{kind}"'
        dash = ' stroke-dasharray="6 4" fill-opacity="0.35"' if dashed else ""
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"{edge}{dash}/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 13,
        anchor: str = "middle",
        kind: str = "ink",
        bold: bool = False,
        code: bool = False,
    ) -> None:
        extra = ' font-weight="600"' if bold else ""
        extra += ' font-family="monospace"' if code else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" class="{kind}"'
            f"{extra}>{escape(words)}</text>"
        )

    def labelled(
        self, x: float, y: float, w: float, h: float, kind: str, *lines: str, code: int = -1
    ) -> None:
        """A box with lines in its middle; line `code` is a name."""
        self.box(x, y, w, h, kind)
        top = y + h / 2 - 8 * (len(lines) - 1) + 4.5
        for i, line in enumerate(lines):
            small = 12 if i or len(lines) > 2 else 13
            self.text(
                x + w / 2,
                top + 16 * i,
                line,
                size=small,
                bold=i == 0,
                code=i == code,
                kind="ink" if i == 0 or i == code else "soft",
            )

    def row(self, of_all: tuple[float, float, str], *boxes: tuple[float, float, str, str]) -> None:
        """Boxes side by side: y, height and kind of all, then x, width and lines of each."""
        y, h, kind = of_all
        for x, w, *lines in boxes:
            self.labelled(x, y, w, h, kind, *lines)

    def frame(self, x: float, y: float, w: float, h: float, title: str) -> None:
        """Around what one of our ops does."""
        self.box(x, y, w, h, "ours", dashed=True)
        self.text(x + w / 2, y + 22, title, bold=True)

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<path d="{path}" class="line" fill="none"{dash} marker-end="url(#head)"/>'
        )

    def rule(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="3 3"' if dashed else ""
        self._parts.append(
            f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" class="line" fill="none"{dash}/>'
        )

    def svg(self, theme: str = "reader's") -> str:
        """`theme`: "light", "dark", or the reader's: what the screen that shows it prefers."""
        w, h = self._size
        style = _style(1) if theme == "dark" else _style(0)
        if theme == "reader's":
            style += f"@media (prefers-color-scheme: dark){{{_style(1)}}}"
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" '
            f'role="img" font-family="system-ui, sans-serif" stroke-width="1.3">\n'
            f"<title>{escape(self._title)}</title>\n<style>{style}text{{stroke:none}}</style>\n"
            '<defs><marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" '
            'orient="auto"><path d="M0 0L9 4L0 8z" class="soft"/></marker></defs>\n'
            f'<rect width="{w}" height="{h}" rx="8" class="paper"/>\n'
        )
        return head + "\n".join(self._parts) + "\n</svg>\n"
