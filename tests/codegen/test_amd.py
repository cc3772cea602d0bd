"""What an AMD GPU would run: the text that is made for it is the text that is compiled for it ahead of time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Problem
from pair_cases import operands as pair_operands

import sparsetc as stc
from sparsetc.codegen import cache

pytest.importorskip("triton")
interpreted = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that was built for AMD's GPUs."""
    monkeypatch.setattr(torch.version, "hip", "6.4")


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every module that is loaded."""
    found: list[str] = []
    load = cache.load

    def listening(text: str, directory: Path | None, name: str) -> Any:
        found.append(text)
        return load(text, directory, name)

    monkeypatch.setattr(cache, "load", listening)
    return found


def kernels(precision: str) -> list[tuple[stc.Kernel | stc.Kernel, str]]:
    """Runs and fibers with dots, tiles stored whole and as bitmaps, pairs of blocks; and what each is."""
    sizes = {"i": 20, "j": 30, "k": 40, "r": 32, "s": 32}
    ttmc = Problem("ijk,jr,ks->irs", sizes).operands()
    matrices = Problem("ij,jr->ir", sizes).operands()
    settings: dict[str, Any] = {"precision": precision, "backend": "triton"}
    pair = pair_operands("ijk,klm->ijlm", "skewed", torch.float32, sizes=dict.fromkeys("ijlm", 20) | {"k": 70})
    return [
        *((stc.compile("ijk,jr,ks->irs", *ttmc, plan=plan, **settings), plan) for plan in ("coo", "fiber")),
        (stc.compile("ij,jr->ir", *matrices, plan=stc.plans.plan_hls(1), **settings), "tiles"),
        (stc.compile("ij,jr->ir", *matrices, plan=stc.plans.plan_hls(1), memory_limit=8000, **settings), "bitmaps"),
        (stc.compile("ijk,klm->ijlm", *pair, plan=stc.plans.plan_bcb(storage="whole"), **settings), "blocks"),
        (
            stc.compile("ijk,klm->ijlm", *pair, plan=stc.plans.plan_bcb(storage="bitmap"), **settings),
            "blocks of bitmaps",
        ),
    ]


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_amd_runs_what_its_matrix_units_have(precision: str, amd: None) -> None:
    for kernel, what in kernels(precision):
        assert "tl.dot" in kernel.source, what
        assert "tf32" not in kernel.source, what
        assert "popc" not in kernel.source, what
        if precision == "highest":
            assert 'input_precision="ieee"' in kernel.source, what


def test_plans_say_so_too(amd: None) -> None:
    kernel, _ = kernels("highest")[0]
    assert isinstance(kernel, stc.Kernel)
    assert [p.schedule.precision for p in kernel.plan.parts] == ["ieee"]
    assert [p.instruction for p in kernel.explain().parts] == ["tensor core, ieee"]


@pytest.mark.skipif(interpreted, reason="the interpreter compiles nothing")
def test_what_runs_is_what_is_compiled_ahead_of_time(amd: None, texts: list[str]) -> None:
    for kernel, what in kernels("highest"):
        texts.clear()
        assert "amdgcn" in kernel.ptx("gfx942")
        assert set(texts) == {kernel.source}, what


@pytest.mark.skipif(interpreted, reason="the interpreter compiles nothing")
def test_elsewhere_the_text_for_amd_has_none_of_it_either(texts: list[str]) -> None:
    for kernel, what in kernels("highest"):
        texts.clear()
        assert "amdgcn" in kernel.ptx("gfx942")
        assert "tl.dot" in texts[-1], what
        assert "tf32" not in texts[-1], what
