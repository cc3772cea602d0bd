"""Products of entries with matrices that many of them share: a product a group, whatever the pattern."""

from __future__ import annotations

import pytest
import torch

import sparsetc as stc
from sparsetc.contraction import passing

SIZES = {"t": 60, "e": 4, "i": 32, "o": 48, "b": 3, "s": 50, "p": 5}
EQUATIONS = [
    *("te,ti,eio->to", "te,ti,eoi->ot", "te,eio,ti->to", "te,tbi,eio->tbo", "te,tbi,eio->tob", "te,tpi,eoip->to"),
    *("tse,si,eio->to", "te,ti,eio->o", "te,ti,eio->eo", "tse,tsi,eio->os"),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The entries of products by groups."""
    counts: list[int] = []
    multiply = passing._products

    def noting(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        counts.append(len(rows))
        return multiply(rows, matrices, ends)

    monkeypatch.setattr(passing, "_products", noting)
    return counts


def operands(equation: str, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Coordinates in no order; values and dense operands that learn."""
    g = torch.Generator().manual_seed(0)
    first, *terms = equation.split("->")[0].split(",")
    coords = torch.stack([torch.randint(SIZES[c], (count,), generator=g) for c in first])
    drawn = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((count,), *map(shape_of, terms))]
    return coords, [t.to(dtype).requires_grad_() for t in drawn]


def shape_of(term: str) -> tuple[int, ...]:
    """The shape of an operand."""
    return tuple(SIZES[c] for c in term)


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.complex64], ids=str)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_results_and_gradients(equation: str, dtype: torch.dtype, products: list[int]) -> None:
    letters = equation.split(",")[0]
    coords, (values, *dense) = operands(equation, dtype, 180)
    result = stc.einsum(equation, stc.SparseTensor(coords, values, shape_of(letters)), *dense, output="dense")
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = [t.detach().to(wide).requires_grad_() for t in (values, *dense)]
    full = torch.zeros(shape_of(letters), dtype=wide).index_put(tuple(coords), exact[0], accumulate=True)
    expected = torch.einsum(equation, full, *exact[1:])
    upstream = torch.randn(expected.shape, dtype=wide)
    ours = result, *torch.autograd.grad(result, [values, *dense], upstream.to(dtype))
    assert products
    assert (result.dtype, result.is_contiguous()) == (dtype, True)
    for one, other in zip(ours, (expected, *torch.autograd.grad(expected, exact, upstream)), strict=True):
        assert (one.to(wide) - other).norm() <= TOLERANCE.get(dtype, 1e-5) * other.norm()


def test_second_derivatives() -> None:
    coords, (values, *dense) = operands("te,ti,eio->to", torch.float64, 40)
    dense = [dense[0][:, :3], dense[1][:, :3, :2]]
    recipe = passing.Recipe.of("te,ti,eio->to", ((60, 4), (60, 3), (4, 3, 2)), 0, "dense")
    assert recipe is not None

    def result(*operands: torch.Tensor) -> torch.Tensor:
        return recipe.result(coords.unbind(), operands[0], operands[1:])

    assert torch.autograd.gradgradcheck(result, (values, *dense))


@pytest.mark.parametrize(("count", "by_groups"), [(0, False), (20, False), (40, True), (250, False)])
def test_too_few_and_too_many_entries_are_compiled(count: int, by_groups: bool, products: list[int]) -> None:
    """Few do not fill groups; if more entries than rows times matrices were given, a dense product comes first."""
    coords, (values, *dense) = operands("te,ti,eio->to", torch.float32, count)
    x = stc.SparseTensor(coords, values, (60, 4), coalesce=False)
    full = torch.zeros(60, 4).index_put(tuple(coords), values, accumulate=True)
    torch.testing.assert_close(
        stc.einsum("te,ti,eio->to", x, *dense), torch.einsum("te,ti,eio->to", full, *dense), rtol=1e-4, atol=1e-4
    )
    assert bool(products) == by_groups


def test_what_is_asked_for_is_planned(products: list[int]) -> None:
    coords, (values, *dense) = operands("te,ti,eio->to", torch.float32, 40)
    x = stc.SparseTensor(coords, values, (60, 4))
    for options in ({"plan": "coo"}, {"deterministic": True}, {"precision": "medium"}):
        stc.einsum("te,ti,eio->to", x, *dense, **options)
    assert not products
