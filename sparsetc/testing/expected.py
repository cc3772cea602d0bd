"""The reference's result of a case.

In: a built case. Out: `Expected`: values in float64, the sum of the absolute values of each element's terms, where a
term is NaN, and the pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from sparsetc.testing.build import Built, laid_out
from sparsetc.testing.case import Case
from sparsetc.testing.compare import SMALLEST, Expected, tolerance
from sparsetc.testing.forms import CIRCUMSTANCES, magnitude_memory
from sparsetc.testing.reference import ReferenceEntries, Term, evaluate, integer_rule, join, pattern, whole, wide


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


def wide_leaves(built: Built, changed: bool = True) -> list[torch.Tensor]:
    """Copies of the leaves that the reference computes with, changed as the circumstance changes them or as given."""
    factor = CIRCUMSTANCES[built.case.circumstance].factor if changed else 1
    first = next(n for n, o in enumerate(built.case.operands) if o.sparse)
    leaves = [leaf.detach().cpu() for leaf in built.leaves]
    if factor != 1:
        leaves[first] = multiple(leaves[first], factor)
    return [leaf.to(wide(leaf.dtype)) for leaf in leaves]


def multiple(leaf: torch.Tensor, factor: int) -> torch.Tensor:
    """A leaf times a number, in its own dtype, where integers wrap; parts of complex numbers on their own."""
    if leaf.is_complex():
        return torch.view_as_complex(torch.view_as_real(leaf) * factor)
    return leaf * factor


def magnitude_leaves(built: Built) -> list[torch.Tensor]:
    """Absolute values of what the leaves lay out."""
    found = []
    for operand, leaf in zip(built.case.operands, wide_leaves(built), strict=True):
        memory = operand.memory
        values = laid_out(operand, leaf, memory) if memory in ("conj", "negative", "real") else leaf
        found.append(values.abs().double() if values.dtype.is_complex else values.double().abs())
    return found


def rounded_to(case: Case) -> list[str]:
    """Names of the types that the result is rounded to: its own, and those in which duplicates are added up."""
    types = {case.promoted}
    for o in case.operands:
        if o.nonzeros is not None and len(set(o.nonzeros)) < len(o.nonzeros):
            types.add(case.dtype_of(o))
    return sorted(str(t).removeprefix("torch.") for t in types)


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
        fits, kept = True, dtype
        for leaves in (wide_leaves(built, False), wide_leaves(built)):
            exact, close = (
                evaluate(terms_of(built, given), case.output, case.sizes, entries)
                for given in (leaves, [leaf.double() for leaf in leaves])
            )
            kept, held = integer_rule(exact, close, dtype, plain_sum)
            fits &= held
        return Expected(values, magnitude, kept, 0.0, fits=fits, pattern=shape)
    special = any(o.values.specials for o in case.operands)
    nan = _has_nan(built, entries) if special else None
    names = rounded_to(case)
    # A sum over no terms may be formed as a product of sums, of which one is infinite and another 0.
    free = prod(size for letter, size in case.sizes.items() if letter not in case.sparse_letters)
    any_value = special and not entries.count * free
    return Expected(
        values,
        magnitude,
        dtype,
        max(tolerance(name, case.precision) for name in names),
        max(SMALLEST.get(name, 0.0) for name in names),
        nan=nan,
        any_value=any_value,
        pattern=shape,
    )


def _has_nan(built: Built, entries: ReferenceEntries) -> torch.Tensor:
    """Where a term of the result has a factor that is NaN."""
    leaves = [torch.where(torch.isinf(leaf), 1.0, leaf) for leaf in magnitude_leaves(built)]
    return torch.isnan(evaluate(terms_of(built, leaves, True), built.case.output, built.case.sizes, entries))
