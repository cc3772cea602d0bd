"""Generated source as modules: compiled from the text in memory, of which a file is a copy for readers.

In: source text, a folder, a name. Out: its module, and the path of its copy. The text that was generated is what runs:
neither the file nor compiled bytecode of it is ever imported. Tracebacks, `inspect` and Triton, which reads the source
of its kernels, are given the text by the module's loader and by `linecache`. So a copy that is absent, damaged or
another's is only written anew, and any file or folder may go at any moment. Copies are a bounded number, named by their
content. Beside them lies machine code that numba made of native loops, which is loaded only from files, and a folder,
that nobody else may write to (`codegen.launch`). A folder that cannot be written to, or that is not the user's alone,
is replaced, with a warning, by a temporary one for as long as the process lives.
"""

from __future__ import annotations

import atexit
import hashlib
import linecache
import logging
import os
import shutil
import sys
import tempfile
import time
import weakref
from collections import OrderedDict
from contextlib import suppress
from functools import lru_cache
from importlib.abc import InspectLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType

from sparsetc.support import Ints, Lock, files
from sparsetc.support.entry import log_since, warn
from sparsetc.support.files import cache_folder

MAX_MODULES = 512
"""Modules kept in memory."""

_modules: OrderedDict[Path, tuple[ModuleType, Path, Ints | None]] = OrderedDict()
"""Modules, each with its copy and what the file system said of the copy once it was written or compared."""
_lock = Lock()


@lru_cache(maxsize=MAX_MODULES)
def path_of(source: str, directory: Path, name: str) -> Path:
    """Return the path of a source: ``<name>_<digest of the text>.py``."""
    digest = hashlib.sha256(source.encode()).hexdigest()[: files.DIGITS]
    return directory / f"{name}_{digest}.py"


def load(source: str, directory: Path | None = None, name: str = "kernel") -> tuple[ModuleType, Path]:
    """Return the module that the text makes, and the path of its copy in the cache; both are made if they do not exist.

    While the file is the one that was seen last, it is not compared again.
    """
    folder = cache_folder(directory)
    key = path_of(source, folder or Path(), name)
    with _lock.own:
        module, path, seen = _modules.get(key, (None, key, None))
        status = _status(path)
        if seen is None or seen != status:
            path = keep(source, folder, key.name)
            status = _status(path)
        if module is None:
            start, module = time.perf_counter(), _module(source, path)
            log_since(start, logging.DEBUG, "loaded %s", path)
        _modules[key] = module, path, status
        _modules.move_to_end(key)
        while len(_modules) > MAX_MODULES:
            _forget(_modules.popitem(last=False)[1][0])
        return module, path


def _status(path: Path) -> Ints | None:
    """Return what tells a file from another, and from itself before a change; None if there is no file."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns


def count() -> int:
    """Return how many modules are in memory."""
    return len(_modules)


def clear() -> None:
    """Forget all modules; kernels that have one keep it."""
    with _lock.own:
        while _modules:
            _forget(_modules.popitem()[1][0])


class _TextLoader(InspectLoader):
    """A loader of text in memory, which whoever asks for a module's source is given."""

    def __init__(self, source: str, path: Path) -> None:
        self.source, self.path = source, path

    def get_source(self, fullname: str) -> str:
        """The text, whatever has become of the file."""
        return self.source

    def get_code(self, fullname: str) -> CodeType:
        """The text, compiled."""
        return self.source_to_code(self.source, str(self.path))


def _module(source: str, path: Path) -> ModuleType:
    name, loader = f"sparsetc_generated.{path.stem}", _TextLoader(source, path)
    spec = spec_from_loader(name, loader, origin=str(path), is_package=False)
    assert spec is not None
    module = module_from_spec(spec)
    module.__file__ = str(path)
    # linecache has the text for as long as the loader lives, which is as long as any function of its module; no time of
    # change: what was not read from a file is not compared with it
    entry = (len(source), None, [f"{line}\n" for line in source.splitlines()], str(path))
    linecache.cache[str(path)] = entry
    weakref.finalize(loader, _hide, str(path), entry).atexit = False
    sys.modules[name] = module  # where inspect looks for the module of a function
    try:
        loader.exec_module(module)
    except BaseException:
        _forget(module)
        raise
    return module


def _hide(name: str, entry: object) -> None:
    if linecache.cache.get(name) is entry:  # another module may have the same text
        del linecache.cache[name]


def _forget(module: ModuleType) -> None:
    """Remove the module from `sys.modules`; kernels that hold it keep it."""
    if sys.modules.get(module.__name__) is module:
        del sys.modules[module.__name__]


# -- copies for readers -----------------------------------------------------------------------------------------------

ATTEMPTS = 3
"""At writing a file to a folder that other processes may be removing."""
_refused: set[Path | None] = set()


def keep(source: str, folder: Path | None, name: str) -> Path:
    """Return the path of a file with this text, written if it is missing. Without a home directory `folder` is None."""
    try:
        if folder is None:
            raise FileNotFoundError("there is no home directory")
        return _kept(source, folder, name)
    except OSError as error:
        return _kept_for_now(source, folder, name, error)


def _kept(source: str, folder: Path, name: str) -> Path:
    for _ in range(ATTEMPTS - 1):
        with suppress(FileNotFoundError):  # the folder went between two steps
            return _written(folder / name, source.encode())
    return _written(folder / name, source.encode())


def _written(path: Path, data: bytes) -> Path:
    files.claim(path.parent)
    if not _intact(path, data):
        files.write_private(path, data)
        files.evict_sometimes(path)
    return path


def _kept_for_now(source: str, folder: Path | None, name: str, error: OSError) -> Path:
    """Keep the file in the temporary folder of this process; without one either, name a path that is not there."""
    try:
        where = _kept(source, _temporary_folder(), name)
        instead = f"in {where.parent} until this process ends"
    except OSError:
        where = (folder or Path(os.devnull)) / name  # below no folder, so that nothing is ever written there
        instead = "in memory only"
    if folder not in _refused:
        _refused.add(folder)
        warn(
            f"cannot write generated source to {folder or 'a cache folder'} ({error}); it is kept {instead}. Set "
            "SPARSETC_CACHE_DIR to a folder that only you can write to; one that is absent is made"
        )
    return where


@lru_cache
def _temporary_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="sparsetc-"))
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child goes on with its parent's folder
        shutil.rmtree(folder, ignore_errors=True)


def _intact(path: Path, data: bytes) -> bool:
    """True if the file has these bytes. Its use is noted, so that it is not the next file to be removed."""
    try:
        same = files.read_private(path, len(data)) == data
    except OSError:
        return False
    if same:
        with suppress(OSError):  # a folder that may only be read still serves
            os.utime(path)
    return same


def source_name(equation: str, backend: str) -> str:
    """Return a readable file name: the equation's letters, then the backend."""
    letters = "".join(c if c.isalnum() else "_" for c in equation.replace("->", "_to_").replace(",", "_"))
    short = letters if len(letters) <= 60 else hashlib.sha256(letters.encode()).hexdigest()[:12]
    return f"{short or 'scalar'}_{backend}"
