"""Whether what was found is what was expected: values within a tolerance, the pattern, dtype and shape exactly.

In: a result and the reference's. Out: nothing, or `Wrong` that says which element is off by how much. An element
that is NaN or infinite in the reference must be so in the result, and no other may be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

TOLERANCE = {
    "float64": 1e-13,
    "float32": 1e-5,
    "float16": 4e-3,
    "bfloat16": 3e-2,
    "complex64": 1e-5,
    "complex128": 1e-13,
}
"""Tolerance of the error of an element, relative to the sum of the absolute values of its terms."""
PRECISION = {"high": 4e-3, "medium": 3e-2}
"""What `TOLERANCE` is where float32 is not kept in matrix products."""
SMALLEST = {"float16": 2e-6}
"""What an element may be off by besides: float16 has few exponents."""


class Wrong(AssertionError):
    """A result that is not the reference's; `what` names the kind of fault."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(f"{what}: {message}")
        self.what = what


@dataclass(frozen=True)
class Expected:
    """The reference's result.

    Attributes:
        magnitude: the sum of the absolute values of each element's terms.
        nan: where a term has a NaN; None where no operand has one.
        any_value: whether values are not compared.
        fits: whether its dtype holds the result; if not, an error is expected.
        pattern: where entries are; None where the pattern is no matter.
    """

    values: torch.Tensor
    magnitude: torch.Tensor
    dtype: torch.dtype
    tolerance: float
    smallest: float = 0.0
    nan: torch.Tensor | None = None
    any_value: bool = False
    fits: bool = True
    pattern: torch.Tensor | None = None


def tolerance(dtype: str, precision: str) -> float:
    """What an error may be, relative to the sum of the absolute values of the terms."""
    return max(TOLERANCE.get(dtype, 0.0), PRECISION.get(precision, 0.0) if dtype in ("float32", "complex64") else 0.0)


def dense_of(found: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A result as a dense tensor, differentiable, and how many entries each element has; None for a dense result."""
    if isinstance(found, torch.Tensor):
        return found, None
    coords, values, shape = found.coords, found.values, tuple(found.shape)
    dense = shape[coords.shape[0] :]
    if dense != tuple(values.shape[1:]) or values.shape[0] != coords.shape[1]:
        raise Wrong(
            "shape", f"a result of shape {shape} has coords {tuple(coords.shape)}, values {tuple(values.shape)}"
        )
    sizes = torch.tensor(shape[: coords.shape[0]], device=coords.device).unsqueeze(1)
    if bool(((coords < 0) | (coords >= sizes)).any()):
        raise Wrong("coordinates", f"a result of shape {shape} has coordinates outside of it")
    where = tuple(coords)
    wide = values if _real_or_complex(values) else values.long()
    whole = torch.zeros(shape, dtype=wide.dtype, device=values.device).index_put(where, wide, accumulate=True)
    ones = torch.ones_like(values, dtype=torch.int64)
    count = torch.zeros(shape, dtype=torch.int64, device=values.device).index_put(where, ones, accumulate=True)
    return whole, count


def check_result(found: Any, expected: Expected, form: str, coalesced: bool) -> None:
    """Raise `Wrong` unless a result is the expected one, in the form that was asked for.

    Args:
        found: a tensor or a `SparseTensor`.
        expected: the reference's result.
        form: ``"auto"``, ``"sparse"`` or ``"dense"``.
        coalesced: whether the sparse operands were, so that the result must be sorted and unique.
    """
    if not expected.fits and coalesced:
        raise Wrong("integers", f"a result that {expected.dtype} cannot hold was given, not refused")
    if form != "auto" and isinstance(found, torch.Tensor) != (form == "dense"):
        raise Wrong("form", f"the result is a {type(found).__name__}, asked for was {form}")
    if found.dtype != expected.dtype:
        raise Wrong("dtype", f"the result is {found.dtype}, expected {expected.dtype}")
    if tuple(found.shape) != tuple(expected.values.shape):
        raise Wrong("shape", f"the result has shape {tuple(found.shape)}, expected {tuple(expected.values.shape)}")
    dense, count = dense_of(found)
    if count is not None and expected.pattern is not None:
        _check_pattern(found, count.cpu(), expected.pattern, coalesced)
    if not expected.any_value:
        check_values(dense.detach().cpu(), expected)


def _real_or_complex(values: torch.Tensor) -> bool:
    return values.is_floating_point() or values.is_complex()


def _check_pattern(found: Any, count: torch.Tensor, pattern: torch.Tensor, coalesced: bool) -> None:
    missing, more = int((pattern & (count == 0)).sum()), int((~pattern & (count > 0)).sum())
    if missing or more:
        raise Wrong("pattern", f"the result's pattern lacks {missing} positions and has {more} too many")
    if (coalesced or found.is_coalesced) and int((count > 1).sum()):
        raise Wrong("pattern", "the result should be coalesced, and has duplicates")
    if (coalesced or found.is_coalesced) and not _sorted(found.coords.cpu()):
        raise Wrong("pattern", "the result should be coalesced, and is not sorted")


def _sorted(coords: torch.Tensor) -> bool:
    columns = coords.T.tolist()
    return columns == sorted(columns)


def check_values(found: torch.Tensor, expected: Expected, what: str = "values") -> None:
    """Raise `Wrong` unless each element is within the tolerance, and NaN or infinite where it should be."""
    wanted = expected.values
    if not _real_or_complex(wanted):
        _require(found.to(wanted.dtype) == wanted, what, found, wanted, None)
        return
    value = found.to(wanted.dtype)
    finite = torch.isfinite(wanted)
    allowed = expected.tolerance * expected.magnitude + expected.smallest
    near = (value - wanted).abs() <= allowed
    _require(torch.where(finite, near, True), what, found, wanted, allowed)
    if bool(finite.all()):
        return
    right = ~torch.isfinite(value)
    if not wanted.is_complex():
        right &= ~torch.isinf(wanted) | (value == wanted)
    if expected.nan is not None:
        right &= ~expected.nan | torch.isnan(value)
    _require(finite | right, f"{what} that are not finite", found, wanted, allowed)


def _require(
    right: torch.Tensor, what: str, found: torch.Tensor, wanted: torch.Tensor, allowed: torch.Tensor | None
) -> None:
    if bool(right.all()):
        return
    wrong = torch.nonzero(~right)
    at = tuple(wrong[0].tolist())
    within = "" if allowed is None else f" within {allowed[at].item():.3g}"
    raise Wrong(
        what,
        f"{len(wrong)} of {right.numel()} elements are wrong; element {at} is {found[at].item()}, expected "
        f"{wanted[at].item()}{within}",
    )
