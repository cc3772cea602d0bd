"""``plan="dense"``: the operand as a dense tensor that torch multiplies, in every einsum, type and circumstance."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import Problem, assert_matches, poisoned, random_sparse

import sparsetc as stc
from sparsetc.contraction.prepare import in_force_on
from sparsetc.ir.plan import Plan
from sparsetc.planner.registry import PLANS
from sparsetc.runtime.calls import multiply

F32 = torch.float32
SIZES = {"i": 7, "j": 6, "k": 5, "l": 4, "r": 8, "s": 3}
EQUATIONS = (
    *("ij,jr->ir", "ij,jr->ri", "ij,ir->jr", "ij,rj->ir", "ij,j->i", "ij,i->j", "ij->i", "ij->", "ij->ji", "ij,jr->i"),
    *("ij,i,jr->ir", "ij,ir,jr->r", "ij,ir,jr->ir", "ij,i,j->", "ij,ir->ijr", "ij,r->ijr", "ii,ir->ir", "i,ir->r"),
    *("ijk,jr,kr->ir", "ijk,ir,kr->jr", "ijk,ir,jr->kr", "ijk,jr,ks->irs", "ijk,jkr->ir", "ijk,kr->ijr", "ijk,kr->jir"),
    *("ijk,ijr->ikr", "ijk,kr,rs->ijs", "ijk,j->ik", "ijkl,jr,kr,lr->ir", "ijkl,jr,ks->ilrs", "ijk,r->ri"),
)


def made(equation: str, *operands: Any, **options: Any) -> stc.Kernel:
    return stc.compile(equation, *operands, **{"plan": "dense", "output": "dense", **options})


def half_full(rows: int, columns: int, share: float = 0.5) -> stc.SparseTensor:
    g = torch.Generator().manual_seed(0)
    chosen = torch.rand(rows, columns, generator=g) < share
    return stc.SparseTensor.from_dense(torch.where(chosen, torch.rand(rows, columns, generator=g) + 0.5, 0.0))


# --- results ----------------------------------------------------------------------------------------------------------

SAMPLED = ("ij,ir,jr->ij", "ij,jr,ir->ij", "ij,ri,rj->ij", "ijk,ijr,kr->ijk", "ijk,kr,rij->ijk", "ij,irs,jsr->ij")


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", ["random", "dense", "one", "empty"])
@pytest.mark.parametrize("equation", SAMPLED)
def test_a_sampled_product_is_read_of_a_whole_one(equation: str, name: str, backend: str) -> None:
    for dtype in (F32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32):
        if dtype == torch.int32 and backend == "triton":
            continue
        operands = Problem(equation, SIZES, name, dtype).operands()
        with poisoned():
            kernel = made(equation, *operands, backend=backend, output="sparse")
            found = kernel(*operands[1:])
        assert [p.format for p in kernel.plan.parts] == ["positions"]
        assert found.pattern is operands[0].pattern
        assert_matches(found, equation, operands)


def test_gradients_of_values_are_sampled_products() -> None:
    """A pruned layer's values learn by products of torch; where kernels may read none, every value being 1, none is."""
    x, b, g = half_full(64, 48), torch.randn(48, 40), torch.randn(64, 40)
    values = x.values.clone().requires_grad_()
    made("ij,jr->ir", x, b)(b, values=values).backward(g)
    torch.testing.assert_close(values.grad, (g @ b.T)[x.coords[0], x.coords[1]])
    kernel = made("ij,ir,jr->ij", x, g, b, backend="triton", output="sparse")
    of_ones = stc.SparseTensor._make(x.pattern.of_ones, x.values)
    kernel_of_ones = made("ij,ir,jr->ij", of_ones, g, b, backend="triton", output="sparse")
    assert ["mul_(values)" in k.source for k in (kernel, kernel_of_ones)] == [True, False]
    torch.testing.assert_close(kernel_of_ones(g, b).values, values.grad)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", ["random", "dense", "one", "empty"])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_every_einsum(equation: str, name: str, backend: str) -> None:
    """Torch runs the plan on any device, whatever generates the kernels of others."""
    operands = Problem(equation, SIZES | ({"i": 6} if "ii" in equation else {}), name, F32).operands()
    with poisoned():
        kernel = made(equation, *operands, backend=backend)
        found = kernel(*operands[1:])
    assert kernel.plan.name == "dense"
    assert [p.format for p in kernel.plan.parts] == ["dense"]
    assert kernel.step.executable.programs.backend.name == "torch"
    assert_matches(found, equation, operands)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, F32], ids=str)
@pytest.mark.parametrize("equation", ["ij,jr->ir", "ij,j->i", "ijk,jr,kr->ir", "ijk,jr,ks->irs", "ijk,ijr->ikr"])
def test_every_type_as_a_gpu_takes_it(equation: str, dtype: torch.dtype, precision: str) -> None:
    """Values and operands stay in 16 bits where one of them is multiplied as it is, and sums have 32."""
    operands = Problem(equation, SIZES, "random", dtype).operands()
    found = made(equation, *operands, backend="triton", precision=precision)(*operands[1:])
    assert_matches(found, equation, operands, 3e-2 if precision == "medium" and dtype == F32 else None)


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.complex128, torch.int32, torch.int64, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("equation", ["ij,jr->ir", "ijk,jr,kr->ir", "ij->i"])
def test_every_type_of_the_torch_programs(equation: str, dtype: torch.dtype) -> None:
    operands = Problem(equation, SIZES, "random", dtype).operands()
    assert_matches(made(equation, *operands, backend="torch")(*operands[1:]), equation, operands)


def test_what_is_written_is_the_result_itself() -> None:
    """One matrix product writes the result; what is made of several operands is rounded once, where it may be."""
    x, b, c = random_sparse((6, 5, 4), "random", F32), torch.rand(5, 8), torch.rand(4, 8)
    kernel = made("ijk,jr,kr->ir", x, b, c, backend="triton", precision="medium")
    assert '@matmul_precision("high")' in kernel.source
    assert "multiply(values.view(6, 20), made.reshape(20, 8).to(values.dtype), A)" in kernel.source
    kernel = made("ijk,jkr->ir", x, torch.rand(5, 4, 8), backend="triton")
    assert '@matmul_precision("highest")' in kernel.source
    assert "multiply(values.view(6, 20), B.reshape(20, 8), A)" in kernel.source
    assert "einsum" not in kernel.source.split("def part_0")[1]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("equation", ["oi,bi->bo", "oi,ib->ob", "oi,ib->bo", "oi,bi->ob", "oi,hbi->hbo"])
def test_every_orientation_is_one_call_without_copies(
    equation: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, b = half_full(6, 5), torch.rand([{"i": 5, "b": 7, "h": 2}[c] for c in equation[3 : equation.index("-")]])
    kernel, read = made(equation, x, b, backend=backend), []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda left, right, out: read.append((right, out)) or mm(left, right, out=out))
    result = kernel(b)
    ((right, out),) = read
    assert result.is_contiguous()
    assert (right.data_ptr(), out.data_ptr()) == (b.data_ptr(), result.data_ptr())
    torch.testing.assert_close(result, torch.einsum(equation, x.to_dense(), b))


def test_a_full_tensor_is_multiplied_densely_on_a_cpu() -> None:
    x = half_full(400, 400, 0.39).reshape(20, 20, 20, 20)
    operands = [torch.rand(20, 20) for _ in range(4)]
    kernel = stc.compile("pqrs,pi,qj,rk,sl->ijkl", x, *operands)
    # Whole or in steps it is made dense first, and nothing passes over its nonzeros.
    assert kernel.plan.name == "dense" or kernel.plan.path[0] == (0,)
    torch.testing.assert_close(
        kernel(*operands), torch.einsum("pqrs,pi,qj,rk,sl->ijkl", x.to_dense(), *operands), rtol=1e-4, atol=1e-4
    )


def test_a_mode_in_the_middle_is_not_summed_first() -> None:
    """Torch would copy the tensor for that."""
    x, factors = half_full(6, 8).reshape(2, 3, 4, 2), [torch.rand(n, 2) for n in (2, 3, 4)]
    kernel = stc.compile("ijkl,ia,jb,kc->labc", x, *factors, plan="dense", backend="torch")
    assert "einsum(" not in kernel.source  # all products are of matrices as they lie
    assert torch.allclose(kernel(*factors), torch.einsum("ijkl,ia,jb,kc->labc", x.to_dense(), *factors))


def test_what_is_rounded_meets_what_is_not() -> None:
    """A plan of one's own may round an operand of what is multiplied without a dot."""
    x, b = half_full(6, 5), torch.rand(5)
    (part,) = made("ij,j->i", x, b, backend="triton", precision="medium").plan.parts
    own = replace(part, schedule=replace(part.schedule, precision="bf16", rounded=("B",)))
    found = made("ij,j->i", x, b, plan=Plan("own", (own,)), backend="triton")(b)
    torch.testing.assert_close(found, x.to_dense() @ b.bfloat16().float())


def test_precision_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, mm = [], torch.mm

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return mm(*args, **kwargs)

    x, b = half_full(6, 5), torch.rand(5, 8)
    monkeypatch.setattr(torch, "mm", watched)
    for precision in ("highest", "high", "medium"):
        made("ij,jr->ir", x, b, backend="triton", precision=precision)(b)
        assert torch.get_float32_matmul_precision() == "highest"
    assert seen == ["highest", "high", "high"]


def test_products_of_16_bits_have_sums_of_32() -> None:
    left, right = torch.full((1, 4096), 1.0, dtype=torch.float16), torch.full((4096, 1), 100.0, dtype=torch.float16)
    out = torch.empty(1, 1)
    multiply(left, right, out)
    assert out.item() == 409_600  # beyond float16
    with pytest.raises(stc.DtypeError, match=r"of one dtype, found torch\.float16 and torch\.float32"):
        multiply(left, right.float(), out)


def test_an_output_is_overwritten_or_added_to() -> None:
    x, b = half_full(6, 5), torch.rand(5, 8)
    step = made("ij,jr->ir", x, b).step
    packed, out = step.packed(x.values), torch.full((6, 8), 3.0)
    expected = x.to_dense() @ b
    assert step.executable.run(step.arrays, packed, [b], out) is out
    torch.testing.assert_close(out, expected)
    step.executable.run(step.arrays, packed, [b], out, accumulate=True)
    torch.testing.assert_close(out, 2 * expected)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_zeros_do_not_meet_infinities(backend: str, bad: float) -> None:
    """A call with such an operand takes runs of nonzeros, which without a GPU only the torch programs can."""
    x, b = half_full(6, 5), torch.rand(5, 8)
    kernel = made("ij,jr->ir", x, b, backend=backend)
    torch.testing.assert_close(kernel(b), x.to_dense() @ b)
    b[2, 3] = bad
    if backend == "triton":
        with pytest.raises(stc.DeviceError):
            kernel(b)
        return
    assert_matches(kernel(b[:, :3].repeat(1, 3)[:, :8].contiguous()), "ij,jr->ir", [x, b[:, :3].repeat(1, 3)[:, :8]])
    found, hit = kernel(b), x.to_dense()[:, 2] != 0
    assert torch.equal(found[:, 3].isfinite(), ~hit)


# --- what calls share with other plans --------------------------------------------------------------------------------


def test_gradients_batches_and_new_values() -> None:
    x, b = half_full(6, 5), torch.rand(5, 8, dtype=F32, requires_grad=True)
    values = x.values.clone().requires_grad_()
    kernel = made("ij,jr->ir", x, b.detach())
    found = kernel.with_values(values)(b)
    torch.testing.assert_close(found, x.to_dense() @ b)
    found.square().sum().backward()
    dense = x.to_dense().requires_grad_()
    own = b.detach().clone().requires_grad_()
    (dense @ own).square().sum().backward()
    assert own.grad is not None
    assert dense.grad is not None
    torch.testing.assert_close(b.grad, own.grad)
    torch.testing.assert_close(values.grad, dense.grad[tuple(x.coords)])
    batch = torch.rand(3, 5, 8)
    torch.testing.assert_close(torch.func.vmap(kernel)(batch), x.to_dense() @ batch)
    _, tangent = torch.func.jvp(kernel, (b.detach(),), (batch[0],))
    torch.testing.assert_close(tangent, x.to_dense() @ batch[0])


def test_dense_modes_blocks_and_broadcasts() -> None:
    g = torch.Generator().manual_seed(0)
    coords = torch.tensor([[0, 0, 1, 2, 3], [1, 2, 0, 2, 1]])
    x = stc.SparseTensor(coords, torch.rand(5, 4, generator=g), (4, 3, 4))
    b = torch.rand(3, 8, generator=g)
    kernel, expected = made("ijh,jr->ihr", x, b), torch.einsum("ijh,jr->ihr", x.to_dense(), b)
    torch.testing.assert_close(kernel(b), expected)
    assert kernel.plan.parts[0].nbytes == 4 * 3 * 4 * 4 + 2 * 4, "no mode numbers the entries"
    torch.testing.assert_close(made("ijh,jr->ihr", x, b, plan=kernel.plan)(b), expected)
    y = half_full(6, 5)
    for own in (torch.rand(1, 8), torch.rand(5, 1), torch.rand(5, 8).T.contiguous().T):
        expected = y.to_dense() @ own.expand(5, 8)
        torch.testing.assert_close(stc.einsum("ij,jr->ir", y, own.expand(5, 8), plan="dense"), expected)
    blocks = stc.SparseTensor.from_blocks(torch.tensor([[0, 1], [1, 0]]), torch.rand(2, 3, 2), (6, 4))
    c = torch.rand(4, 8)
    kernel = made("ij,jr->ir", blocks, c)
    torch.testing.assert_close(kernel(c), blocks.to_dense() @ c)
    assert kernel.plan.parts[0].nbytes == 6 * 4 * 4 + 2 * 4, "nor the blocks"
    torch.testing.assert_close(made("ij,jr->ir", blocks, c, plan=kernel.plan)(c), kernel(c))


def test_a_kernel_can_be_copied_and_its_plan_given_back() -> None:
    x, b = half_full(6, 5), torch.rand(5, 8)
    kernel = made("ij,jr->ir", x, b, deterministic=True, backend="triton")
    expected, saved = kernel(b), io.BytesIO()
    torch.save(kernel, saved)
    saved.seek(0)
    copies = (copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel)), torch.load(saved, weights_only=False))
    for other in (*copies, made("ij,jr->ir", x, b, plan=kernel.plan, backend="triton")):
        assert torch.equal(other(b), expected)
        assert other.plan == kernel.plan
        assert other.source == kernel.source
    part = kernel.plan.parts[0]
    assert (part.nnz, part.nbytes) == (x.nnz, 6 * 5 * 4 + 2 * 4)


def test_explain_says_what_runs() -> None:
    x, b = half_full(600, 500), torch.rand(500, 64)
    kernel = made("ij,jr->ir", x, b, backend="triton", precision="high")
    text = str(kernel.explain())
    assert "matrix product" in text
    assert "dense: dense[- | - | ij] tf32" in text
    assert "tiles by nonzeros" not in text
    assert str(kernel.path) in text
    assert kernel.path.read_text() == kernel.source
    for backend in ("triton", "torch"):
        with pytest.raises(stc.PlanError, match=r"plan 'dense' runs torch's own kernels, which have no PTX"):
            made("ij,jr->ir", x, b, backend=backend).ptx("sm_90")


# --- where it does not apply ------------------------------------------------------------------------------------------


def test_what_cannot_be_dense_is_refused_by_name() -> None:
    x, b = half_full(6, 5), torch.rand(5, 8)
    for equation in ("ij,ir,jr->ji", "ij,ir->ij"):
        terms = equation.partition("->")[0].split(",")[1:]
        dense = [torch.rand([{"i": 6, "j": 5, "r": 8}[c] for c in term]) for term in terms]
        with pytest.raises(stc.PlanError, match=f'plan "dense" does not apply to "{equation}": its result is sparse'):
            stc.einsum(equation, x, *dense, plan="dense", output="sparse")
    twice = random_sparse((6, 5), "random", F32, coalesce=False)
    with pytest.raises(stc.PlanError, match=r"the operand has duplicates; take its coalesce\(\)"):
        stc.einsum("ij,jr->ir", twice, b, plan="dense")
    with pytest.raises(stc.PlanError, match="no matrix product of integers on a GPU"):
        made("ij,jr->ir", x.to(torch.int64), b.long(), backend="triton")
    with pytest.raises(stc.PlanError, match=r"the product, and as much .* takes 240 bytes, the limit is 200"):
        stc.compile("ij,ir,jr->ij", x, torch.rand(6, 8), b, plan="dense", output="sparse", memory_limit=200)
    large = stc.SparseTensor(torch.tensor([[0, 9_999], [3, 7]]), torch.ones(2), (10_000, 1000))
    with pytest.raises(stc.PlanError, match=r"what packs it, takes 200,000,000 bytes, the limit is 1,000,000"):
        stc.compile("ij,jr->ir", large, torch.rand(1000, 1), plan="dense", memory_limit=1_000_000)
    cube, wide = random_sparse((2, 90, 90), "random", F32), torch.rand(90, 64)
    with pytest.raises(stc.PlanError, match="and what is made on the way, takes"):
        stc.compile("ijk,jr,kr->ir", cube, wide, wide, plan="dense", memory_limit=300_000)
    beyond = stc.SparseTensor(torch.tensor([[0, 5], [3, 7]]), torch.ones(2), (2**30, 2**30))
    with pytest.raises(stc.SparsetcError, match="dense tensor"):
        stc.compile("ij,jr->r", beyond, torch.rand(1, 1).expand(2**30, 1), plan="dense")


def test_streams_refuse_it() -> None:
    x, b = half_full(60, 50), torch.rand(50, 8)
    given = made("ij,jr->ir", x, b).plan
    for plan, says in (("dense", "a stream does not store its chunks"), (given, "which a stream's chunks are not")):
        with pytest.raises(stc.PlanError, match=says):
            stc.stream("ij,jr->ir", x, b, plan=plan, device="cpu")
    torch.testing.assert_close(stc.stream("ij,jr->ir", x, b, device="cpu"), x.to_dense() @ b)


def test_a_dense_part_is_a_plans_only_part() -> None:
    x, b = half_full(60, 50, 0.1), torch.rand(50, 8)
    own, runs = (stc.compile("ij,jr->ir", x, b, plan=p, backend="triton").plan.parts[0] for p in ("dense", "coo"))
    mixed = Plan("mixed", (own, runs), False, "run_length", (("threshold", 5),))
    with pytest.raises(stc.PlanError, match="is a plan's only part"):
        stc.compile("ij,jr->ir", x, b, plan=mixed, backend="triton")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_result_without_rows_is_explained(backend: str) -> None:
    x = stc.SparseTensor(torch.zeros(2, 0, dtype=torch.long), torch.zeros(0), (0, 5))
    kernel = made("ij,jr->ir", x, torch.rand(5, 3), backend=backend)
    assert "dense" in str(kernel.explain())
    assert kernel.cost.at()["seconds"] > 0
    assert kernel(torch.rand(5, 3)).shape == (0, 3)


def test_a_plan_of_ones_own_is_checked() -> None:
    x, b = half_full(6, 5), torch.rand(5, 8)
    (part,) = made("ij,jr->ir", x, b, backend="triton").plan.parts
    halves = replace(part, schedule=replace(part.schedule, precision="f16x3"))
    with pytest.raises(stc.PlanError, match="torch multiplies no float32 in f16x3"):
        made("ij,jr->ir", x, b, plan=Plan("own", (halves,)), backend="triton")
    for sequence in ((0,), (0, 0), (0, 5), (0, 1, 2)):
        other = replace(part, storage=replace(part.storage, sequence=sequence))
        with pytest.raises(stc.PlanError, match="the storage's sequence names each of 2 modes once"):
            made("ij,jr->ir", x, b, plan=Plan("own", (other,)))


@pytest.mark.parametrize("equation", ["ij,jr->ir", "ijk,jr,kr->ir", "ijk,ijr->ikr"])
def test_no_nonzeros_are_summed_in_one_order(equation: str) -> None:
    operands = Problem(equation, SIZES, "empty", F32).operands()
    kernel = made(equation, *operands, backend="triton", deterministic=True)
    assert kernel.plan.name == "dense"
    assert not kernel(*operands[1:]).any()


# --- when it is chosen ------------------------------------------------------------------------------------------------


def estimated(x: stc.SparseTensor, b: torch.Tensor, **settings: Any) -> tuple[stc.Kernel, list[float]]:
    """A kernel by ``"auto"``, and the microseconds that the dense tensor is expected to take where it is considered."""
    kernel = stc.compile("ij,jr->ir", x, b, backend="triton", **settings)
    with in_force_on(kernel.step.settings, kernel.step.device):
        return kernel, [1e6 * sum(e.seconds) for e in PLANS["dense"].estimates(kernel.step.problem)]


def test_a_half_full_matrix_is_multiplied_dense_where_precision_allows() -> None:
    """On an H200: microseconds of the plan, by precision and columns."""
    x = half_full(2000, 2000)
    measured = {
        ("high", 4096): 108.0,
        ("medium", 4096): 66.5,
        ("high", 512): 28.4,
        ("medium", 512): 16.8,
        ("high", 128): 19.7,
        ("medium", 128): 12.9,
    }
    for (precision, columns), microseconds in measured.items():
        kernel, dense = estimated(x, torch.zeros(()).expand(2000, columns), precision=precision)
        assert 0.85 * microseconds < min(dense) < 1.3 * microseconds
        assert kernel.plan.name == "dense"
    exact, dense = estimated(x, torch.zeros(()).expand(2000, 4096), precision="highest")
    assert 400 < min(dense) < 1000
    assert any(n.startswith("dense") for n, _ in exact.step.choice.considered)


def test_price_and_memory_decide_and_small_tensors_are_not_made_dense() -> None:
    b = torch.zeros(()).expand(2000, 4096)
    assert estimated(half_full(2200, 2000, 0.1), b, precision="medium")[1]
    kernel, dense = estimated(half_full(2200, 2000, 0.001), b, precision="highest")
    assert dense
    assert kernel.plan.name != "dense"
    assert estimated(half_full(20, 20), torch.rand(20, 8), precision="medium")[0].plan.name != "dense"
    x = half_full(2000, 2000)
    assert estimated(x, b, precision="medium", memory_limit=100_000_000)[1]
    assert not estimated(x, b[:, :64], precision="medium", memory_limit=10_000_000)[1]


def test_it_is_priced_by_the_rates_of_torch_and_by_what_lies_aligned() -> None:
    def seconds(columns: int, dtype: torch.dtype = F32, precision: str = "high") -> float:
        x = half_full(2000, 2000).to(dtype)
        b = torch.zeros((), dtype=dtype).expand(2000, columns)
        return sum(made("ij,jr->ir", x, b, backend="triton", precision=precision).step.choice.seconds)

    assert seconds(4095) > 2 * seconds(4096)
    assert seconds(4096, torch.float16) < 0.8 * seconds(4096)
    assert seconds(4096, torch.float64) > 5 * seconds(4096)
    assert seconds(4096, precision="highest") > 5 * seconds(4096)


def test_infinities_that_an_ndarray_writes_are_seen() -> None:
    """Tiles multiply zeros, so operands are looked at; torch counts no change of the second call's."""
    x = stc.SparseTensor.from_dense(torch.tensor([[1.0, 0, 2], [0, 3, 0]]))
    for plan in ("dense", "hls", "window", "auto"):
        b = torch.ones(3, 2)
        stc.einsum("ij,jr->ir", x, b, plan=plan)
        b.numpy()[1, 0] = np.inf
        assert stc.einsum("ij,jr->ir", x, b, plan=plan).tolist() == [[3, 3], [np.inf, 3]]
