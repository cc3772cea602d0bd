"""Random einsums, shapes, patterns, dtypes and plans, against the float64 reference; on memory full of NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import PATTERNS, assert_matches, poisoned, random_sparse, random_values
from hypothesis import event, given, settings
from hypothesis import strategies as st

import sparsetc as stc

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int32, torch.int64, torch.complex64, torch.complex128),
)
MOST = 40_000
"""Elements of the product of all sizes: what the reference may have to make."""


@dataclass(frozen=True)
class Drawn:
    """An equation, its operands' shapes, and how to run it."""

    equation: str
    shapes: tuple[tuple[int, ...], ...]
    sparse: int
    pattern: str
    dtype: torch.dtype
    coalesce: bool
    output: str
    plan: str
    deterministic: bool
    seed: int

    def operands(self) -> list[Any]:
        made: list[Any] = []
        for n, shape in enumerate(self.shapes):
            if n == self.sparse:
                made.append(random_sparse(shape, self.pattern, self.dtype, self.seed, self.coalesce))
            else:
                made.append(random_values(shape, self.dtype, self.seed + n + 10))
        return made


@st.composite
def sparse_terms(draw: st.DrawFn) -> str:
    """Letters of the sparse operand, of order 1 to 6; one in four repeats a letter."""
    order = draw(st.integers(1, 6))
    letters = "ijklmn"[:order]
    if order > 1 and draw(st.integers(0, 3)) == 0:
        return "".join(draw(st.lists(st.sampled_from(letters[:-1]), min_size=order, max_size=order)))
    return "".join(draw(st.permutations(letters)))


@st.composite
def problems(draw: st.DrawFn) -> Drawn:
    term = draw(sparse_terms())
    known = sorted(set(term))
    dense = draw(st.lists(st.lists(st.sampled_from([*known, *"rst"]), max_size=4), max_size=3))
    terms = ["".join(t) if draw(st.integers(0, 5)) == 0 else "".join(dict.fromkeys(t)) for t in dense]
    sparse = draw(st.integers(0, len(terms)))
    terms.insert(sparse, term)
    letters = sorted({c for t in terms for c in t})
    output = draw(st.lists(st.sampled_from(letters), unique=True, max_size=len(letters)))
    if draw(st.integers(0, 3)) == 0:  # more often than chance would have it: all the sparse letters
        output = list(dict.fromkeys([*known, *output]))
    smallest = 0 if draw(st.integers(0, 9)) == 0 else 1
    sizes, room = {}, MOST
    for c in letters:
        sizes[c] = draw(st.integers(smallest, max(1, min(7 if c in known else 5, room))))
        room = max(1, room // max(1, sizes[c]))
    kept = any(c in output for c in term)
    return Drawn(
        f"{','.join(terms)}->{''.join(output)}",
        tuple(tuple(sizes[c] for c in t) for t in terms),
        sparse,
        draw(st.sampled_from(sorted(PATTERNS))),
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(0, 3)) > 0,
        draw(st.sampled_from(["auto", "auto", "dense", *(["sparse"] if kept else [])])),
        draw(st.sampled_from(["auto", "auto", "coo", "fiber", "rows"])),
        draw(st.booleans()),
        draw(st.integers(0, 1000)),
    )


@settings(max_examples=1500)
@given(problems())
def test_any_einsum_agrees_with_the_reference(drawn: Drawn) -> None:
    operands = drawn.operands()
    with poisoned():
        try:
            result = stc.einsum(
                drawn.equation,
                *operands,
                output=drawn.output,
                plan=drawn.plan,
                deterministic=drawn.deterministic,
            )
        except stc.PlanError:
            event("the plan does not apply")
            assert drawn.plan in ("fiber", "rows")
            return
    if drawn.output != "auto":
        assert isinstance(result, stc.SparseTensor) == (drawn.output == "sparse")
    assert_matches(result, drawn.equation, operands)


@settings(max_examples=150)
@given(problems())
def test_a_second_call_and_other_values_agree_too(drawn: Drawn) -> None:
    operands = drawn.operands()
    x = operands[drawn.sparse]
    other = x.with_values(random_values((x.nnz,), drawn.dtype, drawn.seed + 99))
    dense = [o for o in operands if isinstance(o, torch.Tensor)]
    kernel = stc.compile(drawn.equation, *operands, output=drawn.output)
    fresh = [random_values(tuple(d.shape), drawn.dtype, drawn.seed + 50 + n) for n, d in enumerate(dense)]
    again = iter(fresh)
    replaced = [other if n == drawn.sparse else next(again) for n in range(len(operands))]
    with poisoned():
        assert_matches(kernel(*dense), drawn.equation, operands)
        assert_matches(kernel.with_values(other.values)(*fresh), drawn.equation, replaced)
        assert_matches(kernel(*dense), drawn.equation, operands)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_on_one_case(dtype: torch.dtype) -> None:
    x = random_sparse((6, 7, 8), "random", dtype)
    b, c = random_values((7, 5), dtype, 1), random_values((8, 5), dtype, 2)
    assert_matches(stc.einsum("ijk,jr,kr->ir", x, b, c), "ijk,jr,kr->ir", [x, b, c])
