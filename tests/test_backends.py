"""Backends: which one runs an einsum, and that each fact of a backend decides by itself."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sparsetc as stc
from sparsetc.backends import BACKENDS, TORCH, TRITON, Backend
from sparsetc.ir.plan import Part, Plan, Schedule, Storage
from sparsetc.options import Options
from sparsetc.planner.pricing import suited
from sparsetc.planner.problem import Problem

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("named", "device", "dtype", "backend"),
    [
        (None, CPU, None, TORCH),
        (None, GPU, None, TRITON),
        (None, GPU, torch.complex64, TORCH),
        ("triton", CPU, torch.float32, TRITON),
        ("triton", CPU, torch.complex128, TORCH),
        ("torch", GPU, None, TORCH),
        ("numba", CPU, None, TORCH),  # whose programs are printed as loops
    ],
)
def test_the_backend_of_an_einsum(
    named: str | None, device: torch.device, dtype: torch.dtype, backend: Backend
) -> None:
    assert Options(backend=named).effective_backend(device, dtype) == backend


def problem(backend: Backend, **facts: bool) -> Problem:
    """The problem of an SpMM for a backend that differs from one of the package."""
    kernel = stc.compile("ij,jr->ir", stc.eye(4), torch.ones(4, 8), backend=backend.name, deterministic=True)
    return replace(kernel.step.problem, backend=replace(backend, name="another", **facts))


def test_sums_are_ordered_where_work_items_add_at_the_same_time() -> None:
    assert problem(TRITON).ordered
    assert not problem(TRITON, atomics=False).ordered
    assert problem(TORCH, atomics=True).ordered


def test_a_plan_is_suited_to_each_fact_alone() -> None:
    storage = Storage(item=(0,), leaf=(1,), lanes=8, narrow=True)
    schedule = Schedule(lanes=8, unroll=4, rounded=("B",), precision="bf16")
    plan = Plan("mine", (Part("coo", storage, schedule),))

    def kept(**facts: bool) -> tuple[bool, int, tuple[str, ...]]:
        (part,) = suited(plan, problem(TRITON, **facts)).parts
        return part.storage.narrow, part.schedule.lanes, part.schedule.rounded

    assert kept() == (True, 8, ("B",))
    assert kept(narrow=False) == (False, 8, ("B",))
    assert kept(at_once=True) == (True, 1, ("B",))
    assert kept(tensor_cores=False) == (True, 8, ())


def test_general_code_asks_for_facts_and_not_for_names() -> None:
    """What is left: settings, a warning, steps that plans of torch are not compared with, and numba's own names."""
    package = Path(stc.__file__).parent
    branch = re.compile(r"\bif\b.*backend (==|!=|is|in|not in) |\bbackend (==|!=) ")
    found = {
        path.relative_to(package).as_posix(): count
        for path in sorted(package.rglob("*.py"))
        if "codegen" not in path.parts and (count := len(branch.findall(path.read_text(encoding="utf-8"))))
    }
    assert found == {"contraction/compile.py": 1, "contraction/step.py": 1, "options.py": 1}, found
    assert {*BACKENDS} == {"triton", "torch", "numba"}
