"""SparseTensor: coordinates, values and a shape. What every level takes as its sparse operand.

In: coordinates and values, or a sparse tensor of torch, scipy or pydata. Out: one checked, coalesced COO tensor on
one device, differentiable with respect to its values. The levels above keep what they made with its `Pattern`.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparsetc.errors import DtypeError, ShapeError
from sparsetc.support import later
from sparsetc.support.entry import entry_point
from sparsetc.tensor import coerce, convert, functions, tables
from sparsetc.tensor.arithmetic import Arithmetic
from sparsetc.tensor.attributes import IN_PLACE, Sparse
from sparsetc.tensor.coords import numbered
from sparsetc.tensor.dtypes import dtype_name
from sparsetc.tensor.picture import SIDE, as_html, binned
from sparsetc.tensor.reductions import Reductions
from sparsetc.tensor.structure import Structure

P = ParamSpec("P")
R = TypeVar("R")

INSTEAD = {
    "numpy": ".to_dense().numpy(), or .to_numpy() for coordinates and values",
    "tolist": ".to_dense().tolist()",
    "backward": "gradients start at a number, as .sum().backward()",
    "data": "take .detach(), or .values.data",
    "_nnz": "take .nnz",
    "_indices": "take .coords",
    "sparse_dim": "take .sparse_order",
    "dense_dim": "take .dense_order",
    **dict.fromkeys(
        ("to_sparse", "to_sparse_coo", "to_sparse_csr", "to_sparse_csc"), "to_torch(layout) makes one of torch's"
    ),
    **dict.fromkeys(("crow_indices", "col_indices"), "to_torch(torch.sparse_csr) has them"),
    **dict.fromkeys(
        ("new_zeros", "new_ones", "new_full", "new_empty"), "take x.values.new_…, or stc.zeros and stc.full"
    ),
    "masked_select": "take x[mask].values",
    "masked_fill": "take stc.where(mask, value, x), or map()",
    "layout": "convert it by .to_torch() for what asks for a layout of torch's",
}
"""Replacements for attributes of torch's tensors that a SparseTensor lacks; for others to_dense() or values."""

CONVERSIONS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
CONVERSIONS |= {"int": torch.int32, "long": torch.int64, "bool": torch.bool}
"""torch's names for conversions. They are not set in the class: annotations there mean Python's types by them."""


def _constructor(make: Callable[Concatenate[type[SparseTensor], P], R]) -> Callable[P, R]:
    """The class method that a function of the class is."""
    return classmethod(make)  # type: ignore[return-value]


def _converted(dtype: torch.dtype) -> Callable[[Sparse], Sparse]:
    """The method that converts values."""

    def converted(x: Sparse) -> Sparse:
        return x.to(dtype)

    converted.__doc__ = f"Return the tensor with values cast to {dtype_name(dtype)}."
    return converted


class SparseTensor(Arithmetic, Reductions, Structure):
    """A sparse tensor in coordinate form, immutable by convention.

    Args:
        coords: (sparse_order, nnz) integers, 0-based; torch tensor, ndarray or nested sequence. Kept as int64, in
            memory of its own.
        values: (nnz,) or, with trailing dense modes ("semi-sparse", as torch's hybrid COO), (nnz, *dense sizes).
            float64/32/16, bfloat16, complex64/128, uint8, int8..int64 or bool; the dtype is kept. uint16 becomes
            int32, uint32 and uint64 int64, as torch computes nothing with them. NaN and infinities are allowed and
            treated as values; so are explicit zeros. Duplicates of bools are joined by or.
        shape: sizes of all modes, the dense ones last. Without it, largest coordinate + 1 and the dense sizes.
            The product of sizes may pass 2**63. A size of 0 is legal when there are no nonzeros.
        coalesce: sort lexicographically and sum duplicates (the default). float16 and bfloat16 are summed in
            float32. Coordinates already sorted and unique are recognised, and then ``values`` is kept as it is,
            the same storage. With False, order and duplicates stay as given, meaning the sum of the duplicates.
        check: check that coordinates are in range, which waits for a GPU. Structure is always checked.

    A tensor may also be in blocks, stored dense and all of one shape (`from_blocks`, and torch's BSR and BSC): then
    ``coords`` are those of blocks, ``nnz`` counts them, and values are (nnz, *blocksize, *dense sizes).

    Values may be changed in place, by whoever has them: `einsum` packs them again where they changed. On a GPU it knows
    this from torch's count of changes, which leaves out what is written through ``.data``. Coordinates are copied, and
    must not be changed.

    A SparseTensor can be pickled, copied, and saved by ``torch.save``; ``torch.load`` takes it by default. Coordinates
    are checked again when it is loaded, and tensors of one pattern that are saved together have one again. Kernels and
    whatever else is kept with it stay behind.

    Raises:
        FormatError: coords are not integers, not 2-D, or do not match values.
        CoordinateError: a coordinate outside its mode.
        ShapeError: a shape that is no shape, or dense modes that do not match.
        DtypeError: values of a dtype not listed above, or integer duplicates whose sum does not fit theirs.
        DeviceError: coords and values on different devices.

    Examples:
        >>> x = stc.SparseTensor([[0, 1, 1], [2, 0, 0]], [1.0, 2.0, 3.0], (2, 3))
        >>> x
        SparseTensor(shape=(2, 3), nnz=2, density=0.333, dtype=torch.float32, device=cpu)
        >>> x.to_dense()
        tensor([[0., 0., 1.],
                [5., 0., 0.]])
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        """Return the pattern, or values on it, of coordinates that are sorted when first asked for."""
        if name == "matvec":  # by which scipy knows an operator; but it also reads numpy's dtype
            raise DtypeError("scipy's solvers take .as_linear_operator() of a SparseTensor, or .to_scipy()")
        if name == "is_quantized":  # what torch.export asks of buffers first
            raise DtypeError(
                "torch.export takes no SparseTensor as a buffer, but one that is an attribute: for a buffer called "
                "graph write `graph = model.graph; del model.graph; model.graph = graph` before it"
            )
        if name not in ("_pattern", "_values"):
            said = f"{type(self).__name__!r} object has no attribute {name!r}"
            if hasattr(Tensor, name) and not name.startswith("__"):
                said = f"a SparseTensor has no {name}: {INSTEAD.get(name, 'call .to_dense(), or compute with .values')}"
                said = IN_PLACE.format(name) if name.endswith("_") else said
            raise AttributeError(said, name=name, obj=self)
        unsorted = self._unsorted
        if unsorted is not None:  # else another thread has set both in the meantime
            self._set(*unsorted.coalesced())
        return object.__getattribute__(self, name)

    # ---- what it is -------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        dense = f", dense_order={self.dense_order}" if self.dense_order else ""
        dense = f", blocksize={self.blocksize}{dense}" if self.blocksize else dense
        labels = f", modes={', '.join(self._pattern.labels)}" if self._pattern.labels else ""
        return (
            f"SparseTensor(shape={self.shape}, nnz={self.nnz}{dense}, density={self.density:.3g}, "
            f"dtype={self.dtype}, device={self.device}{labels})"
        )

    def __str__(self) -> str:
        lines = [] if self.device.type == "meta" else self._pattern.first_entries(self._values)
        return "\n  ".join([repr(self), *lines])

    def _repr_html_(self) -> str:
        nbytes = self._pattern.coords.nbytes + self._values.nbytes
        blocks = {"blocks of": self.blocksize} if self.blocksize else {}
        rows = {"shape": self.shape, "entries": f"{self.nnz:,}", **blocks}
        rows |= {"density": f"{self.density:.3g}", "bytes": f"{nbytes:,}", "dtype": str(self.dtype)}
        rows |= {"modes": ", ".join(self._pattern.labels)} if self._pattern.labels else {}
        picture = binned(self._pattern.coords, self._pattern.shape, (0, 1), SIDE)
        lines = self._pattern.first_entries(self._values)
        return as_html("SparseTensor", {**rows, "device": self.device}, picture, lines)

    # ---- what it is not, though Python or numpy would take it for one -------------------------------------------

    def __bool__(self) -> NoReturn:
        raise DtypeError("a SparseTensor is neither true nor false: ask `is None`, or .nnz")

    def __eq__(self, other: object) -> bool:
        if self is other:  # by which collections find it, and weak ones ask
            return True
        if not (hasattr(other, "shape") or isinstance(other, Number)):
            return NotImplemented
        raise DtypeError(
            "== does not compare a SparseTensor's elements: take torch.equal of .to_dense(), or of .values where one "
            "`is` the other's .pattern"
        )

    __hash__ = object.__hash__

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise DtypeError(
            "a SparseTensor is no ndarray: call .to_dense().numpy(), .to_numpy() for coordinates and values, or "
            ".to_scipy()"
        )

    __dlpack__ = __dlpack_device__ = __array__  # torch.as_tensor would read one element after another

    # ---- the same tensor, otherwise ---------------------------------------------------------------------------

    __torch_function__ = classmethod(functions.of_torch)
    __array_ufunc__ = functions.of_ufunc
    __array_function__ = functions.of_numpy

    def where(self, condition: Any, y: Any = 0) -> SparseTensor:
        """Return this tensor's elements where ``condition`` holds, and those of ``y`` elsewhere."""
        return functions.FUNCTIONS["where"](condition, self, y)  # type: ignore[no-any-return]

    def type(self, dtype: Any = None) -> Any:
        """Convert values to a dtype. Without one, return torch's old name of the values' type."""
        return self._values.type() if dtype is None else self.to(dtype)

    def unique_map(self) -> Tensor:
        """Return for each entry the number of the entry of `coalesce` that it is added to, (nnz,) int64.

        Examples:
            >>> stc.SparseTensor([[1, 0, 1]], [1.0, 2.0, 3.0], coalesce=False).unique_map()
            tensor([1, 0, 1])
        """
        return numbered([*self.coords], self._pattern.shape, self.nnz, self.coords[0]).rank

    def cuda(self, device: int | torch.device | str | None = None) -> SparseTensor:
        """Move the tensor to a CUDA device, by default the current one."""
        if isinstance(device, int):
            device = torch.device("cuda", device)
        return self.to("cuda" if device is None else device)

    def cpu(self) -> SparseTensor:
        """Move the tensor to the memory of the host."""
        return self.to("cpu")

    # ---- to and from others -----------------------------------------------------------------------------------

    def to_dense(self, memory_limit: int | str | None = None) -> Tensor:
        """Return the strided tensor of ``shape``; differentiable.

        Args:
            memory_limit: bytes, or text such as ``"8GB"``; by default the limit of `sparsetc.options`, or the memory
                free on the tensor's device. Temporary memory counts: 8 bytes an entry, more if duplicates are summed,
                and a copy of a tensor in blocks.

        Raises:
            OutOfMemoryError: it would need more than the limit.

        Examples:
            >>> stc.eye(2).to_dense()
            tensor([[1., 0.],
                    [0., 1.]])
        """
        return (convert.to_dense if torch.compiler.is_compiling() else _to_dense)(self, memory_limit)

    def as_linear_operator(self) -> Any:
        """Return scipy's `LinearOperator` of a matrix, for scipy's solvers: `cg`, `gmres`, `eigsh`, `svds` and others.

        Vectors are ndarrays on the host, wherever the tensor is.

        Raises:
            ShapeError: the order is not 2.
            ImportError: scipy is not installed.

        Examples:
            >>> from scipy.sparse.linalg import cg
            >>> cg(stc.full((1, 1), 2.0).as_linear_operator(), np.ones(1))[0]
            array([0.5])
        """
        if self.order != 2:
            raise ShapeError(f"a linear operator is of a matrix, found shape {self.shape}")
        vector = torch.zeros(self.shape[1], dtype=self.dtype, device=self.device)
        return later("api", "compile")("ij,j->i", self, vector).as_linear_operator()

    labels = property(tables.labels_of)
    with_labels = tables.with_labels
    to_table = tables.to_table
    to_torch = convert.to_torch
    to_scipy = convert.to_scipy
    to_numpy = convert.to_numpy
    to_pydata = convert.to_pydata
    from_torch = _constructor(convert.from_torch)
    from_dense = _constructor(convert.from_dense)
    from_scipy = _constructor(convert.from_scipy)
    from_pydata = _constructor(convert.from_pydata)
    from_table = _constructor(tables.from_table)
    from_graph = _constructor(coerce.from_graph)

    @classmethod
    def from_numpy(cls, coords: np.ndarray, values: np.ndarray, shape: Any = None) -> SparseTensor:
        """Make a tensor of ndarrays: coords (sparse_order, nnz) integers, values (nnz, *dense sizes).

        Examples:
            >>> stc.SparseTensor.from_numpy(np.array([[0, 1]]), np.ones(2, np.float32), (4,)).nnz
            2
        """
        return cls(np.asarray(coords), np.asarray(values), shape)

    coerce = _constructor(coerce.coerce)


_to_dense = entry_point(convert.to_dense)
for _name, _method in functions.methods():
    setattr(SparseTensor, _name, _method)
for _name, _dtype in CONVERSIONS.items():
    setattr(SparseTensor, _name, _converted(_dtype))
