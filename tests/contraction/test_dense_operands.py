"""Dense operands however they lie in memory: broadcast, strided, negated or conjugated by a bit, under autocast."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import assert_matches, random_sparse, random_values

import sparsetc as stc
from sparsetc.contraction.contraction import compiled
from sparsetc.options import of_call

F32 = torch.float32


def matrix(seed: int = 0) -> stc.SparseTensor:
    return random_sparse((6, 5), "random", F32, seed)


@pytest.mark.parametrize("equation", ["ij,ij->ij", "ij,ij->i", "ij,ij->", "ij,jr->ij"])
def test_a_broadcast_operand_is_read_as_one_slice(equation: str) -> None:
    n = 10**6
    x = stc.SparseTensor([[0, n - 1, 7], [5, 7, 7]], [1.0, 2.0, 3.0], (n, n))
    b = torch.tensor([[2.0]]).expand(n, 3 if "r" in equation else n)  # 4 TB, were it made whole
    found = stc.einsum(equation, x, b)
    total = 2.0 * (3 if "r" in equation else 1)
    if isinstance(found, stc.SparseTensor):
        torch.testing.assert_close(found.values, x.values * total)
    else:
        torch.testing.assert_close(found.sum(), x.values.sum() * total)


def test_a_broadcast_operand_that_kernels_need_whole_is_refused_by_its_size() -> None:
    x = stc.SparseTensor([[0, 1], [1, 2]], [1.0, 2.0], (2, 3))
    with pytest.raises(stc.OutOfMemoryError, match="a broadcast operand of shape"):
        stc.einsum("ij,jrs->irs", x, torch.ones(3, 1, 1).expand(3, 100, 100), memory_limit=100_000)


@pytest.mark.parametrize("shape", [(1, 4), (5, 1), (1, 1), (5, 4)])
@pytest.mark.parametrize("compiled_for", [(1, 4), (5, 1), (5, 4)])
def test_a_kernel_takes_operands_that_broadcast_otherwise(
    shape: tuple[int, int], compiled_for: tuple[int, int]
) -> None:
    x, c = matrix(), random_values((6, 4), F32, 3)
    kernel = stc.compile("ij,jr,ir->ir", x, torch.ones(compiled_for), c)
    b = random_values(shape, F32, 1)
    for given in (b, b.expand(5, 4)):
        assert_matches(kernel(given, c), "ij,jr,ir->ir", [x, given, c])


@pytest.mark.parametrize(("equation", "coalesce"), [("iij,jr->ir", True), ("iij,jr->ir", False), ("kij,jr->kr", False)])
def test_a_kernel_of_some_entries_takes_operands_in_full(equation: str, coalesce: bool) -> None:
    x = random_sparse((6, 6, 5), "random", F32, coalesce=coalesce)
    b = random_values((5, 4), F32, 1)
    kernel = stc.compile(equation, x, torch.ones(1, 4))
    for given in (b, b[:1].expand(5, 4), b):
        assert_matches(kernel(given), equation, [x, given])


@pytest.mark.parametrize("shape", [(1, 4), (5, 1), (1, 1)])
def test_gradients_of_broadcast_operands(shape: tuple[int, int]) -> None:
    x, c = matrix(), random_values((6, 4), F32, 3)
    b = random_values(shape, F32, 1).requires_grad_()
    whole = b.expand(5, 4)
    expected = torch.einsum("ij,jr,ir->ir", x.to_dense(), whole, c).pow(2).sum()
    for given in (b, whole):
        found = stc.einsum("ij,jr,ir->ir", x, given, c).pow(2).sum()
        for wanted in {id(o): o for o in (given, b)}.values():
            (mine,) = torch.autograd.grad(found, wanted, retain_graph=True)
            (theirs,) = torch.autograd.grad(expected, wanted, retain_graph=True)
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_bits_of_negation_and_conjugation_are_read() -> None:
    z = torch.complex(random_values((5, 4), torch.float64, 1), random_values((5, 4), torch.float64, 2))
    x = random_sparse((6, 5), "random", torch.float64)
    negative = z.conj().imag
    assert negative.is_neg()
    values = torch.complex(x.values, x.values).conj().imag
    assert_matches(stc.einsum("ij,jr->ir", x, negative), "ij,jr->ir", [x, negative.clone()])
    y = x.with_values(values)
    assert_matches(stc.einsum("ij,jr->ir", y, negative), "ij,jr->ir", [x.with_values(-x.values), negative.clone()])
    c = random_sparse((6, 5), "random", torch.complex128)
    assert_matches(stc.einsum("ij,jr->ir", c, z.conj()), "ij,jr->ir", [c, z.conj().resolve_conj()])


PLANS = {"coo": "coo", "hls": stc.plans.plan_hls(1), "auto": "auto"}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("equation", ["ij,jr->ir", "ij,jr,rs->is"])
def test_options_say_the_precision_under_autocast(equation: str, plan: str) -> None:
    x = matrix()
    sizes = {"i": 6, "j": 5, "r": 40, "s": 30}
    terms = equation.split("->")[0].split(",")[1:]
    dense = [random_values(tuple(sizes[c] for c in t), F32, n).requires_grad_() for n, t in enumerate(terms)]
    outside = stc.einsum(equation, x, *dense, plan=PLANS[plan])
    grads = torch.autograd.grad(outside.sum(), dense)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = stc.einsum(equation, x, *dense, plan=PLANS[plan])
        inside = torch.autograd.grad(found.sum(), dense)
    torch.testing.assert_close(found, outside, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(inside, grads, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, torch.float64], ids=str)
@pytest.mark.parametrize("equation", ["ij,jr,rs->is", "ij->i", "ij,jk,rs,sk->ir"])
def test_gradients_under_autocast_are_those_outside(equation: str, dtype: torch.dtype) -> None:
    sizes = {"i": 6, "j": 5, "k": 4, "r": 40, "s": 30}
    operands: list[torch.Tensor | stc.SparseTensor] = []
    leaves = []
    for n, term in enumerate(equation.split("->")[0].split(",")):
        shape = tuple(sizes[c] for c in term)
        if term in ("ij", "jk"):
            x = random_sparse(shape, "random", dtype, n, coalesce=False)
            leaves.append(x.values.requires_grad_())
            operands.append(x)
        else:
            leaves.append(random_values(shape, dtype, n).requires_grad_())
            operands.append(leaves[-1])

    def gradients() -> tuple[torch.Tensor, ...]:
        found = stc.einsum(equation, *operands, output="dense")
        return torch.autograd.grad(found.sum(), leaves, create_graph=True)

    outside = gradients()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = gradients()
    torch.testing.assert_close(inside, outside, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("plan", ["scalar", "dense", "bcb", "auto"])
def test_contractions_under_autocast(plan: str) -> None:
    x, y = matrix(), random_sparse((5, 7), "random", F32, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = stc.einsum("ij,jk->ik", x, y, plan=plan)
    assert_matches(found, "ij,jk->ik", [x, y])


def test_floats_of_different_types_meet_under_autocast_only() -> None:
    x, b = matrix(), random_values((5, 4), F32, 1)
    with pytest.raises(stc.DtypeError):
        stc.einsum("ij,jr->ir", x, b.bfloat16())
    kernel = stc.compile("ij,jr->ir", x, b)
    expected = stc.einsum("ij,jr->ir", x, b.bfloat16().float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for found in (stc.einsum("ij,jr->ir", x, b.bfloat16()), kernel(b.bfloat16())):
            assert found.dtype == F32
            torch.testing.assert_close(found, expected)
        assert stc.einsum("ij,jr->ir", x.to(torch.bfloat16), b).dtype == F32


def test_threads_leave_torch_s_precision_as_it_was() -> None:
    x = random_sparse((50, 50), "random", F32)
    b, c = random_values((50, 40), F32, 1), random_values((40, 8), F32, 2)
    before = torch.get_float32_matmul_precision()
    precisions = ["high", "highest", "medium"]

    def run(n: int) -> None:
        stc.einsum("ij,jr,rs->is", x, b, c, precision=precisions[n % 3])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(600)))
    assert torch.get_float32_matmul_precision() == before


def test_the_gradient_for_an_operand_that_was_one_slice_repeated_has_an_element_for_each_of_its_own() -> None:
    g = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(0, n, (20,), generator=g) for n in (5, 6, 7)])
    x = stc.SparseTensor(coords, torch.rand(20, generator=g, dtype=torch.float64), (5, 6, 7))
    b, c = torch.rand(1, 4, generator=g, dtype=torch.float64).expand(6, 4), torch.rand(7, 4, dtype=torch.float64)
    made = compiled("ijk,jr,kr->ir", [x, b, c], of_call({}), "dense")
    upstream = torch.rand(5, 4, dtype=torch.float64)
    found = torch.ops.sparsetc.contract(made.key, [x.values, b, c, upstream], 1)
    torch.testing.assert_close(found, torch.einsum("ijk,ir,kr->jr", x.to_dense(), upstream, c))


def test_a_plan_that_was_compiled_for_serves_a_call_with_repeated_slices() -> None:
    x = stc.SparseTensor(torch.tensor([[1], [0]]), torch.ones(1, 2), (2, 2, 2))
    a = torch.ones(1, 2).expand(2, 2)
    plan = stc.compile("abc,ad->bcd", x, a, plan="coo").plan
    assert torch.equal(stc.einsum("abc,ad->bcd", x, a, plan=plan), stc.einsum("abc,ad->bcd", x, a))
