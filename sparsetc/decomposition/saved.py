"""Files of models: an .npz of plain arrays, written whole or not at all, and read without pickles.

In: arrays by name, and a path. Out: the same arrays, checked to be those of the kind of model that is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from sparsetc.errors import DtypeError, IOFormatError, SparsetcError
from sparsetc.io import memory, npy
from sparsetc.support.files import replacing

DTYPES = (torch.float32, torch.float64)
"""Dtypes that a model in a file may have: those that decompositions compute in, and numpy has."""

WORD = 256
"""Bytes that a word in a file may take."""


@dataclass(frozen=True)
class Held:
    """What a file of a model holds."""

    first: torch.Tensor
    """The weights, or the core."""
    factors: tuple[torch.Tensor, ...]
    numbers: Mapping[str, tuple[float, ...]]
    stopped: str


def write(
    path: str | os.PathLike[str],
    kind: str,
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Sequence[float]],
    stopped: str,
) -> None:
    """Write tensors, lists of numbers and two words; OSError names the path, DtypeError what `read` would not take."""
    dtype = next(iter(tensors.values())).dtype
    if dtype not in DTYPES:
        raise DtypeError(f"a file of a model holds float32 or float64, found {dtype}; convert it: .to(torch.float32)")
    arrays = {name: t.detach().cpu().contiguous().numpy() for name, t in tensors.items()}
    lists = {name: np.array(given, np.float64) for name, given in numbers.items()}
    with replacing(path) as file:
        np.savez(file, **arrays, **lists, kind=np.array(kind), stopped=np.array(stopped))  # type: ignore[arg-type]


def read(path: str | os.PathLike[str], kind: str, first: str, lists: Sequence[str], device: torch.device | str) -> Held:
    """What `write` wrote of this kind of model; IOFormatError where it is not, OutOfMemoryError above the limit.

    Args:
        path: of the file.
        kind: of the model.
        first: name of the tensor before the factors.
        lists: names of the lists of numbers; one that the file has not is empty.
        device: where the tensors go.
    """
    with npy.opened(path) as archive:
        if "kind" not in archive.names or first not in archive.names or _word(archive, "kind") != kind:
            raise ValueError(f"it holds no {kind} model")
        count = sum(name.startswith("factor_") for name in archive.names)
        names = (first, *(f"factor_{m}" for m in range(count)))
        memory.check(path, "the model", sum(archive.header(name).nbytes for name in names))
        tensors = [_tensor(archive, name, device) for name in names]
        numbers = {
            name: tuple(archive.array(name).astype(np.float64).ravel().tolist()) if name in archive.names else ()
            for name in lists
        }
        return Held(tensors[0], tuple(tensors[1:]), numbers, _word(archive, "stopped"))


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """An error of a model that is made of what a file holds is one of the file."""
    try:
        yield
    except SparsetcError as error:
        raise IOFormatError(f"{path}: {error}") from error


def _tensor(archive: npy.Archive, name: str, device: torch.device | str) -> torch.Tensor:
    if archive.header(name).dtype not in (np.float32, np.float64):
        raise ValueError(f"{name} is of {archive.header(name).dtype}, not of float32 or float64")
    return torch.from_numpy(np.ascontiguousarray(archive.array(name))).to(device)


def _word(archive: npy.Archive, name: str) -> str:
    header = archive.header(name)
    if header.shape or header.dtype.kind != "U" or header.nbytes > WORD:
        raise ValueError(f"{name} is not a single word")
    return str(archive.array(name).item())
