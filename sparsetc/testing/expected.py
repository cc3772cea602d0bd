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
from sparsetc.testing.reference import Entries, Term, evaluate, join, pattern, result_dtype, whole, wide


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
    """Copies of the leaves that the reference computes with."""
    return [leaf.detach().cpu().to(wide(leaf.dtype)) for leaf in built.leaves]


def magnitude_leaves(built: Built) -> list[torch.Tensor]:
    """Absolute values of what the leaves lay out."""
    found = []
    for operand, leaf in zip(built.case.operands, wide_leaves(built), strict=True):
        memory = operand.memory
        values = laid_out(operand, leaf, memory) if memory in ("conj", "negative", "real") else leaf
        found.append(values.abs().double() if wide(values.dtype) != torch.int64 else values.abs())
    return found


def result_expected(built: Built) -> Expected:
    """The reference's result of a case."""
    case = built.case
    terms = terms_of(built, wide_leaves(built))
    entries = join(terms)
    factor = CIRCUMSTANCES[case.circumstance].factor
    values = evaluate(terms, case.output, case.sizes, entries) * factor
    dtype = case.torch_dtype
    shape = pattern(entries, case.output, case.sizes)
    if wide(dtype) == torch.int64:
        plain_sum = len(case.operands) == 1 and set(case.operands[0].letters) != set(case.output)
        return Expected(values, values, result_dtype(dtype, plain_sum), 0.0, pattern=shape)
    magnitude = evaluate(terms_of(built, magnitude_leaves(built), True), case.output, case.sizes, entries) * factor
    special = any(o.values.specials for o in case.operands)
    nan = _has_nan(built, entries) if special else None
    limit = tolerance(case.dtype, case.precision)
    # A sum over no terms may be formed as a product of sums, of which one is infinite and another 0.
    free = prod(size for letter, size in case.sizes.items() if letter not in case.sparse_letters)
    any_value = special and not entries.count * free
    return Expected(values, magnitude, dtype, limit, SMALLEST.get(case.dtype, 0.0), nan, any_value, shape)


def _has_nan(built: Built, entries: Entries) -> torch.Tensor:
    """Where a term of the result has a factor that is NaN."""
    leaves = [torch.where(torch.isinf(leaf), 1.0, leaf) for leaf in magnitude_leaves(built)]
    return torch.isnan(evaluate(terms_of(built, leaves, True), built.case.output, built.case.sizes, entries))
