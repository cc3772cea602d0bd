"""Sparse tensors made of others or of nothing: joined, stacked, multiplied out, and with entries anywhere.

In: SparseTensors, or a shape. Out: a SparseTensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from sparsetc.errors import DeviceError, DtypeError, FormatError, ShapeError
from sparsetc.support.checks import check_memory
from sparsetc.support.entry import entry_point
from sparsetc.tensor import coords as crd
from sparsetc.tensor.dtypes import check_dtype, multiplied
from sparsetc.tensor.duplicates import coalescing_bytes
from sparsetc.tensor.elementwise import holding, where_holds
from sparsetc.tensor.sparse_tensor import SparseTensor

PERMUTED = 1 << 22
"""Positions up to which random ones are the first of a permutation of all."""


@entry_point
def cat(tensors: Sequence[SparseTensor], dim: int = 0) -> SparseTensor:
    """Concatenate tensors along a mode; the sizes of their other modes are equal.

    Raises:
        ShapeError: no tensors, or shapes that do not agree.
        DeviceError: tensors on several devices.

    Examples:
        >>> stc.cat([stc.eye(2), stc.eye(2)], 1).shape
        (2, 4)
    """
    parts = _alike(tensors, "cat")
    order = parts[0].order
    mode = crd.mode_of(order, dim, "cat")
    others = {(*x.shape[:mode], *x.shape[mode + 1 :]) for x in parts}
    if len(others) > 1:
        raise ShapeError(f"cat along mode {mode} takes one shape of the others, found {[x.shape for x in parts]}")
    if mode >= parts[0].sparse_order:
        parts = [x.expand_dense() for x in parts]
    coords, start = [], 0
    for x in parts:
        rows = x.coords.clone()
        rows[mode] += start
        coords.append(rows)
        start += x.shape[mode]
    shape = (*parts[0].shape[:mode], start, *parts[0].shape[mode + 1 :])
    return SparseTensor(torch.cat(coords, 1), torch.cat([x.values for x in parts]), shape, check=False)


@entry_point
def stack(tensors: Sequence[SparseTensor], dim: int = 0) -> SparseTensor:
    """Stack tensors of one shape along a new mode, which becomes mode ``dim``; errors as for `cat`.

    Examples:
        >>> stc.stack([stc.eye(2), stc.eye(2), stc.eye(2)]).shape
        (3, 2, 2)
    """
    return cat([x.unsqueeze(dim) for x in _alike(tensors, "stack")], dim)


@entry_point
def block_diag(*tensors: SparseTensor) -> SparseTensor:
    """Place tensors of one order as blocks along the diagonal of a tensor; its sizes are the sums of theirs.

    Raises:
        ShapeError: no tensors, or tensors of several orders or with other dense modes.
        DeviceError: tensors on several devices.

    Examples:
        >>> stc.block_diag(stc.eye(2), stc.full((1, 2), 3.0)).shape
        (3, 4)
    """
    parts = _alike(tensors, "block_diag")
    modes, dense = parts[0].sparse_order, parts[0].shape[parts[0].sparse_order :]
    if any(x.shape[modes:] != dense for x in parts):
        raise ShapeError(f"block_diag takes tensors with the same dense modes, found shapes {[x.shape for x in parts]}")
    starts = torch.tensor([(0,) * modes, *(x.shape[:modes] for x in parts)]).cumsum(0)
    coords = [x.coords + start[:, None].to(x.device) for x, start in zip(parts, starts, strict=False)]
    shape = (*starts[-1].tolist(), *dense)
    return SparseTensor(torch.cat(coords, 1), torch.cat([x.values for x in parts]), shape)


def _alike(tensors: Sequence[Any], name: str) -> list[SparseTensor]:
    """The tensors of single nonzeros, on one device and with the same dense modes."""
    if not isinstance(tensors, list | tuple):
        raise ShapeError(f"{name} takes a list of sparse tensors, found {type(tensors).__name__}")
    coerced = [SparseTensor.coerce(x) for x in tensors]
    if not coerced or None in coerced:
        raise ShapeError(
            f"{name} takes sparse tensors, at least one, found {[type(x).__name__ for x in tensors]!s:.200}"
        )
    sparse: list[SparseTensor] = [x for x in coerced if x is not None]
    if len({x.order for x in sparse}) > 1:
        raise ShapeError(f"{name} takes tensors of one order, found {[x.shape for x in sparse]}")
    if len({x.device for x in sparse}) > 1:
        raise DeviceError(f"{name} takes tensors on one device, found {sorted(str(x.device) for x in sparse)}")
    if any(x.blocksize for x in sparse) or len({x.dense_order for x in sparse}) > 1:
        sparse = [x.expand_dense() for x in sparse]
    return sparse


@entry_point
def kron(x: SparseTensor, y: SparseTensor) -> SparseTensor:
    """Return the Kronecker product: each entry of x times all of y, in blocks of the shape of y; differentiable.

    Raises:
        ShapeError: tensors of different orders, or sizes past 2**63 - 1.
        DtypeError: a product of integers that does not fit.

    Examples:
        >>> stc.kron(stc.eye(2), stc.full((1, 2), 3.0)).to_dense()
        tensor([[3., 3., 0., 0.],
                [0., 0., 3., 3.]])
    """
    x, y = (one.expand_dense().coalesce() for one in _alike((x, y), "kron"))
    shape = crd.checked_shape([n * m for n, m in zip(x.shape, y.shape, strict=True)])
    count, like = x.nnz * y.nnz, torch.empty(0, dtype=torch.result_type(x.values, y.values), device=x.device)
    nbytes = count * (8 * x.order + like.itemsize) + coalescing_bytes(shape, count, like)
    check_memory(f"the {count:,} entries of a Kronecker product of shape {shape}", nbytes, x.device)
    sizes = torch.tensor(y.shape, device=x.device).view(-1, 1, 1)
    coords = (x.coords.unsqueeze(2) * sizes + y.coords.unsqueeze(1)).flatten(1)
    values = multiplied(torch.outer, torch.result_type(x._values, y._values), x._values, y._values)
    return SparseTensor._of(coords, values.flatten(), shape, False).coalesce()


@entry_point
def eye(n: int, m: int | None = None, *, dtype: torch.dtype | None = None, device: Any = None) -> SparseTensor:
    """Make the (n, m) matrix with ones on its diagonal; square without ``m``.

    Examples:
        >>> stc.eye(2, 3).to_dense()
        tensor([[1., 0., 0.],
                [0., 1., 0.]])
    """
    shape = crd.checked_shape((n, n if m is None else m))
    at = torch.arange(min(shape), device=device)
    return SparseTensor(at.expand(2, -1), torch.ones(at.numel(), dtype=dtype, device=device), shape, check=False)


@entry_point
def zeros(*shape: Any, dtype: torch.dtype | None = None, device: Any = None) -> SparseTensor:
    """Make a tensor without entries.

    Examples:
        >>> stc.zeros(2, 3).nnz
        0
    """
    sizes = crd.checked_shape(crd.flat(shape))
    coords = torch.zeros((len(sizes), 0), dtype=torch.int64, device=device)
    return SparseTensor(coords, torch.zeros(0, dtype=dtype, device=device), sizes)


@entry_point
def full(shape: Sequence[int], value: float, *, dtype: torch.dtype | None = None, device: Any = None) -> SparseTensor:
    """Make a tensor with an entry of one value at every position.

    Examples:
        >>> stc.full((2, 3), 7.0).sum()
        tensor(42.)
    """
    sizes = crd.checked_shape(shape)
    if not sizes:
        raise FormatError("full takes the size of at least one mode, found ()")
    none = torch.zeros((0, 1), dtype=torch.int64, device=device)
    like = torch.full((), value, dtype=dtype, device=device)
    check_dtype(like.dtype)
    nbytes = prod(sizes) * (8 * len(sizes) + like.itemsize) + 8 * max(sizes)
    check_memory(f"all entries of shape {sizes}", nbytes, like.device)
    values = like.new_full((prod(sizes),), value)
    return SparseTensor._of(crd.with_dense_modes(none, sizes), values, sizes, True)


@entry_point
def where(condition: Any, x: Any, y: Any = 0) -> SparseTensor:
    """Return entries of x where a condition holds, and of y elsewhere, as `torch.where` does; differentiable.

    Args:
        condition: a SparseTensor such as ``x > 2``, true at its entries that are not 0; or a dense bool tensor,
            broadcast to the shape of x and y.
        x: a SparseTensor of the shape of y; with a sparse condition also a number, or a dense tensor that is
            broadcast.
        y: a SparseTensor, or 0.

    Raises:
        DtypeError: the result would not be 0 where there is no entry.
        ShapeError: shapes that differ.

    Examples:
        >>> x = stc.SparseTensor([[0, 1, 2]], [1, 2, 3])
        >>> stc.where(x > 2, 9, x).values
        tensor([1, 2, 9])
    """
    sparse = isinstance(condition, SparseTensor)
    if sparse:
        condition = condition.expand_dense().drop()
    elif not isinstance(condition, Tensor):
        raise DtypeError(f"where takes a SparseTensor or a tensor as condition, found {type(condition).__name__}")
    if sparse and not isinstance(x, SparseTensor):
        if isinstance(x, int | float | complex):
            like = holding(y.values, x) if isinstance(y, SparseTensor) else torch.ones(())
            x = torch.as_tensor(x, dtype=torch.result_type(like, x), device=condition.device).reshape(1)
        x = condition.map(lambda values: torch.ones_like(values, dtype=torch.bool)) * x
    if not isinstance(x, SparseTensor) or not (isinstance(y, SparseTensor) or (isinstance(y, Number) and y == 0)):
        kinds = f"{type(x).__name__} and {type(y).__name__}"
        raise DtypeError(f"where takes sparse tensors, and 0 for the second, or the result is dense; found {kinds}")
    here = where_holds(x, condition, True)
    return here if isinstance(y, Number) else here + where_holds(y, condition, False)


@entry_point
def rand(
    *shape: Any,
    density: float | None = None,
    nnz: int | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
) -> SparseTensor:
    """Make a random tensor: positions uniform without repeats, values uniform in [0, 1).

    Args:
        shape: sizes of the modes, as numbers; or as a tuple, which the density may follow: ``rand((20, 30), 0.1)``.
        density: the share of positions that have an entry; 0.01 if ``nnz`` is not given either.
        nnz: the number of entries.
        generator: of random numbers, on the same device.
        dtype: floating point or complex.
        device: the tensor's device.

    Raises:
        ShapeError: a number of entries that is negative or above the number of positions; or both density and nnz.
        DtypeError: another dtype.

    Examples:
        >>> stc.rand((100, 100), density=0.02).nnz
        200
    """
    if shape and not hasattr(shape[0], "__index__"):
        shape, *density_too = shape
        if len(density_too) > (density is None):
            raise ShapeError(f"after a shape {tuple(shape)} comes one density, found {len(density_too)} arguments")
        density = density_too[0] if density_too else density
    if density is not None and nnz is not None:
        raise ShapeError("a random tensor takes a density or nnz, not both")
    sizes, share = crd.checked_shape(shape), 0.01 if density is None else density
    positions = prod(sizes)
    if not 0 <= share <= 1:
        raise ShapeError(f"a density is from 0 to 1, found {share}")
    if nnz is not None and not 0 <= nnz <= positions:
        raise ShapeError(f"a tensor of shape {sizes} has 0 to {positions:,} nonzeros, found nnz={nnz}")
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise DtypeError(f"random values are floating point or complex, found {dtype}")
    count = round(share * positions) if nnz is None else nnz
    if positions <= max(PERMUTED, 4 * count):
        key = torch.randperm(positions, generator=generator, device=device)[:count].sort().values
        # torch.unravel_index imports sympy, which takes .4 s
        coords = torch.stack(crd.decoded(key, sizes)) if sizes else key.new_zeros(0, len(key))
    else:
        coords = torch.zeros((len(sizes), 0), dtype=torch.int64, device=device)
        while coords.shape[1] < count:  # duplicates are dropped, so that it takes another draw at times
            more = [torch.randint(n, (count + count // 8 + 16,), generator=generator, device=device) for n in sizes]
            drawn = torch.cat((coords, torch.stack(more)), 1)
            coords = torch.stack(crd.numbered([*drawn], sizes, drawn.shape[1], drawn[0]).coords)
        kept = torch.randperm(coords.shape[1], generator=generator, device=device)[:count].sort().values
        coords = coords[:, kept]
    values = torch.rand(count, generator=generator, dtype=dtype, device=device)
    return SparseTensor(coords, values, sizes, check=False)


@entry_point
def randn(
    *shape: Any,
    density: float | None = None,
    nnz: int | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
) -> SparseTensor:
    """Make a random tensor with standard normal values; arguments as for `rand`.

    Examples:
        >>> stc.randn((100, 100), nnz=5).nnz
        5
    """
    x = rand(*shape, density=density, nnz=nnz, generator=generator, dtype=dtype, device=device)
    return x.with_values(torch.randn(x.nnz, generator=generator, dtype=dtype, device=device))
