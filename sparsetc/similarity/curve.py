"""Blocking curves: how high and how dense the blocks of a matrix come out, for each similarity (1-SA, section 2.2).

In: a sparse tensor, a width of strips, similarities. Out: a `BlockingCurve`, a point a similarity, that prints as a
table, and that `plot.blocking` draws.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from textwrap import indent
from typing import Any

import torch
from torch import Tensor

from sparsetc.errors import DtypeError, PlanError
from sparsetc.explain import aligned
from sparsetc.similarity.groups import Groups, check_options, group_of_nonzeros, group_rows
from sparsetc.support.entry import bar
from sparsetc.tensor.coords import histogram, linear_key, numbered, of_modes, ranked
from sparsetc.tensor.sparse_tensor import SparseTensor

TAUS = tuple(n / 10 for n in range(1, 11))
"""The paper's similarities."""


@dataclass(frozen=True)
class BlockingPoint:
    """The blocking by one similarity.

    Attributes:
        blocks: blocks that have nonzeros: strips that each group touches, over the groups.
        height: mean rows of such a block; 0 of a matrix without nonzeros.
        density: nonzeros a stored value; 0 of a matrix without nonzeros.
        stored: values that the blocks store; the last strip counts as wide as any.
        seconds: time of grouping the rows.
    """

    tau: float
    groups: int
    blocks: int
    height: float
    density: float
    stored: int
    seconds: float


@dataclass(frozen=True, repr=False)
class BlockingCurve:
    """Blockings of one matrix, by groups of similar rows, for several similarities; prints as a table.

    Attributes:
        shape: sizes of the tensor.
        mode: the mode whose slices are the rows.
        nnz: number of nonzeros.
        width: columns of a block.
        points: one `BlockingPoint` for each similarity, in the order in which they were given.

    Examples:
        >>> curve = stc.plans.blocking_curve(stc.eye(8), width=4, taus=(1.0,))
        >>> curve.points[0].groups, curve.points[0].blocks, curve.points[0].density
        (2, 2, 0.25)
    """

    shape: tuple[int, ...]
    mode: int
    nnz: int
    width: int
    points: tuple[BlockingPoint, ...]

    def table(self) -> str:
        """Return a table as text, with one line for each similarity."""
        rows = [("tau", "groups", "blocks", "mean height", "density", "stored values", "seconds")]
        for p in self.points:
            sizes = f"{p.height:.1f}", f"{p.density:.3g}", f"{p.stored:,}"
            rows.append((f"{p.tau:g}", f"{p.groups:,}", f"{p.blocks:,}", *sizes, f"{p.seconds:.3f}"))
        return indent(aligned(rows), "  ")

    def __str__(self) -> str:
        sizes = " x ".join(map(str, self.shape))
        rows = "" if len(self.shape) == 2 and self.mode == 0 else f", rows along mode {self.mode}"
        return f"blockings of {sizes}, {self.nnz:,} nonzeros{rows}, strips of {self.width} columns\n{self.table()}"

    __repr__ = __str__


def blocking_curve(
    matrix: Any, *, width: int = 64, taus: Sequence[float] = TAUS, mode: int = 0, progress: bool = False
) -> BlockingCurve:
    """Group the rows of a matrix at several similarities, and return height and density of the blocks of each grouping.

    Args:
        matrix: a `SparseTensor`, or a sparse tensor of torch, scipy or pydata/sparse. A tensor of order above 2 is
            unfolded: columns are the coordinates of all other modes. Blocks and dense modes are expanded.
        width: of a block: the columns are cut into strips of this many.
        taus: Jaccard similarities, each above 0 and at most 1.
        mode: the mode whose slices are rows.
        progress: show a progress bar on stderr.

    Raises:
        DtypeError: the operand is not sparse.
        PlanError: a width, a similarity or a mode out of range.

    Examples:
        >>> curve = stc.plans.blocking_curve(stc.eye(8), width=4, taus=(0.5, 1.0))
        >>> [point.groups for point in curve.points]
        [2, 2]
    """
    x = SparseTensor.coerce(matrix)
    if x is None:
        raise DtypeError(f"a blocking curve is of a sparse matrix, found {type(matrix).__name__}")
    if not 0 <= mode < x.order:
        raise PlanError(f"rows are slices of a mode from 0 to {x.order - 1}, found mode {mode}")
    for tau in taus:
        check_options(width, tau)
    x = x.expand_dense().coalesce()
    if x.nnz == 0:
        empty = tuple(BlockingPoint(tau, 0, 0, 0.0, 0.0, 0, 0.0) for tau in taus)
        return BlockingCurve(x.shape, mode, 0, width, empty)
    rows, columns = x.coords[mode], _columns(x, mode)
    n_columns = int(columns.max()) + 1
    points = []
    with bar(len(taus), "grouping rows", progress, "similarities") as at:
        for n, tau in enumerate(taus):
            start = time.perf_counter()
            groups = group_rows(rows, columns, x.shape[mode], n_columns, width=width, tau=tau)
            if x.device.type == "cuda":
                torch.cuda.synchronize(x.device)
            seconds = time.perf_counter() - start
            points.append(measured(groups, rows, columns, n_columns, width, tau, seconds))
            at(n + 1)
    return BlockingCurve(x.shape, mode, x.nnz, width, tuple(points))


def measured(
    groups: Groups, rows: Tensor, columns: Tensor, n_columns: int, width: int, tau: float, seconds: float
) -> BlockingPoint:
    """The blocks of a grouping, given the (nnz,) coordinates of nonzeros."""
    nnz, group = rows.numel(), group_of_nonzeros(groups, rows)
    touched = numbered([group, columns // width], [groups.count, -(-n_columns // width)], nnz, group)
    strips = histogram(touched.coords[0], groups.count)  # that each group touches
    blocks, cells = torch.stack([strips.sum(), (strips * groups.heights).sum()]).tolist()
    height = cells / blocks
    density = nnz / (cells * width)
    stored = cells * width
    return BlockingPoint(tau, groups.count, blocks, height, density, stored, seconds)


def _columns(x: SparseTensor, mode: int) -> Tensor:
    """Return (nnz,) the linear index of all modes but one; its rank among the nonzeros' if it could pass 2**63."""
    others = [m for m in range(x.order) if m != mode]
    rows, sizes = of_modes(x.coords, x.shape, others)
    key, span = linear_key(rows, sizes, x.coords[mode])
    return ranked(key, span)[0].long() if span < prod(sizes) else key
