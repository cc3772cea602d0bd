"""Rules by which an einsum is run as another one: what they give, in which order, and what is composed of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsetc as stc
from sparsetc.contraction.dense import einsum
from sparsetc.contraction.request import Request
from sparsetc.contraction.rewrites import Pull, rewrites_of
from sparsetc.ir.equation.parse import parse
from sparsetc.options import Options


def request(equation: str, *operands: stc.SparseTensor | torch.Tensor) -> Request:
    shapes = [tuple(o.shape) for o in operands]
    bound = parse(equation, shapes, [isinstance(o, stc.SparseTensor) for o in operands])
    return Request(bound, operands, Options(), "auto", of_call=True)


def semi_sparse() -> stc.SparseTensor:
    g = torch.Generator().manual_seed(0)
    values = torch.rand(4, 5, generator=g, dtype=torch.float64)
    return stc.SparseTensor([[0, 1, 1, 2], [2, 0, 1, 2]], values, (3, 3, 5))


def test_rules_follow_one_another_and_are_explained_by_name() -> None:
    x, b, w = semi_sparse(), torch.rand(3, 2, dtype=torch.float64), torch.rand(2, 4, dtype=torch.float64)
    ones = torch.ones(3, 1, 2, dtype=torch.float64).expand(3, 5, 2)
    operands = x, b, w, ones
    rewrites, inner = rewrites_of(request("ijh,jr,rs,ihr->ihs", *operands))
    assert [r.name for r in rewrites] == ["broadcast along h", "entries numbered a"]
    assert str(inner.bound.einsum) == "aij,jr,rs,ir,ah->ihs"
    kernel = stc.compile("ijh,jr,rs->ihs", x, b, w)
    for line in ("run as   aij,jr,rs,ah->ihs   entries numbered a", "run as   aij,js,ah->ihs   first jr,rs->js"):
        assert line in str(kernel.explain())
    want = torch.einsum("ijh,jr,rs,ihr->ihs", x.to_dense(), b, w, ones)
    torch.testing.assert_close(stc.einsum("ijh,jr,rs,ihr->ihs", *operands).to_dense(), want)


@pytest.mark.parametrize("equation", ["iij,jr,rs->is", "iij,jr->ri"])
def test_functions_are_composed_and_those_of_packed_values_are_left_out(equation: str) -> None:
    g = torch.Generator().manual_seed(0)
    x = stc.SparseTensor(torch.randint(0, 3, (3, 20), generator=g), torch.arange(20.0), (3, 3, 3))
    dense = [torch.rand(3, 2, generator=g), torch.rand(2, 4, generator=g)][: equation.count(",")]
    asked = request(equation, x, *dense)
    rewrites, inner = rewrites_of(asked)
    pull = Pull.of(asked.bound.einsum, rewrites)
    (values,), tables = pull([x.values], dense)
    assert torch.equal(values, pull.value(x.values))
    assert torch.equal(values, x.values[x.coords[0] == x.coords[1]])
    assert [tuple(t.shape) for t in tables] == list(inner.bound.dense_shapes)
    _, beside = pull([x.values], dense, packed=True)
    assert all(map(torch.equal, tables, beside))
    assert sum(change is not None for change, _ in pull.beside) == len(pull.steps) - 1


EQUATIONS = [
    "jr,rs->js",
    "rs,jr->sj",
    "jr,sr->js",
    "ijk,rk->rij",
    "ijk,jr->rik",
    "ijk,kr->ijr",
    "j,jr->r",
    "ij,kl->ikjl",
    "ij,ij->",
    "i,ij->j",
]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_products_of_dense_operands(equation: str, turned: bool) -> None:
    sizes, g = dict(zip("ijklrs", (3, 4, 5, 6, 7, 8), strict=True)), torch.Generator().manual_seed(0)
    operands = []
    for term in equation.split("->")[0].split(","):
        operand = torch.rand([sizes[c] for c in term], generator=g, dtype=torch.float64)
        dims = tuple(reversed(range(operand.ndim)))
        operands.append(operand.permute(dims).contiguous().permute(dims) if turned else operand)
    torch.testing.assert_close(einsum(equation, *operands), torch.einsum(equation, *operands))


def test_ones_that_are_not_kept_are_no_operand_of_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    diagonal = torch.arange(2).expand(3, 2)
    pattern = stc.SparseTensor(diagonal, torch.ones(2), (2, 2, 2)).pattern.of_ones
    ones = stc.SparseTensor._make(pattern, torch.zeros(()).expand(2))
    tables = [torch.zeros(1).expand(2, 128, 1024), torch.zeros(2, 64, 128)]
    contraction = stc.compile("aIJ,Jjr,aij->Iir", ones, *tables, backend="triton").contraction
    assert "32 positions of j a step" in contraction.rewrites[-1]
    seen: list[torch.Tensor] = []

    def result(*arguments: Any) -> torch.Tensor:
        seen.extend(arguments[-1])
        return torch.zeros(())

    monkeypatch.setattr(type(contraction.innermost), "result", result)
    contraction.result([pattern], [None], tables)
    assert [table.shape for table in seen] == [(2, 128, 1024), (2, 64, 128)]


def test_long_sums_of_sampled_blocks_are_loops_whose_results_are_stored() -> None:
    entries = torch.arange(6)
    pattern = stc.SparseTensor(torch.stack((entries, entries // 2, entries % 4)), torch.ones(6), (6, 40, 40)).pattern
    ones = stc.SparseTensor._make(pattern.of_ones, torch.zeros((), dtype=torch.float16).expand(6))
    table = torch.zeros((), dtype=torch.float16).expand(1024, 40, 32)
    kernel = stc.compile("aIJ,rIi,rJj->aij", ones, table, table, output="dense", backend="triton")
    assert "64 positions of r a step" in kernel.contraction.rewrites[-1]
    assert "tl.store" in kernel.source
    assert "atomic" not in kernel.source
