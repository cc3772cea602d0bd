"""Pictures of tensors, plans and models. Each function returns matplotlib axes; a notebook shows their picture.

In: a SparseTensor, a kernel, a model or a blocking curve; axes to draw into, or None for a new figure. Out: the axes.
matplotlib comes with the extra ``plot``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import combinations
from math import isclose
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsetc.contraction.kernel import Kernel
from sparsetc.errors import DtypeError, PlanError, ShapeError
from sparsetc.explain import Explanation
from sparsetc.support import required
from sparsetc.tensor.coords import mode_of
from sparsetc.tensor.picture import binned
from sparsetc.tensor.sparse_tensor import SparseTensor

if TYPE_CHECKING:
    from sparsetc.decomposition.factored import Factored
    from sparsetc.similarity.curve import BlockingCurve, BlockingPoint

__all__ = ["blocking", "factors", "fit", "plan", "spy", "tiles"]

BINS = 256
"""Rows and columns of a picture of entries, at most."""
SHOWN = 8
"""Components that `factors` draws, at most."""
BARS = 256
"""Rows of a factor up to which its columns are drawn as bars, and as lines from there on."""


def spy(
    x: SparseTensor,
    modes: tuple[int, int] | None = None,
    *,
    at: Mapping[int, int] | None = None,
    bins: int = BINS,
    ax: Any = None,
) -> Any:
    """Draw the positions of entries: the darker a cell, the more of them it holds.

    Args:
        x: of any order; blocks and dense modes are drawn entry by entry.
        modes: that of rows and that of columns. None is (0, 1) of a matrix, and every pair of modes of a tensor.
        at: indices of other modes, by mode, for a slice; modes that it does not name are projected.
        bins: rows and columns of cells, at most.
        ax: axes to draw into; an array of as many as there are pairs.

    Returns:
        Axes, or an array of them, one a pair of modes.

    Raises:
        ShapeError: no such mode.
        DtypeError: what is not sparse.
        ImportError: matplotlib is not installed.

    Examples:
        ``stc.plot.spy(x, (0, 2), at={1: 5}).figure.savefig("slice.png")``
    """
    sparse = SparseTensor.coerce(x)
    if sparse is None:
        raise DtypeError(f"spy draws a sparse tensor, found {type(x).__name__}")
    x = sparse.expand_dense().coalesce()
    coords = x.coords
    shape = x.shape
    order = max(2, x.order)
    for mode, index in (at or {}).items():
        coords = coords[:, coords[mode_of(x.order, mode, "spy")] == index]
    pairs = (
        [*combinations(range(order), 2)]
        if modes is None
        else [(mode_of(order, modes[0], "spy"), mode_of(order, modes[1], "spy"))]
    )
    across = min(3, len(pairs))
    drawn = _axes(ax, len(pairs), (3.4 * across, 3.2 * -(-len(pairs) // across)), across)
    for one, (rows, columns) in zip(drawn, pairs, strict=True):
        counts = binned(coords, shape, (rows, columns), bins).cpu()
        _image(one, torch.where(counts > 0, counts.log1p(), torch.nan), shape, (rows, columns), cmap="viridis_r")
        one.set_title(f"{int(counts.sum()):,} entries")
    return drawn if modes is None and len(pairs) > 1 else drawn[0]


def tiles(kernel: Kernel, modes: tuple[int, int] = (0, 1), *, bins: int = BINS, ax: Any = None) -> Any:
    """Draw the part of a plan that stores the entries of each region, by colour.

    Args:
        kernel: of one sparse operand.
        modes: that of rows and that of columns.
        bins: rows and columns of cells, at most.
        ax: axes to draw into.

    Raises:
        PlanError: a kernel of several steps.
        ImportError: matplotlib is not installed.
    """
    _explained(kernel)
    (one,) = _axes(ax, 1, (5, 4))
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    step = kernel.step
    coords, shape = step.operand.coords, step.problem.shape
    rows, columns = (mode_of(max(2, len(shape)), mode, "tiles") for mode in modes)
    counts = []
    for part in step.parts:
        stored = part.packed.in_whole(part.packed.positions)
        held = coords if stored is None else coords[:, stored[stored >= 0].unique()]
        counts.append(binned(held, shape, (rows, columns), bins).cpu())
    most, which = torch.stack(counts).max(0)
    colors = _colors(len(counts))
    looks = {"cmap": ListedColormap(colors), "vmin": -0.5, "vmax": len(counts) - 0.5}
    _image(one, torch.where(most > 0, which.double(), torch.nan), shape, (rows, columns), **looks)
    names = [f"{n}: {p.program.format}, {p.packed.nnz:,} nonzeros" for n, p in enumerate(step.parts)]
    patches = [Patch(color=c, label=name) for c, name in zip(colors, names, strict=True)]
    one.legend(handles=patches, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.08))
    one.set_title(f"{kernel.equation}: {kernel.plan.name}")
    return one


def plan(kernel: Kernel, *dense: Tensor, ax: Any = None) -> Any:
    """Draw the bytes of each part of a kernel, the time expected, and the least time that the device allows.

    Args:
        kernel: of one sparse operand.
        dense: its dense operands, for a bar of the time that a call takes, measured.
        ax: axes to draw into.

    Raises:
        PlanError: a kernel of several steps.
        ImportError: matplotlib is not installed.
    """
    parts = _explained(kernel).parts
    (one,) = _axes(ax, 1, (6, 1.2 + 0.6 * (len(parts) + bool(dense))))
    names = [f"{p.number}: {p.format}\n{p.nbytes / 1e6:,.1f} MB" for p in parts]
    one.barh(names, [p.predicted_us for p in parts], color=_colors(2)[0], label="expected")
    one.barh(names, [p.roofline_us for p in parts], height=0.4, color=_colors(2)[1], label="floor")
    if dense:
        one.barh(["measured"], [1e6 * kernel.benchmark(*dense).median], color="grey", label="measured, all parts")
    one.invert_yaxis()
    one.set(xlabel="microseconds a call", title=f"{kernel.equation}: {kernel.plan.name}")
    one.legend(fontsize=8)
    return one


def factors(
    model: Factored, components: Sequence[int] | None = None, *, modes: Sequence[str] | None = None, ax: Any = None
) -> Any:
    """Draw the columns of a model's factor matrices: a row of axes a component, a column a mode.

    Args:
        model: of `decomposition`; of CP, `CP.arranged` puts components in order.
        components: numbers of columns; None is the first 8.
        modes: a name for each mode; None numbers them.
        ax: array of axes (components, modes) to draw into.

    Raises:
        ShapeError: no such component, or another number of names than modes.
        ImportError: matplotlib is not installed.
    """
    ranks = [f.shape[1] for f in model.factors]
    chosen = list(range(min(SHOWN, max(ranks)))) if components is None else list(components)
    if not chosen or not all(0 <= c < max(ranks) for c in chosen):
        raise ShapeError(f"components are numbers below {max(ranks)}, found {chosen}")
    names = [f"mode {mode}" for mode in range(len(ranks))] if modes is None else list(modes)
    if len(names) != len(ranks):
        raise ShapeError(f"modes has {len(names)} names, the model {len(ranks)} modes")
    size = (2.6 * len(ranks), 1.4 * len(chosen))
    drawn = _axes(ax, len(chosen) * len(ranks), size, columns=len(ranks)).reshape(len(chosen), len(ranks))
    for row, component in zip(drawn, chosen, strict=True):
        for mode, (one, factor) in enumerate(zip(row, model.factors, strict=True)):
            if component >= factor.shape[1]:
                one.set_axis_off()  # a Tucker model's modes have different numbers of columns
                continue
            column = factor[:, component].detach().cpu().double().numpy()
            if len(column) <= BARS:
                one.bar(range(len(column)), column, width=1.0)
            else:
                one.plot(column, linewidth=0.7)
            one.set_title(f"{names[mode]}, component {component}", fontsize=8)
            one.tick_params(labelsize=7)
    return drawn


def fit(model: Factored, *, ax: Any = None) -> Any:
    """Draw a model's fit, or its log-likelihood if it has one, iteration by iteration.

    Raises:
        ImportError: matplotlib is not installed.
    """
    (one,) = _axes(ax, 1, (5, 3))
    likelihoods = getattr(model, "log_likelihoods", ())
    numbers = likelihoods or model.fits
    one.plot(range(1, len(numbers) + 1), numbers, marker="." if len(numbers) < 60 else "")
    one.set(
        xlabel="iteration", ylabel="log-likelihood" if likelihoods else "fit", title=f"{model.KIND}, rank {model.rank}"
    )
    one.xaxis.get_major_locator().set_params(integer=True)
    one.grid(alpha=0.3)
    return one


def blocking(curve: BlockingCurve, *, ax: Any = None) -> Any:
    """Draw density over height of the blocks of a `BlockingCurve`, a point a similarity.

    Raises:
        DtypeError: no such curve.
        ImportError: matplotlib is not installed.
    """
    if not hasattr(curve, "points"):
        raise DtypeError(f"blocking draws what `stc.plans.blocking_curve` returns, found {type(curve).__name__}")
    (one,) = _axes(ax, 1, (6, 4))
    one.set(xlabel="mean height of blocks", ylabel="density in blocks")
    one.set_title(f"blockings by similarity τ, strips of {curve.width} columns")
    shown = [p for p in curve.points if p.blocks]
    one.plot([p.height for p in shown], [p.density for p in shown], marker="o")
    for label, p in _labels(shown):
        one.annotate(f"τ {label}", (p.height, p.density), xytext=(4, 4), textcoords="offset points", fontsize=8)
    if shown:
        one.set_xscale("log", base=2)
    one.set_ylim(0, 1.1 * max((p.density for p in shown), default=1.0))
    one.grid(alpha=0.3)
    return one


def _explained(kernel: Kernel) -> Explanation:
    """Return the explanation of a kernel of one sparse operand. Raise `PlanError` for other kernels."""
    explained: Explanation = kernel.explain()
    if explained.step is None:
        raise PlanError(f'"{kernel.equation}" has several sparse operands, and no parts to draw')
    return explained


def _image(one: Any, cells: Tensor, shape: Sequence[int], modes: tuple[int, int], **looks: Any) -> None:
    """Draw cells of two modes into axes, the first mode downwards, with the modes' sizes and names at the sides."""
    high, wide = (max(1, shape[mode]) if mode < len(shape) else 1 for mode in modes)
    one.imshow(cells.numpy(), aspect="auto", extent=(0, wide, high, 0), interpolation="nearest", **looks)
    one.set(xlabel=f"mode {modes[1]}", ylabel=f"mode {modes[0]}")


def _labels(points: Sequence[BlockingPoint]) -> list[tuple[str, BlockingPoint]]:
    """Label each group of points at about one place by its similarity, or by the first and last of the group."""
    places: list[list[BlockingPoint]] = []
    for p in points:
        near = places[-1][0] if places else None
        if near and isclose(p.height, near.height, rel_tol=0.1) and isclose(p.density, near.density, rel_tol=0.05):
            places[-1].append(p)
        else:
            places.append([p])
    return [(" … ".join(f"{p.tau:g}" for p in dict.fromkeys((one[0], one[-1]))), one[0]) for one in places]


def _axes(ax: Any, count: int, size: tuple[float, float], columns: int = 1) -> Any:
    """Return an array of `count` axes: the ones given, or of a new figure."""
    figures = required("matplotlib.figure", 'a plot needs matplotlib: pip install "sparsetc[plot]"')
    import numpy as np

    if ax is None:
        make: Any = figures.Figure
        if "ipykernel" in sys.modules:  # a notebook shows what pyplot has open at the end of a cell, and closes it
            make = import_module("matplotlib.pyplot").figure
        ax = make(figsize=size, layout="constrained").subplots(-(-count // columns), columns, squeeze=False)
        for unused in ax.reshape(-1)[count:]:
            unused.remove()
        ax = ax.reshape(-1)[:count]
    axes = np.asarray(ax, dtype=object).reshape(-1)
    if len(axes) != count:
        raise ShapeError(f"this picture takes {count} axes, found {len(axes)}")
    return axes


def _colors(count: int) -> list[Any]:
    """Return `count` distinct colours."""
    import matplotlib

    return [matplotlib.colormaps["tab10"](n % 10) for n in range(count)]
