"""What models of a matrix a mode have in common, whatever stands before the matrices: weights, or a core.

In: a dataclass with factors. Out: its sizes, dtype and device, what its run says, how it is moved, its entries at
coordinates, files of it, and the same model as an object of tensorly or pyttb.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from math import prod
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from sparsetc.errors import DecompositionError, DeviceError, DtypeError, IOFormatError, ShapeError, SparsetcError
from sparsetc.io import memory, npy
from sparsetc.io.atomic import replacing
from sparsetc.options import current
from sparsetc.support.memory import as_bytes
from sparsetc.tensor.coords import check_range

DTYPES = (torch.float32, torch.float64)
"""Dtypes that a model in a file may have: those that decompositions compute in, and numpy has."""

WORD = 256
"""Bytes that a word in a file may take."""

CHUNK = 1 << 22
"""Elements of an intermediate result at a time: 16 to 32 MB."""

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(self.factors))
        for tensor in (self._head, *self.factors):
            if not isinstance(tensor, torch.Tensor):
                raise DecompositionError(f"a {self.KIND} model is of torch tensors, found {type(tensor).__name__}")
        if not self._head.dtype.is_floating_point:
            raise DtypeError(f"a {self.KIND} model is of real floating-point numbers, found {self.dtype}")
        head, ranks = f"the {self.HEAD} of shape {tuple(self._head.shape)}", self._ranks()
        if not self.factors or len(ranks) != self.order:
            raise ShapeError(f"a {self.KIND} model needs a factor for each mode, found {self.order} with {head}")
        for mode, (factor, rank) in enumerate(zip(self.factors, ranks, strict=True)):
            at = f"the factor of mode {mode}"
            if factor.ndim != 2 or factor.shape[1] != rank:
                raise ShapeError(f"{at} must have shape (size, {rank}) with {head}, found {tuple(factor.shape)}")
            if factor.dtype != self.dtype:
                raise DtypeError(f"{at} has dtype {factor.dtype}, the {self.HEAD} {self.dtype}")
            if factor.device != self.device:
                raise DeviceError(f"{at} is on {factor.device}, the {self.HEAD} on {self.device}")

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def _head(self) -> torch.Tensor:
        """The weights, or the core."""
        found: torch.Tensor = getattr(self, self.HEAD)
        return found

    def _ranks(self) -> tuple[int, ...]:
        """The number of columns of each factor."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return iter((self._head, list(self.factors)))

    def __repr__(self) -> str:
        head, run = self._head, ""
        known = head.numel() > 0 and not head.is_meta
        size = "{} {:.4g} to {:.4g}, ".format(self.HEAD, *head.aminmax()) if known else ""
        if self.fits:
            run = f", fit={self.fit:.4f} after {len(self.fits)} iterations"
        if self.stopped:
            run += f", stopped={self.stopped!r}"
        shape = f"shape={self.shape}, rank={self.rank}{run}"
        return f"{self.KIND}({shape}, {size}dtype={self.dtype}, device={self.device})"

    @property
    def rank(self) -> Any:
        """The number of components, or of columns a mode."""
        raise NotImplementedError

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

    # -- entries ------------------------------------------------------------------------------------------------------

    def to_dense(self, memory_limit: int | str | None = None) -> torch.Tensor:
        """The tensor in full: strided, of ``shape``.

        Raises:
            OutOfMemoryError: it would take more than ``memory_limit`` bytes (by default what the options say).
        """
        limit = None if memory_limit is None else as_bytes(memory_limit)
        nbytes = prod(self.shape) * self.dtype.itemsize
        current().check_memory(nbytes, self.device, f"the model in full, {self.shape}", limit)
        return self._dense()

    def values_at(self, coords: Any) -> torch.Tensor:
        """(n,) entries of the tensor at ``coords``, computed a part at a time.

        Args:
            coords: (order, n) integers, 0-based; a tensor, an ndarray or nested lists.

        Raises:
            ShapeError, DtypeError, CoordinateError: of coordinates that are not of this tensor.
        """
        coords = _as_coords(coords, self.shape, self.device)
        parts = coords.split(max(1, CHUNK // max(1, self._head.numel())), 1)
        return torch.cat([self._entries(at) for at in parts])

    def _dense(self) -> torch.Tensor:
        """The tensor in full."""
        raise NotImplementedError

    def _entries(self, at: torch.Tensor) -> torch.Tensor:
        """(part,) the entries at (order, part) coordinates."""
        raise NotImplementedError

    # -- the same model, elsewhere ------------------------------------------------------------------------------------

    def to(self: Own, *args: Any, **kwargs: Any) -> Own:
        """The model elsewhere, arguments as of `torch.Tensor.to`."""
        moved = tuple(f.to(*args, **kwargs) for f in self.factors)
        return replace(self, **{self.HEAD: self._head.to(*args, **kwargs)}, factors=moved)  # type: ignore[type-var]

    def to_tensorly(self) -> Any:
        """The same as tensorly's CPTensor or TuckerTensor, of its current backend; ImportError without tensorly."""
        tl, module = imported("tensorly"), import_module(f"tensorly.{self.KIND.lower()}_tensor")
        is_torch = tl.get_backend() == "pytorch"
        head, *factors = (t.detach().clone() if is_torch else tl.tensor(_array(t)) for t in (self._head, *self.factors))
        return getattr(module, f"{self.KIND}Tensor")((head, factors))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all of it to an .npz file of this name, whole or not at all; an old file stays until it is complete.

        Raises:
            DtypeError: of a model that is not of float32 or float64; an old file stays.
            OSError: names the path.
        """
        if self.dtype not in DTYPES:
            raise DtypeError(
                f"a file of a model holds float32 or float64, found {self.dtype}; convert it: .to(torch.float32)"
            )
        arrays = {self.HEAD: _array(self._head)} | {f"factor_{m}": _array(f) for m, f in enumerate(self.factors)}
        arrays |= {name: np.array(getattr(self, name), np.float64) for name in self.NUMBERS}
        arrays |= {"kind": np.array(self.KIND), "stopped": np.array(self.stopped)}
        with replacing(path) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls: type[Own], path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Own:
        """The model in a file that `save` wrote.

        Raises:
            IOFormatError: the file holds no model of this kind.
            OutOfMemoryError: it would pass the memory limit.
            FileNotFoundError: no such file.
        """
        fields: dict[str, Any] = {}
        with npy.opened(path) as archive:
            if "kind" not in archive.names or cls.HEAD not in archive.names or _word(archive, "kind") != cls.KIND:
                raise ValueError(f"it holds no {cls.KIND} model")
            names = [f"factor_{m}" for m in range(sum(name.startswith("factor_") for name in archive.names))]
            memory.check(path, "the model", sum(archive.header(name).nbytes for name in (cls.HEAD, *names)))
            fields[cls.HEAD] = _tensor(archive, cls.HEAD, device)
            fields["factors"] = [_tensor(archive, name, device) for name in names]
            fields["stopped"] = _word(archive, "stopped")
            for name in cls.NUMBERS:
                if name in archive.names:
                    fields[name] = tuple(archive.array(name).astype(np.float64).ravel().tolist())
        try:
            return cls(**fields)
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


def _array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as an ndarray; float32 of the narrow dtypes that numpy lacks."""
    held = tensor.detach().cpu()
    return (held if held.dtype in DTYPES else held.float()).contiguous().numpy()


def imported(name: str) -> Any:
    """A library that a model is given to; ImportError that says how to get it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{name} is not installed, and a model cannot be given in its form: pip install {name}"
        ) from error


def fortran(tensor: torch.Tensor) -> np.ndarray:
    """A float64 copy in the order that pyttb has its arrays in."""
    return np.array(_array(tensor), np.float64, order="F")


def _as_coords(given: Any, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
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
