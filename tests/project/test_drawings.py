"""The drawings and the printed examples of *How it works*: they are current, legible, and name what kernels read."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
HOW = ROOT / "docs" / "how"
sys.path.append(str(ROOT / "docs"))

import drawings  # noqa: E402
import svg  # noqa: E402

Box = tuple[float, float, float, float]
FILES = sorted(path.relative_to(HOW).as_posix() for path in HOW.rglob("*.svg"))
ARRAYS = r"(?:pair|item|block|lane|x)_\w+|word|tile_word|rows|columns(?:_\d+)?|values"
OF_H200 = pytest.mark.skipif(torch.cuda.is_available(), reason="plans are chosen by the profile of an H200")


def texts(name: str) -> list[tuple[Box, str]]:
    """Return each text of a drawing, and the box that it fills: left, top, right, bottom."""
    found = []
    for element in ElementTree.parse(HOW / name).getroot().iter("{http://www.w3.org/2000/svg}text"):
        size, text = float(element.attrib["font-size"]), element.text or ""
        width = len(text) * size * svg.ADVANCE
        left = float(element.attrib["x"]) - width * {"start": 0, "middle": 0.5, "end": 1}[element.attrib["text-anchor"]]
        baseline = float(element.attrib["y"])
        found.append(((left, baseline - 0.75 * size, left + width, baseline + 0.2 * size), text))
    return found


@OF_H200
def test_the_drawings_are_current() -> None:
    made = drawings.drawings()
    assert sorted(made) == FILES
    for name, text in made.items():
        assert (HOW / name).read_text(encoding="utf-8") == text, f"{name}: run python docs/drawings.py"


@pytest.mark.parametrize("name", FILES)
def test_texts_lie_in_the_drawing_and_apart(name: str) -> None:
    _, _, width, height = map(float, ElementTree.parse(HOW / name).getroot().attrib["viewBox"].split())
    boxes = texts(name)
    for (left, top, right, bottom), text in boxes:
        assert min(left, top, width - right, height - bottom) >= 0, text
    for (a, first), (b, second) in combinations(boxes, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart or not first or not second, f"{first!r} and {second!r}"


def test_the_names_are_those_of_the_source() -> None:
    kernels = {
        "coo": drawings.compiled("coo"),
        "fiber": drawings.in_small("fiber", lanes=2),
        "hls": drawings.in_tiles(),
        "bcb": drawings.in_bitmaps(),
    }
    for name, kernel in kernels.items():
        drawn = {text for _, text in texts(f"formats/{name}.svg") if re.fullmatch(ARRAYS, text)}
        assert drawn
        assert drawn <= set(re.findall(r"\w+", kernel.source))


def test_bytes_in_the_text_are_those_of_the_drawing() -> None:
    for section in (HOW / "formats.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        (name,) = re.findall(r"\((formats/.*\.svg)\)", section)
        (said,) = re.findall(r"([\d.]+)\s+bytes\s+a\s+nonzero", section)
        assert any(f"{said} a nonzero" in text for _, text in texts(name)), name


@OF_H200
@pytest.mark.filterwarnings("ignore:sparsetc. no GPU")
@pytest.mark.parametrize("page", ["index.md", "formats.md"])
def test_what_a_page_prints_is_what_its_code_prints(page: str) -> None:
    text, space = (HOW / page).read_text(encoding="utf-8"), dict[str, Any]()
    blocks = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", text, re.M | re.S)
    assert len(blocks) == text.count("```python")
    for code, printed in blocks:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, page, "exec"), space)
        assert output.getvalue() == printed
