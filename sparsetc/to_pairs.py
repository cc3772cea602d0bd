"""Masks, sparse tensors, boolean tensors, block masks and compressed rows as `Pairs` of queries and keys.

In: a pattern as users have it. Out: one pattern or mask for all heads, or a stack, one for each head or batch. It is
kept as long as the object that it was made from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from sparsetc import masks
from sparsetc.contraction.operands import as_operand
from sparsetc.errors import DeviceError, FormatError, ShapeError, TransformError
from sparsetc.maps.pairs import NARROW, SQUARE, Pairs, single
from sparsetc.maps.row_tiles import whole_blocks
from sparsetc.support import Ints
from sparsetc.support.entry import exporting, traced_by_modes
from sparsetc.tensor.blocks import Blocks, checked
from sparsetc.tensor.pattern import Pattern, lasting
from sparsetc.tensor.sparse_tensor import SparseTensor


def pairs_of(pattern: Any, heads: Ints, shape: tuple[int, int], device: torch.device, causal: bool) -> Pairs:
    """Return the pairs of a query and a key that attend, once for all heads or as a stack.

    Args:
        pattern: as `attention` takes it; None for all pairs.
        heads: sizes of the modes in front of queries and keys.
        shape: queries and keys.
        device: of the operands.
        causal: whether a query sees only keys up to its own position.

    Raises:
        FormatError: what is no pattern.
        ShapeError: of another shape, or a stack that does not follow the heads.
        DeviceError: on another device.
    """
    if pattern is None:
        pattern = masks.causal() if causal else masks.everything()
    if isinstance(pattern, masks.Mask):
        if causal and pattern is not masks.causal():
            pattern = masks.kept.once(("causal", pattern), lambda: pattern & masks.causal())
        return Pairs(pattern, shape, device)
    if type(pattern).__name__ == "BlockMask":
        converted: tuple[Any, Ints] = _of_block_mask(pattern, shape, device)
    elif isinstance(pattern, Tensor) and pattern.dtype == torch.bool and pattern.layout == torch.strided:
        converted = _of_dense(pattern, heads, shape, device)
    else:
        converted = _of_sparse(pattern, shape, device)
    pattern, lead = converted
    if causal and isinstance(pattern, Pattern):
        pattern = _causal(pattern)
    elif causal:
        pattern = tuple([mask & masks.causal() for mask in pattern])
    if isinstance(pattern, tuple) and len(pattern) == 1:
        pattern = pattern[0]
    patterns, fastest = _stack(lead, heads)
    return Pairs(pattern, shape, device, patterns, fastest)


def parts_of(pairs: Pairs, heads: Ints) -> Ints:
    """Return the sizes of the modes of heads that share a pattern."""
    if pairs.patterns == 1:
        return heads
    count, sizes = 1, list(heads)
    while count < pairs.patterns:
        count *= sizes.pop() if pairs.fastest else sizes.pop(0)
    return tuple(sizes)


def _stack(lead: Ints, heads: Ints) -> tuple[int, bool]:
    """Return the number of patterns in a stack of these leading sizes, and whether they vary fastest over the heads."""
    while lead[:1] == (1,):
        lead = lead[1:]
    if not lead:
        return 1, False
    sizes = (1,) * (len(heads) - len(lead)) + lead
    if len(sizes) > len(heads) or any(n not in (1, size) for n, size in zip(sizes, heads, strict=True)):
        raise ShapeError(f"patterns of {lead} do not broadcast to heads {heads}")
    apart = [n == size for n, size in zip(sizes, heads, strict=True) if size > 1]
    same = len(apart) - sum(apart)
    if apart not in ([True] * sum(apart) + [False] * same, [False] * same + [True] * sum(apart)):
        raise ShapeError(f"patterns of {lead} for heads {heads}: take one for each of the first modes, or of the last")
    return prod(sizes), not apart[0]


def _check(pattern_shape: Ints, pattern_device: torch.device, shape: Ints, device: torch.device) -> None:
    if pattern_shape != shape:
        raise ShapeError(f"the pattern must be {shape}, a row a query, found {pattern_shape}")
    if pattern_device != device:
        raise DeviceError(f"the pattern must be on {device}, as the operands are, found {pattern_device}")


# -- masks ------------------------------------------------------------------------------------------------------------


def _kept(needs: Sequence[Tensor], key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Return what is made of tensors, kept while they live unchanged: on a CPU copies tell, as ndarrays may write."""
    if traced_by_modes() or any(t.is_inference() for t in needs):  # whose versions nobody counts
        return make()
    whole = (*[(id(t), t._version) for t in needs], *key)
    copies, made = masks.kept.get(whole) or ((), None)
    if made is None or not all(map(torch.equal, copies, needs)):
        masks.kept.pop(whole)
        with lasting():
            copies = () if needs[0].is_cuda else [t.clone() for t in needs]
            _, made = masks.kept.put(whole, (copies, make()), needs=needs)
    return made


def _of_block_mask(flex: Any, shape: Ints, device: torch.device) -> tuple[tuple[masks.Mask, ...], Ints]:
    _check(tuple(flex.seq_lengths), flex.kv_num_blocks.device, shape, device)
    lead = tuple(flex.kv_num_blocks.shape[:2])
    key = "block mask", id(flex)
    each = masks.kept.get(key)
    if each is None:
        with lasting():
            each = tuple([masks.block_mask(flex, b, h) for b in range(lead[0]) for h in range(lead[1])])
        each = masks.kept.put(key, each, needs=[flex])
    return each, lead


def _of_dense(meets: Tensor, heads: Ints, shape: Ints, device: torch.device) -> tuple[tuple[masks.Mask, ...], Ints]:
    if exporting() and traced_by_modes():
        raise TransformError(
            "torch.export cannot look at a boolean pattern: make stc.masks.dense_mask(pattern), or a sparse tensor of "
            "it, outside forward"
        )
    sizes = (1,) * (2 - meets.ndim) + tuple(meets.shape)
    if any(n not in (1, size) for n, size in zip(sizes[-2:], shape, strict=True)):
        raise ShapeError(f"a boolean pattern must broadcast to {(*heads, *shape)}, found {sizes}")
    _check(shape, meets.device, shape, device)

    def made() -> tuple[masks.Mask, ...]:
        return tuple([masks.dense_mask(one.clone()) for one in meets.reshape(prod(sizes[:-2]), *sizes[-2:])])

    return _kept([meets], ("dense",), made), sizes[:-2]


def within_sequences(pattern: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[masks.Mask, Tensor]:
    """Return the mask of pairs within each sequence of jagged nested tensors, and the begins of the queries' sequences.

    Raises:
        FormatError: other nested tensors, or a pattern that is no mask.
        ShapeError: `causal`, of sequences that do not have as many keys as queries.
    """
    for one in (q, k, v):
        jagged: Any = one
        if not one.is_nested or one.layout != torch.jagged or jagged._ragged_idx != one.ndim - 2 or jagged._lengths:
            raise FormatError(
                "attention takes nested tensors of layout torch.jagged, (batch, heads, rows, d), without holes; those "
                "of (batch, rows, heads, d) are turned by .transpose(1, 2)"
            )
    if pattern is not None and not isinstance(pattern, masks.Mask):
        raise FormatError("attention of nested tensors takes masks of sparsetc.masks, of positions in q.values()")
    nested: tuple[Any, Any] = q, k
    offsets = [one.offsets() for one in nested]
    documents: masks.Mask = _kept(offsets, ("documents",), lambda: masks.documents(*offsets))
    if causal and documents.made[1] != documents.made[2]:
        raise ShapeError("attention: is_causal of nested tensors takes as many keys as queries in each sequence")
    inside = documents & masks.causal() if causal else documents
    return (inside if pattern is None else pattern & inside), offsets[0]


# -- sparse tensors ---------------------------------------------------------------------------------------------------


def _of_sparse(stored: Any, shape: Ints, device: torch.device) -> tuple[Pattern, Ints]:
    """Return a coalesced pattern of two modes (three for a stack), and the sizes of its leading modes."""
    if isinstance(stored, Pattern) and stored.is_coalesced and stored.blocks is None and stored.order == 2:
        _check(stored.shape, stored.device, shape, device)  # as most; no tensor is made of it
        return stored, ()
    if isinstance(stored, tuple) and len(stored) in (2, 4):
        operand: Any = _of_rows(stored, shape)
    elif isinstance(stored, Pattern):
        operand = SparseTensor._make(stored, torch.ones((), device=stored.device).expand(stored.values_shape(())))
    else:
        operand = as_operand(stored, "pattern")
    if not isinstance(operand, SparseTensor):
        advice = ""
        if isinstance(operand, Tensor):
            advice = ": a dense mask is boolean, as mask != 0, and numbers that are added to scores are bias="
        elif callable(stored):
            advice = ": a mask_mod becomes one by FlexAttention's create_block_mask, or is written with sparsetc.masks"
        raise FormatError(f"{type(stored).__name__} is no pattern of rows and columns{advice}")
    pattern, sizes = operand.coalesce().pattern, tuple(operand.shape)
    _check(sizes[-2:], operand.device, shape, device)
    if pattern.blocks is not None and not whole_blocks(pattern, SQUARE, NARROW):
        blocks = pattern
        pattern = blocks._once("single", lambda: single(blocks))
    if len(sizes) == 2:
        return pattern, ()
    return pattern._once("stacked", lambda: _stacked(pattern)), sizes[:-2]


def _stacked(pattern: Pattern) -> Pattern:
    """Return a pattern with its leading modes joined to one, or removed if they have a single position."""
    blocks = pattern.blocks
    if blocks is not None and prod(blocks.sides[:-2]) != 1:
        pattern, blocks = single(pattern), None
    sizes = pattern.shape
    number = torch.zeros_like(pattern.coords[0])
    for mode, size in enumerate(sizes[:-2]):
        number = number * size + pattern.coords[mode]
    stack = prod(sizes[:-2])
    front = [] if stack == 1 else [stack]
    coords = torch.stack((*([number] if front else []), *pattern.coords[-2:]))
    if blocks is not None:
        blocks = Blocks((*[1 for _ in front], *blocks.sides[-2:]), (*front, *blocks.shape[-2:]))
    return Pattern(coords, (*front, *sizes[-2:]), True, blocks)


def _causal(pattern: Pattern) -> Pattern:
    def made() -> Pattern:
        entries = single(pattern)
        before = entries.coords[-1] <= entries.coords[-2]
        return Pattern(entries.coords[:, before].contiguous(), entries.shape, True)

    return pattern._once("causal", made)


def _of_rows(given: tuple[Any, ...], shape: Ints) -> SparseTensor:
    """Return the tensor of compressed rows: row i has the columns `indices` from ``indptr[i]`` to ``indptr[i + 1]``.

    With two sides after these, rows and indices are those of blocks.
    """
    indptr, indices = map(torch.as_tensor, given[:2])
    blocks = checked(given[2:] or (1, 1), shape)

    def made() -> SparseTensor:
        ones = torch.ones(indices.shape, device=indices.device)
        try:
            rows = torch.sparse_csr_tensor(indptr, indices, ones, blocks.grid, check_invariants=True)
        except RuntimeError as error:
            raise FormatError(f"(indptr, indices) are no compressed rows of {blocks.grid}: {error}") from None
        tensor = SparseTensor.from_torch(rows)
        if len(given) == 2:
            return tensor
        pattern = Pattern(tensor.coalesce().pattern.coords, blocks.grid, True, blocks)
        return SparseTensor._make(pattern, ones.new_ones(()).expand(pattern.values_shape(())))

    return _kept([indptr, indices], ("rows", *blocks.sides, *shape), made)  # type: ignore[no-any-return]
