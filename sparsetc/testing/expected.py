"""The reference's result of a case.

In: a built case. Out: `Expected`: values in float64, the sum of the absolute values of each element's terms, where a
term is NaN, and the pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from sparsetc.testing.build import Built, laid_out
from sparsetc.testing.compare import SMALLEST, Expected, tolerance
from sparsetc.testing.forms import CIRCUMSTANCES, magnitude_memory
from sparsetc.testing.reference import Entries, Term, evaluate, integer_rule, join, pattern, whole, wide


def terms_of(built: Built, leaves: Sequence[torch.Tensor], magnitude: bool = False) -> list[Term]:
    """The operands as the reference reads them, laid out from these wide leaves on the CPU."""
    terms = []
    for operand, leaf, coords in zip(built.case.operands, leaves, built.coords, strict=True):
        memory = magnitude_memory(operand.memory)
        if not magnitude and operand.memory in ("conj", "negative", "real"):
            memory = operand.memory
        values = laid_out(operand, leaf, memory)
        terms.append(Term(operand.letters, values) if coords is None else whole(operand.letters, coords, values))
    return terms


def wide_leaves(built: Built) -> list[torch.Tensor]:
    """Copies of the leaves that the reference computes with, changed as the circumstance changes them."""
    factor = CIRCUMSTANCES[built.case.circumstance].factor
    first = next(n for n, o in enumerate(built.case.operands) if o.sparse)
    leaves = [leaf.detach().cpu() for leaf in built.leaves]
    if factor != 1:
        leaves[first] = leaves[first] * factor  # in its own dtype, where integers wrap
    return [leaf.to(wide(leaf.dtype)) for leaf in leaves]


def magnitude_leaves(built: Built) -> list[torch.Tensor]:
    """Absolute values of what the leaves lay out."""
    found = []
    for operand, leaf in zip(built.case.operands, wide_leaves(built), strict=True):
        memory = operand.memory
        values = laid_out(operand, leaf, memory) if memory in ("conj", "negative", "real") else leaf
        found.append(values.abs().double() if values.dtype.is_complex else values.double().abs())
    return found


def result_expected(built: Built) -> Expected:
    """The reference's result of a case."""
    case = built.case
    terms = terms_of(built, wide_leaves(built))
    entries = join(terms)
    values = evaluate(terms, case.output, case.sizes, entries)
    magnitude = evaluate(terms_of(built, magnitude_leaves(built), True), case.output, case.sizes, entries)
    dtype = case.promoted
    shape = pattern(entries, case.output, case.sizes)
    if wide(dtype) == torch.int64:
        plain_sum = len(case.operands) == 1 and bool(set(case.letters) - set(case.output))
        dtype, fits = integer_rule(values, dtype, plain_sum)
        return Expected(values, magnitude, dtype, 0.0, fits=fits, pattern=shape)
    special = any(o.values.specials for o in case.operands)
    nan = _has_nan(built, entries) if special else None
    name = str(dtype).removeprefix("torch.")
    limit = tolerance(name, case.precision)
    # A sum over no terms may be formed as a product of sums, of which one is infinite and another 0.
    free = prod(size for letter, size in case.sizes.items() if letter not in case.sparse_letters)
    any_value = special and not entries.count * free
    return Expected(
        values, magnitude, dtype, limit, SMALLEST.get(name, 0.0), nan=nan, any_value=any_value, pattern=shape
    )


def _has_nan(built: Built, entries: Entries) -> torch.Tensor:
    """Where a term of the result has a factor that is NaN."""
    leaves = [torch.where(torch.isinf(leaf), 1.0, leaf) for leaf in magnitude_leaves(built)]
    return torch.isnan(evaluate(terms_of(built, leaves, True), built.case.output, built.case.sizes, entries))
