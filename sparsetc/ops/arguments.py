"""Arguments of named operations: the equation by the operands' orders, and operands, modes and matrices checked."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from functools import lru_cache
from inspect import signature
from operator import index
from string import ascii_letters
from typing import Any

from torch import Tensor

from sparsetc.api import OPERATIONS, sharded_of
from sparsetc.contraction.request import Result, as_operand, check_operand
from sparsetc.errors import EquationError, ShapeError
from sparsetc.support import outside
from sparsetc.support.checks import found_shape
from sparsetc.tensor.coords import mode_of
from sparsetc.tensor.inputs import check_plain, not_sparse
from sparsetc.tensor.sparse_tensor import SparseTensor

MODES = "ijklmnopq"
"""Letters of modes; the rest of the alphabet follows where they run out."""
RANKS = "rstuvwxyz"
"""Letters of ranks."""


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


def sparse_of(x: Any, name: str, other: Any = None) -> SparseTensor:
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


def matrix_of(a: Any, name: str, other: Any = None) -> SparseTensor:
    sparse = sparse_of(a, name, other)
    if sparse.order != 2:
        raise ShapeError(f"{name}: the first operand must be a matrix, found shape {sparse.shape}")
    return sparse


def _call(name: str) -> str:
    """Return the call of an operation as text."""
    named = [p.name for p in signature(OPERATIONS[name]).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return f"{name}({', '.join(named)})"


def mode_at(x: SparseTensor, mode: Any, name: str) -> int:
    try:
        index(mode)
    except TypeError:
        raise ShapeError(
            f"{name}: a mode must be an integer, found {type(mode).__name__}; call {_call(name)}"
        ) from None
    return mode_of(x.order, mode, name)


def one_a_mode(x: SparseTensor, given: Sequence[Result | None], mode: int, name: str, what: str) -> dict[int, Result]:
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
            kept[m] = checked_table(matrix, x, (size, "rank"), f"{name}: {what}[{m}]")
    if not kept:
        raise EquationError(f"{name}: x has order {x.order}; it needs at least 2 modes, one of them to sum")
    return kept


def checked_table(given: Any, x: SparseTensor, shape: tuple[int | str, ...], what: str) -> Result:
    """Another operand than x as a tensor, sparse if it is; checked are dtype, device and shape, whose rank is free."""
    table = as_operand(given, what)
    sizes = table.shape if isinstance(table, Result) else ()
    if len(sizes) != len(shape) or any(n != m for n, m in zip(sizes, shape, strict=True) if m not in ("rank", "width")):
        expected = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
        raise ShapeError(f"{what} must have shape {expected}, found {found_shape(table)}")
    check_operand(table, what, x.dtype, x.device)
    return table  # type: ignore[no-any-return]
