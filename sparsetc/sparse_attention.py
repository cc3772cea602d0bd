"""Attention over a sparse pattern or a mask: one kernel where there is one, and three steps elsewhere.

In: queries, keys, values and which of them meet. Out: the rows of values that each query takes, differentiable. The
three steps are a sampled product, a softmax over the entries of a row, and a product of the weights with the values.
"""

from __future__ import annotations

from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from typing_extensions import Unpack

from sparsetc import masks
from sparsetc.api import einsum
from sparsetc.contraction.operands import as_operand, promoted
from sparsetc.errors import DeviceError, DtypeError, FormatError, ShapeError
from sparsetc.maps.body import Body
from sparsetc.maps.computed import computed
from sparsetc.maps.fused import Pairs
from sparsetc.options import Settings
from sparsetc.support.entry import entry_point, traced_by_modes
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
    entry; a query that meets nothing, or whose bias is minus infinity wherever it meets a key, gets zeros. Nothing is
    formed over all pairs. Scores, softmax and sums of 16-bit operands are in float32.

    On a GPU one kernel computes the result and two its gradients, for float16, bfloat16 and float32, and for q, k and v
    of up to 128 columns, or up to 256 over scattered entries. They go through tiles of 64 queries by 64 keys, or
    through each query's entries where these lie far apart. Values and keys that share such a tile with a query that
    does not meet them must be finite. On a CPU, with a `plan`, in forward mode and in transforms of `torch.func`, and
    for gradients of gradients there are three steps: a sampled product, `softmax`, and a product of the weights with
    the values. ``logging.getLogger("sparsetc")`` says at level DEBUG which way was taken, and why.

    Args:
        q: (*heads, rows, d); batches and heads, any number of modes, stand in front.
        k: (*heads, columns, d).
        v: (*heads, columns, width).
        pattern: which queries meet which keys, of shape (rows, columns), the same for all heads: a mask of
            `sparsetc.masks`, a `Pattern`, any sparse tensor that `einsum` takes (values are not read, so stored zeros
            meet too; blocks are met whole), FlashInfer's and scipy's pair ``(indptr, indices)`` of rows, or a
            `BlockMask` of FlexAttention of one batch and head.
        scale: that products are multiplied by; ``d ** -0.5`` by default.
        bias: (nnz,) or (*heads, nnz), added to the scaled products of entries in lexicographic order.
        settings: of `einsum`, for both products of the three steps; the kernels take precision and cache_dir.

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
    dtype = q.dtype
    if not dtype.is_floating_point or {k.dtype, v.dtype} != {dtype}:
        raise DtypeError(
            f"attention takes q, k and v of one floating point dtype, found {dtype}, {k.dtype} and {v.dtype}"
        )
    call = _opaque if is_dynamo_compiling() and q.is_cuda else _attention
    return call(q, k, v, pattern, max(q.shape[-1], 1) ** -0.5 if scale is None else scale, bias, settings)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Any, scale: float, bias: Any, settings: Settings
) -> torch.Tensor:
    (*heads, rows, _), columns = q.shape, k.shape[-2]
    meeting = meeting_of(pattern, (rows, columns), q.device)
    tensors = [one.reshape(prod(heads), *one.shape[-2:]) for one in (q, k, v)]  # one mode of heads
    if bias is not None:
        meeting = pattern_of(meeting, (rows, columns), q.device)
        tensors.append(_bias(bias, heads, meeting.nnz).expand(prod(heads), meeting.nnz))
    steps = partial(_in_steps, meeting, (rows, columns), scale, settings)
    pairs = Pairs(meeting, (rows, columns), q.device)
    result = computed(_body(float(scale), bias is not None), pairs, tensors, steps, settings, "attention")
    return result.reshape(*heads, rows, v.shape[-1])


_opaque = entry_point(_attention)


@lru_cache(maxsize=64)
def _body(scale: float, with_bias: bool) -> Body:
    """Return attention as a body; kernels are kept by it."""
    if with_bias:
        return Body({"s": ("q", "k")}, {"bias": "entries"}, lambda s, bias: s * scale + bias, True, ("o", "v"))
    return Body({"s": ("q", "k")}, {}, lambda s: s * scale, True, ("o", "v"))


def _in_steps(
    meeting: Pattern | masks.Mask,
    shape: tuple[int, int],
    scale: float,
    settings: Settings,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention of (heads, rows, d) operands, and a bias (heads, nnz), by a product, softmax and a product."""
    dtype, wide, pattern = q.dtype, accumulator(q.dtype), pattern_of(meeting, shape, q.device)
    ones = SparseTensor._make(pattern, q.new_ones(pattern.nnz, dtype=wide))
    q, k, v = (one.to(wide) for one in (q, k, v))
    products = einsum("ij,hid,hjd->ijh", ones, q, k, output="sparse", **settings)
    scores = products.values * scale
    if bias is not None:
        scores = scores + bias.T.to(wide)
    weights = softmax(SparseTensor._make(pattern, scores), 1)
    means: torch.Tensor = einsum("ijh,hjd->hid", weights, v, output="dense", **settings)
    return means.to(dtype)


def _bias(bias: torch.Tensor, heads: list[int], nnz: int) -> torch.Tensor:
    """Return (heads or 1, nnz) of a bias."""
    if not isinstance(bias, torch.Tensor) or bias.shape not in ((nnz,), (*heads, nnz)):
        raise ShapeError(f"attention: bias must be {(nnz,)} or {(*heads, nnz)}, found {bias!r:.80}")
    if not bias.is_floating_point():
        raise DtypeError(f"attention: bias is added to scores, and must be floating point, found {bias.dtype}")
    return bias.reshape(prod(bias.shape[:-1]), nnz)


# -- which pairs meet -------------------------------------------------------------------------------------------------


@entry_point
def meeting_of(given: Any, shape: tuple[int, int], device: torch.device) -> Pattern | masks.Mask:
    """Return the coalesced pattern, of entries or blocks, or the mask that stands for what says which pairs meet.

    Raises:
        FormatError: what is no pattern.
        ShapeError: of another shape.
        DeviceError: on another device.
    """
    if isinstance(given, masks.Mask):
        return given
    if type(given).__name__ == "BlockMask":
        _check(tuple(given.seq_lengths), given.kv_num_blocks.device, shape, device)
        key = "block mask", id(given)
        mask: masks.Mask = masks.kept.get(key) or masks.kept.put(key, masks.block_mask(given), needs=[given])
        return mask
    if isinstance(given, tuple) and len(given) == 2:
        found: Any = _of_rows(torch.as_tensor(given[0]), torch.as_tensor(given[1]), shape)
    elif isinstance(given, Pattern):
        found = SparseTensor._make(given, torch.ones((), device=given.device).expand(given.values_shape(())))
    else:
        found = as_operand(given, "attention: pattern")
    if not isinstance(found, SparseTensor):
        raise FormatError(f"attention: {type(given).__name__} is no pattern of queries and keys")
    _check(tuple(found.shape), found.device, shape, device)
    return found.coalesce().pattern  # type: ignore[no-any-return]


def pattern_of(meeting: Pattern | masks.Mask, shape: tuple[int, int], device: torch.device) -> Pattern:
    """Return the pattern of single entries."""
    if isinstance(meeting, masks.Mask):
        return masks.pattern_of(meeting, shape, device)
    if meeting.blocks is None:
        return meeting
    whole = SparseTensor._make(meeting, torch.ones((), device=meeting.device).expand(meeting.values_shape(())))
    return without_blocks(whole).pattern  # type: ignore[no-any-return]


def _check(found: tuple[int, ...], found_on: torch.device, shape: tuple[int, int], device: torch.device) -> None:
    if found != shape:
        raise ShapeError(f"attention: the pattern must be {shape}, a row a query, found {found}")
    if found_on != device:
        raise DeviceError(f"attention: the pattern must be on {device} as q is, found {found_on}")


def _of_rows(indptr: torch.Tensor, indices: torch.Tensor, shape: tuple[int, int]) -> SparseTensor:
    """Of rows, compressed: those of `indices` from ``indptr[i]`` to ``indptr[i + 1]`` are row i's columns."""
    lasts = not (indptr.is_inference() or indices.is_inference() or traced_by_modes())
    key = "rows", id(indptr), lasts and indptr._version, id(indices), lasts and indices._version, shape
    kept: SparseTensor | None = masks.kept.get(key) if lasts else None
    if kept is not None:
        return kept
    ones = torch.ones(indices.shape, device=indices.device)
    try:
        rows = torch.sparse_csr_tensor(indptr, indices, ones, shape, check_invariants=True)
    except RuntimeError as error:
        raise FormatError(f"attention: (indptr, indices) are no compressed rows of {shape}: {error}") from None
    tensor = SparseTensor.from_torch(rows)
    return masks.kept.put(key, tensor, needs=[indptr, indices]) if lasts else tensor  # type: ignore[no-any-return]
