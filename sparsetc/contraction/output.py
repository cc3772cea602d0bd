"""The result of an einsum: a dense tensor, or values on a pattern that is known once the sparse operand is.

In: an einsum as rules leave it, its sparse operand. Out: `Output`: shapes, pattern, the row each nonzero adds to. And
what may be done to results once they are made: zeros dropped, another tensor added (``alpha Z + beta out``: BCB-SpTC,
formula (1)); nothing is changed in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from sparsetc.contraction.operands import check_operand
from sparsetc.contraction.request import Request
from sparsetc.errors import DtypeError, PlanError, ShapeError
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.support import Ints, cached_property, memory, volume
from sparsetc.tensor.coords import numbered
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import exactly, fitted, multiplied, result_bytes

KEEP_SPARSE = "keep more modes sparse in the output"
"""Advice where a dense result passes the memory limit."""
SPARE = 2
"""Letters that gradients of an einsum of entries, and batches of these, need beside its own."""


@dataclass(frozen=True)
class Output:
    """The form of a result: a dense tensor, or values on a pattern known since compilation.

    Attributes:
        width_shape: sizes of the dense letters, in the output's order.
        permutation: from (kept, dense) letters to the output's order; None when they are so already.
        pattern: pattern of a sparse output, over kept modes; None of a dense one.
        own: whether the result's pattern is the sparse operand's own.
        slot: (nnz,) the row of the output each nonzero adds to; None where it is the nonzero's own number.
    """

    kept_shape: Ints
    width_shape: Ints
    permutation: Ints | None
    pattern: Pattern | None
    own: bool
    slot: Tensor | None

    @cached_property
    def sparse(self) -> bool:
        """True if the result is a SparseTensor."""
        return self.pattern is not None

    @cached_property
    def rows(self) -> int:
        """Rows of the result."""
        return prod(self.kept_shape) if self.pattern is None else self.pattern.nnz

    @property
    def width(self) -> int:
        """Elements of a row."""
        return prod(self.width_shape)

    def strides(self, joined: bool) -> Ints | None:
        """Strides of a dense result seen as (rows, *dense sizes); None if it cannot be seen so.

        If `joined`, also None where the dense sizes are not one dimension too.
        """
        sizes = (*self.kept_shape, *self.width_shape)
        order = self.permutation or tuple(range(len(sizes)))
        strides = {dim: volume(sizes, order[at + 1 :]) for at, dim in enumerate(order)}
        count = len(self.kept_shape)
        for dims in (range(count), range(count, len(sizes)))[: 1 + joined]:
            if any(strides[n] != strides[n + 1] * sizes[n + 1] for n in dims[:-1]):
                return None
        return (strides[count - 1] if count else 1, *(strides[n] for n in range(count, len(sizes))))

    def letters_apart(self, rows: Tensor) -> Tensor:
        """The rows of a dense result with a dimension for each letter."""
        return rows if len(self.kept_shape) == 1 else rows.reshape((*self.kept_shape, *self.width_shape))

    def shaped(self, rows: Tensor) -> Tensor:
        """A dense result of (rows, *dense sizes)."""
        result = self.letters_apart(rows)
        return result if self.permutation is None else result.permute(self.permutation)


def check_form(form: str, e: Einsum) -> None:
    """Raise `PlanError` unless a result can be given as ``auto``, ``dense`` or, having a pattern, ``sparse``."""
    if form not in ("auto", "dense", "sparse"):
        raise PlanError(f'output must be "auto", "dense" or "sparse", found {form!r}')
    if form == "sparse" and not e.kept:
        which = "the" if len(e.sparse) == 1 else "a"
        why = f"keeps no mode of {which} sparse operand, so its result has no pattern"
        raise PlanError(f'"{e.text}" {why}; use output="dense"')


def is_sparse(form: str, e: Einsum, coordinates: Sequence[Sequence[str]]) -> bool:
    """Return True if a result in this form is sparse, given the letters with coordinates of each sparse operand.

    By itself (``auto``) it is where it keeps a letter with coordinates; of a single sparse operand's letters it must
    keep two or more, or all.
    """
    first = e.inputs[e.sparse[0]]
    kept = {*e.output} & set[str]().union(*coordinates)
    enough = len(e.sparse) > 1 or sum(map(first.__contains__, e.output)) >= min(2, len(set(first)))
    return form == "sparse" or (form == "auto" and bool(kept) and enough)


def sparse_result(request: Request, expanded: bool) -> bool:
    """Return True if the result of an einsum is sparse, and False if it is dense and fits the memory limit.

    Args:
        request: the einsum.
        expanded: whether dense modes become coordinates.

    Raises:
        OutOfMemoryError: it does not fit.
    """
    bound, sparse = request.bound, request.sparse
    e, x = bound.einsum, sparse[0]
    orders = [x.order if expanded else x.sparse_order for x in sparse]
    if is_sparse(request.form, e, [e.inputs[p][:order] for p, order in zip(e.sparse, orders, strict=True)]):
        return True
    nbytes = prod(bound.output_shape) * result_bytes(x.dtype)
    memory.check(f"the result of {bound}", nbytes, x.device, request.settings.memory_limit, KEEP_SPARSE)
    return False


def known_result(bound: Bound, patterns: Sequence[Pattern], pattern: Pattern) -> Pattern:
    """Return the cached pattern equal to a result's pattern, of an einsum of the same operands, or `pattern` itself."""
    (first, *others), e = patterns, bound.einsum
    return first.known((e.inputs, e.output, e.sparse, bound.sizes), pattern, others)


def output_of(bound: Bound, pattern: Pattern, form: str) -> Output:
    """Shape and pattern of the result, given the sparse operand's pattern.

    Einsums that keep the same modes of it share their results' pattern.
    """
    e = bound.einsum
    kept = tuple(map(e.sparse_indices.index, e.kept))
    order = (*e.kept, *e.free)
    shape = bound.extents(e.kept)
    width = bound.extents(e.free)
    moved = None if order == e.output else tuple([order.index(c) for c in e.output])
    everything = len(kept) == pattern.order
    if not is_sparse(form, e, [e.sparse_indices]):
        return Output(shape, width, moved, None, False, None)
    if everything and kept == tuple(range(len(kept))):
        whole = pattern.known(("modes", kept), Pattern(pattern.coords, shape, pattern.is_coalesced))
        return Output(shape, width, moved, whole, moved is None, None)
    rows = pattern.coords[list(kept)]
    numbering = numbered(rows.unbind(), shape, rows.shape[1], rows)
    some = pattern.known(("modes", kept), Pattern(torch.stack(numbering.coords), shape, True))
    return Output(shape, width, moved, some, False, numbering.rank)


def arranged(output: Output) -> tuple[Pattern | None, Tensor | None]:
    """A sparse result's pattern with its modes in the output's order, and which element of the rows each value is.

    None for the order where they are so already, one row for each entry.
    """
    if output.pattern is None or output.permutation is None:
        return output.pattern, None
    elements = torch.arange(output.rows * output.width, device=output.pattern.device)
    numbered = SparseTensor._make(output.pattern, elements.reshape(output.rows, *output.width_shape))
    arranged_numbers = numbered.expand_dense().permute(*output.permutation)
    return arranged_numbers.pattern, arranged_numbers._values


Result = Tensor | SparseTensor


def check_accumulation(out: Any, shape: Ints, dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless `contract`'s input can be added to a result of this shape, dtype and device, before it is made."""
    if not isinstance(out, SparseTensor | Tensor):
        raise DtypeError(f"input must be a SparseTensor or a torch tensor, found {type(out).__name__}")
    if tuple(out.shape) != shape:
        raise ShapeError(f"input must have the result's shape {shape}, found {tuple(out.shape)}")
    check_operand(out, "input", dtype, device, "the result")


def check_scalars(dtype: torch.dtype, **scalars: Any) -> None:
    """Raise DtypeError unless each scalar can multiply values of this dtype and give the same dtype."""
    for name, value in scalars.items():
        whole = isinstance(value, int) and -(2**63) <= value < 2**63
        fits = whole or (isinstance(value, float) and (dtype.is_floating_point or dtype.is_complex))
        if not fits and not (isinstance(value, complex) and dtype.is_complex):
            raise DtypeError(f"{name} must be a number that {dtype} can be multiplied by, found {value!r}")


def accumulated(result: Result, out: Result | None, alpha: Any, beta: Any) -> Result:
    """``alpha * result + beta * out``: on the union of both patterns if both are sparse, dense if either is.

    With ``beta=0`` `out` is not read, as in BLAS. Integers are int64, and refused where they pass it.
    """
    scaled = _times(result, alpha)
    if out is None or beta == 0:
        return scaled
    other = _times(out.to(result.dtype), beta)
    if isinstance(scaled, SparseTensor) and isinstance(other, SparseTensor):
        return scaled + other
    terms = (t.to_dense() if isinstance(t, SparseTensor) else t for t in (scaled, other))
    return exactly(torch.add, scaled.dtype, "alpha times the result and beta times input", *terms)


def _times(z: Any, factor: Any) -> Any:
    if factor == 1:
        return z
    return z * factor if isinstance(z, SparseTensor) else multiplied(torch.mul, z.dtype, z, factor)


def narrowed(result: Result, dtype: torch.dtype, what: str) -> Result:
    """The result in a dtype; DtypeError for an integer that does not fit."""
    if isinstance(result, SparseTensor):
        return result.with_values(fitted(result.values, dtype, what))
    return fitted(result, dtype, what)
