"""Random einsums called again, with other values, and in every dtype; `test_fuzz` has the rest of what is random."""

from __future__ import annotations

import pytest
import torch
from cases import assert_matches, poisoned, random_sparse, random_values
from fuzz.case import Case
from fuzz.run import ROUND
from fuzz.strategies import cases
from hypothesis import given, seed, settings

import sparsetc as stc

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int32, torch.int64, torch.complex64, torch.complex128),
)


@pytest.mark.parametrize("number", range(15))
def test_a_second_call_and_other_values_agree_too(number: int) -> None:
    @seed(number)
    @settings(max_examples=ROUND, database=None)
    @given(case=cases("einsums"))
    def agree(case: Case) -> None:
        called_again(case)

    agree()


def called_again(case: Case) -> None:
    number = sum(map(ord, case.letters)) + case.operands[0].values[1]
    dtype, sizes = DTYPES[number % len(DTYPES)], case.sizes
    operands = []
    for n, o in enumerate(case.operands):
        if o.nonzeros is None:
            operands.append(random_values(o.shape, dtype, number + n))
        else:
            shape = tuple(min(sizes[c], 100) for c in o.letters)  # larger ones are no dense operand's
            operands.append(random_sparse(shape, "random", dtype, number))
    x = next(o for o in operands if isinstance(o, stc.SparseTensor))
    dense = [o for o in operands if isinstance(o, torch.Tensor)]
    other = x.with_values(random_values((x.nnz,), dtype, number + 99))
    fresh = [random_values(tuple(d.shape), dtype, number + 50 + n) for n, d in enumerate(dense)]
    again = iter(fresh)
    replaced = [other if o is x else next(again) for o in operands]
    equation = ",".join(o.letters for o in case.operands) + "->" + case.output
    kernel = stc.compile(equation, *operands, output=case.form)
    with poisoned():
        assert_matches(kernel(*dense), equation, operands)
        assert_matches(kernel.with_values(other.values)(*fresh), equation, replaced)
        assert_matches(kernel(*dense), equation, operands)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_on_one_case(dtype: torch.dtype) -> None:
    x = random_sparse((6, 7, 8), "random", dtype)
    b, c = random_values((7, 5), dtype, 1), random_values((8, 5), dtype, 2)
    assert_matches(stc.einsum("ijk,jr,kr->ir", x, b, c), "ijk,jr,kr->ir", [x, b, c])
