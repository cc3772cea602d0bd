"""Generated source on disk: files named by their content, importable, readable, editable; bounded; safe to share.

In: source text. Out: its module and path. A file is written to a temporary name and renamed, so two processes may
write at once. A file that is damaged no longer matches the digest in its name and is written anew; to edit a kernel,
copy it. The least recently used files go when there are more than `MAX_FILES`. A cache that cannot be written to is
replaced, with a warning, by a private temporary folder for the life of the process.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import warnings
from collections import OrderedDict
from pathlib import Path
from types import ModuleType

MAX_FILES = 4096
"""Files kept in a cache directory."""
MAX_MODULES = 512
"""Modules kept in memory."""

_modules: OrderedDict[Path, tuple[ModuleType, Path]] = OrderedDict()
_private: list[Path] = []


def default_directory() -> Path:
    """``$SPARSETC_CACHE_DIR``, else ``sparsetc`` in ``$XDG_CACHE_HOME`` or ``~/.cache``, else the temporary folder."""
    chosen = os.environ.get("SPARSETC_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base) / "sparsetc" if base else Path.home() / ".cache" / "sparsetc"
    except RuntimeError:  # no home directory
        return Path(tempfile.gettempdir()) / "sparsetc"


def path_of(source: str, directory: Path, name: str) -> Path:
    """Where this source lives: ``<name>_<digest of the text>.py``."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:20]
    return directory / f"{name}_{digest}.py"


def load(source: str, directory: Path | None = None, name: str = "kernel") -> tuple[ModuleType, Path]:
    """Import the source from its file in the cache, writing the file if it is absent or damaged."""
    directory = (directory or default_directory()).expanduser().absolute()
    path = path_of(source, directory, name)
    known = _modules.get(path)
    if known is not None:
        _modules.move_to_end(path)
        return known
    own = path
    if _intact(path, source):
        _touch(path)
    else:
        own = _written(path, source)
    loaded = _import(own), own
    _modules[path] = loaded
    while len(_modules) > MAX_MODULES:
        _, (_, old) = _modules.popitem(last=False)
        sys.modules.pop(_module_name(old), None)
    return loaded


def _written(path: Path, source: str) -> Path:
    """Write the file, to a private temporary folder where the cache cannot be written to; returns where it is."""
    try:
        _write(path, source)
        return path
    except OSError as error:
        if not _private:
            folder = Path(tempfile.mkdtemp(prefix="sparsetc-"))
            _private.append(folder)
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            warnings.warn(
                f"sparsetc: cannot write generated source to {path.parent} ({error}); using {folder} until this "
                "process ends. Set SPARSETC_CACHE_DIR to a folder that can be written to",
                stacklevel=2,
            )
        own = _private[0] / path.name
        _write(own, source)
        return own


def _intact(path: Path, source: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == source
    except (OSError, UnicodeDecodeError):
        return False


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):  # a cache that may only be read still serves
        os.utime(path)


def _write(path: Path, source: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(source)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _evict(path.parent)


def _evict(directory: Path) -> None:
    """Remove the least recently used files above the bound; another process may be doing the same."""
    files = []
    for file in directory.glob("*.py"):
        try:
            files.append((file.stat().st_mtime, file))
        except OSError:
            continue
    for _, file in sorted(files)[: max(0, len(files) - MAX_FILES)]:
        file.unlink(missing_ok=True)
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def _module_name(path: Path) -> str:
    return f"sparsetc_generated.{path.stem}"


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_module_name(path), path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import generated source {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
