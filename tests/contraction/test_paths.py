"""Contraction in steps: every path of an einsum gives what one pass gives, and the fastest is found by its price."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf
from typing import Any

import opt_einsum
import pytest
import torch

import sparsetc as stc
from sparsetc.contraction.guard import Guard
from sparsetc.device.profile import cpu
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.equation.parse import parse
from sparsetc.planner.paths import Search

TTMC = "ijkl,jJ,kK,lL->iJKL"


def scattered(shape: Sequence[int], nnz: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> stc.SparseTensor:
    """A tensor of distinct nonzeros anywhere."""
    g = torch.Generator().manual_seed(seed)
    whole = torch.zeros(tuple(shape), dtype=dtype)
    places = torch.randperm(whole.numel(), generator=g)[:nnz]
    whole.view(-1)[places] = torch.randn(len(places), generator=g, dtype=torch.float64).to(dtype)
    return stc.SparseTensor.from_dense(whole)


def tables(equation: str, sizes: dict[str, int], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """The dense operands of an equation whose first operand is sparse."""
    g = torch.Generator().manual_seed(1)
    terms = equation.split("->")[0].split(",")[1:]
    return [torch.randn([sizes[c] for c in t], generator=g, dtype=torch.float64).to(dtype) for t in terms]


def ttmc(rank: int = 3, dtype: torch.dtype = torch.float64) -> tuple[stc.SparseTensor, list[torch.Tensor]]:
    x = scattered((6, 7, 8, 9), 300, dtype=dtype)
    return x, tables(TTMC, dict(zip("ijkl", x.shape, strict=True)) | dict.fromkeys("JKL", rank), dtype)


def drawn(seed: int) -> tuple[str, stc.SparseTensor, list[torch.Tensor], list[tuple[int, ...]]]:
    """An equation with operands, and a path of them."""
    r = random.Random(seed)
    own = "ijklm"[: r.randint(1, 5)]
    sizes = {c: r.choice((1, 2, 3, 5)) for c in own} | {c: r.choice((1, 2, 4)) for c in "rst"}
    terms = ["".join(r.sample(own + "rst", r.randint(1, 3))) for _ in range(r.randint(1, 4))]
    letters = sorted({*own, *"".join(terms)})
    equation = ",".join([own, *terms]) + "->" + "".join(r.sample(letters, r.randint(0, min(3, len(letters)))))
    dense_modes = r.choice((0, 0, 0, 1)) if len(own) > 1 else 0
    x = scattered([sizes[c] for c in own], 3 * len(own) * 4, seed)
    if dense_modes:
        rows = torch.unique(x.coords[:-1], dim=1)
        x = stc.SparseTensor(rows, x.to_dense()[tuple(rows)], x.shape)
    left, path = 1 + len(terms), []
    while left > 1:
        places = tuple(r.sample(range(left), min(left, r.choice((2, 2, 2, 3, left)))))
        path.append(places)
        left += 1 - len(places)
    return equation, x, tables(equation, sizes), path


@pytest.mark.parametrize("seed", range(60))
def test_any_path_and_its_gradients_agree_with_torch(seed: int) -> None:
    equation, x, dense, path = drawn(seed)
    values = x.values.clone().requires_grad_()
    operands = [t.clone().requires_grad_() for t in dense]
    found = stc.einsum(equation, x.with_values(values), *operands, path=path, output="dense")
    whole = x.to_dense().requires_grad_()
    others = [t.clone().requires_grad_() for t in dense]
    expected = torch.einsum(equation, whole, *others)
    torch.testing.assert_close(found, expected)
    above = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(2))
    found.backward(above)
    expected.backward(above)
    for one, other in zip(operands, others, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    torch.testing.assert_close(values.grad, sampled(x, whole.grad))


def sampled(x: stc.SparseTensor, whole: torch.Tensor) -> torch.Tensor:
    """What a dense tensor has at the entries of a sparse one."""
    return whole[tuple(x.coords)]  # rows of dense modes too


@pytest.mark.parametrize("plan", ["one-pass", "steps", "dense", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.bfloat16])
def test_plans_by_name(plan: str, dtype: torch.dtype) -> None:
    x, dense = ttmc(dtype=dtype)
    kernel = stc.compile(TTMC, x, *dense, plan=plan)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = torch.einsum(TTMC, *(t.to(wide) for t in (x.to_dense(), *dense)))
    error = (kernel(*dense).to(wide) - expected).norm() / expected.norm()
    assert error < (4e-3 if dtype == torch.bfloat16 else 1e-5)
    assert (kernel.plan.name == "steps") >= (plan == "steps")


def test_sums_of_16_bits_are_not_rounded_on_the_way() -> None:
    x = stc.full((4, 64, 64), 1.0).to(torch.bfloat16)
    row, column = torch.full((64, 1), 1.0).bfloat16(), torch.tensor([[1.0]] * 63 + [[-63 * 1.0 + 1]]).bfloat16()
    found = stc.einsum("ijk,jr,ks->irs", x, row, column, path=[(0, 2), (0, 1)])
    assert found.flatten().tolist() == [64.0] * 4


def test_opt_einsum_paths_are_taken() -> None:
    x, dense = ttmc()
    path, _ = opt_einsum.contract_path(TTMC, x.to_dense(), *dense)
    kernel = stc.compile(TTMC, x, *dense, path=path)
    assert kernel.plan.path == tuple(tuple(sorted(step)) for step in path)
    torch.testing.assert_close(kernel(*dense), opt_einsum.contract(TTMC, x.to_dense(), *dense))


def test_a_plan_in_steps_is_taken_again() -> None:
    x, dense = ttmc()
    kernel = stc.compile(TTMC, x, *dense, plan="steps")
    again = stc.compile(TTMC, x, *dense, plan=kernel.plan)
    assert again.plan == kernel.plan
    assert again.source == kernel.source


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ([(0, 5), (0, 1), (0, 1)], "different operands of the 4 that are left"),
        ([(0, 0), (0, 1), (0, 1)], "different operands of the 4"),
        ([(0, 1), (0, 1), (0, 1, 1), ()], "different operands of the 2"),
        ([(0, 1)], "is of 2 operands, the equation has 4"),
        ([()], "is of 0 operands"),
        ([("a",)], "list of tuples of positions"),
        (3, "list of tuples of positions"),
        ([], "list of tuples of positions"),
    ],
)
def test_a_path_that_cannot_be_is_refused(path: object, message: str) -> None:
    x, dense = ttmc()
    with pytest.raises(stc.PlanError, match=message):
        stc.compile(TTMC, x, *dense, path=path)


def test_steps_of_what_has_none_are_refused() -> None:
    x = scattered((4, 5), 8)
    with pytest.raises(stc.PlanError, match="fewer than two dense operands"):
        stc.einsum("ij,j->i", x, torch.ones(5, dtype=torch.float64), plan="steps")
    blocks = stc.SparseTensor.from_dense(torch.ones(4, 4), blocksize=(2, 2))
    with pytest.raises(stc.PlanError, match="blocks"):
        stc.einsum("ij,ir,jr->r", blocks, torch.ones(4, 2), torch.ones(4, 2), plan="steps")
    with pytest.raises(stc.PlanError, match="its result is sparse"):
        stc.einsum("ij,ir,jr->ij", x, *[torch.ones(n, 2).double() for n in (4, 5)], path=[(0,), (0, 1), (0, 1)])


def test_intermediate_results_count_against_the_limit() -> None:
    x, dense = ttmc(rank=7)
    nbytes = 8 * 6 * 7**3  # of the result
    with pytest.raises(stc.OutOfMemoryError, match=r'the dense tensor "ijkl"'):
        stc.compile(TTMC, x, *dense, path=[(0,), (0, 3), (0, 2), (0, 1)], memory_limit=nbytes)
    with pytest.raises(stc.OutOfMemoryError, match="jkJK"):
        stc.compile(TTMC, x, *dense, path=[(1, 2), (0, 1, 2)], memory_limit=8 * 7 * 8 * 7 * 7 - 1)
    path = stc.compile(TTMC, x, *dense, plan="steps", memory_limit=nbytes).plan.path
    assert (0,) not in path[:1]


def test_an_infinity_that_no_nonzero_meets_stays_out() -> None:
    x = stc.SparseTensor([[0, 1], [0, 1], [1, 0]], torch.tensor([2.0, 3.0]).double(), (3, 3, 2))
    b, c = torch.ones(3, 2).double(), torch.ones(2, 2).double()
    path = [(0, 1), (1,), (0, 1)]
    kernel = stc.compile("ijk,jr,ks->irs", x, b, c, path=path)
    expected = kernel(b, c)
    b[2] = inf
    torch.testing.assert_close(kernel(b, c), expected)
    torch.testing.assert_close(torch.func.vmap(kernel, in_dims=(0, None))(torch.stack([b, b]), c)[1], expected)
    b[0] = inf
    assert torch.isinf(kernel(b, c)[0]).all()


def test_a_product_of_finite_operands_that_overflows_meets_no_zeros() -> None:
    filled = torch.ones(3, 3, 3)
    filled[:, 0] = 0
    x = stc.SparseTensor.coerce(filled.to_sparse())
    b, c, e = torch.ones(3, 2), torch.ones(3, 2), torch.full((2, 2), 1e10)
    b[0] = 1e30  # where x has no entries
    kernel = stc.compile("ijk,jr,ks,rt->ist", x, b, c, e, path=[(0,), (0, 2), (0, 1), (0, 1)])
    for _ in range(2):
        torch.testing.assert_close(kernel(b, c, e), stc.einsum("ijk,jr,ks,rt->ist", x, b, c, e, plan="coo"))


def test_integers_of_a_path_are_summed_as_those_of_one_pass() -> None:
    x = stc.SparseTensor([[0, 0, 1], [0, 1, 1]], torch.tensor([100, 100, 3], dtype=torch.int8), (2, 2))
    for path in (None, [(0,)]):
        found = stc.einsum("ij->i", x, path=path)
        assert found.dtype == torch.int64
        assert found.tolist() == [200, 3]


def test_double_backward_and_transforms() -> None:
    x, dense = ttmc(rank=2)
    small = [t.requires_grad_() for t in dense]
    kernel = stc.compile(TTMC, x, *dense, plan="steps")
    assert torch.autograd.gradcheck(kernel, tuple(small))
    assert torch.autograd.gradgradcheck(kernel, tuple(small), nondet_tol=1e-12)
    primals = tuple(t.detach() for t in dense)
    _, forward = torch.func.jvp(lambda *t: kernel(*t), primals, primals)
    torch.testing.assert_close(forward, 3 * kernel(*primals))


def test_a_path_in_a_compiled_graph() -> None:
    x, dense = ttmc(dtype=torch.float32)
    kernel = stc.compile(TTMC, x, *dense, plan="steps")
    traced = torch.compile(lambda *t: kernel(*t) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(traced(*dense), 2 * kernel(*dense))


def test_a_sparse_result_has_the_pattern_of_one_pass() -> None:
    x, dense = ttmc()
    equation, operands = "ijkl,kK,lL->ijKL", dense[1:]
    one = stc.einsum(equation, x, *operands, plan="one-pass")
    steps = stc.einsum(equation, x, *operands, plan="steps")
    assert steps.pattern is one.pattern
    torch.testing.assert_close(steps.values, one.values)


@pytest.mark.parametrize("path", [[(0, 2, 3), (1,), (0, 1)], [(0,), (0, 3), (0, 2), (0, 1)]])
def test_new_values_are_seen(path: list[tuple[int, ...]]) -> None:
    x, dense = ttmc()
    kernel = stc.compile(TTMC, x, *dense, path=path)
    before = kernel(*dense)
    torch.testing.assert_close(kernel(*dense), before)
    x.values.numpy()[:] *= 2
    torch.testing.assert_close(stc.einsum(TTMC, x, *dense, path=path), 2 * before)
    x.values.mul_(2)
    torch.testing.assert_close(kernel(*dense), 4 * before)
    torch.testing.assert_close(kernel.with_values(x.values / 4)(*dense), before)


def test_a_line_a_step_is_explained() -> None:
    x, dense = ttmc()
    told = str(stc.explain(TTMC, x, *dense, path=[(1, 2), (0, 2), (1,), (0, 1)]))
    lines = [line.strip() for line in told.splitlines() if line.strip().startswith("step ")]
    assert len(lines) == 4
    assert "jJ,kK->jkJK   torch.einsum" in lines[0]
    assert "made a dense tensor" in lines[2]


# -- the search -------------------------------------------------------------------------------------------------------
def search(x: stc.SparseTensor, equation: str, sizes: dict[str, int]) -> tuple[Bound, Search]:
    terms = equation.split("->")[0].split(",")
    bound = parse(equation, [tuple(sizes[c] for c in t) for t in terms], [n == 0 for n in range(len(terms))])

    def fibers(modes: tuple[int, ...]) -> int:
        return int(torch.unique(x.coords[list(modes)], dim=1).shape[1]) if modes else 1

    return bound, Search(bound, x.order, fibers, x.nnz, cpu().constants, 4, 1 << 32, sparse_result=False)


def test_a_transform_of_integrals_takes_the_dense_tensor() -> None:
    sizes = dict.fromkeys("pqrsijkl", 12)
    _, found = search(scattered((12,) * 4, 8000), "pqrs,pi,qj,rk,sl->ijkl", sizes)
    picked = found.picked(asked=False)
    assert picked is not None
    assert picked[1][0] == (0,)


def test_small_tensors_take_one_pass() -> None:
    sizes = {"i": 6, "j": 7, "k": 8, "r": 4}
    _, found = search(scattered((6, 7, 8), 60), "ijk,jr,kr->ir", sizes)
    assert found.picked(asked=False) is None


def test_a_chain_of_long_fibers_sums_the_long_mode_first() -> None:
    sizes = {"i": 20, "j": 30, "k": 400, "J": 16, "K": 16}
    _, found = search(scattered((20, 30, 400), 20_000), "ijk,jJ,kK->iJK", sizes)
    picked = found.picked(asked=True)
    assert picked is not None
    assert picked[1][0] == (0, 2)


def test_a_first_pass_has_the_price_of_its_plan() -> None:
    sizes = {"i": 20, "j": 30, "k": 400, "J": 16, "K": 16}
    _, found = search(scattered((20, 30, 400), 20_000), "ijk,jJ,kK->iJK", sizes)
    assert found.picked(False, 1.0, lambda taken, after: 1e-3) is not None
    assert found.picked(False, 1.0, lambda taken, after: 0.9) is None


def test_a_step_looks_at_its_operands_again_where_those_of_the_path_changed() -> None:
    x, dense = ttmc()
    kernel, looks = stc.compile(TTMC, x, *dense, path=[(1, 2), (0, 1), (0, 1)]), list[int]()
    step = kernel.steps[0]

    class OnGpu(Guard):
        """A guard of tables that no ndarray changes."""

        def admits(self, operands: Any, tables: Any) -> bool:
            return super().admits(operands, [])

    step.guard = OnGpu(lambda operands: not looks.append(len(operands)))  # type: ignore[func-returns-value]
    for _ in range(3):
        kernel(*dense)
    assert len(looks) == 1
    dense[0][0] = 2
    kernel(*dense)
    assert len(looks) == 2


def test_a_plan_by_entries_is_given_back_where_an_operand_is_broadcast() -> None:
    x = stc.SparseTensor([[1, 0], [0, 1]], torch.rand(2, 2), (2, 2, 2))
    y = stc.SparseTensor([[1, 0], [0, 1]], torch.rand(2), (2, 2))
    equation, operands = (
        "xch,cl,xr,cr,hr,lr->r",
        [x, y, *(torch.rand(2, 2) for _ in range(2)), torch.rand(1, 2), torch.rand(2, 2)],
    )
    kernel = stc.compile(equation, *operands, plan=stc.plans.plan_bcb())
    want = torch.einsum(equation, x.to_dense(), y.to_dense(), *(d.expand(2, 2) for d in operands[2:]))
    torch.testing.assert_close(kernel(*operands[2:]), want)
    torch.testing.assert_close(stc.einsum(equation, *operands, plan=kernel.plan), want)
