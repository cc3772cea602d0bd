"""Products of a sparse tensor with matrices or vectors: `mttkrp`, `ttmc`, `ttm`, `ttv`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from sparsetc.api import einsum, einsum_together, register_op
from sparsetc.contraction.request import Result
from sparsetc.errors import ShapeError
from sparsetc.ops.arguments import checked_table, equation, letters_of, mode_at, one_a_mode, sparse_of
from sparsetc.options import Auto, ToDense, ToSparse
from sparsetc.support.entry import traced_by_modes
from sparsetc.tensor.sparse_tensor import SparseTensor


@overload
def mttkrp(x: Any, factors: Sequence[Result | None], mode: int, **settings: Unpack[ToSparse]) -> SparseTensor: ...
@overload
def mttkrp(x: Any, factors: Sequence[Tensor | None], mode: int, **settings: Unpack[Auto]) -> Tensor: ...
@overload
def mttkrp(
    x: Any, factors: Sequence[Tensor | None], mode: None = None, **settings: Unpack[Auto]
) -> tuple[Tensor, ...]: ...
@overload
def mttkrp(
    x: Any, factors: Sequence[Result | None], mode: int | None = None, **settings: Unpack[Auto]
) -> Result | tuple[Result, ...]: ...
@register_op
def mttkrp(
    x: Any, factors: Sequence[Result | None], mode: int | None = None, **settings: Any
) -> Result | tuple[Result, ...]:
    """Multiply a matricised tensor by a Khatri-Rao product: ``"ijk,jr,kr->ir"`` for order 3 and mode 0.

    Args:
        x: sparse, of any order >= 2.
        factors: one (size, rank) matrix a mode, in order, dense or sparse; that of `mode` is not read and may be
            None.
        mode: the mode that is kept; negative counts from the end. None computes every mode with the same factors; if
            these are dense, the einsums are planned together and may share one copy of x, as with `compile_many`.
        settings: as for `einsum`.

    Returns:
        (size of `mode`, rank), dense, unless ``output="sparse"`` or a sparse factor makes it a `SparseTensor`; for
        ``mode=None`` a tuple with one result a mode.

    Examples:
        >>> x = stc.full((2, 3, 4), 1.0)
        >>> stc.mttkrp(x, [None, torch.ones(3, 2), torch.ones(4, 2)], 0)
        tensor([[12., 12.],
                [12., 12.]])
    """
    sparse = sparse_of(x, "mttkrp")
    if mode is not None:
        text, operands = _mttkrp(sparse, factors, mode_at(sparse, mode, "mttkrp"))
        return einsum(text, *operands, **settings)
    each = [_mttkrp(sparse, factors, m) for m in range(sparse.order)]
    traced = torch.compiler.is_compiling() or traced_by_modes()  # a graph keeps no workloads: each is planned alone
    planned_alone = traced or type(sparse) is not SparseTensor
    if planned_alone or any(isinstance(o, SparseTensor) for _, operands in each for o in operands[1:]):
        return tuple(einsum(text, *operands, **settings) for text, operands in each)
    return einsum_together(each, **settings)


def _mttkrp(x: SparseTensor, factors: Sequence[Result | None], mode: int) -> tuple[str, list[Result]]:
    """Return the equation of one mode, and its operands."""
    matrices = one_a_mode(x, factors, mode, "mttkrp", "factors")
    if len({f.shape[1] for f in matrices.values()}) > 1:
        ranks = ", ".join(f"{f.shape[1]} in mode {m}" for m, f in matrices.items())
        raise ShapeError(f"mttkrp: the factors must have one rank, found {ranks}")
    letters, rank = letters_of(len(factors), 1, "mttkrp")
    terms = [c + rank for m, c in enumerate(letters) if m != mode]
    return equation(letters, terms, letters[mode] + rank), [x, *matrices.values()]


@overload
def ttmc(x: Any, matrices: Sequence[Result | None], mode: int, **settings: Unpack[ToSparse]) -> SparseTensor: ...
@overload
def ttmc(x: Any, matrices: Sequence[Tensor | None], mode: int, **settings: Unpack[Auto]) -> Tensor: ...
@overload
def ttmc(x: Any, matrices: Sequence[Result | None], mode: int, **settings: Unpack[Auto]) -> Result: ...
@register_op
def ttmc(x: Any, matrices: Sequence[Result | None], mode: int, **settings: Any) -> Result:
    """Multiply a tensor by a matrix along all modes but one: ``"ijk,jr,ks->irs"`` for order 3 and mode 0 (TTM chain).

    Args:
        x: sparse, of any order >= 2.
        matrices: one (size, rank of the mode) matrix a mode; that of `mode` is not read and may be None.
        mode: the mode that is kept; negative counts from the end.
        settings: as for `einsum`.

    Returns:
        (size of `mode`, then the rank of every other mode, in the modes' order), dense.

    Examples:
        >>> x = stc.full((2, 3, 4), 1.0)
        >>> stc.ttmc(x, [None, torch.ones(3, 5), torch.ones(4, 6)], 0).shape
        torch.Size([2, 5, 6])
    """
    sparse = sparse_of(x, "ttmc")
    mode = mode_at(sparse, mode, "ttmc")
    by_mode = one_a_mode(sparse, matrices, mode, "ttmc", "matrices")
    letters, ranks = letters_of(sparse.order, len(by_mode), "ttmc")
    terms = [letters[m] + r for m, r in zip(by_mode, ranks, strict=True)]
    return einsum(equation(letters, terms, letters[mode] + "".join(ranks)), sparse, *by_mode.values(), **settings)


@overload
def ttm(x: Any, matrix: Result, mode: int, *, transpose: bool = False, **settings: Unpack[ToDense]) -> Tensor: ...
@overload
def ttm(
    x: Any, matrix: Result, mode: int, *, transpose: bool = False, **settings: Unpack[ToSparse]
) -> SparseTensor: ...
@overload
def ttm(x: Any, matrix: Result, mode: int, *, transpose: bool = False, **settings: Unpack[Auto]) -> Result: ...
@register_op
def ttm(x: Any, matrix: Result, mode: int, *, transpose: bool = False, **settings: Any) -> Result:
    """Multiply a tensor by a (rank, size) matrix along a mode: ``"ijk,rj->irk"``; the mode's size becomes the rank.

    Same convention as Kolda & Bader (2009, section 2.5), tensorly and pyttb; `ttmc` and `mttkrp` take (size, rank)
    factors instead.

    Args:
        x: sparse, of any order >= 1.
        matrix: (rank, size of `mode`).
        mode: the mode that is contracted; negative counts from the end.
        transpose: the matrix is (size of `mode`, rank), like a factor.
        settings: as for `einsum`.

    Returns:
        A tensor of x's order: a `SparseTensor` for order 3 and more, else dense. It has a fiber of `rank` values
        wherever x has a nonzero fiber along `mode`. For the last mode the fiber is a dense mode of the result
        (`dense_order` 1); for others each of its values is an entry, since dense modes of a SparseTensor come last.

    Examples:
        >>> stc.ttm(stc.full((2, 3, 4), 1.0), torch.ones(5, 3), 1).shape
        (2, 5, 4)
    """
    return _of_one_mode(x, matrix, mode, "ttm", "matrix", ("rank",), settings, transpose)


@overload
def ttv(x: Any, vector: Result, mode: int, **settings: Unpack[ToDense]) -> Tensor: ...
@overload
def ttv(x: Any, vector: Result, mode: int, **settings: Unpack[ToSparse]) -> SparseTensor: ...
@overload
def ttv(x: Any, vector: Result, mode: int, **settings: Unpack[Auto]) -> Result: ...
@register_op
def ttv(x: Any, vector: Result, mode: int, **settings: Any) -> Result:
    """Multiply a tensor by a vector along a mode, which disappears: ``"ijk,j->ik"``.

    Args:
        x: sparse, of any order >= 1.
        vector: (size of `mode`,).
        mode: negative counts from the end.
        settings: as for `einsum`.

    Returns:
        A tensor of order one less: a `SparseTensor` if x has order 3 or more, else dense.

    Examples:
        >>> stc.ttv(stc.full((2, 3, 4), 1.0), torch.ones(3), 1)
        SparseTensor(shape=(2, 4), nnz=8, density=1, dtype=torch.float32, device=cpu)
    """
    return _of_one_mode(x, vector, mode, "ttv", "vector", (), settings)


def _of_one_mode(
    x: Any,
    other: Result,
    mode: int,
    name: str,
    what: str,
    ranks: tuple[str, ...],
    settings: dict[str, Any],
    transpose: bool = False,
) -> Result:
    """Multiply a tensor by a (rank, size) matrix or a vector along one mode, which is replaced by the ranks."""
    sparse = sparse_of(x, name)
    mode = mode_at(sparse, mode, name)
    letters, rank = letters_of(sparse.order, len(ranks), name)
    sizes: tuple[int | str, ...] = (*ranks, sparse.shape[mode])
    term = rank + letters[mode]
    if transpose:
        sizes, term = sizes[::-1], term[::-1]
    table = checked_table(other, sparse, sizes, f"{name}: the {what} of mode {mode}")
    kept = letters[:mode] + rank + letters[mode + 1 :]
    return einsum(equation(letters, [term], kept), sparse, table, **settings)
