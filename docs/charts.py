"""Tables in Markdown and bar charts in SVG; below each stand its file of results, the device and the versions."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
LETTER, WIDTH, ROW = 7.6, 760, 20
"""Pixels: of a letter at most, of a whole chart, and of a bar with its gap."""
PEERS = ("scipy", "sparse", "opt_einsum", "torch_geometric", "pyttb", "tensorly")
"""Packages whose versions files of results may hold."""
MORE, LESS = "#3d85c6", "#cc7a29"
"""Colours of bars above and below 1; both are readable on white and on black."""


def measured(name: str) -> bool:
    """True if there is a file of results."""
    return (RESULTS / f"{name}.json").exists()


def results(name: str) -> dict[str, Any]:
    """Return what a file of results holds."""
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def source(*names: str) -> str:
    """Return the line below a figure: its files, and what they were measured with."""
    lines = []
    for name in names:
        data = results(name)
        of = data if "device" in data else data["rows"][0]
        threads = f", {data['cpu_threads']} threads" if "NVIDIA" not in of["device"] and "cpu_threads" in data else ""
        versions = ", ".join(f"{key} {data[key]}" for key in PEERS if key in data)
        lines.append(
            f"`benchmarks/results/{name}.json`: {of['device']}{threads}, torch {of['torch']}, Triton {of['triton']}"
            + (f", {versions}" if versions else "")
            + f", {data['date']}"
        )
    return "\n\n*" + "; ".join(lines) + ".*\n"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; numbers are written with three digits."""
    lines = [list(head), ["---"] * len(head), *([_text(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _text(cell: Any) -> str:
    if isinstance(cell, list | tuple):
        return ", ".join(map(_text, cell))
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def bars(title: str, axis: str, values: Sequence[tuple[str, float]]) -> str:
    """Return an SVG of a bar a ratio, on a logarithmic axis, from a line at 1: to the right what is faster.

    Args:
        title: what is compared.
        axis: what a value says.
        values: a label and a ratio each.
    """
    ratios = [value for _, value in values]
    low, high = math.log10(min(1.0, *ratios)), math.log10(max(1.0, *ratios))
    margin = LETTER * max(len(label) for label, _ in values) + 8
    scale = (WIDTH - margin - 60) / (high - low or 1.0)
    height = 70 + ROW * len(values)

    def at(value: float) -> float:
        return margin + (math.log10(value) - low) * scale

    parts = [f'<text x="0" y="14" font-weight="bold">{html.escape(title)}</text>']
    for mark in _marks(10**low, 10**high):
        parts.append(
            f'<path d="M{at(mark):.1f} 24V{height - 42}" stroke="currentColor" opacity="{0.5 if mark == 1 else 0.15}"/>'
        )
        parts.append(f'<text x="{at(mark):.1f}" y="{height - 28}" text-anchor="middle" opacity="0.7">{mark:g}</text>')
    parts.append(
        f'<text x="{at(1):.1f}" y="{height - 10}" text-anchor="start" opacity="0.7">{html.escape(axis)}</text>'
    )
    for n, (label, value) in enumerate(values):
        y, left, right = 28 + ROW * n, min(at(1), at(value)), max(at(1), at(value))
        colour = MORE if value >= 1 else LESS
        parts.append(f'<text x="{margin - 8:.1f}" y="{y + 12}" text-anchor="end">{html.escape(label)}</text>')
        parts.append(
            f'<rect x="{left:.1f}" y="{y}" width="{max(1.0, right - left):.1f}" height="{ROW - 5}" fill="{colour}"/>'
        )
        parts.append(f'<text x="{right + 5:.1f}" y="{y + 12}">{_text(float(value))}</text>')
    style = 'font-family="inherit" font-size="12" fill="currentColor" style="width:100%;height:auto"'
    name = f'role="img" aria-label="{html.escape(title)}"'
    frame = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {name} {style}'
    return f"<svg {frame}>{''.join(parts)}</svg>\n"


def _marks(low: float, high: float) -> list[float]:
    """Return the round numbers of an axis: 1, 2 and 5 of each decade, of a long axis only the decades."""
    steps = (1, 2, 5) if high / low < 100 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [m for d in decades for s in steps if low * 0.999 <= (m := round(s * 10.0**d, 9)) <= high * 1.001]
