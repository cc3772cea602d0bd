"""SparseTensor: coordinates, values and a shape. What every level takes as its sparse operand.

In: coordinates and values, or a sparse tensor of torch, scipy or pydata. Out: one checked, coalesced COO tensor on
one device, differentiable with respect to its values. The levels above keep what they made with its `Pattern`.
"""

from __future__ import annotations

import math
from numbers import Number
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from sparsetc.errors import DeviceError, DtypeError, ShapeError
from sparsetc.support.entry import entry_point
from sparsetc.tensor import convert, graphs, tables
from sparsetc.tensor.arithmetic import Arithmetic
from sparsetc.tensor.attributes import IN_PLACE
from sparsetc.tensor.conversions import Typed
from sparsetc.tensor.dtypes import check_dtype
from sparsetc.tensor.duplicates import Merge, coalesced
from sparsetc.tensor.functions import Functions
from sparsetc.tensor.inputs import ArrayLike, as_values, constructed
from sparsetc.tensor.pattern import Pattern, lasting
from sparsetc.tensor.picture import SIDE, as_html, binned
from sparsetc.tensor.readings import Unsorted
from sparsetc.tensor.reductions import Reductions
from sparsetc.tensor.structure import Structure
from sparsetc.tensor.sums import INTEGERS

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


class SparseTensor(Arithmetic, Functions, Reductions, Structure, Typed):
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
        check: check that coordinates are in range (one transfer from a GPU). Structure is always checked.

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

    __slots__ = ("__weakref__", "_ddp_ignored", "_pattern", "_unsorted", "_values")
    # torch's DistributedDataParallel sets the second one of buffers that it leaves alone

    _pattern: Pattern
    _values: Tensor
    _unsorted: Unsorted | None  # where the other two are not made yet

    @entry_point
    def __init__(
        self, coords: ArrayLike, values: ArrayLike, shape: Any = None, *, coalesce: bool = True, check: bool = True
    ) -> None:
        checked = constructed(coords, values, shape, coalesce, check)
        if isinstance(checked, Unsorted):
            self._unsorted = checked
        else:
            self._set(*checked)

    def _set(self, pattern: Pattern, values: Tensor) -> None:
        self._pattern = pattern
        self._values = values
        self._unsorted = None

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

    @classmethod
    def _make(cls, pattern: Pattern, values: Tensor) -> SparseTensor:
        """The constructor without any check: (nnz, *dense sizes) values on a pattern that is believed."""
        self = cls.__new__(cls)
        self._set(pattern, values)
        return self

    @classmethod
    def _of(cls, coords: Tensor, values: Tensor, shape: tuple[int, ...], coalesced: bool) -> SparseTensor:
        """The constructor without any check, on a new pattern."""
        return cls._make(Pattern(coords, shape[: coords.shape[0]], coalesced), values)

    def _bare(self) -> SparseTensor:
        """The pattern with no values to speak of and nothing kept: what is kept for a pattern may refer to it."""
        with lasting():  # nothing of the values, which a transform may follow
            none = torch.zeros((), dtype=self.dtype, device=self.device).expand(self._values.shape)
        return SparseTensor._make(self._pattern.bare(), none)

    # ---- copies -----------------------------------------------------------------------------------------------

    def __copy__(self) -> SparseTensor:
        return self.with_values(self.values)

    # ---- what it is -------------------------------------------------------------------------------------------

    @property
    def pattern(self) -> Pattern:
        """The coordinates and sizes of the sparse modes, shared by all tensors of this pattern; compare with ``is``."""
        return self._pattern

    @property
    def coords(self) -> Tensor:
        """The coordinates, (sparse_order, nnz) int64, contiguous, 0-based."""
        return self._pattern.coords

    @property
    def values(self) -> Tensor:
        """The values, (nnz, *dense sizes), or (nnz, *blocksize, *dense sizes) of a tensor in blocks.

        They may be changed in place: `einsum` packs them again where they changed.
        """
        return self._values

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of all modes, dense ones last."""
        unsorted = self._unsorted
        if unsorted is not None:
            return unsorted.reading.sizes
        blocks = self._pattern._blocks
        if blocks is not None:
            return blocks.shape + tuple(self._values.shape[1 + len(blocks.shape) :])
        shape = self._pattern._shape
        return shape if self._values.ndim == 1 else shape + tuple(self._values.shape[1:])

    @property
    def blocksize(self) -> tuple[int, ...]:
        """The side of blocks along each sparse mode; empty for a tensor of single nonzeros."""
        blocks = self._pattern._blocks
        return () if blocks is None else blocks.sides

    @property
    def order(self) -> int:
        """The number of modes, dense ones included."""
        return len(self.shape)

    @property
    def sparse_order(self) -> int:
        """The number of modes with coordinates, at least 1."""
        return self._pattern.order

    @property
    def dense_order(self) -> int:
        """The number of trailing dense modes, usually 0."""
        return self._values.ndim - 1 - len(self.blocksize)

    @property
    def nnz(self) -> int:
        """The number of stored nonzeros or blocks (columns of coords), explicit zeros and duplicates included."""
        return self._pattern.nnz

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self._given.dtype

    @property
    def device(self) -> torch.device:
        """The device of coordinates and values."""
        return self._given.device

    @property
    def requires_grad(self) -> bool:
        """True if autograd follows the values."""
        return self._given.requires_grad

    @property
    def _given(self) -> Tensor:
        """The values, unsorted until somebody asks for the pattern."""
        unsorted = self._unsorted
        return self._values if unsorted is None else unsorted.values

    @property
    def is_coalesced(self) -> bool:
        """True if the nonzeros are known to be lexicographically sorted and unique."""
        return self._pattern._coalesced

    @property
    def density(self) -> float:
        """The number of stored nonzeros or blocks over the number of possible positions; 0 for an empty shape."""
        positions = math.prod(self._pattern._shape)
        return self.nnz / positions if positions else 0.0

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
        blocks = {"blocks of": " × ".join(map(str, self.blocksize))} if self.blocksize else {}
        rows = {"shape": " × ".join(map(str, self.shape)), "entries": f"{self.nnz:,}", **blocks}
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

    def coalesce(self) -> SparseTensor:
        """Sort entries lexicographically and sum duplicates. Return the tensor itself if it is known to be coalesced.

        Examples:
            >>> stc.SparseTensor([[1, 0, 1]], [1.0, 2.0, 3.0], coalesce=False).coalesce().values
            tensor([2., 4.])
        """
        if self.is_coalesced:
            return self
        pattern, merge = self._merged()
        return SparseTensor._make(pattern, self._values if merge is None else merge.values(self._values))

    def _merged(self) -> tuple[Pattern, Merge | None]:
        def made() -> tuple[Pattern, Merge | None]:
            coords, merge = coalesced(self.coords, self._pattern._shape)
            return self._pattern.like(coords, True), merge

        return self._pattern._once("coalesced", made)

    def unique_map(self) -> Tensor:
        """Return for each entry the number of the entry of `coalesce` that it is added to, (nnz,) int64.

        Examples:
            >>> stc.SparseTensor([[1, 0, 1]], [1.0, 2.0, 3.0], coalesce=False).unique_map()
            tensor([1, 0, 1])
        """
        merge = None if self.is_coalesced else self._merged()[1]
        number = torch.arange(self.nnz, device=self.device)
        if merge is not None:
            number[merge.order] = number.clone() if merge.run is None else merge.run
        return number

    def with_values(self, values: ArrayLike) -> SparseTensor:
        """Return a tensor of this pattern with new values, on the same device; dtype and dense modes may differ.

        The pattern is shared with everything kept for it, so an einsum compiled for values of this shape is not
        planned again. Values of blocks past the end of the shape are never read.

        Args:
            values: (nnz, *dense sizes), or (nnz, *blocksize, *dense sizes) for a tensor in blocks. The dense sizes
                (there may be none) become the last modes of the shape: values (nnz, heads) on an (n, n) pattern make a
                tensor (n, n, heads).

        Raises:
            ShapeError: another number of values than nonzeros, or other block sizes.

        Examples:
            >>> stc.eye(2).with_values([3.0, 4.0]).to_dense()
            tensor([[3., 0.],
                    [0., 4.]])
        """
        new, entries = as_values(values), self._pattern.values_shape(())
        if new.shape[: len(entries)] != entries:
            raise ShapeError(f"values must have shape {entries}, dense modes may follow; found {tuple(new.shape)}")
        if new.device != self.device:
            raise DeviceError(f"values must be on {self.device} as the pattern is, found {new.device}")
        return SparseTensor._make(self._pattern, new)

    def to(self, *args: Any, **kwargs: Any) -> SparseTensor:
        """Move or cast: ``to(device)``, ``to(dtype)``, ``to(device, dtype)``, ``to(other)``, ``non_blocking=``.

        Returns the tensor itself if nothing changes. On the same device, pattern and cache are shared.

        Examples:
            >>> stc.eye(2).to(torch.float64).dtype
            torch.float64
        """
        plain: Any = [a._values if isinstance(a, SparseTensor) else a for a in args]
        values = self._values.to(*plain, **kwargs)
        if values is self._values:
            return self
        check_dtype(values.dtype)
        of_sums = values.dtype in INTEGERS and self.dtype not in INTEGERS  # of the sum alone
        if not self.is_coalesced and (of_sums or torch.bool in (values.dtype, self.dtype)):
            return self.coalesce().to(*args, **kwargs)
        if values.device == self.device:
            return self.with_values(values)
        coords = self.coords.to(values.device, non_blocking=bool(kwargs.get("non_blocking", False)))
        return SparseTensor._make(self._pattern.like(coords, self.is_coalesced), values)

    def cuda(self, device: int | torch.device | str | None = None) -> SparseTensor:
        """Move the tensor to a CUDA device, by default the current one."""
        if isinstance(device, int):
            device = torch.device("cuda", device)
        return self.to("cuda" if device is None else device)

    def cpu(self) -> SparseTensor:
        """Move the tensor to the memory of the host."""
        return self.to("cpu")

    permute = convert.permute
    expand_dense = convert.expand_dense

    @classmethod
    def from_blocks(
        cls, coords: ArrayLike, blocks: ArrayLike, shape: Any, *, coalesce: bool = True, check: bool = True
    ) -> SparseTensor:
        """Make a tensor of dense blocks, all of one shape, on a grid that begins at 0.

        Args:
            coords: (order, n) integers, coordinates of blocks: coordinate c in a mode of side s stands for elements
                ``c * s .. c * s + s - 1``.
            blocks: (n, *sides), or (n, *sides, *dense sizes); the sides become `blocksize`.
            shape: sizes of all modes, in elements. They need not be multiples of the sides: values of blocks past the
                end must be zero.
            coalesce: sort blocks and sum duplicates, as the constructor does nonzeros.
            check: check that blocks are in range, and zero past the end.

        Raises:
            FormatError, CoordinateError, ShapeError, DtypeError, DeviceError: as the constructor.

        Examples:
            >>> stc.SparseTensor.from_blocks([[0], [1]], torch.ones(1, 2, 2), (4, 4)).to_dense()
            tensor([[0., 0., 1., 1.],
                    [0., 0., 1., 1.],
                    [0., 0., 0., 0.],
                    [0., 0., 0., 0.]])
        """
        checked = constructed(coords, blocks, shape, coalesce, check, in_blocks=True)
        assert not isinstance(checked, Unsorted)
        return cls._make(*checked)

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
        return Arithmetic._compile_of("ij,j->i", self, vector).as_linear_operator()

    labels = property(tables.labels_of)
    with_labels = tables.with_labels
    to_table = tables.to_table
    to_torch = convert.to_torch
    to_scipy = convert.to_scipy
    to_numpy = convert.to_numpy
    to_pydata = convert.to_pydata
    from_torch = classmethod(convert.from_torch)
    from_dense = classmethod(convert.from_dense)
    from_scipy = classmethod(convert.from_scipy)
    from_pydata = classmethod(convert.from_pydata)
    from_table = classmethod(tables.from_table)
    from_graph = classmethod(graphs.from_graph)

    @classmethod
    def from_numpy(cls, coords: np.ndarray, values: np.ndarray, shape: Any = None) -> SparseTensor:
        """Make a tensor of ndarrays: coords (sparse_order, nnz) integers, values (nnz, *dense sizes).

        Examples:
            >>> stc.SparseTensor.from_numpy(np.array([[0, 1]]), np.ones(2, np.float32), (4,)).nnz
            2
        """
        return cls(np.asarray(coords), np.asarray(values), shape)

    coerce = classmethod(convert.coerce)


_to_dense = entry_point(convert.to_dense)
