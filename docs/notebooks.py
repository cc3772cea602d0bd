"""Notebooks of `examples/notebooks/` as pages: text, code, and below each cell the outputs that are stored with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any


def page(path: Path) -> str:
    """Return a notebook as Markdown."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _parts(cell))


def _parts(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"~~~python\n{source}\n~~~"
    for output in cell["outputs"]:
        shown = output.get("data", {"text/plain": output.get("text", "")})
        if "text/html" in shown:
            yield "<div>" + "".join(shown["text/html"]).replace("\n\n", "\n") + "</div>"
        else:
            text = "".join(shown["text/plain"])
            yield f"~~~text\n{text.rstrip()}\n~~~"


FOLDER = Path(__file__).resolve().parent.parent / "examples" / "notebooks"
PAGES = {f"notebook_{path.stem}": partial(page, path) for path in FOLDER.glob("*.ipynb")}
"""What a page names: `{{ notebook_decomposition }}`."""
