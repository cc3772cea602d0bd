"""The common part of models with one matrix a mode, led by weights (CP) or by a core (Tucker).

In: a dataclass with factors. Out: its sizes, dtype and device, what its run says, how it is moved, its entries at
coordinates, files of it, and the same model as an object of tensorly or pyttb.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from sparsetc.decomposition.checks import DTYPES
from sparsetc.errors import DecompositionError, DeviceError, DtypeError, ShapeError
from sparsetc.io import memory as files
from sparsetc.io.atomic import replacing
from sparsetc.support import FilePath, Ints, Names, required
from sparsetc.support.checks import check_memory
from sparsetc.tensor.coords import check_range
from sparsetc.tensor.inputs import as_coords
from sparsetc.tensor.picture import as_html

CHUNK = 1 << 22
"""Elements of an intermediate result at a time: 16 to 32 MB."""


class Factored:
    """A model: a head (weights or a core, as the subclass says) and a factor matrix (size, rank) for each mode.

    Attributes:
        KIND: what such a model is called.
        HEAD: name of the field before the factors.
        HISTORIES: names of the fields with a number for each iteration.
    """

    KIND: ClassVar[str]
    HEAD: ClassVar[str]
    HISTORIES: ClassVar[Names]
    factors: tuple[Tensor, ...]
    fits: tuple[float, ...]
    stopped: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(self.factors))
        for tensor in (self._head, *self.factors):
            if not isinstance(tensor, Tensor):
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
    def _head(self) -> Tensor:
        """The weights, or the core."""
        return getattr(self, self.HEAD)  # type: ignore[no-any-return]

    def _ranks(self) -> Ints:
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

    def _repr_html_(self) -> str:
        run = {"fit": f"{self.fit:.4f} after {len(self.fits)} iterations"} if self.fits else {}
        rows = {"shape": self.shape, "rank": self.rank, **run, "stopped": self.stopped}
        return as_html(self.KIND, {**rows, "dtype": self.dtype, "device": self.device})

    @property
    def rank(self) -> Any:
        """The number of components, or of columns a mode."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the modes of the full tensor."""
        return tuple(f.shape[0] for f in self.factors)

    @property
    def order(self) -> int:
        """The number of modes."""
        return len(self.factors)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all tensors of the model."""
        return self._head.dtype

    @property
    def device(self) -> torch.device:
        """The device of all tensors of the model."""
        return self._head.device

    @property
    def fit(self) -> float | None:
        """The last of `fits`; None if no run made the model."""
        return self.fits[-1] if self.fits else None

    # -- entries ------------------------------------------------------------------------------------------------------

    def to_dense(self, memory_limit: int | str | None = None) -> Tensor:
        """Return the full tensor, strided, of ``shape``.

        Args:
            memory_limit: bytes, or text such as ``"8GB"``; by default the limit of `sparsetc.options`.

        Raises:
            OutOfMemoryError: it would take more than the limit.
        """
        nbytes = self._most_elements() * self.dtype.itemsize
        check_memory(f"the model in full, {self.shape},", nbytes, self.device, memory_limit)
        return self._dense()

    def values_at(self, coords: Any) -> Tensor:
        """Return the (n,) elements of the tensor at ``coords``, computed in chunks.

        Args:
            coords: (order, n) integers, 0-based; a tensor, an ndarray or nested lists.

        Raises:
            FormatError, ShapeError, CoordinateError: of what is no array of integers, or not of this tensor.
        """
        coords = as_coords(coords).to(self.device)
        if len(coords) != self.order:
            raise ShapeError(f"coordinates must have shape ({self.order}, n), found {tuple(coords.shape)}")
        check_range(coords, self.shape, "entry")
        parts = coords.split(max(1, CHUNK // max(1, self._head.numel())), 1)
        return torch.cat([self._entries(at) for at in parts])

    def _dense(self) -> Tensor:
        """Return the full tensor."""
        raise NotImplementedError

    def _most_elements(self) -> int:
        """Return the most elements that `_dense` holds at a time."""
        raise NotImplementedError

    def _entries(self, at: Tensor) -> Tensor:
        """Return the (n,) entries at (order, n) coordinates."""
        raise NotImplementedError

    # -- the same model, elsewhere ------------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast the model; arguments as for `torch.Tensor.to`."""
        moved = tuple(f.to(*args, **kwargs) for f in self.factors)
        return replace(self, **{self.HEAD: self._head.to(*args, **kwargs)}, factors=moved)  # type: ignore[type-var]

    def to_tensorly(self) -> Any:
        """Return the model as CPTensor or TuckerTensor, in tensorly's current backend; needs tensorly."""
        tl, module = imported("tensorly"), import_module(f"tensorly.{self.KIND.lower()}_tensor")
        is_torch = tl.get_backend() == "pytorch"
        head, *factors = (t.detach().clone() if is_torch else tl.tensor(_array(t)) for t in (self._head, *self.factors))
        return getattr(module, f"{self.KIND}Tensor")((head, factors))

    def save(self, path: FilePath) -> None:
        """Write the model to a safetensors file. The file appears under its name only when it is complete.

        Raises:
            DtypeError: of a model that is not of float32 or float64; an old file stays.
            ImportError: without safetensors, the extra ``files``.
            OSError: names the path.
        """
        if self.dtype not in DTYPES:
            raise DtypeError(
                f"a file of a model holds float32 or float64, found {self.dtype}; convert it: .to(torch.float32)"
            )
        named = {self.HEAD: self._head} | {f"factor_{m}": f for m, f in enumerate(self.factors)}
        tensors = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in named.items()}
        lists = {name: json.dumps(getattr(self, name)) for name in self.HISTORIES}
        data = _safetensors().torch.save(tensors, {"kind": self.KIND, "stopped": self.stopped, **lists})
        with replacing(path) as file:
            file.write(data)

    @classmethod
    def load(cls, path: FilePath, device: torch.device | str = "cpu") -> Self:
        """Read a model from a file written by `save`. No code of the file is run.

        Raises:
            IOFormatError: the file holds no model of this kind.
            OutOfMemoryError: it would pass the memory limit.
            ImportError: without safetensors, the extra ``files``.
            FileNotFoundError: no such file.
        """
        library = _safetensors()
        with files.on_disk(path), files.of_file(path, Exception):
            files.check(path, "the model, and the mapped file,", 2 * os.path.getsize(path))
            with library.safe_open(path, "pt") as opened:
                metadata, names = opened.metadata() or {}, sorted(opened.keys())
                if metadata.get("kind") != cls.KIND:
                    raise ValueError(f"it holds no {cls.KIND} model")
                tensors = {name: opened.get_tensor(name).clone() for name in names}
            for name, tensor in tensors.items():
                if tensor.dtype not in DTYPES:
                    raise ValueError(f"{name} is of {tensor.dtype}, not of float32 or float64")
            fields: dict[str, Any] = {cls.HEAD: tensors.pop(cls.HEAD).to(device), "stopped": metadata["stopped"]}
            fields["factors"] = tuple(tensors[f"factor_{m}"].to(device) for m in range(len(tensors)))
            return cls(**fields, **{name: tuple(map(float, json.loads(metadata[name]))) for name in cls.HISTORIES})


def _array(tensor: Tensor) -> np.ndarray:
    """A tensor as an ndarray; float32 of the narrow dtypes that numpy lacks."""
    held = tensor.detach().cpu()
    return (held if held.dtype in DTYPES else held.float()).contiguous().numpy()


def _safetensors() -> Any:
    required("safetensors.torch", 'files of models need safetensors: pip install "sparsetc[files]"')
    return import_module("safetensors")


def imported(name: str) -> Any:
    """Import a library to convert a model to. Raise an ImportError that says how to install it."""
    return required(name, f"{name} is not installed, and a model cannot be given in its form: pip install {name}")


def fortran(tensor: Tensor) -> np.ndarray:
    """A float64 copy in the order that pyttb has its arrays in."""
    return np.array(_array(tensor), np.float64, order="F")
