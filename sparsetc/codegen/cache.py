"""Generated source as modules: compiled from the text in memory, of which a file is a copy for readers.

In: source text. Out: its module, and the path of its file (`sparsetc/codegen/source_files.py`). The text that was
generated is what runs: neither the file nor compiled bytecode of it is ever imported. Tracebacks, `inspect` and Triton,
which reads the source of its kernels, are given the text by the module's loader and by `linecache`, so the file may go
or change at any moment.
"""

from __future__ import annotations

import hashlib
import linecache
import sys
import weakref
from collections import OrderedDict
from importlib.abc import InspectLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType

from sparsetc.codegen import source_files
from sparsetc.support.files import cache_folder
from sparsetc.support.locks import Lock

MAX_MODULES = 512
"""Modules kept in memory."""

_modules: OrderedDict[Path, ModuleType] = OrderedDict()
_lock = Lock()


def path_of(source: str, directory: Path, name: str) -> Path:
    """Where this source lives: ``<name>_<digest of the text>.py``."""
    digest = hashlib.sha256(source.encode()).hexdigest()[: source_files.DIGITS]
    return directory / f"{name}_{digest}.py"


def load(source: str, directory: Path | None = None, name: str = "kernel") -> tuple[ModuleType, Path]:
    """The module that the text makes, made once, and the path of its copy in the cache, which is written if need be."""
    folder = cache_folder(directory)
    key = path_of(source, folder or Path(), name)
    with _lock.own:
        path = source_files.keep(source, folder, key.name)
        module = _modules.get(key)
        if module is None:
            module = _modules[key] = _module(source, path)
        _modules.move_to_end(key)
        while len(_modules) > MAX_MODULES:
            _forget(_modules.popitem(last=False)[1])
        return module, path


def count() -> int:
    """How many modules are in memory."""
    return len(_modules)


def clear() -> None:
    """Forget all modules; kernels that have one keep it."""
    with _lock.own:
        while _modules:
            _forget(_modules.popitem()[1])


class _Text(InspectLoader):
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
    name, loader = f"sparsetc_generated.{path.stem}", _Text(source, path)
    spec = spec_from_loader(name, loader, origin=str(path), is_package=False)
    assert spec is not None
    module = module_from_spec(spec)
    module.__file__ = str(path)
    _show(loader)
    sys.modules[name] = module  # where inspect looks for the module of a function
    try:
        loader.exec_module(module)
    except BaseException:
        _forget(module)
        raise
    return module


def _show(loader: _Text) -> None:
    """Give the text to `linecache` for as long as the loader lives, which is as long as any function of its module."""
    name = str(loader.path)
    # no time of change: what was not read from a file is not compared with it
    entry = (len(loader.source), None, [f"{line}\n" for line in loader.source.splitlines()], name)
    linecache.cache[name] = entry
    weakref.finalize(loader, _hide, name, entry).atexit = False


def _hide(name: str, entry: object) -> None:
    if linecache.cache.get(name) is entry:  # another module may have the same text
        del linecache.cache[name]


def _forget(module: ModuleType) -> None:
    """Take the module from those that can be imported; kernels that have it keep it."""
    if sys.modules.get(module.__name__) is module:
        del sys.modules[module.__name__]
