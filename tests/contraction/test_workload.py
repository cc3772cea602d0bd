"""Several einsums of one tensor, compiled together: which plans they take, and what they store."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from cases import assert_matches, densified, mttkrp, random_sparse, random_values
from mixed_mode_cases import crossed

import sparsetc as stc
from sparsetc.contraction import compile
from sparsetc.packing.base import Packed

MANY = 10**12
"""A memory limit that everything fits."""


def factors(x: stc.SparseTensor, rank: int = 4) -> list[torch.Tensor]:
    return [random_values((n, rank), x.dtype, m) for m, n in enumerate(x.shape)]


def modes(x: stc.SparseTensor) -> tuple[list[str], list[list[torch.Tensor]]]:
    """The MTTKRP of every mode, and its operands."""
    own = factors(x)
    return [mttkrp(x.order, m) for m in range(x.order)], [own[:m] + own[m + 1 :] for m in range(x.order)]


def bytes_of(kernels: tuple[stc.Kernel, ...]) -> int:
    """Bytes of all that the kernels store, each copy once."""
    parts = {part.packed.token: part.packed for k in kernels for part in k.step.parts}
    values = {v.data_ptr(): v.numel() * v.element_size() for k in kernels for v in k._packed}
    return sum(p.nbytes for p in parts.values()) + sum(values.values())


def names(kernels: tuple[stc.Kernel, ...]) -> list[str]:
    return [k.plan.name for k in kernels]


@pytest.mark.parametrize("plan", ["auto", "mm-csf", "coo"])
@pytest.mark.parametrize("order", [2, 3, 4])
def test_results_are_those_of_each_einsum(order: int, plan: str) -> None:
    x = random_sparse((7, 9, 5, 4)[:order], "skewed", torch.float64)
    equations, operands = modes(x)
    kernels = stc.compile_many(equations, x, operands, plan=plan)
    for kernel, equation, own in zip(kernels, equations, operands, strict=True):
        assert_matches(kernel(*own), equation, [x, *own])


def test_without_a_limit_each_takes_the_plan_that_it_takes_alone() -> None:
    x = stc.datasets.uber()
    equations, operands = modes(x)
    kernels = stc.compile_many(equations, x, operands, memory_limit=MANY)
    each = zip(equations, operands, strict=True)
    alone = [stc.compile(e, x, *own, memory_limit=MANY, plan="one-pass") for e, own in each]
    assert [k.plan for k in kernels] == [k.plan for k in alone]
    said = kernels[0].explain()
    assert "planned together with 3 other einsums" in said.reason
    assert "the fastest set of plans" in said.reason
    assert any(name.startswith("mm-csf") for name, _ in said.considered)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_copies_that_do_not_fit_are_traded_for_one_that_serves_all(backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    x = stc.datasets.uber()
    equations, operands = modes(x)

    def within(limit: int) -> tuple[stc.Kernel, ...]:
        return stc.compile_many(equations, x, operands, backend=backend, memory_limit=limit)

    fastest, smallest = within(MANY), within(400_000)
    assert names(smallest) == ["mm-csf"] * 4
    assert bytes_of(smallest) < bytes_of(fastest) / 2
    assert "one copy serving 4 of them: no set of plans fits 400,000 bytes" in smallest[0].explain().reason
    times = []
    for share in (0.3, 0.6, 0.9, 1.1):
        limit = int(share * bytes_of(fastest))
        kernels = within(limit)
        times.append(sum(k.explain().predicted_us for k in kernels))
        if bytes_of(smallest) < limit:
            assert bytes_of(kernels) <= 1.1 * limit
        if share < 1 and bytes_of(smallest) < limit:
            assert f"that fit {limit:,} bytes; without a limit" in kernels[0].explain().reason
    assert times == sorted(times, reverse=True)
    assert names(kernels) == names(fastest)


def test_a_plan_that_is_named_is_taken_where_its_copies_fit() -> None:
    x = stc.datasets.uber()
    equations, operands = modes(x)
    every = stc.compile_many(equations, x, operands, plan="fiber", memory_limit=MANY)
    assert names(every) == ["fiber"] * 4
    assert every[0].explain().reason.endswith("by name; asked for by name")
    some = stc.compile_many(equations, x, operands, plan="fiber", memory_limit=bytes_of(every) * 6 // 10)
    assert 1 <= names(some).count("fiber") < 4
    assert set(names(some)) == {"fiber", "mm-csf"}
    assert "most by 'fiber', which was asked for, of the sets that fit" in some[0].explain().reason


def test_a_plan_with_parts_is_taken_as_it_is() -> None:
    x = crossed(3, torch.float32)
    equations, operands = modes(x)
    plan = stc.compile(equations[0], x, *operands[0]).plan
    kernels = stc.compile_many([equations[0]] * 2, x, [operands[0]] * 2, plan=plan, memory_limit=2000)
    assert [k.plan for k in kernels] == [plan] * 2


# --- what is shared ---------------------------------------------------------------------------------------------------


def copies(kernels: tuple[stc.Kernel, ...]) -> int:
    return len({values.data_ptr() for kernel in kernels for values in kernel._packed})


def test_values_are_packed_once_for_all_kernels() -> None:
    x = crossed(3, torch.float64)  # of values that the caller has too
    equations, operands = modes(x)
    kernels = stc.compile_many(equations, x, operands, plan="mm-csf")
    assert copies(kernels) == 3
    alone = tuple(stc.compile(e, x, *own, plan="mm-csf") for e, own in zip(equations, operands, strict=True))
    assert copies(alone) == 3  # packed once for each tensor of values, whoever wraps it
    x.values.mul_(2)
    for kernel, equation, own in zip(kernels, equations, operands, strict=True):
        assert_matches(kernel(*own), equation, [x, *own])
    assert copies(kernels) == 3


def test_values_that_are_learned_are_packed_at_each_call() -> None:
    x = crossed(3, torch.float64)
    leaf = x.values.clone().requires_grad_()
    equations, operands = modes(x)
    kernels = stc.compile_many(equations, x.with_values(leaf), operands, plan="mm-csf")
    for factor in (1, 3):
        with torch.no_grad():
            leaf.data.fill_(factor)
        for kernel, equation, own in zip(kernels, equations, operands, strict=True):
            assert_matches(kernel(*own), equation, [x.with_values(leaf.detach()), *own])
    assert len([p for p in x.pattern.cache.values() if isinstance(p, Packed)]) == 3


def test_kernels_of_other_values_and_pickled_ones() -> None:
    x = crossed(3, torch.float64)
    equations, operands = modes(x)
    kernels = stc.compile_many(equations, x, operands, plan="coo", memory_limit=1000)
    assert "mm-csf" in names(kernels)
    other = x.values + 1
    for kernel, equation, own in zip(kernels, equations, operands, strict=True):
        assert_matches(kernel.with_values(other)(*own), equation, [x.with_values(other), *own])
        again = pickle.loads(pickle.dumps(kernel))
        assert again.plan == kernel.plan
        assert_matches(again(*own), equation, [x, *own])


@pytest.mark.parametrize("kind", ["dense modes", "blocks"])
def test_tensors_that_are_no_single_nonzeros(kind: str) -> None:
    at = torch.tensor([[0, 1, 2], [1, 0, 2]])
    if kind == "blocks":
        x = stc.SparseTensor.from_blocks(at, random_values((3, 2, 2), torch.float64, 0), (6, 6))
        equations, operands = ["ij,jr->ir", "ij,ir->jr"], [random_values((6, 3), torch.float64, 1)] * 2
    else:
        x = stc.SparseTensor(at, random_values((3, 4), torch.float64, 0), (3, 3, 4))
        equations, operands = ["ijd,jr->ird", "ijd,ir->jrd"], [random_values((3, 3), torch.float64, 1)] * 2
    for kernel, equation, own in zip(stc.compile_many(equations, x, operands), equations, operands, strict=True):
        torch.testing.assert_close(densified(kernel(own)), torch.einsum(equation, x.to_dense(), own))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("equations", "operands", "said"),
    [
        ("ij,jr->ir", [torch.ones(3, 2)], "takes a list of equations"),
        ([], [], "found 0 equations and 0 lists"),
        (["ij,jr->ir"] * 2, [torch.ones(3, 2)], "found 2 equations and 1 lists"),
        (["ij,jr->ir", "ij,ij"], [torch.ones(3, 2)] * 2, "operand 2"),
    ],
)
def test_what_is_no_workload(equations: Any, operands: Any, said: str) -> None:
    x = random_sparse((3, 3), "random", torch.float32)
    with pytest.raises((stc.EquationError, stc.ShapeError), match=said):
        stc.compile_many(equations, x, operands)


def test_the_operand_in_common_is_sparse() -> None:
    with pytest.raises(stc.EquationError, match="takes a sparse operand after the equations, found Tensor"):
        stc.compile_many(["ij,jr->ir"], torch.ones(3, 3), [torch.ones(3, 2)])


# --- mttkrp of all modes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"plan": "mm-csf"}, {"deterministic": True}], ids=str)
def test_mttkrp_of_all_modes(settings: dict[str, Any]) -> None:
    x = random_sparse((7, 9, 5), "skewed", torch.float64)
    own = factors(x)
    found = stc.mttkrp(x, own, **settings)
    assert isinstance(found, tuple)
    for mode, one in enumerate(found):
        assert_matches(one, mttkrp(3, mode), [x, *own[:mode], *own[mode + 1 :]])


def test_mttkrp_of_all_modes_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    together = compile.choose_together
    monkeypatch.setattr(compile, "choose_together", lambda *a: planned.append(1) or together(*a))
    x = random_sparse((7, 9, 5), "random", torch.float64)
    for _ in range(2):
        stc.mttkrp(x, factors(x))
    assert len(planned) == 1
    assert stc.cache_info().kernels >= 3
    x.values.mul_(2)  # read at each call
    assert_matches(stc.mttkrp(x, factors(x))[1], mttkrp(3, 1), [x, *(f for m, f in enumerate(factors(x)) if m != 1)])


def test_gradients_of_mttkrp_of_all_modes() -> None:
    x = crossed(3, torch.float64)
    own = [f.requires_grad_() for f in factors(x)]
    values = x.values.clone().requires_grad_()

    def gradients(all_modes: bool) -> tuple[torch.Tensor, ...]:
        y = x.with_values(values)
        found = stc.mttkrp(y, own, plan="mm-csf") if all_modes else [stc.mttkrp(y, own, m) for m in range(3)]
        return torch.autograd.grad(sum(f.square().sum() for f in found), [values, *own])

    for one, other in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(one, other)


def test_mttkrp_of_all_modes_in_a_graph() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x = random_sparse((7, 9, 5), "random", torch.float64)
    traced = make_fx(lambda *own: stc.mttkrp(x, list(own)), tracing_mode="real")(*factors(x))
    for one, other in zip(traced(*factors(x)), stc.mttkrp(x, factors(x)), strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_no_workload_is_refused() -> None:
    x = random_sparse((7, 9, 5), "skewed", torch.float64)
    equations, operands = modes(x)
    with pytest.raises(stc.EquationError, match="found list_iterator and list"):
        stc.compile_many(iter(equations), x, operands)  # type: ignore[arg-type]
    with pytest.raises(stc.EquationError, match="found list and Tensor"):
        stc.compile_many(["ijk,kr->ijr"], x, factors(x)[2])  # type: ignore[arg-type]
    for none in (None, "ab"):
        with pytest.raises(stc.EquationError, match="a list of dense operands for 'ijk->i'"):
            stc.compile_many(["ijk->i"], x, [none])


@pytest.mark.parametrize("convert", [lambda w: w, stc.SparseTensor.to_torch, stc.SparseTensor.to_scipy])
def test_a_second_sparse_operand_is_refused_by_its_place(convert: Any) -> None:
    x, w = random_sparse((7, 9, 5), "skewed", torch.float64), random_sparse((5, 4), "skewed", torch.float64)
    with pytest.raises(stc.EquationError, match="operand 2 of 'ijk,kl->ijl' is sparse too"):
        stc.compile_many(["ijk,kl->ijl"], x, [(convert(w),)])


def test_a_single_operand_may_be_an_array() -> None:
    x = random_sparse((7, 9, 5), "skewed", torch.float64)
    b = factors(x)[2]
    for own in (b, b.numpy()):
        (kernel,) = stc.compile_many(["ijk,kr->ir"], x, [own])
        assert_matches(kernel(b), "ijk,kr->ir", [x, b])
