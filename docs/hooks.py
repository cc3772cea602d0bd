"""A hook of mkdocs: a line `{{ name }}` of a page becomes the figure of that name, or the notebook (`notebooks.py`)."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import figures
import notebooks

TEXTS = {**figures.FIGURES, **notebooks.PAGES}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with its figures and notebooks; a name that none has is a KeyError."""
    return re.sub(r"^\{\{ (\w+) \}\}$", lambda line: TEXTS[line[1]](), markdown, flags=re.M)
