"""Attention as a body, for tests of its kernels: tasks, patterns, and the same over all pairs in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import sparsetc as stc
from sparsetc import masks
from sparsetc.maps import fused, kernel
from sparsetc.maps.fused import Task
from sparsetc.maps.kernel import WalkKernel
from sparsetc.meeting import pairs_of
from sparsetc.pairwise import entries_of
from sparsetc.sparse_attention import _body

SMALL = masks.causal() & masks.sliding_window(40) | masks.global_tokens(3)
CPU = torch.device("cpu")


def scattered(rows: int, columns: int, share: float, seed: int = 0) -> torch.Tensor:
    """Which pairs meet: drawn one by one, but for row 3, which meets nothing."""
    meets = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < share
    meets[3] = False
    return meets


def in_blocks(rows: int, columns: int, side: int, places: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Which pairs meet: those of the blocks at these places."""
    meets = torch.zeros(rows, columns, dtype=torch.bool)
    for i, j in places:
        meets[i * side : (i + 1) * side, j * side : (j + 1) * side] = True
    return meets


PLACES = (0, 0), (1, 2), (0, 1), (2, 1)
PATTERNS: dict[str, Callable[[], tuple[Any, torch.Tensor]]] = {
    "mask": lambda: (SMALL, SMALL.dense(150)),
    "entries": lambda: _of_entries(SMALL.dense(100)),
    "scattered": lambda: _of_entries(scattered(60, 70, 0.02)),
    "by-row": lambda: _of_entries(scattered(60, 70, 0.02, seed=1)),
    "scattered-one-row": lambda: _of_entries(torch.arange(200)[None, :] % 3 == 0),
    "blocks-of-32": lambda: _of_blocks(in_blocks(90, 110, 32, PLACES), 32),
    "blocks-of-128": lambda: _of_blocks(in_blocks(300, 330, 128, PLACES), 128),
    "one-entry": lambda: _of_entries(torch.arange(35)[:, None] * torch.arange(4) == 3 * 2),
}
"""What `attention` is given, and which pairs meet."""


def as_if_large(name: str, patch: pytest.MonkeyPatch) -> None:
    """Gather the columns of patterns whose name says so, which are too small for it, and maybe row by row."""
    if "scattered" in name or "by-row" in name:
        patch.setitem(fused.PRICES, fused.APART, 0.0)
    if "by-row" in name:
        patch.setattr(kernel, "GATHERED", {key: {} for key in kernel.GATHERED})


def _of_entries(meets: torch.Tensor) -> tuple[Any, torch.Tensor]:
    return stc.SparseTensor.from_dense(meets.float()), meets


def _of_blocks(meets: torch.Tensor, side: int) -> tuple[Any, torch.Tensor]:
    return stc.SparseTensor.from_dense(meets.float(), blocksize=(side, side)), meets


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meets: torch.Tensor, scale: float, bias: torch.Tensor | None
) -> torch.Tensor:
    """Attention over all pairs; zeros for a query that meets nothing. A bias is one of all pairs."""
    some = meets.any(-1)[:, None]
    scores = q @ k.mT * scale if bias is None else q @ k.mT * scale + bias
    weights = torch.softmax(scores.masked_fill(~meets, -torch.inf).masked_fill(~some, 0.0), -1)
    return weights * some @ v


def kernels(
    given: Any, shape: tuple[int, int], dtype: torch.dtype, depth: int, width: int, bias: bool = False, heads: int = 2
) -> list[WalkKernel]:
    """Return the kernels of attention over a pattern: of the result, and of gradients by rows and by columns."""
    pairs = pairs_of(given, (heads,), shape, CPU, causal=False)
    if bias:
        pairs = replace(pairs, given=entries_of(pairs))
    body = _body(0.3, bias)
    task = Task(body, pairs, "highest", None, "attention")
    rows, columns = shape
    sizes: dict[str, tuple[int, ...]] = {"q": (rows, depth), "k": (columns, depth), "v": (columns, width)}
    if bias:
        assert isinstance(pairs.given, stc.Pattern)
        sizes["bias"] = (pairs.given.nnz,)
    named = {name: torch.empty(heads, *size, dtype=dtype) for name, size in sizes.items()}
    found = task.kernels(tuple(named.values()))
    assert not found.refusal
    result, sums = torch.empty(heads, rows, width, dtype=dtype), torch.empty(heads, rows)
    given_too = {"o": result, "g_o": result, "lse": sums, "delta": sums}
    return [found.result, *found.of_gradients({**named, **given_too}, body.inputs)]
