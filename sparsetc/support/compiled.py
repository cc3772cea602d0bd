"""Functions of numbers and arrays as machine code: compiled by numba where it is installed, kept on disk.

In: a function of Python over numpy arrays. Out: the same of tensors, as machine code; None where it is not worth that.
What the compiler made is kept in the cache folder, under the rules of generated sources: in a folder that is the user's
alone, in a file that nobody else may write to, by the digest of all that it was made from. What cannot be read is
compiled anew; what cannot be written is compiled again by the next process. Compiled functions hold no lock of Python.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._dynamo import guards

from sparsetc.support import files
from sparsetc.support.entry import traced_by_modes, warn

MOST_BYTES = 1 << 26
"""Most bytes of a compiled function's file; one takes 20 to 100 kB."""
LARGE = 1 << 20
"""Elements of a large tensor: 4 MB of float32, from which on numpy asks for large pages."""
ENOUGH, MANY = 1 << 12, 1 << 16
"""Least elements of a loop for running it natively, and for importing numba for it, which takes .3 s."""


@lru_cache
def has_numba() -> bool:
    """Return True if numba is installed."""
    return find_spec("numba") is not None


@lru_cache
def usable() -> bool:
    """Return True if numba can be imported; where it is installed and cannot, as for a later numpy, say so once."""
    try:
        import_module("numba")
    except Exception as error:  # whatever a library raises that is not made for another
        why = str(error)[:200]
        warn(f"numba is installed and cannot be imported ({why}); torch's operations run in place of native loops")
        return False
    return True


def native(function: Callable[..., Any], device: torch.device, elements: int) -> Callable[..., Any] | None:
    """Return a function as machine code, which is made at its first call with arguments of some types.

    None on a GPU, without numba, where ``SPARSETC_BACKEND`` names other programs, while a graph is traced or a
    transform is active, and where there are too few elements to make up for a compiler.

    Args:
        function: of arrays, numbers and nothing else; it calls no function of the package.
        device: of the tensors.
        elements: that it goes over.

    Returns:
        A function of tensors on the CPU, in place of arrays, and numbers.
    """
    if device.type != "cpu" or os.environ.get("SPARSETC_BACKEND", "auto") not in ("auto", "numba"):
        return None
    seen = torch.compiler.is_compiling() or traced_by_modes() or torch._C._are_functorch_transforms_active()
    if seen:  # by what knows torch's operations alone
        return None
    enough = ENOUGH if "numba" in sys.modules else MANY
    return _native(function) if elements >= enough and has_numba() and usable() else None


@lru_cache
def _native(function: Callable[..., Any]) -> Callable[..., Any]:
    from numba import njit

    compiled: Any = njit(nogil=True, error_model="numpy")(function)
    text = inspect.getsource(sys.modules[function.__module__])
    compiled._cache = Kept(function.__name__, text, files.cache_folder(None))

    def call(*arguments: Any) -> Any:
        return compiled(*[a.detach().numpy() if isinstance(a, Tensor) else a for a in arguments])

    return call


def room(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return an uninitialised tensor; a large one on a CPU in memory of numpy, which asks the system for large pages.

    The first writes to 16 MB take .4 ms then, and 8 ms in pages of 4 KB, as torch allocates it.
    """
    if device.type != "cpu" or prod(shape) < LARGE or dtype == torch.bfloat16:  # which numpy has not
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(shape, str(dtype).removeprefix("torch.")))


def room_of(like: Tensor, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that gives an uninitialised tensor like this one; a GPU's is made without torch's dispatch."""
    shape, strides = tuple(like.shape), like.stride()  # a torch.Size is none to torch's own function

    def make() -> Tensor:
        if device.type == "cuda" and torch._C._cuda_getDevice() == device.index:
            return guards._empty_strided_cuda(shape, strides, like.dtype)  # type: ignore[attr-defined, no-any-return]
        return torch.empty_strided(shape, strides, dtype=like.dtype, device=device)

    return make


class Kept:
    """The compiled forms of one function on disk, in the interface of a cache of numba's dispatcher."""

    def __init__(self, name: str, text: str, folder: Path | None) -> None:
        """Set the text to compile, which with the name determines the result up to compiler and types."""
        self.name = name
        self.text = text
        self.folder = folder
        self.cache_path = str(folder)

    def path(self, signature: Any, target: Any) -> Path:
        """Return the file of a form: named by the text, the compiler, the processor and the types."""
        import llvmlite
        import numba

        assert self.folder is not None
        versions = sys.version, numba.__version__, llvmlite.__version__, target.codegen().magic_tuple()
        made_from = repr((self.text, self.name, versions, str(signature)))
        digest = hashlib.sha256(made_from.encode()).hexdigest()[: files.DIGITS]
        return self.folder / f"{self.name}_{digest}{files.COMPILED}"

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return the compiled form for the types of a signature; None where no file of the user's own has it."""
        if self.folder is None:
            return None
        from numba.core.compiler import CompileResult
        from numba.core.runtime import rtsys

        rtsys.initialize(target)  # what is loaded calls it; all that a compiler needs beside takes .3 s to import
        try:
            files.check(self.folder)
            data = files.read_private(self.path(signature, target), MOST_BYTES)
            return CompileResult._rebuild(target, *pickle.loads(data))
        except Exception:  # absent, of others, or damaged in whatever way: it is compiled
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep a compiled form, where the folder can be written to."""
        if self.folder is None:
            return
        from numba.core import serialize

        with suppress(OSError):
            path = self.path(signature, compiled.target_context)
            files.claim(self.folder)
            files.write_private(path, serialize.dumps(compiled._reduce()))
            files.evict_sometimes(path)
