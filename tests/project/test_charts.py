"""The figures of the site's benchmark pages: each is made from the results, and stands on one page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
sys.path.insert(0, str(DOCS))

import charts  # noqa: E402
import figures  # noqa: E402
import hooks  # noqa: E402


@pytest.mark.parametrize("name", sorted(figures.FIGURES))
def test_a_figure_is_made_from_the_results(name: str) -> None:
    text = figures.FIGURES[name]()
    assert "benchmarks/results/" in text
    if text.startswith("<svg"):
        drawing = ElementTree.fromstring(text[: text.index("</svg>") + 6])
        width, height = (float(side) for side in drawing.attrib["viewBox"].split()[2:])
        bars = [part for part in drawing if part.tag.endswith("rect")]
        assert bars
        assert all(0 <= float(bar.attrib["x"]) <= width for bar in bars)
        assert all(0 <= float(part.attrib["y"]) <= height for part in drawing if "y" in part.attrib)
        ends = [part for part in drawing if part.attrib.get("text-anchor") == "end"]
        assert all(len(part.text or "") * charts.LETTER <= float(part.attrib["x"]) for part in ends)
    elif text.startswith("Not measured yet"):
        assert not charts.measured(name)
    else:
        assert text.count("\n| ") > 1


def test_every_figure_stands_on_one_page() -> None:
    pages = [page.read_text(encoding="utf-8") for page in sorted((DOCS / "benchmarks").glob("*.md"))]
    named = [name for page in pages for name in re.findall(r"^\{\{ (\w+) \}\}$", page, re.M)]
    assert sorted(named) == sorted(figures.FIGURES)
    assert all("{{" not in hooks.on_page_markdown(page) for page in pages)


def test_bars_start_at_one() -> None:
    drawing = ElementTree.fromstring(charts.bars("title", "axis", [("slower", 0.5), ("faster", 4.0)]))
    slower, faster = (part for part in drawing if part.tag.endswith("rect"))
    assert float(slower.attrib["x"]) + float(slower.attrib["width"]) == pytest.approx(
        float(faster.attrib["x"]), abs=0.2
    )
    assert float(faster.attrib["width"]) == pytest.approx(2 * float(slower.attrib["width"]), abs=0.2)
