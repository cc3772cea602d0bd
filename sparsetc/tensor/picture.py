"""Sparse tensors as small pictures: how many entries each cell of a grid has, and what notebooks show of a tensor.

In: coordinates and sizes. Out: counts, or HTML with a picture of them as PNG, for which no other library is needed.
"""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from math import prod
from struct import pack
from typing import Any

import torch
from torch import Tensor

from sparsetc.tensor import coords as crd

FIRST = 6
"""Entries that are shown as text, at most."""
SIDE = 96
"""Pixels of a picture in a notebook, at most."""


def binned(coords: Tensor, shape: Sequence[int], modes: tuple[int, int], bins: int) -> Tensor:
    """Count the entries in each cell of a grid over two modes.

    Args:
        coords: (order, n) of entries.
        shape: sizes of the modes.
        modes: that of rows and that of columns; one that the tensor has not has size 1.
        bins: rows and columns of the grid, at most; a mode that is smaller has a row an index.

    Returns:
        (rows, columns) int64, on the device of the coordinates.
    """
    sizes = [shape[m] if m < len(shape) else 1 for m in modes]
    widths = [max(1, -(-n // bins)) for n in sizes]
    counts, key = [max(1, -(-n // width)) for n, width in zip(sizes, widths, strict=True)], torch.zeros_like(coords[0])
    for mode, width, count in zip(modes, widths, counts, strict=True):
        key = key * count + (coords[mode] // width if mode < len(shape) else 0)
    return crd.histogram(key, prod(counts)).view(counts[0], counts[1])


def as_text(value: Any) -> str:
    """A number in six digits, the first of a list of them, or sizes."""
    if isinstance(value, tuple):
        return " × ".join(map(str, value))
    if isinstance(value, list):
        return f"[{', '.join(map(as_text, value[:FIRST]))}{', …' if len(value) > FIRST else ''}]"
    return f"{value:.6g}" if isinstance(value, float | complex) else str(value)


def as_html(title: str, rows: Mapping[str, Any], picture: Tensor | None = None, lines: Sequence[str] = ()) -> str:
    """Return a table of names and what they are, beside a picture of counts and lines of text, as HTML."""
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(as_text(said))}</td></tr>" for name, said in rows.items())
    table = f"<table><caption><b>{escape(title)}</b></caption>{cells}</table>"
    if picture is None:
        return table
    table += f"<pre>{escape(chr(10).join(lines))}</pre>" if lines else ""
    height, width = picture.shape
    scale = max(1, SIDE // max(height, width, 1))
    source = f"data:image/png;base64,{b64encode(as_png(picture)).decode()}"
    style = f"width:{width * scale}px;height:{height * scale}px;image-rendering:pixelated;border:1px solid #888"
    return f'<div style="display:flex;gap:1em;align-items:center"><img src="{source}" style="{style}">{table}</div>'


def as_png(counts: Tensor) -> bytes:
    """Return a greyscale PNG in which a cell is the darker the more entries it has."""
    level = (counts.cpu().double() / max(1, int(counts.max()) if counts.numel() else 1)).sqrt()
    grey = torch.where(counts.cpu() > 0, 200 - 200 * level, 255.0).to(torch.uint8)
    lines = b"".join(b"\0" + bytes(row) for row in grey.tolist())

    def chunk(kind: bytes, data: bytes) -> bytes:
        return pack(">I", len(data)) + kind + data + pack(">I", zlib.crc32(kind + data))

    head = pack(">IIBBBBB", grey.shape[1], grey.shape[0], 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
