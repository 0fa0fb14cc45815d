"""A picture as SVG: shapes on a light card, which reads well on a dark page too."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from attrs import define, field

#: The meaning of each colour in all pictures.
COLOURS = {
    "engine": "#0b6e4f",
    "waiting": "#c9cfd8",
    "other": "#c8553d",
    "line": "#57606a",
    "text": "#1f2328",
    "light": "#f3f5f7",
    "shared": "#2f6db5",
}
MARGIN = 16


@define
class Picture:
    """Shapes in a coordinate system whose unit is a pixel, with the origin at the upper left.

    Attributes:
        title: What a screen reader says, and a browser shows under the pointer.
        width, height: Of the whole card.
    """

    title: str
    width: float
    height: float
    _shapes: list[str] = field(init=False, factory=list)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        said: str = "",
        **more: Any,
    ) -> None:
        about = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
        inside = f"<title>{escape(said)}</title>" if said else ""
        self._shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" '
            f'fill="{COLOURS.get(fill, fill)}"{about}>{inside}</rect>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "start",
        fill: str = "text",
        size: float = 12,
        mono: bool = False,
        bold: bool = False,
    ) -> None:
        style = ' font-family="ui-monospace, monospace"' if mono else ""
        style += ' font-weight="600"' if bold else ""
        self._shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:g}"{style} '
            f'fill="{COLOURS.get(fill, fill)}" xml:space="preserve">{escape(words)}</text>'
        )

    def line(
        self,
        *points: tuple[float, float],
        stroke: str = "line",
        width: float = 1,
        arrow: bool = False,
        dashed: bool = False,
    ) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        more = ' marker-end="url(#arrow)"' * arrow + ' stroke-dasharray="3 3"' * dashed
        self._shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{COLOURS.get(stroke, stroke)}" '
            f'stroke-width="{width:g}"{more}/>'
        )

    def curve(self, x1: float, y1: float, x2: float, y2: float, width: float, stroke: str) -> None:
        """A line that leaves and arrives horizontally."""
        middle = (x1 + x2) / 2
        self._shapes.append(
            f'<path d="M{x1:.1f},{y1:.1f} C{middle:.1f},{y1:.1f} {middle:.1f},{y2:.1f} '
            f'{x2:.1f},{y2:.1f}" fill="none" stroke="{COLOURS.get(stroke, stroke)}" '
            f'stroke-width="{width:g}"/>'
        )

    def write(self, path: Path) -> Path:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" role="img" '
            'font-family="system-ui, -apple-system, Segoe UI, sans-serif">'
        )
        arrow = (
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" '
            f'fill="{COLOURS["line"]}"/></marker></defs>'
        )
        card = (
            f'<rect x="0.5" y="0.5" width="{self.width - 1:g}" height="{self.height - 1:g}" rx="6" '
            'fill="#ffffff" stroke="#d0d7de"/>'
        )
        lines = [head, f"<title>{escape(self.title)}</title>", arrow, card, *self._shapes]
        path.write_text("\n".join([*lines, "</svg>\n"]), "utf-8")
        return path
