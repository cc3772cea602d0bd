"""Named operations: thin sugar over `einsum`, for a sparse operand of any order, in any mode.

In: a sparse operand `x` (whatever `einsum` takes as one) and dense tensors, or, but for `spmm`, sparse ones in their
place. Out: what `einsum` returns for the equation written from the operands' orders. Each takes `einsum`'s settings
(``plan=``, ``precision=``, ``output=``, …), is differentiable where `einsum` is, and is known by its name in
`OPERATIONS`.

Factor matrices have a row an index of their mode: (size of the mode, rank).
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from functools import lru_cache
from inspect import signature
from operator import index
from string import ascii_letters
from typing import Any, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from sparsetc.api import OPERATIONS, einsum, einsum_together, register_op, sharded_of
from sparsetc.contraction.operands import as_operand, check_operand
from sparsetc.contraction.output import Result, accumulated, check_accumulation, check_scalars, narrowed, without_zeros
from sparsetc.errors import DistributedError, DtypeError, EquationError, ShapeError
from sparsetc.options import Auto, ToDense, ToSparse
from sparsetc.support import memory, outside
from sparsetc.support.entry import traced_by_modes
from sparsetc.tensor.blocks import without_blocks
from sparsetc.tensor.groups import groups_of, reduced_groups
from sparsetc.tensor.inputs import check_plain, not_sparse
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import summed_dtype

MODES = "ijklmnopq"
"""Letters of modes; the rest of the alphabet follows where they run out."""
RANKS = "rstuvwxyz"
"""Letters of ranks."""


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
    sparse = _sparse(x, "mttkrp")
    if mode is not None:
        text, operands = _mttkrp(sparse, factors, _mode(sparse, mode, "mttkrp"))
        return einsum(text, *operands, **settings)
    each = [_mttkrp(sparse, factors, m) for m in range(sparse.order)]
    traced = torch.compiler.is_compiling() or traced_by_modes()  # a graph keeps no workloads: each is planned alone
    planned_alone = traced or type(sparse) is not SparseTensor
    if planned_alone or any(isinstance(o, SparseTensor) for _, operands in each for o in operands[1:]):
        return tuple(einsum(text, *operands, **settings) for text, operands in each)
    return einsum_together(each, **settings)


def _mttkrp(x: SparseTensor, factors: Sequence[Result | None], mode: int) -> tuple[str, list[Result]]:
    """Return the equation of one mode, and its operands."""
    matrices = _one_a_mode(x, factors, mode, "mttkrp", "factors")
    if len({f.shape[1] for f in matrices.values()}) > 1:
        ranks = ", ".join(f"{f.shape[1]} in mode {m}" for m, f in matrices.items())
        raise ShapeError(f"mttkrp: the factors must have one rank, found {ranks}")
    return _mttkrp_equation(len(factors), mode), [x, *matrices.values()]


@lru_cache(maxsize=256)
def _mttkrp_equation(order: int, mode: int) -> str:
    letters, rank = letters_of(order, 1, "mttkrp")
    return equation(letters, [c + rank for m, c in enumerate(letters) if m != mode], letters[mode] + rank)


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
    sparse = _sparse(x, "ttmc")
    mode = _mode(sparse, mode, "ttmc")
    by_mode = _one_a_mode(sparse, matrices, mode, "ttmc", "matrices")
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
    sparse = _sparse(x, name)
    mode = _mode(sparse, mode, name)
    letters, rank = letters_of(sparse.order, len(ranks), name)
    sizes: tuple[int | str, ...] = (*ranks, sparse.shape[mode])
    term = rank + letters[mode]
    if transpose:
        sizes, term = sizes[::-1], term[::-1]
    table = _table(other, sparse, sizes, f"{name}: the {what} of mode {mode}")
    kept = letters[:mode] + rank + letters[mode + 1 :]
    return einsum(equation(letters, [term], kept), sparse, table, **settings)


@overload
def spmm(a: Any, b: Tensor, **settings: Unpack[ToSparse]) -> SparseTensor: ...
@overload
def spmm(a: Any, b: Tensor, **settings: Unpack[Auto]) -> Tensor: ...
@register_op
def spmm(a: Any, b: Tensor, **settings: Any) -> Result:
    """Multiply a sparse matrix by a dense matrix, ``"ij,jr->ir"``, or by a vector, ``"ij,j->i"``.

    Args:
        a: sparse (rows, columns).
        b: (columns, width) or (columns,).
        settings: as for `einsum`.

    Returns:
        (rows, width) or (rows,), dense.

    Examples:
        >>> stc.spmm(stc.eye(2, 3), torch.ones(3, 4)).shape
        torch.Size([2, 4])
    """
    sparse = _matrix(a, "spmm", b)
    b = as_operand(b, "spmm: b")
    if not isinstance(b, Tensor):
        raise ShapeError(f"spmm: b must be a dense tensor, found {type(b).__name__}; a @ b takes a sparse one too")
    if b.ndim not in (1, 2) or b.shape[0] != sparse.shape[1]:
        raise ShapeError(f"spmm: b must have {sparse.shape[1]} rows, as a has columns, found {_found(b)}")
    check_operand(b, "spmm: b", sparse.dtype, sparse.device)
    wide = "r" if b.ndim == 2 else ""
    return einsum(f"ij,j{wide}->i{wide}", sparse, b, **settings)


@overload
def sddmm(a: Any, left: Result, right: Result, **settings: Unpack[ToDense]) -> Tensor: ...
@overload
def sddmm(a: Any, left: Result, right: Result, **settings: Unpack[Auto]) -> SparseTensor: ...
@register_op
def sddmm(a: Any, left: Result, right: Result, **settings: Any) -> Result:
    """Compute a sampled dense-dense product: a's values times ``left @ right.T`` at a's nonzeros, ``"ij,ir,jr->ij"``.

    Args:
        a: sparse (rows, columns).
        left: (rows, rank).
        right: (columns, rank).
        settings: as for `einsum`.

    Returns:
        A `SparseTensor` with the pattern of a, coalesced. For several heads write
        ``einsum("ij,ihr,jhr->ijh", a, left, right)``.

    Examples:
        >>> stc.sddmm(stc.eye(3), torch.ones(3, 2), torch.ones(3, 2)).values
        tensor([2., 2., 2.])
    """
    sparse = _matrix(a, "sddmm")
    left = _table(left, sparse, (sparse.shape[0], "rank"), "sddmm: left")
    right = _table(right, sparse, (sparse.shape[1], "rank"), "sddmm: right")
    if left.shape[1] != right.shape[1]:
        raise ShapeError(f"sddmm: left and right must have one rank, found {left.shape[1]} and {right.shape[1]}")
    return einsum("ij,ir,jr->ij", sparse, left, right, **settings)


@register_op
def contract(
    x: Any,
    y: Any,
    modes: int | tuple[int | Sequence[int], int | Sequence[int]],
    *,
    input: Result | None = None,
    alpha: float | complex = 1,
    beta: float | complex = 0,
    **settings: Unpack[Auto],
) -> Result:
    """Sum over modes of a sparse tensor and another tensor, as `torch.tensordot`: ``"ijk,jkr->ir"`` for ``modes=2``.

    Args:
        x: sparse, of any order.
        y: sparse or dense, of any order.
        modes: a number n: the last n modes of x with the first n of y; or a pair (modes of x, modes of y).
        input: a tensor to add, sparse or dense, of the result's shape, dtype and device.
        alpha: factor of the contraction.
        beta: factor of `input`, which is not read if this is 0.
        settings: as for `einsum`, ``drop_zeros=True`` included.

    Returns:
        The tensor with x's other modes, then y's other modes. If y is dense, it is a `SparseTensor` when two or more
        of x's modes are left, with y's modes as dense modes, else dense. If y is sparse, it is a `SparseTensor` when
        any mode is left. With `input`, ``alpha * contraction + beta * input``, sparse if both are sparse. Integers are
        added in 64 bits; a sum that does not fit is refused.

    Examples:
        >>> stc.contract(stc.rand((4, 5, 6), nnz=9), torch.ones(5, 6, 2), 2).shape
        torch.Size([4, 2])
    """
    sparse = _sparse(x, "contract", y)
    second = as_operand(y, "contract: y")
    if not isinstance(second, SparseTensor | Tensor):
        raise ShapeError(f"contract: y must be a dense torch tensor, or sparse, found {type(second).__name__}")
    check_operand(second, "contract: y", sparse.dtype, sparse.device)
    order = len(second.shape)
    left, right = _pairs(modes, sparse.shape, second.shape)
    for m, n in zip(left, right, strict=True):
        if sparse.shape[m] != second.shape[n]:
            raise ShapeError(
                f"contract: mode {m} of x has size {sparse.shape[m]}, mode {n} of y has size {second.shape[n]}: "
                "modes that are summed together have one size"
            )
    check_scalars(sparse.dtype, alpha=alpha, beta=beta)
    if beta != 0 and input is None:
        raise EquationError(f"contract: beta is {beta}, and there is no input for it to be times")
    letters, others = letters_of(sparse.order, order - len(right), "contract")
    paired, rest = dict(zip(right, left, strict=True)), iter(others)
    term = "".join(letters[paired[n]] if n in paired else next(rest) for n in range(order))
    kept = "".join(c for m, c in enumerate(letters) if m not in left) + others
    if input is not None:
        sizes = dict(zip(letters + term, (*sparse.shape, *second.shape), strict=True))
        check_accumulation(input, tuple(sizes[c] for c in kept), sparse.dtype, sparse.device)
    scaled = alpha != 1 or beta != 0
    if type(sparse) is not SparseTensor:
        if scaled:
            raise DistributedError("contract: alpha=, beta= and input= are of tensors of one process, and x is Sharded")
        return einsum(equation(letters, [term], kept), sparse, second, **settings)
    drop_zeros = settings.pop("drop_zeros", False)
    wide = summed_dtype(sparse.dtype) if scaled else sparse.dtype  # of integers only the sum need fit
    contraction = einsum(equation(letters, [term], kept), sparse.to(wide), second.to(wide), **settings)
    what = f"{alpha} times the result" + (f" and {beta} times input" if beta else "")
    result = narrowed(accumulated(contraction, input, alpha, beta), sparse.dtype, what)
    return without_zeros(result) if drop_zeros and isinstance(result, SparseTensor) else result


@register_op
def min_plus(x: Any, y: Tensor) -> Tensor:
    """Multiply by a matrix in the min-plus semiring, as shortest paths: ``z[i, r] = min over j of x[i, j] + y[j, r]``.

    Args:
        x: sparse (rows, columns), of real values; an absent entry is an infinite distance.
        y: (columns, width) or (columns,).

    Returns:
        (rows, width) or (rows,), dense; infinity for a row without entries. It needs memory for a row of y at each
        entry.

    Examples:
        >>> far = torch.tensor([0.0, torch.inf, torch.inf])
        >>> edges = stc.SparseTensor([[1, 2, 2], [0, 0, 1]], [1.0, 5.0, 2.0], (3, 3))  # to, from
        >>> stc.min_plus(edges, torch.minimum(far, stc.min_plus(edges, far)))
        tensor([inf, 1., 3.])
    """
    sparse = _matrix(x, "min_plus")
    wide = ("width",) if isinstance(y, Tensor) and y.ndim == 2 else ()
    table: Any = _table(y, sparse, (sparse.shape[1], *wide), "min_plus: y")
    if not sparse.dtype.is_floating_point or not isinstance(table, Tensor):
        raise DtypeError(
            f"min_plus takes floating point values and a dense y, found {sparse.dtype} and {type(y).__name__}"
        )
    sparse = without_blocks(sparse.coalesce())
    columns = sparse.coords[1]
    nbytes = 2 * sparse.nnz * table[:1].nbytes
    memory.check(f"the {sparse.nnz:,} rows of sums of min_plus", nbytes, table.device)
    sums = sparse.values.view(-1, *[1] * len(wide)) + table[columns]
    least = reduced_groups(sums, sparse.pattern, (0,), "amin")
    extrema = sums.new_full((sparse.shape[0], *sums.shape[1:]), torch.inf)
    return extrema.index_copy(0, groups_of(sparse.pattern, (0,)).pattern.coords[0], least)


# -- equations --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def letters_of(order: int, ranks: int, name: str) -> tuple[str, str]:
    """(one letter a mode, one letter a rank): i, j, k, … and r, s, t, … as far as they go."""
    if order + ranks > len(ascii_letters):
        raise EquationError(f"{name}: {order} modes and {ranks} ranks need more than the 52 letters there are")
    rest = "".join(outside(ascii_letters, MODES + RANKS))
    modes = (MODES + rest + RANKS)[:order]
    return modes, "".join(outside(RANKS + rest + MODES, modes))[:ranks]


def equation(letters: str, terms: Sequence[str], kept: str) -> str:
    """The equation of a sparse operand, dense ones and a result, each by its letters."""
    return f"{','.join((letters, *terms))}->{kept}"


# -- checks -----------------------------------------------------------------------------------------------------------


def _sparse(x: Any, name: str, other: Any = None) -> SparseTensor:
    """The first operand, which must be sparse; `other` is the second one of a product."""
    if type(x) is SparseTensor or sharded_of((x,)) is not None:
        return x  # type: ignore[no-any-return]
    if isinstance(x, str):
        raise EquationError(
            f"{name} writes the equation itself: {_call(name)}; sparsetc.einsum takes one, here {x!r:.60}"
        )
    check_plain(x, f"{name}: the first operand")
    sparse = SparseTensor.coerce(x)
    if sparse is None:
        exchanged = "where only the second is, call torch.tensordot, torch.matmul or einsum"
        what_it_is = not_sparse(x) if SparseTensor.coerce(other) is None else not_sparse(x, exchanged)
        raise EquationError(f"{name}: the first operand must be sparse, {what_it_is}")
    return sparse


def _matrix(a: Any, name: str, other: Any = None) -> SparseTensor:
    sparse = _sparse(a, name, other)
    if sparse.order != 2:
        raise ShapeError(f"{name}: a must be a matrix, found order {sparse.order}, shape {sparse.shape}")
    return sparse


def _call(name: str) -> str:
    """Return the call of an operation as text."""
    named = [p.name for p in signature(OPERATIONS[name]).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return f"{name}({', '.join(named)})"


def _mode(x: SparseTensor, mode: Any, name: str) -> int:
    try:
        place = index(mode)
    except TypeError:
        raise ShapeError(f"{name}: a mode is an integer, found {type(mode).__name__}; call {_call(name)}") from None
    return _place(place, x.shape, name, "x")


def _place(mode: int, shape: tuple[int, ...], name: str, what: str) -> int:
    order = len(shape)
    if not -order <= mode < order:
        message = f"{name}: mode {mode} is not a mode of {what}, whose shape is {tuple(shape)}"
        raise ShapeError(f"{message}; expected {-order}..{order - 1}")
    return mode % order


def _one_a_mode(x: SparseTensor, given: Sequence[Result | None], mode: int, name: str, what: str) -> dict[int, Result]:
    """The matrices of all modes but one, by mode."""
    listed = isinstance(given, list | tuple) or (isinstance(given, Sized) and not isinstance(given, Tensor | str))
    if not listed or len(given) != x.order:
        kind = "a tensor" if isinstance(given, Tensor) else type(given).__name__
        what_it_is = len(given) if listed else kind
        raise EquationError(
            f"{name}: {what} must be a list of {x.order}, one a mode of x (None for mode {mode}), found {what_it_is}"
        )
    kept: dict[int, Result] = {}
    for m, (matrix, size) in enumerate(zip(given, x.shape, strict=True)):
        if m != mode:
            kept[m] = _table(matrix, x, (size, "rank"), f"{name}: {what}[{m}]")
    if not kept:
        raise EquationError(f"{name}: x has order {x.order}; it needs at least 2 modes, one of them to sum")
    return kept


def _table(given: Any, x: SparseTensor, shape: tuple[int | str, ...], what: str) -> Result:
    """Another operand than x as a tensor, sparse if it is; checked are dtype, device and shape, whose rank is free."""
    table = as_operand(given, what)
    sizes = table.shape if isinstance(table, Result) else ()
    if len(sizes) != len(shape) or any(n != m for n, m in zip(sizes, shape, strict=True) if m not in ("rank", "width")):
        expected = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
        raise ShapeError(f"{what} must have shape {expected}, found {_found(table)}")
    check_operand(table, what, x.dtype, x.device)
    return table  # type: ignore[no-any-return]


def _found(operand: Any) -> str:
    return f"shape {tuple(operand.shape)}" if isinstance(operand, Result) else type(operand).__name__


def _pairs(modes: Any, left: tuple[int, ...], right: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the modes of x and of y that are summed in pairs, counted from the first."""
    if isinstance(modes, int):
        if not 0 <= modes <= min(len(left), len(right)):
            raise ShapeError(
                f"contract: {modes} modes cannot be summed; x has order {len(left)}, y has {len(right)} dimensions"
            )
        return list(range(len(left) - modes, len(left))), list(range(modes))
    try:
        sides = [[side] if isinstance(side, int) else [index(m) for m in side] for side in modes]
    except TypeError:
        sides = []
    if len(sides) != 2 or len(sides[0]) != len(sides[1]):
        raise EquationError(f"contract: modes must be a number, or as many modes of x as of y, found {modes!r:.80}")
    both = []
    for side, shape, name in zip(sides, (left, right), "xy", strict=True):
        places = [_place(m, shape, "contract", name) for m in side]
        if len(set(places)) != len(places):
            raise EquationError(f"contract: a mode of {name} is named twice in {side}")
        both.append(places)
    return both[0], both[1]
