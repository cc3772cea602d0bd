"""Cells and arrays as SVG: what `drawings.py` puts on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

GREY, NONE, INK, FAINT, LINE = "#d4d4d4", "#ffffff", "#222222", "#6b6b6b", "#a8a8a8"
FONT = "DejaVu Sans Mono, Menlo, Consolas, monospace"
ADVANCE = 0.61
"""Width of a character of the font, for a size of 1."""
CELL, HIGH, CAPTION, GAP, MARGIN = 23, 20, 10, 7, 18
"""Width and height of a cell, what a caption adds to its height, and what is left between blocks and around all."""
LEFT, NAMES, ARRAYS = 42, 272, 362
"""Where the tensor, the names and the arrays begin."""
COLUMN = 226
"""Width of the arrays of one part, where those of several stand side by side."""


@dataclass(frozen=True)
class Cell:
    """One element of an array.

    Attributes:
        colour: what fills the cell.
        caption: the coordinates that the element holds, where these are several.
        padding: whether the element stands for nothing.
    """

    text: str
    colour: str = NONE
    caption: str = ""
    padding: bool = False


Block = Sequence[Sequence[Cell]]
"""Rows of cells; they lie in memory one row after the other."""


@dataclass(frozen=True)
class Row:
    """An array as it is drawn: its name in the source, its type, what an element is, and its elements in blocks."""

    name: str
    dtype: str
    note: str
    blocks: Sequence[Block]

    @property
    def line(self) -> int:
        """Height of a line of cells."""
        return HIGH + CAPTION * any(cell.caption for block in self.blocks for line in block for cell in line)

    @property
    def height(self) -> int:
        """Height of all that is drawn, up to the next row."""
        return max(27 + max(len(block) for block in self.blocks) * self.line, 50)


@dataclass
class Page:
    """Elements of an SVG, and how far down they reach."""

    width: int = 820
    bottom: int = 0
    elements: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, size: int = 11, colour: str = INK, anchor: str = "start") -> None:
        """Write a line of text, whose baseline is at y."""
        bold = ' font-weight="bold"' if size > 12 else ""
        about = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}"{bold}'
        self.elements.append(f'<text x="{x:g}" y="{y:g}" {about}>{escape(text)}</text>')
        self.bottom = max(self.bottom, round(y + 4))

    def code(self, x: float, y: float, line: str, size: int) -> None:
        """Write a line of code, whose indentation is a shift to the right."""
        code = line.lstrip()
        self.text(x + (len(line) - len(code)) * size * ADVANCE, y, code, size)

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = LINE) -> None:
        """Draw a rectangle."""
        about = f'width="{width:g}" height="{height:g}" fill="{fill}" stroke="{stroke}"'
        self.elements.append(f'<rect x="{x:g}" y="{y:g}" {about}/>')
        self.bottom = max(self.bottom, round(y + height))

    def arrow(self, x: float, y: float, down: float) -> None:
        """Draw an arrow that points down."""
        self.elements.append(f'<path d="M{x:g} {y:g}v{down:g}m-4 -5l4 5l4 -5" fill="none" stroke="{FAINT}"/>')

    def svg(self, title: str) -> str:
        """Return the file, on a light background."""
        height = self.bottom + MARGIN
        sizes = f'viewBox="0 0 {self.width} {height}" width="{self.width}" height="{height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {sizes} font-family="{FONT}" role="img">',
                f"<title>{escape(title)}</title>",
                f'<rect x="0" y="0" width="{self.width}" height="{height}" rx="6" fill="#fbfbfa"/>',
                *self.elements,
                "</svg>\n",
            ]
        )


def draw_cells(page: Page, x: float, y: float, block: Block, height: int = HIGH) -> None:
    """Draw a block of cells; the elements of padding are grey."""
    for down, row in enumerate(block):
        for right, cell in enumerate(row):
            left, top = x + right * CELL, y + down * height
            page.box(left, top, CELL, height, cell.colour)
            page.text(left + CELL / 2, top + 14, cell.text, 11, FAINT if cell.padding else INK, "middle")
            if cell.caption:
                page.text(left + CELL / 2, top + HIGH + 6, cell.caption, 8, INK, "middle")


def draw_rows(page: Page, y: float, columns: Sequence[Sequence[Row]]) -> float:
    """Draw arrays below one another, those of several parts side by side; return where the next would be."""
    for rows in zip(*columns, strict=True):
        page.text(NAMES, y + 27, rows[0].name, 12)
        page.text(NAMES, y + 38, rows[0].dtype, 8, FAINT)
        for number, row in enumerate(rows):
            left = ARRAYS + number * COLUMN
            page.text(left, y + 9, row.note, 9, FAINT)
            for block in row.blocks:
                draw_cells(page, left, y + 13, block, row.line)
                left += max(len(line) for line in block) * CELL + GAP
        y += max(row.height for row in rows)
    return y
