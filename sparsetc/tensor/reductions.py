"""Sums, means, extrema, products and norms over modes of a sparse tensor.

In: a SparseTensor and modes. Out: a tensor of the modes that are left, dense or sparse, differentiable. Entries that
agree in these are reduced together; absent ones count as the zeros that they are, unless entries alone are asked for.

The largest and least elements along a mode are sought among the entries of each row and as many of its first absent
positions as are asked for; so what is made is not as long as the mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sparsetc.errors import DtypeError, KeywordError, ShapeError
from sparsetc.support import outside, volume
from sparsetc.support.checks import check_memory
from sparsetc.tensor import coords as crd
from sparsetc.tensor.blocks import without_blocks
from sparsetc.tensor.dtypes import accumulator, exactly, fitted, multiplied, summed_dtype
from sparsetc.tensor.duplicates import coalescing_bytes
from sparsetc.tensor.elementwise import at_entries, check_ordered
from sparsetc.tensor.groups import check_reduction, groups_of, reduced_groups
from sparsetc.tensor.pattern import transforming
from sparsetc.tensor.structure import reshaped

Dims = int | Sequence[int] | None
"""Modes, negative ones counted from the end; None for all, and () for none, as numpy has it."""
Output = Literal["auto", "dense", "sparse"]
OUTPUTS = get_args(Output)


def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """Return the k largest elements along a mode, or the least, and where they are; in order, of equal ones the first.

    Args:
        x: a SparseTensor of real values.
        k: how many, no more than the mode has positions.
        dim: the mode, in whose place the results have k elements.
        largest: False for the least.
        sorted: is ignored, as they are always in order.

    Returns:
        Dense ``values`` and ``indices``, as of `torch.topk`.

    Raises:
        ShapeError: more elements than there are positions.
        DtypeError: complex values, which have no order.

    Examples:
        >>> stc.eye(3).topk(2).indices
        tensor([[0, 1],
                [1, 0],
                [2, 0]])
    """
    mode, k = crd.mode_of(x.order, dim, "topk"), crd.integer(k, "topk: the number of elements")
    check_ordered(x)
    if not 0 <= k <= x.shape[mode]:
        raise ShapeError(f"topk: {k} elements of mode {mode}, of size {x.shape[mode]}")
    others = [m for m in range(x.order) if m != mode]
    x = x.expand_dense().permute(*others, mode).coalesce()
    *sizes, size = x.shape
    rows = prod(sizes)
    check_memory(f"the candidates of {rows:,} rows", 96 * (rows * max(k, 1) + x.nnz), x.device)
    matrix = x.reshape(rows, size)
    row, position = matrix._pattern.coords
    # before the absent position number j of a row are j others, and the entries that stand no further than these all
    each = crd.histogram(row, rows)
    start = each.cumsum(0) - each
    number, absent = torch.arange(rows, device=x.device).unsqueeze(1), torch.arange(k, device=x.device)
    ahead = row * (size + 1) + position - torch.arange(x.nnz, device=x.device) + start[row]
    entries = torch.searchsorted(ahead, number * (size + 1) + absent, right=True) - start.unsqueeze(1)
    inside = absent + entries < size
    zeros = torch.stack((number.expand(rows, k)[inside], (absent + entries)[inside]))
    coords = torch.cat((matrix._pattern.coords, zeros), 1)
    values = torch.cat((matrix._values, matrix._values.new_zeros(zeros.shape[1])))
    if transforming() or bool((matrix._values == 0).any()):  # stored zeros, and absent ones, in the order of positions
        by_position = crd.lexsort(coords, (rows, size))
        coords, values = coords[:, by_position], values[by_position]
    row, position = coords
    order = torch.sort(values.detach(), descending=largest, stable=True).indices
    order = order[torch.sort(crd.narrowed(row, rows)[order], stable=True).indices]
    each += inside.sum(1)
    first = order[(each.cumsum(0) - each).unsqueeze(1) + torch.arange(k, device=x.device)]
    ranked = (one[first].reshape(*sizes, k).movedim(-1, mode) for one in (values, position))
    return torch.return_types.topk(tuple(ranked))  # type: ignore[arg-type, return-value]


def extremum(x: Any, dim: Any, keepdim: bool, largest: bool) -> Any:
    """Return the largest or least element; along a mode, values and indices; for two tensors, elementwise."""
    if dim is None:
        return x.amax() if largest else x.amin()
    if hasattr(dim, "shape"):
        return (torch.maximum if largest else torch.minimum)(x, dim)
    if largest or not x.dtype.is_floating_point:
        values, where = topk(x, 1, dim, largest)
    else:  # NaN is the extremum of either kind, and only the last of the least
        negated, where = topk(-x, 1, dim)
        values = 0 - negated
    if not keepdim:
        values, where = values.squeeze(dim), where.squeeze(dim)
    return (torch.return_types.max if largest else torch.return_types.min)((values, where))


def argument(x: Any, dim: int | None, keepdim: bool, largest: bool) -> Tensor:
    """Return where the largest or least elements are: in a mode, or in row-major order among all."""
    if dim is not None:
        return extremum(x, dim, keepdim, largest).indices  # type: ignore[no-any-return]
    place = extremum(x.reshape(-1), 0, False, largest).indices
    return place.reshape([1] * x.order) if keepdim else place  # type: ignore[no-any-return]


class Reductions:
    """Reductions of a `SparseTensor` over modes.

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
        """Sum over modes.

        Args:
            dim: a mode, several modes, or None for all.
            keepdim: keep the summed modes, with size 1.
            output: ``"dense"``, ``"sparse"`` or ``"auto"``: sparse if two or more modes with coordinates are left.
            dtype: cast values to it first. Without it, sums of integers are int64.
            numpys: ``axis=`` and ``keepdims=``, numpy's names of the first two.

        Returns:
            A tensor or a SparseTensor, as `output` says.

        Raises:
            ShapeError: the tensor has no such mode.
            DtypeError: a sum of integers does not fit.
            OutOfMemoryError: the result would pass the memory limit.

        Examples:
            >>> stc.full((2, 3), 1.0).sum(0)
            tensor([2., 2., 2.])
        """
        return _reduced(self, "sum", dim, keepdim, numpys, output, dtype=dtype)

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
        """Average over modes, counting absent entries as 0.

        Args:
            dim: a mode, several modes, or None for all.
            keepdim: keep the reduced modes, with size 1.
            output: as for `sum`.
            entries: average the stored entries alone; the result is 0 where there are none.
            dtype: cast values to it first.
            numpys: as for `sum`.

        Examples:
            >>> x = stc.SparseTensor([[0, 0], [0, 1]], [1.0, 3.0], (2, 4))
            >>> x.mean(1), x.mean(1, entries=True)
            (tensor([1., 0.]), tensor([2., 0.]))
        """
        return _reduced(self, "mean", dim, keepdim, numpys, output, entries, dtype)

    def amax(
        self, dim: Dims = None, keepdim: bool = False, *, output: Output = "auto", entries: bool = False, **numpys: Any
    ) -> Any:
        """Return the largest value over modes, counting absent entries as 0; arguments as for `mean`.

        Examples:
            >>> (-stc.eye(2)).amax(1), (-stc.eye(2)).amax(1, entries=True)
            (tensor([0., 0.]), tensor([-1., -1.]))
        """
        return _reduced(self, "amax", dim, keepdim, numpys, output, entries)

    def amin(
        self, dim: Dims = None, keepdim: bool = False, *, output: Output = "auto", entries: bool = False, **numpys: Any
    ) -> Any:
        """Return the least value over modes, counting absent entries as 0; arguments as for `mean`.

        Examples:
            >>> stc.eye(2).amin(1), stc.eye(2).amin(1, entries=True)
            (tensor([0., 0.]), tensor([1., 1.]))
        """
        return _reduced(self, "amin", dim, keepdim, numpys, output, entries)

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
        """Multiply values over modes, counting absent entries as 0; arguments as for `mean`.

        Examples:
            >>> stc.full((2, 2), 3.0).prod(1)
            tensor([9., 9.])
        """
        return _reduced(self, "prod", dim, keepdim, numpys, output, entries, dtype)

    def norm(
        self, p: float | str = 2.0, dim: Dims = None, keepdim: bool = False, *, output: Output = "auto", **numpys: Any
    ) -> Any:
        """Return the p-norm over modes, ``(sum of |x| ** p) ** (1 / p)``; for ``p=inf`` the largest magnitude.

        Args:
            p: above 0, ``inf`` or ``"fro"`` (which is 2).
            dim: a mode, several modes, or None for all.
            keepdim: keep the reduced modes, with size 1.
            output: as for `sum`.
            numpys: as for `sum`.

        Examples:
            >>> stc.full((2, 2), 2.0).norm()
            tensor(4.)
        """
        x: Any = self
        check_reduction("norm", x.dtype)
        p = 2.0 if p == "fro" else p  # as torch names it
        if p == float("inf"):
            return x.abs().amax(dim, keepdim, output=output, **numpys)
        if not isinstance(p, int | float) or not p > 0:
            raise DtypeError(f"norm takes p above 0, inf or 'fro', found {p!r}{': take count_nonzero' * (p == 0)}")
        real = x._values[:0].abs().dtype
        sums = x.map(lambda values: values.abs().to(accumulator(values.abs().dtype)) ** p)
        sums = sums.sum(dim, keepdim, output=output, **numpys)

        def root(powers: Tensor) -> Tensor:
            return _root(powers, p).to(real)

        return root(sums) if isinstance(sums, Tensor) else sums.map(root)

    def count_nonzero(self, dim: Dims = None, keepdim: bool = False, *, output: Output = "auto", **numpys: Any) -> Any:
        """Count the values other than 0 over modes, as int64; stored zeros do not count. Arguments as for `sum`.

        Examples:
            >>> stc.SparseTensor([[0, 1]], [0.0, 2.0]).count_nonzero()
            tensor(1)
        """
        x: Any = self
        return x.map(lambda values: values != 0).sum(dim, keepdim, output=output, **numpys)

    def any(self, dim: Dims = None, keepdim: bool = False, *, output: Output = "auto", **numpys: Any) -> Any:
        """Test whether any value over the modes is not 0; arguments as for `sum`.

        Examples:
            >>> stc.SparseTensor([[0], [1]], [2.0], (2, 2)).any(1)
            tensor([ True, False])
        """
        return self.count_nonzero(dim, keepdim, output=output, **numpys) != 0

    def all(self, dim: Dims = None, keepdim: bool = False, *, output: Output = "auto", **numpys: Any) -> Any:
        """Test whether all values over the modes are other than 0; absent entries are 0. Arguments as for `sum`.

        Examples:
            >>> stc.eye(2).all(1), stc.full((2, 2), 1.0).all(1)
            (tensor([False, False]), tensor([True, True]))
        """
        x: Any = self
        dim, keepdim = _named(dim, keepdim, numpys)
        size = volume(x.shape, _modes(x.order, dim))
        counts = x.count_nonzero(dim, keepdim, output=output if size else "dense")
        size = size if size < crd.INT64_SIZES else -1  # no tensor has as many entries
        return counts == size if isinstance(counts, Tensor) else counts.map(lambda number: number == size)

    def var(
        self, dim: Dims = None, unbiased: bool = True, keepdim: bool = False, *, correction: int = 1, **numpys: Any
    ) -> Tensor:
        """Return the variance over modes, counting absent entries as 0; the result is dense.

        Args:
            dim: a mode, several modes, or None for all.
            unbiased: divide by the number of positions less `correction`; False divides by their number.
            keepdim: keep the reduced modes, with size 1.
            correction: see `unbiased`.
            numpys: as for `sum`.

        Examples:
            >>> stc.eye(2).var(1)
            tensor([0.5000, 0.5000])
        """
        x: Any = self
        dim, keepdim = _named(dim, keepdim, numpys)
        check_reduction("variance", x.dtype)
        wide = without_blocks(x.to(accumulator(x.dtype)))
        gone = _modes(x.order, dim)
        positions = float(volume(x.shape, gone))
        mean = wide.mean(gone, True, output="dense")
        deviations = wide.with_values((wide._values - at_entries(mean, wide, "the mean")).abs().square())
        absent = positions - wide.map(torch.ones_like).abs().sum(gone, True, output="dense")
        squares = deviations.sum(gone, True, output="dense") + absent * mean.abs().square()
        variance = squares / max(0, positions - (correction if unbiased else 0))
        return (variance if keepdim else variance.squeeze(gone)).to(x._values[:0].abs().dtype)

    def std(self, *args: Any, **settings: Any) -> Tensor:
        """Return the standard deviation, the root of `var`, which has the same arguments.

        Examples:
            >>> stc.eye(2).std(1)
            tensor([0.7071, 0.7071])
        """
        return _root(self.var(*args, **settings), 2)

    def max(self, dim: Any = None, keepdim: bool = False) -> Any:
        """Return the largest element; along a mode, values and indices as torch; with a tensor, elementwise.

        Examples:
            >>> stc.eye(2).max(), stc.eye(2).max(1)[1]
            (tensor(1.), tensor([0, 1]))
        """
        return extremum(self, dim, keepdim, True)

    def min(self, dim: Any = None, keepdim: bool = False) -> Any:
        """Return the least element; along a mode, values and indices as torch; with a tensor, elementwise.

        Examples:
            >>> stc.eye(2).min(), stc.eye(2).min(1)[1]
            (tensor(0.), tensor([1, 0]))
        """
        return extremum(self, dim, keepdim, False)

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Return the index of the largest element along a mode, or in row-major order; the first of equal ones.

        Examples:
            >>> stc.eye(2).argmax(1)
            tensor([0, 1])
        """
        return argument(self, dim, keepdim, True)

    def argmin(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Return the index of the least element along a mode, or in row-major order; the first of equal ones.

        Examples:
            >>> stc.eye(2).argmin(1)
            tensor([1, 0])
        """
        return argument(self, dim, keepdim, False)

    topk = topk


def _named(dim: Dims, keepdim: bool, numpys: Mapping[str, Any]) -> tuple[Dims, bool]:
    """Return `dim` and `keepdim`, also from numpy's names. Raise `KeywordError` for others."""
    named = {name: value for name, value in numpys.items() if value is not None}
    if unknown := sorted(named.keys() - {"axis", "keepdims"}):
        raise KeywordError(f"a reduction takes dim=, keepdim= and output=, or axis= and keepdims=, not {unknown[0]}=")
    if (dim is not None and "axis" in named) or (keepdim and "keepdims" in named):
        raise KeywordError("axis= and keepdims= are other names of dim= and keepdim=: a reduction takes one of them")
    return named.get("axis", dim), named.get("keepdims", keepdim)


def _reduced(
    x: Any,
    kind: str,
    dim: Dims,
    keepdim: bool,
    numpys: Mapping[str, Any],
    output: str,
    entries: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    """Reduce by one kind; see `Reductions`."""
    dim, keepdim = _named(dim, keepdim, numpys)
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
    kept = outside(range(order), gone)
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
    result = x._make(pattern, values)
    if output == "dense" or (output == "auto" and len(kept) < 2):
        return _with_ones(result.to_dense(), gone) if keepdim else result.to_dense()
    if not keepdim:
        return result
    whole = reshaped(pattern, tuple(1 if m in gone else n for m, n in enumerate(x._pattern.shape)))
    whole.labels = {name: pattern.labels.get(name) for name in x._pattern.labels}
    return x._make(whole, _with_ones(values, [m - order + 1 for m in gone if m >= order]))


def _root(powers: Tensor, p: float) -> Tensor:
    """Return the p-th root. At 0, where it has no derivative, the gradient is 0, one of its subgradients."""
    none = powers == 0
    return powers.masked_fill(none, 1).pow(1 / p).masked_fill(none, 0)


def _modes(order: int, dim: Dims) -> list[int]:
    """Modes, ascending and counted from the first; `ShapeError` for one that there is not, or twice."""
    if dim is None:
        return list(range(order))
    modes = sorted(crd.mode_of(order, mode) for mode in crd.flat((dim,)))
    if len({*modes}) < len(modes):
        raise ShapeError(f"dim names a mode twice: {dim!r:.80}")
    return modes


def _check_memory(x: Any, kind: str, gone: Sequence[int], output: str, dtype: torch.dtype) -> None:
    """Raise `OutOfMemoryError` where groups of entries, and a dense result, would pass the memory limit."""
    left = [n for m, n in enumerate(x.shape) if m not in gone]
    sparse = sum(m not in gone for m in range(x.sparse_order))
    dense = output == "dense" or (output == "auto" and sparse < 2) or 0 in x.shape
    # to number groups takes up to 72 bytes an entry, and their coordinates 8 a mode
    nbytes = x._values.numel() * (8 * len(left) + 96 + 2 * accumulator(x.dtype).itemsize)
    if not x.is_coalesced:
        nbytes += coalescing_bytes(x._pattern.shape, x.nnz, x._values)
    check_memory(f"the {kind} over modes {gone} of {x.shape}", nbytes + dense * prod(left) * dtype.itemsize, x.device)


def _of_nothing(x: Any, kind: str, gone: Sequence[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """Reduce modes of size 0 as torch does: the mean is NaN, the product 1; `ShapeError` for an extremum."""
    if kind in ("amax", "amin"):
        raise ShapeError(f"{kind} over modes {gone} of {x.shape} is of no position")
    sizes = [1 if m in gone else n for m, n in enumerate(x.shape) if keepdim or m not in gone]
    nothing = torch.full(sizes, 1 if kind == "prod" else float("nan"), dtype=dtype, device=x.device)
    return nothing + x._values.sum(dtype=dtype)  # a function of no values too


def _with_ones(sums: Tensor, gone: Sequence[int]) -> Tensor:
    for mode in gone:
        sums = sums.unsqueeze(mode)
    return sums
