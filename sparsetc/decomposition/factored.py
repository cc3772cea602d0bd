"""What models of a matrix a mode have in common, whatever stands before the matrices: weights, or a core.

In: a dataclass with factors. Out: its sizes, dtype and device, what its run says, how it is moved, its entries at
coordinates, files of it, and the same model as an object of tensorly or pyttb.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from math import prod
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from sparsetc.errors import DeviceError, DtypeError, IOFormatError, ShapeError, SparsetcError
from sparsetc.io import memory, npy
from sparsetc.io.atomic import replacing
from sparsetc.options import current
from sparsetc.support.memory import as_bytes
from sparsetc.tensor.coords import check_range

DTYPES = (torch.float32, torch.float64)
"""Dtypes that a model in a file may have: those that decompositions compute in, and numpy has."""

WORD = 256
"""Bytes that a word in a file may take."""


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


def read(
    path: str | os.PathLike[str], kind: str, first: str, lists: Sequence[str], device: torch.device | str
) -> dict[str, Any]:
    """The fields of a model that `write` wrote; IOFormatError where it is none, OutOfMemoryError above the limit.

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
        return {first: tensors[0], "factors": tuple(tensors[1:]), "stopped": _word(archive, "stopped"), **numbers}


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


def check_memory(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, limit: int | str | None = None
) -> None:
    """Raise `OutOfMemoryError` where a dense tensor of this shape would pass the limit."""
    nbytes = prod(shape) * dtype.itemsize
    current().check_memory(
        nbytes, device, f"the model in full, {tuple(shape)}", None if limit is None else as_bytes(limit)
    )


def tensorly_cp(weights: torch.Tensor, factors: Sequence[torch.Tensor]) -> Any:
    """A CPTensor."""
    tl = _imported("tensorly")
    return import_module("tensorly.cp_tensor").CPTensor((_of(tl, weights), [_of(tl, f) for f in factors]))


def tensorly_tucker(core: torch.Tensor, factors: Sequence[torch.Tensor]) -> Any:
    """A TuckerTensor."""
    tl = _imported("tensorly")
    return import_module("tensorly.tucker_tensor").TuckerTensor((_of(tl, core), [_of(tl, f) for f in factors]))


def pyttb_ktensor(weights: torch.Tensor, factors: Sequence[torch.Tensor]) -> Any:
    """A ktensor."""
    return _imported("pyttb").ktensor([_array(f) for f in factors], _array(weights))


def pyttb_ttensor(core: torch.Tensor, factors: Sequence[torch.Tensor]) -> Any:
    """A ttensor."""
    pyttb = _imported("pyttb")
    return pyttb.ttensor(pyttb.tensor(_array(core)), [_array(f) for f in factors])


def _of(tl: Any, tensor: torch.Tensor) -> Any:
    """A tensor of tensorly's current backend; torch's own where that is the backend."""
    own = tensor.detach()
    if tl.get_backend() == "pytorch":
        return own.clone()
    own = own.float() if own.dtype == torch.bfloat16 else own  # which numpy does not have
    return tl.tensor(own.cpu().numpy())


def _array(tensor: torch.Tensor) -> np.ndarray:
    return np.array(tensor.detach().cpu().double().numpy(), order="F")


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{name} is not installed, and a model cannot be given in its form: pip install {name}"
        ) from error


CHUNK = 1 << 22
"""Elements of an intermediate result at a time: 16 to 32 MB."""


def as_coords(given: Any, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """(order, n) int64 on a device, checked (one transfer); ShapeError, DtypeError, CoordinateError."""
    try:
        coords = torch.as_tensor(given, device=device)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"coordinates must be a rectangle of integers ({len(shape)}, n): {error}") from None
    if not coords.numel() and not isinstance(given, torch.Tensor):
        coords = coords.long()  # the dtype of empty lists says nothing
    if coords.dtype.is_floating_point or coords.dtype.is_complex or coords.dtype == torch.bool:
        raise DtypeError(f"coordinates are integers, found {coords.dtype}")
    if coords.ndim != 2 or coords.shape[0] != len(shape):
        raise ShapeError(f"coordinates must have shape ({len(shape)}, n), found {tuple(coords.shape)}")
    coords = coords.long()
    check_range(coords, shape, "entry")
    return coords


Own = TypeVar("Own", bound="Factored")


class Factored:
    """A model of a head, a tensor that its subclass names, and a factor matrix (size, rank) a mode.

    Attributes:
        KIND: what such a model is called.
        HEAD: name of the field before the factors.
        NUMBERS: names of the fields with a number for each iteration.
    """

    KIND: ClassVar[str]
    HEAD: ClassVar[str]
    NUMBERS: ClassVar[tuple[str, ...]]
    factors: tuple[torch.Tensor, ...]
    fits: tuple[float, ...]
    stopped: str

    @property
    def _head(self) -> torch.Tensor:
        """The weights, or the core."""
        found: torch.Tensor = getattr(self, self.HEAD)
        return found

    def values_at(self, coords: Any) -> torch.Tensor:
        """(n,) entries of the tensor at ``coords``, computed a part at a time.

        Args:
            coords: (order, n) integers, 0-based; a tensor, an ndarray or nested lists.

        Raises:
            ShapeError, DtypeError, CoordinateError: of coordinates that are not of this tensor.
        """
        coords, step = as_coords(coords, self.shape, self.device), max(1, CHUNK // max(1, self._width))
        if coords.shape[1] <= step:
            return self._entries(coords)
        out = self._head.new_empty(coords.shape[1])
        for part, at in zip(out.split(step), coords.split(step, 1), strict=True):
            part.copy_(self._entries(at))
        return out

    @property
    def _width(self) -> int:
        """Elements that an entry takes while it is computed."""
        raise NotImplementedError

    def _entries(self, at: torch.Tensor) -> torch.Tensor:
        """(part,) the entries at (order, part) coordinates."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return iter((self._head, list(self.factors)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the modes of the tensor that it stands for."""
        return tuple(f.shape[0] for f in self.factors)

    @property
    def order(self) -> int:
        """The number of modes."""
        return len(self.factors)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all its tensors."""
        return self._head.dtype

    @property
    def device(self) -> torch.device:
        """Where all its tensors live."""
        return self._head.device

    @property
    def fit(self) -> float | None:
        """The last of `fits`; None of a model that no run made."""
        return self.fits[-1] if self.fits else None

    def to(self: Own, *args: Any, **kwargs: Any) -> Own:
        """The model elsewhere, arguments as of `torch.Tensor.to`."""
        moved = tuple(f.to(*args, **kwargs) for f in self.factors)
        return replace(self, **{self.HEAD: self._head.to(*args, **kwargs)}, factors=moved)  # type: ignore[type-var]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all of it to an .npz file of this name, whole or not at all; an old file stays until it is complete.

        Raises:
            DtypeError: of a model that is not of float32 or float64; an old file stays.
        """
        arrays = {self.HEAD: self._head} | {f"factor_{m}": f for m, f in enumerate(self.factors)}
        numbers = {name: getattr(self, name) for name in self.NUMBERS}
        write(path, self.KIND, arrays, numbers, self.stopped)

    @classmethod
    def load(cls: type[Own], path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Own:
        """The model in a file that `save` wrote.

        Raises:
            IOFormatError: the file holds no model of this kind.
            OutOfMemoryError: it would pass the memory limit.
            FileNotFoundError: no such file.
        """
        fields = read(path, cls.KIND, cls.HEAD, cls.NUMBERS, device)
        with naming(path):
            return cls(**fields)

    def _run(self) -> str:
        """What a repr says of the run that made it; empty where there was none."""
        fit = "" if self.fit is None else f", fit={self.fit:.4f} after {len(self.fits)} iterations"
        return f"{fit}, stopped={self.stopped!r}" if self.stopped else fit


def check_alike(factor: torch.Tensor, mode: int, head: torch.Tensor, name: str, has: str, lies: str) -> None:
    """Raise `DtypeError` or `DeviceError` unless a factor has the head's dtype, a real one, and its device.

    Args:
        factor: of a mode.
        mode: its number.
        head: weights, or a core.
        name: of the kind of model.
        has: subject and verb of what the head has, ``"the core has"``.
        lies: subject and verb of where it is, ``"the core is"``.
    """
    if factor.dtype != head.dtype:
        raise DtypeError(f"the factor of mode {mode} has dtype {factor.dtype}, {has} {head.dtype}")
    if not head.dtype.is_floating_point:
        raise DtypeError(f"a {name} model is of real floating-point numbers, found {head.dtype}")
    if factor.device != head.device:
        raise DeviceError(f"the factor of mode {mode} is on {factor.device}, {lies} on {head.device}")
