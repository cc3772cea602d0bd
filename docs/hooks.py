"""A hook of mkdocs: a line `{{ name }}` of a page becomes the figure of that name in `figures.py`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import figures


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with its figures; a name that no figure has is a KeyError."""
    return re.sub(r"^\{\{ (\w+) \}\}$", lambda line: figures.FIGURES[line[1]](), markdown, flags=re.M)
