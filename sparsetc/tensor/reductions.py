"""Sums, means, extrema, products and norms over modes of a sparse tensor.

In: a SparseTensor and modes. Out: a tensor of the modes that are left, dense or sparse, differentiable. Entries that
agree in these are reduced together; absent ones count as the zeros that they are, unless entries alone are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from sparsetc.errors import DtypeError, KeywordError, ShapeError
from sparsetc.support import memory
from sparsetc.tensor import coords as crd
from sparsetc.tensor.arithmetic import at_entries
from sparsetc.tensor.blocks import without_blocks
from sparsetc.tensor.groups import check_reduction, groups_of, reduced_groups
from sparsetc.tensor.inputs import coalescing_bytes
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.ranking import argument, extremum, topk
from sparsetc.tensor.sums import accumulator, exactly, fitted, multiplied, summed_dtype

if TYPE_CHECKING:
    from sparsetc.tensor.sparse_tensor import SparseTensor

Dims = int | Sequence[int] | None
"""Modes, negative ones counted from the end; None for all, and () for none, as numpy has it."""
Output = Literal["auto", "dense", "sparse"]
OUTPUTS = get_args(Output)


class Reductions:
    """What a `SparseTensor` is reduced by.

    Each takes ``dim``, a mode, several, or None for all; ``keepdim``, to leave them with size 1; and ``output``:
    ``"dense"``, ``"sparse"``, or ``"auto"``, which is sparse where two or more modes are left that have coordinates;
    numpy's and scipy's ``axis`` and ``keepdims`` are other names of the first two, by which `numpy.sum` and so on work.
    Errors are `ShapeError` for modes that there are not, and `DtypeError` for values of which there is no such thing.
    """

    __slots__ = ()

    def sum(
        self,
        dim: Dims = None,
        keepdim: bool = False,
        *,
        output: Output = "auto",
        dtype: torch.dtype | None = None,
        **numpys: Any,
    ) -> Any:
        """The sum over modes; of integers, as their product, in int64. With ``dtype``, values are converted first.

        Examples:
            >>> stc.full((2, 3), 1.0).sum(0)
            tensor([2., 2., 2.])
        """
        return _reduced(self, "sum", *_named(dim, keepdim, numpys), output, dtype=dtype)

    def mean(
        self,
        dim: Dims = None,
        keepdim: bool = False,
        *,
        output: Output = "auto",
        entries: bool = False,
        dtype: torch.dtype | None = None,
        **numpys: Any,
    ) -> Any:
        """The mean over modes: of all positions, absent ones 0; or of ``entries`` alone, 0 where there are none."""
        return _reduced(self, "mean", *_named(dim, keepdim, numpys), output, entries, dtype)

    def amax(
        self, dim: Dims = None, keepdim: bool = False, *, output: Output = "auto", entries: bool = False, **numpys: Any
    ) -> Any:
        """The largest over modes: of all positions, absent ones 0; or of ``entries`` alone, 0 where there are none."""
        return _reduced(self, "amax", *_named(dim, keepdim, numpys), output, entries)

    def amin(
        self, dim: Dims = None, keepdim: bool = False, *, output: Output = "auto", entries: bool = False, **numpys: Any
    ) -> Any:
        """The least value over modes: of all positions, absent ones 0; or of ``entries`` alone, 0 for none."""
        return _reduced(self, "amin", *_named(dim, keepdim, numpys), output, entries)

    def prod(
        self,
        dim: Dims = None,
        keepdim: bool = False,
        *,
        output: Output = "auto",
        entries: bool = False,
        dtype: torch.dtype | None = None,
        **numpys: Any,
    ) -> Any:
        """The product over modes: of all positions, absent ones 0; or of ``entries`` alone, 0 where there are none."""
        return _reduced(self, "prod", *_named(dim, keepdim, numpys), output, entries, dtype)

    def norm(
        self, p: float | str = 2.0, dim: Dims = None, keepdim: bool = False, *, output: Output = "auto", **numpys: Any
    ) -> Any:
        """The p-norm over modes: the root of the sum of powers of magnitudes; for infinity the largest of these."""
        x: Any = self
        dim, keepdim = _named(dim, keepdim, numpys)
        check_reduction("norm", x.dtype)
        p = 2.0 if p == "fro" else p  # as torch names it
        if p == float("inf"):
            return x.abs().amax(dim, keepdim, output=output)
        if not isinstance(p, int | float) or not p > 0:
            raise DtypeError(f"norm takes p above 0, inf or 'fro', found {p!r}{': take count_nonzero' * (p == 0)}")
        real = x._values[:0].abs().dtype
        found = x.map(lambda values: values.abs().to(accumulator(values.abs().dtype)) ** p)
        found = found.sum(dim, keepdim, output=output)

        def root(powers: torch.Tensor) -> torch.Tensor:
            none = powers == 0  # where the root has no derivative, and 0 is one of its subgradients
            return powers.masked_fill(none, 1).pow(1 / p).masked_fill(none, 0).to(real)

        return root(found) if isinstance(found, torch.Tensor) else found.map(root)

    def count_nonzero(self, dim: Dims = None, keepdim: bool = False, *, output: Output = "auto", **numpys: Any) -> Any:
        """How many values are not 0, over modes, int64; explicit zeros do not count."""
        x: Any = self
        return x.map(lambda values: values != 0).sum(dim, keepdim, output=output, **numpys)

    def any(self, dim: Dims = None, keepdim: bool = False, *, output: Output = "auto", **numpys: Any) -> Any:
        """Whether a value is not 0, over modes."""
        return self.count_nonzero(dim, keepdim, output=output, **numpys) != 0

    def all(self, dim: Dims = None, keepdim: bool = False, *, output: Output = "auto", **numpys: Any) -> Any:
        """Whether all values are other than 0, over modes; those of absent entries are 0."""
        x: Any = self
        dim, keepdim = _named(dim, keepdim, numpys)
        size = prod(x.shape[m] for m in _modes(x.order, dim))
        counts = x.count_nonzero(dim, keepdim, output=output if size else "dense")
        return counts == size if isinstance(counts, torch.Tensor) else counts.map(lambda number: number == size)

    def var(
        self, dim: Dims = None, unbiased: bool = True, keepdim: bool = False, *, correction: int = 1, **numpys: Any
    ) -> torch.Tensor:
        """The variance over modes, dense; of ``correction`` less than the number of positions, or of 0 if biased."""
        x: Any = self
        dim, keepdim = _named(dim, keepdim, numpys)
        check_reduction("variance", x.dtype)
        wide = without_blocks(x.to(accumulator(x.dtype)))
        gone = _modes(x.order, dim)
        positions = prod(x.shape[m] for m in gone)
        mean = wide.mean(gone, True, output="dense")
        apart = wide.with_values((wide._values - at_entries(mean, wide, "the mean")).abs().square())
        absent = positions - wide.map(torch.ones_like).abs().sum(gone, True, output="dense")
        squares = apart.sum(gone, True, output="dense") + absent * mean.abs().square()
        found = squares / max(0, positions - (correction if unbiased else 0))
        return (found if keepdim else found.squeeze(gone)).to(x._values[:0].abs().dtype)

    def std(self, *args: Any, **settings: Any) -> torch.Tensor:
        """The root of the variance over modes, as `var` has it."""
        return self.var(*args, **settings).sqrt()

    def max(self, dim: Any = None, keepdim: bool = False) -> Any:
        """The largest element; along a mode, those of its rows and their positions; or of two tensors, elementwise."""
        return extremum(self, dim, keepdim, True)

    def min(self, dim: Any = None, keepdim: bool = False) -> Any:
        """The least element; along a mode, those of its rows and their positions; or of two tensors, elementwise."""
        return extremum(self, dim, keepdim, False)

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
        """Where the largest elements of a mode are, of equal ones the first; without a mode in row-major order."""
        return argument(self, dim, keepdim, True)

    def argmin(self, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
        """Where the least elements of a mode are, of equal ones the first; without a mode in row-major order."""
        return argument(self, dim, keepdim, False)

    topk = topk


def _named(dim: Dims, keepdim: bool, numpys: Mapping[str, Any]) -> tuple[Dims, bool]:
    """Modes and whether they stay, by numpy's names where these are given; `KeywordError` for others."""
    given = {name: value for name, value in numpys.items() if value is not None}
    if unknown := sorted(given.keys() - {"axis", "keepdims"}):
        raise KeywordError(f"a reduction takes dim=, keepdim= and output=, or axis= and keepdims=, not {unknown[0]}=")
    if (dim is not None and "axis" in given) or (keepdim and "keepdims" in given):
        raise KeywordError("axis= and keepdims= are other names of dim= and keepdim=: a reduction takes one of them")
    return given.get("axis", dim), given.get("keepdims", keepdim)


def _reduced(
    x: Any, kind: str, dim: Dims, keepdim: bool, output: str, entries: bool = False, dtype: torch.dtype | None = None
) -> Any:
    """A reduction of one kind; see `Reductions`."""
    x = x if dtype is None else x.to(dtype)
    if output not in OUTPUTS:
        raise ShapeError(f"output must be one of {', '.join(OUTPUTS)}, found {output!r:.80}")
    check_reduction(kind, x.dtype)
    gone = _modes(x.order, dim)
    dtype = dtype or (summed_dtype(x.dtype) if kind in ("sum", "prod") else x.dtype)
    _check_memory(x, kind, gone, output, dtype)
    x = without_blocks(x)
    if kind != "sum" and not entries and 0 in [x.shape[m] for m in gone]:
        nothing = _of_nothing(x, kind, gone, keepdim, dtype)
        return x.from_dense(nothing) if output == "sparse" and nothing.ndim else nothing
    order, pattern = x.sparse_order, x._pattern
    dense = tuple(m - order + 1 for m in gone if m >= order)
    kept = tuple(m for m in range(order) if m not in gone)
    positions = 0 if entries else prod(pattern.shape[m] for m in range(order) if m in gone)
    reduced = partial(reduced_groups, pattern=pattern, kept=kept, kind=kind, positions=positions, dims=dense)
    values = x._values.to(accumulator(x.dtype))
    if kind == "prod":
        values = multiplied(reduced, values.dtype, values)
    elif kind == "sum" and x.dtype == torch.int64:  # narrower ones cannot pass 64 bits
        values = exactly(reduced, torch.int64, "a sum of integers", values)
    else:
        values = reduced(values)
    values = values.squeeze(dense)
    values = fitted(values, dtype, f"the {kind}") if kind in ("sum", "prod") else values.to(dtype)
    if len(kept) < order:
        pattern = groups_of(pattern, kept).pattern
    if not kept:
        values = values.sum(0, dtype=dtype)  # of one, or of none
        return _with_ones(values, gone) if keepdim else values
    found = x._make(pattern, values)
    if output == "dense" or (output == "auto" and len(kept) < 2):
        return _with_ones(found.to_dense(), gone) if keepdim else found.to_dense()
    return _with_sizes_of_1(found, x, gone) if keepdim else found


def _modes(order: int, dim: Dims) -> list[int]:
    """Modes, ascending and counted from the first; `ShapeError` for one that there is not, or twice."""
    named = range(order) if dim is None else dim if isinstance(dim, list | tuple) else [dim]
    modes = sorted(crd.mode_of(order, mode) for mode in named)
    if len({*modes}) < len(modes):
        raise ShapeError(f"dim names a mode twice: {dim!r:.80}")
    return modes


def _check_memory(x: Any, kind: str, gone: Sequence[int], output: str, dtype: torch.dtype) -> None:
    """Raise `OutOfMemoryError` where groups of entries, and a dense result, would pass the memory limit."""
    left = [n for m, n in enumerate(x.shape) if m not in gone]
    dense = output == "dense" or len(left) < 2 or 0 in x.shape
    # to number groups takes up to 72 bytes an entry, and their coordinates 8 a mode
    nbytes = x._values.numel() * (8 * len(left) + 96 + 2 * accumulator(x.dtype).itemsize)
    if not x.is_coalesced:
        nbytes += coalescing_bytes(x._pattern.shape, x.nnz, x._values)
    memory.check(f"the {kind} over modes {gone} of {x.shape}", nbytes + dense * prod(left) * dtype.itemsize, x.device)


def _of_nothing(x: Any, kind: str, gone: Sequence[int], keepdim: bool, dtype: torch.dtype) -> torch.Tensor:
    """Reduce modes of size 0 as torch does: the mean is NaN, the product 1; `ShapeError` for an extremum."""
    if kind in ("amax", "amin"):
        raise ShapeError(f"{kind} over modes {gone} of {x.shape} is of no position")
    sizes = [1 if m in gone else n for m, n in enumerate(x.shape) if keepdim or m not in gone]
    nothing = torch.full(sizes, 1 if kind == "prod" else float("nan"), dtype=dtype, device=x.device)
    return nothing + x._values.sum(dtype=dtype)  # a function of no values too


def _with_ones(found: torch.Tensor, gone: Sequence[int]) -> torch.Tensor:
    for mode in gone:
        found = found.unsqueeze(mode)
    return found


def _with_sizes_of_1(found: SparseTensor, x: SparseTensor, gone: Sequence[int]) -> SparseTensor:
    """The sparse result with the modes that are gone, of size 1; dense ones as dense modes."""
    old, left = found._pattern, iter(found._pattern.coords)
    none = torch.zeros_like(old.coords[0])
    coords = torch.stack([none if m in gone else next(left) for m in range(x.sparse_order)])
    shape = tuple(1 if m in gone else x._pattern.shape[m] for m in range(x.sparse_order))
    values = _with_ones(found._values, [m - x.sparse_order + 1 for m in gone if m >= x.sparse_order])
    pattern = Pattern(coords, shape, True)
    pattern.labels = {name: old.labels.get(name) for name in x._pattern.labels}
    return found._make(pattern, values)
