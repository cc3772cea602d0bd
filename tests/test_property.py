"""Random einsums, gradients and contractions, in random circumstances, against a reference of their own.

What is drawn, and how it is compared, is in `sparsetc.testing`; ``python -m sparsetc.testing fuzz`` goes on for longer.
"""

from __future__ import annotations

import pytest
import torch
from cases import assert_matches, poisoned, random_sparse, random_values

import sparsetc as stc
from sparsetc.testing.draw import draw
from sparsetc.testing.findings import sweep

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int32, torch.int64, torch.complex64, torch.complex128),
)
BATCHES = {"einsums": (0, 2400, 100), "gradients": (0, 200, 20), "contractions": (0, 400, 40)}
"""First seed, last seed, seeds a test."""


def batches() -> list[tuple[str, range]]:
    """Each kind's seeds, a test's worth at a time."""
    return [(kind, range(n, n + step)) for kind, (a, b, step) in BATCHES.items() for n in range(a, b, step)]


@pytest.mark.parametrize(("kind", "seeds"), batches(), ids=str)
def test_any_case_agrees_with_the_reference(kind: str, seeds: range) -> None:
    assert sweep(kind, seeds) > len(seeds) // 2


@pytest.mark.parametrize("first", range(0, 150, 50))
def test_a_second_call_and_other_values_agree_too(first: int) -> None:
    for seed in range(first, first + 50):
        case = draw("einsums", seed)
        dtype, sizes = DTYPES[seed % len(DTYPES)], case.sizes
        operands = []
        for n, o in enumerate(case.operands):
            if o.nonzeros is None:
                operands.append(random_values(o.shape, dtype, seed + n))
            else:
                shape = tuple(min(sizes[c], 100) for c in o.letters)  # larger ones are no dense operand's
                operands.append(random_sparse(shape, "random", dtype, seed))
        x = next(o for o in operands if isinstance(o, stc.SparseTensor))
        dense = [o for o in operands if isinstance(o, torch.Tensor)]
        other = x.with_values(random_values((x.nnz,), dtype, seed + 99))
        fresh = [random_values(tuple(d.shape), dtype, seed + 50 + n) for n, d in enumerate(dense)]
        again = iter(fresh)
        replaced = [other if o is x else next(again) for o in operands]
        kernel = stc.compile(case.equation, *operands, output=case.form)
        with poisoned():
            assert_matches(kernel(*dense), case.equation, operands)
            assert_matches(kernel.with_values(other.values)(*fresh), case.equation, replaced)
            assert_matches(kernel(*dense), case.equation, operands)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_on_one_case(dtype: torch.dtype) -> None:
    x = random_sparse((6, 7, 8), "random", dtype)
    b, c = random_values((7, 5), dtype, 1), random_values((8, 5), dtype, 2)
    assert_matches(stc.einsum("ijk,jr,kr->ir", x, b, c), "ijk,jr,kr->ir", [x, b, c])
