"""One folder of numba's machine code for all processes of the tests, so that a loop is compiled once wherever it runs.

Each worker has a folder of generated source of its own, which scripts that it starts inherit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sparsetc.support import files


def share() -> None:
    """Keep what this process compiles for its folder in the folder of all; a folder that a test made stays its own."""
    folder = Path(os.environ.get("SPARSETC_CACHE_DIR", ""))
    if folder.parent.name != "sparsetc-tests":
        return
    shared = folder.parent / "native"
    shared.mkdir(0o700, exist_ok=True)
    file_of = files.Kept.path

    def path(kept: files.Kept, signature: Any, target: Any) -> Path:
        file = file_of(kept, signature, target)
        return shared / file.name if file.parent == folder else file

    files.Kept.path = path  # type: ignore[method-assign]
