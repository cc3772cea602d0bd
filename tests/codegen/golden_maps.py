"""The maps between products whose generated source is kept in ``tests/golden/maps``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from map_cases import CPU, PATTERNS, SMALL, as_if_large, kernels

from sparsetc import masks
from sparsetc.maps import kernel
from sparsetc.maps.kernel import Heads, WalkKernel
from sparsetc.maps.native_walk import native_walk
from sparsetc.maps.pairs import pairs_of
from sparsetc.maps.task import walk_of
from sparsetc.nn.attention import _gat

FOLDER = Path(__file__).parents[1] / "golden" / "maps"
WHOLE = masks.causal()
"""Full tiles and partial ones, none of which reaches past the end."""
KINDS = ("result", "gradients_rows", "gradients_columns")


@cache
def attention() -> list[WalkKernel]:
    """Blocks of neighbouring columns, full and partial."""
    return kernels(WHOLE, (512, 512), torch.float16, 64, 64)


@cache
def biased() -> list[WalkKernel]:
    """A number an entry."""
    return kernels(PATTERNS["entries"]()[0], (100, 100), torch.float16, 64, 48, bias=True)


@cache
def gathered() -> list[WalkKernel]:
    """Columns that some rows gather."""
    with pytest.MonkeyPatch.context() as patch:
        as_if_large("scattered", patch)
        return kernels(PATTERNS["scattered"]()[0], (60, 70), torch.float16, 64, 64)


@cache
def by_rows() -> list[WalkKernel]:
    """The entries of one row, gathered."""
    with pytest.MonkeyPatch.context() as patch:
        as_if_large("by-row", patch)
        return kernels(PATTERNS["by-row"]()[0], (15, 40), torch.float32, 20, 16)


@cache
def cut() -> list[WalkKernel]:
    """Long windows cut in several items, and their sums combined."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "most_tiles", lambda tiles, heads: 1)
        return kernels(SMALL, (150, 150), torch.float32, 16, 16)


@cache
def loops() -> list[Any]:
    """Graph attention by native loops: the result and the gradients of columns."""
    pattern = torch.eye(9).to_sparse_csr()
    pairs = pairs_of(pattern, (2,), (9, 9), CPU, causal=False)
    body = _gat(0.2)
    rows = torch.empty(9, 2, 24).transpose(0, 1)
    numbers = torch.empty(9, 2).T
    inputs = {"features": rows, "target": numbers, "source": numbers}
    saved = {"o": rows, "g_o": rows, **dict.fromkeys(("lse", "lse_out", "delta"), torch.empty(2, 9))}
    outputs = {"grad_features": torch.empty(2, 9, 24), "grad_source": torch.empty(2, 9)}
    walks = [walk_of(body, 0), walk_of(body, 1, ("features", "source"))]
    paths = [
        native_walk(walk, entries, inputs | saved | outputs, Heads(2), None, "gat")[1]
        for walk, entries in zip(walks, pairs.entries(), strict=True)
    ]
    return [SimpleNamespace(source=SimpleNamespace(text=path.read_text(encoding="utf-8"))) for path in paths]


CASES: dict[str, tuple[Callable[[], list[Any]], int]] = {
    **{f"attention_{kind}": (attention, n) for n, kind in enumerate(KINDS)},
    **{f"biased_{kind}": (biased, n) for n, kind in enumerate(KINDS)},
    "gathered_result": (gathered, 0),
    "by_rows_result": (by_rows, 0),
    "by_rows_gradients_columns": (by_rows, 2),
    "cut_result": (cut, 0),
    "loops_result": (loops, 0),
    "loops_gradients_columns": (loops, 1),
}


def source(name: str) -> str:
    """The text generated for a case."""
    make, number = CASES[name]
    return make()[number].source.text


def path(name: str) -> Path:
    """Where it is kept."""
    return FOLDER / f"{name}.py"
