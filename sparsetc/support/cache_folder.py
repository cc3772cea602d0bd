"""The folder of generated source and measured profiles: which it is, and that it is the user's alone.

In: the folder of the options, if one was given, and the environment. Out: an absolute path, claimed before it is used.
"""

from __future__ import annotations

import os
from pathlib import Path

from sparsetc.support import private


def default_directory() -> Path | None:
    """``$SPARSETC_CACHE_DIR``, else ``sparsetc`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; None without a home."""
    chosen = os.environ.get("SPARSETC_CACHE_DIR")
    return Path(chosen) if chosen else _standard()


def resolved(directory: Path | None) -> Path | None:
    """The absolute path of a folder that was given, or of the default one; None where it needs a home and has none."""
    directory = directory or default_directory()
    try:
        return directory.expanduser().absolute() if directory else None
    except RuntimeError:  # ~ of nobody
        return None


def claim(folder: Path) -> None:
    """Make the folder where it is absent; raise `OSError` where others may write to it.

    The standard one is the package's, so its mode is mended. One that was named may hold more than a cache: it is left
    as it is, and refused.
    """
    private.claim(folder, tighten=folder == _standard())


def _standard() -> Path | None:
    """The place that the XDG base directory specification gives; a relative ``$XDG_CACHE_HOME`` is invalid there."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "sparsetc"
    try:
        return Path.home() / ".cache" / "sparsetc"
    except RuntimeError:  # neither HOME nor an entry in passwd
        return None
