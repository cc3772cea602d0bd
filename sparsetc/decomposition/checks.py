"""Checks of a decomposition's arguments, before any kernel runs.

In: arguments as users give them. Out: the same, checked and in one form; errors say what was expected and found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isfinite
from operator import index
from typing import Any

import torch
from torch import Tensor

from sparsetc.contraction.request import check_operand
from sparsetc.errors import DecompositionError, DeviceError, DtypeError, FormatError, KeywordError, ShapeError
from sparsetc.support import Ints, outside
from sparsetc.tensor import tables
from sparsetc.tensor.coords import checked_size, mode_of
from sparsetc.tensor.dtypes import INTEGERS
from sparsetc.tensor.inputs import as_dense, check_plain, not_sparse
from sparsetc.tensor.sparse_tensor import SparseTensor

DTYPES = (torch.float32, torch.float64)
"""Dtypes of decompositions, and of models in files."""

OURS = {
    "maxiters": "n_iter_max",
    "stoptol": "tol",
    **dict.fromkeys(("printitn", "printinneritn", "verbose"), "progress=True, or callback"),
    **dict.fromkeys(("return_errors", "cvg_criterion"), "the model's fits"),
    **dict.fromkeys(("optdims", "fixed_factors"), "fixed_modes"),
    "dimorder": "permute() of x, whose modes are updated in their order",
    "non_negative": "nonnegative",
    "fixsigns": "the model's arranged()",
    "svd": 'init="nvecs"',
    "stoptime": "a callback that returns True",
    "maxinneriters": "n_inner_max",
    "epsDivZero": "epsilon",
    "kappatol": "kappa_tol",
    "rank": "ranks",
}
"""Arguments of pyttb's and tensorly's decompositions, and what they are called here, for error messages."""


def names(unknown: Iterable[str], name: str) -> None:
    """Raise `KeywordError` for the names of another library, with ours."""
    for other in unknown:
        if other in OURS:
            raise KeywordError(f"{name} has no {other}=; here it is {OURS[other]}")


def tensor(x: Any, single: bool = False, whole: bool = True) -> SparseTensor:
    """The sparse tensor to decompose: coalesced, of two modes or more, finite float32 or float64 values, no gradient.

    Integers become torch's default dtype.

    Args:
        x: as the user gave it.
        single: whether every nonzero must have its coordinates, none a place in a block or in a dense mode.
        whole: whether all values will be read; where not, `check_values` is for those that will.

    Raises:
        DtypeError, ShapeError, DeviceError, FormatError: it is none. To look at the values waits for a GPU once.
    """
    check_plain(x, "x")
    if hasattr(x, "columns"):
        *modes, values = tables.names(x) or [""]
        x = SparseTensor.from_table(x, modes, values)
    sparse = SparseTensor.coerce(x)
    if sparse is None:
        raise DtypeError(f"x must be sparse, {not_sparse(x)}")
    if sparse.dtype in (*INTEGERS, torch.bool):
        sparse = sparse.to(torch.get_default_dtype())
    kind(sparse.dtype, sparse.device, sparse.shape)
    sparse = sparse.coalesce()
    if sparse.requires_grad:
        sparse = sparse.with_values(sparse.values.detach())
    if sparse.blocksize or (single and sparse.dense_order):
        sparse = sparse.expand_dense()
    if whole:
        check_values(sparse.values)
    return sparse


def kind(dtype: torch.dtype, device: torch.device, shape: Sequence[int]) -> None:
    """DtypeError, DeviceError or ShapeError of a tensor that nothing can be decomposed of, whatever its nonzeros."""
    if dtype not in DTYPES:
        hint = "there is no complex decomposition" if dtype.is_complex else "convert it: x.to(torch.float32)"
        raise DtypeError(f"x must be float32 or float64, found {dtype}; {hint}")
    if device.type == "meta":
        raise DeviceError("x is on the meta device, which holds no values")
    if len(shape) < 2:
        raise ShapeError(f"x has one mode, shape {shape}; a decomposition needs at least 2")
    if 0 in shape:
        raise ShapeError(f"mode {shape.index(0)} of x has size 0, shape {shape}; there is nothing to decompose")


def check_values(values: Tensor) -> None:
    """Raise `FormatError` if values are not finite, or if the sum of their squares overflows or vanishes."""
    if not values.numel():
        return
    largest, square = torch.stack((values.abs().max(), values.square().sum())).tolist()
    check_extent(largest, square, values.dtype)


def check_extent(largest: float, square: float, dtype: torch.dtype) -> None:
    """`check_values`, of the largest magnitude and the sum of the squares."""
    if not isfinite(largest):
        raise FormatError("x has values that are infinite or NaN")
    if largest and not torch.finfo(dtype).tiny <= square < inf:
        raise FormatError(f"x has values up to {largest:.3g}, whose squares add up to {square:.3g} in {dtype}; scale x")


def number(value: Any, least: int, what: str) -> int:
    """Return an integer that is large enough."""
    return checked_size(value, what, least, DecompositionError)


def level(value: Any, what: str) -> float:
    """A number from 0 on; None is 0."""
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value >= 0 and isfinite(value)):
        raise DecompositionError(f"{what} must be a number from 0 on, found {value!r:.80}")
    return float(value)


def callback(value: Any) -> None:
    """Raise `DecompositionError` for a callback that cannot be called."""
    if value is not None and not callable(value):
        raise DecompositionError(f"callback must be a function of a model and an error, found {value!r:.80}")


def free_modes(fixed: Iterable[int] | None, order: int) -> Ints:
    """Return the modes that are not fixed, at least one; negative numbers count from the end."""
    fixed = () if fixed is None else fixed
    kept = (fixed,) if isinstance(fixed, int) else fixed
    free = outside(range(order), {mode_of(order, mode, "fixed_modes") for mode in kept})
    if not free:
        raise DecompositionError("fixed_modes has every mode, so there is nothing to compute")
    return free


def model_parts(init: Any) -> tuple[Any, Any] | None:
    """Weights or a core, and factors: of a model here, in tensorly or pyttb, or of a pair of both; None of no model."""
    if hasattr(init, "factors") or hasattr(init, "factor_matrices"):
        matrices = init.factors if hasattr(init, "factors") else init.factor_matrices
        return getattr(init, "weights", None), matrices
    is_pair = isinstance(init, list | tuple) and len(init) == 2 and isinstance(init[1], list | tuple)
    return tuple(init) if is_pair else None


def model(init: Any, x: SparseTensor, ranks: Sequence[int], kind: str) -> tuple[Any, list[Tensor]]:
    """Check a start, and return its weights or core, None of a list of factors, and copies of its factors."""
    head, factors = model_parts(init) or (None, init)
    if not isinstance(factors, list | tuple):
        type_name = type(init).__name__
        raise ShapeError(f"init must be a {kind} model, its two parts or a list of factors, found {type_name}")
    if len(factors) != x.order:
        raise ShapeError(f"init must have {x.order} factors, one a mode of x, found {len(factors)}")
    wanted = enumerate(zip(factors, x.shape, ranks, strict=True))
    return head, [matrix(f, (n, r), x, f"init's factor of mode {m}") for m, (f, n, r) in wanted]


def matrix(tensor: Any, shape: Ints, x: SparseTensor, what: str) -> Tensor:
    """A contiguous copy of a finite dense tensor of this shape, of x's dtype and device; ndarrays are converted."""
    dense = as_dense(tensor, what)
    tensor = dense if dense is tensor or dense.is_complex() else dense.to(x.device, x.dtype)
    if not isinstance(tensor, Tensor):
        raise DecompositionError(f"{what} must be a torch tensor, found {type(tensor).__name__}")
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{what} must have shape {shape}, found {tuple(tensor.shape)}")
    check_operand(tensor, what, x.dtype, x.device, "x")
    if not bool(tensor.isfinite().all()):
        raise FormatError(f"{what} has values that are infinite or NaN")
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def nonnegative(factors: Sequence[Tensor]) -> None:
    """Raise where a start of a nonnegative decomposition has an entry below 0."""
    for mode, factor in enumerate(factors):
        if bool((factor < 0).any()):
            raise DecompositionError(f"init's factor of mode {mode} has entries below 0, and none may be")


def generator(random_state: Any) -> torch.Generator | None:
    """Return the generator of a random start: the one given, a new one of a seed, or None for torch's own."""
    if random_state is None or isinstance(random_state, torch.Generator):
        return random_state
    try:
        return torch.Generator().manual_seed(index(random_state))
    except (TypeError, ValueError, RuntimeError, OverflowError):  # no integer, or one that is no seed
        raise DecompositionError(
            f"random_state must be a seed or a torch.Generator, found {random_state!r:.80}"
        ) from None
