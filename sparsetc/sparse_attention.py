"""Attention over a sparse pattern: sampled products, softmax over the entries of a row, and a sparse matrix product.

In: queries, keys, values and which of them meet. Out: the rows of values that each query takes, differentiable.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from typing_extensions import Unpack

from sparsetc.api import einsum
from sparsetc.contraction.canonical import as_operand, promoted
from sparsetc.errors import DeviceError, DtypeError, FormatError, ShapeError
from sparsetc.options import Settings
from sparsetc.tensor.blocks import without_blocks
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.softmax import softmax
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import accumulator


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Any,
    *,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    **settings: Unpack[Settings],
) -> torch.Tensor:
    """Each query's mean of the values that it meets, weighted by ``softmax(scale * q @ k.T + bias)`` over these alone.

    As `torch.nn.functional.scaled_dot_product_attention` with a mask that is minus infinity where the pattern has no
    entry; a query that meets nothing, or whose bias is minus infinity wherever it meets a key, gets zeros. Three steps,
    each with gradients: a sampled product, `softmax`, and a product of the sparse weights with the values; nothing is
    formed over all pairs. Operands of 16 bits are converted to float32 for all of them.

    Args:
        q: (*heads, rows, d); batches and heads, any number of modes, stand in front.
        k: (*heads, columns, d).
        v: (*heads, columns, width).
        pattern: which queries meet which keys, of shape (rows, columns), the same for all heads: a `Pattern`, any
            sparse tensor that `einsum` takes (values are not read, so stored zeros meet too; blocks are met whole),
            FlashInfer's and scipy's pair ``(indptr, indices)`` of rows, or a `BlockMask` of FlexAttention of one batch
            and head.
        scale: that products are multiplied by; ``d ** -0.5`` by default.
        bias: (nnz,) or (*heads, nnz), added to the scaled products of entries in lexicographic order.
        settings: of `einsum`, for both products.

    Returns:
        (*heads, rows, width), of the operands' dtype.

    Raises:
        DtypeError: operands that are not dense, floating point and of one dtype, or a bias that is not floating point.
        ShapeError: operands that do not fit together, or the pattern.
        FormatError: what is no pattern.
        DeviceError: a pattern that is elsewhere than q.

    Examples:
        >>> q, k, v = torch.zeros(3, 2), torch.zeros(3, 2), torch.eye(3)
        >>> stc.attention(q, k, v, stc.SparseTensor.from_dense(torch.ones(3, 3).tril()))  # causal
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
    """
    for one in (q, k, v):
        if not isinstance(one, torch.Tensor) or one.layout != torch.strided:
            raise DtypeError(f"attention takes dense tensors as q, k and v, found {type(one).__name__}")
    if (
        min(q.ndim, k.ndim, v.ndim) < 2
        or k.shape != (*q.shape[:-2], *k.shape[-2:-1], q.shape[-1])
        or (v.shape[:-1] != k.shape[:-1])
    ):
        raise ShapeError(
            "attention takes q (*heads, rows, d), k (*heads, columns, d) and v (*heads, columns, width), found "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    q, k, v = promoted((q, k, v))
    dtype, (*heads, rows, depth), columns = q.dtype, q.shape, k.shape[-2]
    if not dtype.is_floating_point or {k.dtype, v.dtype} != {dtype}:
        raise DtypeError(
            f"attention takes q, k and v of one floating point dtype, found {dtype}, {k.dtype} and {v.dtype}"
        )
    meeting, wide = pattern_of(pattern, (rows, columns), q.device), accumulator(dtype)
    ones = SparseTensor._make(meeting, q.new_ones(meeting.nnz, dtype=wide))
    q, k, v = (one.reshape(prod(heads), *one.shape[-2:]).to(wide) for one in (q, k, v))  # one mode of heads
    products = einsum("ij,hid,hjd->ijh", ones, q, k, output="sparse", **settings)
    scores = products.values * (max(depth, 1) ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + _bias(bias, heads, meeting.nnz).to(wide)
    weights = softmax(SparseTensor._make(meeting, scores), 1)
    means = einsum("ijh,hjd->hid", weights, v, output="dense", **settings)
    return means.reshape(*heads, rows, v.shape[-1]).to(dtype)


def _bias(bias: torch.Tensor, heads: list[int], nnz: int) -> torch.Tensor:
    """(nnz, heads or 1) of a bias."""
    if not isinstance(bias, torch.Tensor) or bias.shape not in ((nnz,), (*heads, nnz)):
        raise ShapeError(f"attention: bias must be {(nnz,)} or {(*heads, nnz)}, found {bias!r:.80}")
    if not bias.is_floating_point():
        raise DtypeError(f"attention: bias is added to scores, and must be floating point, found {bias.dtype}")
    return bias.reshape(prod(bias.shape[:-1]), nnz).T


def pattern_of(given: Any, shape: tuple[int, int], device: torch.device) -> Pattern:
    """The coalesced pattern of single entries that stands for whatever says which pairs meet; errors of `attention`."""
    if isinstance(given, tuple) and len(given) == 2:
        found: Any = _of_rows(torch.as_tensor(given[0]), torch.as_tensor(given[1]), shape)
    elif type(given).__name__ == "BlockMask":
        found = _of_block_mask(given)
    elif isinstance(given, Pattern):
        found = SparseTensor._make(given, torch.ones((), device=given.device).expand(given.values_shape(())))
    else:
        found = as_operand(given, "attention: pattern")
    if not isinstance(found, SparseTensor):
        raise FormatError(f"attention: {type(given).__name__} is no pattern of queries and keys")
    if found.shape != shape:
        raise ShapeError(f"attention: the pattern must be {shape}, a row a query, found {found.shape}")
    if found.device != device:
        raise DeviceError(f"attention: the pattern must be on {device} as q is, found {found.device}")
    return without_blocks(found).pattern  # type: ignore[no-any-return]


def _of_rows(indptr: torch.Tensor, indices: torch.Tensor, shape: tuple[int, int]) -> SparseTensor:
    """Of rows, compressed: those of `indices` from ``indptr[i]`` to ``indptr[i + 1]`` are row i's columns."""
    ones = torch.ones(indices.shape, device=indices.device)
    try:
        rows = torch.sparse_csr_tensor(indptr, indices, ones, shape, check_invariants=True)
    except RuntimeError as error:
        raise FormatError(f"attention: (indptr, indices) are no compressed rows of {shape}: {error}") from None
    return SparseTensor.from_torch(rows)


def _of_block_mask(mask: Any) -> SparseTensor:
    """Of FlexAttention's blocks: those that are full, and of others the positions that its function admits."""
    if mask.kv_num_blocks.shape[:2].numel() != 1:
        raise FormatError("attention: a BlockMask must be of one batch and head; take a mask a call for others")
    (rows, columns), sides = mask.seq_lengths, mask.BLOCK_SIZE
    parts = [(mask.kv_num_blocks, mask.kv_indices, True), (mask.full_kv_num_blocks, mask.full_kv_indices, False)]
    found = []
    for counts, indices, asked in parts:
        if counts is None:
            continue
        counts, indices = counts[0, 0].long(), indices[0, 0].long()
        taken = torch.arange(indices.shape[1], device=indices.device) < counts[:, None]
        blocks = torch.stack((taken.nonzero()[:, 0], indices[taken]))
        within = torch.cartesian_prod(*(torch.arange(side, device=indices.device) for side in sides)).T
        at = (blocks * blocks.new_tensor(sides)[:, None]).unsqueeze(2) + within.unsqueeze(1)
        q, k = at.reshape(2, -1)
        inside = (q < rows) & (k < columns)
        q, k = q[inside], k[inside]
        if asked and q.numel():  # vmap takes no functions of no positions that divide
            zero = torch.zeros_like(q)
            admitted = torch.vmap(mask.mask_mod)(zero, zero, q, k)
            q, k = q[admitted], k[admitted]
        found.append(torch.stack((q, k)))
    coords = torch.cat(found, 1)
    return SparseTensor(coords, torch.ones(coords.shape[1], device=coords.device), (rows, columns))
