"""Attention over a sparse pattern or a mask: one kernel if possible, else three steps.

In: queries, keys, values and which of them meet. Out: the rows of values that each query takes, differentiable. The
three steps are a sampled product, a softmax over the entries of a row, and a product of the weights with the values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nested import nested_tensor_from_jagged
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import Unpack

from sparsetc import masks
from sparsetc.contraction.library import _constant as constant
from sparsetc.contraction.library import _setting as setting
from sparsetc.contraction.library import _transforms as transforms
from sparsetc.contraction.library import constants
from sparsetc.contraction.request import promoted
from sparsetc.errors import DeviceError, DtypeError, ShapeError
from sparsetc.maps.body import Body, Side
from sparsetc.maps.pairs import Pairs, kept_of, pairs_of, parts_of, within_sequences
from sparsetc.maps.scores import POSITIONS, SCORE, Score, taken_apart
from sparsetc.maps.task import Task
from sparsetc.maps.trace import Untraced, check_takes, told_apart
from sparsetc.options import Settings, latest, of_call
from sparsetc.pairwise import computed, key_of, of_entries
from sparsetc.support import Ints, Lru
from sparsetc.support.checks import checked_number, checked_share
from sparsetc.support.entry import entry_point, exporting, traced_by_modes
from sparsetc.tensor.dtypes import INTEGERS, accumulator
from sparsetc.tensor.pattern import Pattern, transforming
from sparsetc.tensor.sparse_tensor import SparseTensor

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Any = None,
    *,
    scale: float | None = None,
    bias: Tensor | ScoreMod | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    **settings: Unpack[Settings],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Any = None,
    *,
    scale: float | None = None,
    bias: Tensor | ScoreMod | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    return_lse: Literal[True],
    **settings: Unpack[Settings],
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Any = None,
    *,
    scale: float | None = None,
    bias: Tensor | ScoreMod | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    return_lse: bool = False,
    **settings: Unpack[Settings],
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute scaled dot-product attention over the pairs (query, key) of a pattern.

    Equals `torch.nn.functional.scaled_dot_product_attention` with a mask of minus infinity where the pattern has no
    entry, without memory for all pairs. A query without keys, or whose bias is minus infinity for all its keys, gets
    zeros. Scores, softmax and sums of 16-bit operands are computed in float32.

    On a GPU, one kernel computes the result and two its gradients, for float16, bfloat16 and float32, and for q, k
    and v of up to 256 columns. They work in tiles of 64 queries by 32 or 64 keys, or of 16 queries by gathered keys if
    these lie far apart; values and keys in a tile must be finite, even those that some query of the tile does not
    attend to. On a CPU, windows of 32 or 64 queries are multiplied by the tiles of keys that they meet; large patterns
    of entries that leave most of such tiles empty run as native loops where numba is installed. What is left runs in
    three steps: a sampled product, `softmax`, and a product with the values. These are small patterns of entries on a
    CPU, and on all devices calls with a `plan`, in forward mode, in transforms of `torch.func`, and second gradients.
    The log says which way was taken, and why (``logging.getLogger("sparsetc")``, level DEBUG).

    Args:
        q: (*heads, rows, d) with any number of leading modes for batches and heads; or a jagged nested tensor
            (batch, heads, rows, d), and then k and v too: each sequence attends to itself.
        k: (*heads, columns, d).
        v: (*heads, columns, width).
        pattern: the pairs, of shape (rows, columns). A mask of `sparsetc.masks`; a `Pattern` or any sparse tensor
            that `einsum` takes (values are not read, so stored zeros count, and blocks count whole); a pair ``(indptr,
            indices)`` of rows, as of FlashInfer and scipy; FlashInfer's ``(indptr, indices, R, C)`` of blocks; a
            boolean tensor that broadcasts to (*heads, rows, columns), such as a padding mask (batch, 1, 1, columns); or
            a `BlockMask` of FlexAttention. Sparse tensors may have leading modes that match the first or the last
            modes of heads. None: all pairs.
        scale: factor of the products; ``d ** -0.5`` by default.
        bias: added to the scaled products: (nnz,) or a tensor that broadcasts to (*heads, nnz), in lexicographic order
            of entries. With patterns by heads, entries are those of all patterns, and heads those that share one. Or a
            function (score, b, h, i, j) that replaces the scaled product of query i and key j, as FlexAttention's
            ``score_mod``. It may read tensors, as ``slopes[h]`` and ``document[i] == document[j]``, which get
            gradients. What it reads by a whole number of query and key, as ``table[h, i - j]``, or by two, as
            ``table[i % 7, j % 7]``, takes a number for each that the pattern has; otherwise, or with `deterministic`,
            one an entry.
        dropout_p: probability of a weight to be set to 0; others are divided by ``1 - dropout_p``.
        is_causal: use only the entries with ``j <= i``.
        enable_gqa: let k and v have fewer heads (in their last mode of heads), each for several neighbouring heads
            of q.
        return_lse: also return the logarithm of each query's sum of exponentials, (*heads, rows) float32, minus
            infinity for a query without keys; differentiable.
        settings: of `einsum`, for the products of the three steps; kernels use precision and cache_dir.

    Returns:
        (*heads, rows, width), of the operands' dtype; with `return_lse` a pair with the logarithms. Modes of heads
        and rows lie in memory in the order of those of q where the sizes are q's.

    Raises:
        DtypeError: operands are not dense, floating point and of one dtype, or the bias is not floating point.
        ShapeError: operands and pattern do not fit together.
        FormatError: `pattern` is not a pattern.
        DeviceError: pattern and q are on different devices.

    Examples:
        >>> q, k, v = torch.zeros(3, 2), torch.zeros(3, 2), torch.eye(3)
        >>> stc.attention(q, k, v, stc.SparseTensor.from_dense(torch.ones(3, 3).tril()))  # causal
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
    """
    offsets = None
    if isinstance(q, Tensor) and q.is_nested:
        pattern, offsets = within_sequences(pattern, q, k, v, is_causal)
        (q, k, v), is_causal = (one.values() for one in (q, k, v)), False
    for one in (q, k, v):
        if not isinstance(one, Tensor) or one.layout != torch.strided:
            raise DtypeError(f"attention takes dense tensors as q, k and v, found {type(one).__name__}")
    if not _fit(q, k, v, enable_gqa):
        raise ShapeError(
            "attention takes q (*heads, rows, d), k (*heads, columns, d) and v (*heads, columns, width), with "
            f"enable_gqa a divisor of the last mode of heads for k and v; found {tuple(q.shape)}, {tuple(k.shape)} and "
            f"{tuple(v.shape)}"
        )
    q, k, v = promoted((q, k, v))
    dtype = q.dtype
    if not dtype.is_floating_point or {k.dtype, v.dtype} != {dtype}:
        raise DtypeError(
            f"attention takes q, k and v of one floating point dtype, found {dtype}, {k.dtype} and {v.dtype}"
        )
    if scale is None:
        scale = max(q.shape[-1], 1) ** -0.5
    numbers = checked_number(scale, "attention: scale"), checked_share(dropout_p, "attention: dropout_p")
    results: Any = None
    if is_dynamo_compiling():
        settings = dict(latest.traced) | dict(settings)  # type: ignore[assignment]
        results = _node(q, k, v, pattern, constant(numbers), bias, is_causal, settings)
    if results is None:
        results = _opaque(q, k, v, pattern, numbers, bias, is_causal, return_lse, settings)
    if offsets is not None:
        results = [nested_tensor_from_jagged(one, offsets, jagged_dim=2) for one in results[: 1 + return_lse]]
    return (results[0], results[1]) if return_lse else results[0]


def _fit(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> bool:
    """Return True if sizes of operands fit together."""
    if q.ndim >= 2 and q.shape == k.shape == v.shape:
        return True
    if q.ndim < 2 or k.ndim != q.ndim or k.shape[-1] != q.shape[-1] or v.shape[:-1] != k.shape[:-1]:
        return False
    heads, fewer = q.shape[:-2], k.shape[:-2]
    if not enable_gqa or heads == fewer:
        return heads == fewer
    return heads[:-1] == fewer[:-1] and fewer[-1] > 0 and heads[-1] % fewer[-1] == 0


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Any,
    numbers: tuple[float, float],
    bias: Any,
    is_causal: bool,
    return_lse: bool,
    settings: Settings,
) -> Any:
    (*heads, rows, _), columns = q.shape, k.shape[-2]
    pairs = pairs_of(pattern, tuple(heads), (rows, columns), q.device, is_causal)
    if pairs.patterns > 1 and k.shape[-3] < heads[-1]:  # heads that share keys may have patterns of their own
        k, v = (one.repeat_interleave(heads[-1] // one.shape[-3], -3) for one in (k, v))
    tensors = [q, k, v]
    scale, dropout = numbers
    body = _body(scale, isinstance(bias, Tensor), dropout)
    if isinstance(bias, Tensor):
        pairs = of_entries(pairs)
        tensors.append(_bias(bias, parts_of(pairs, tuple(heads)), pairs.given.nnz))  # type: ignore[union-attr]
    elif callable(bias):
        ordered = of_call(settings).deterministic or torch.are_deterministic_algorithms_enabled()
        fewer = tuple(k.shape[:-2])
        body, pairs, vectors = _scored(bias, pairs, tuple(heads), fewer, numbers, accumulator(q.dtype), ordered)
        tensors += vectors
    elif bias is not None:
        raise ShapeError(f"attention: bias is a tensor or a function of (score, b, h, i, j), found {bias!r:.80}")
    seed = torch.randint(1 << 31, (1,), device=q.device) if dropout else None
    return computed(body, pairs, tensors, settings, "attention", seed, return_lse)


_opaque = entry_point(_attention)


# -- in graphs that Dynamo traces -------------------------------------------------------------------------------------


def _node(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Any,
    numbers: tuple[float, float],
    bias: Any,
    is_causal: bool,
    settings: Settings,
) -> Any:
    """Return attention as a node of a graph; None where it cannot be one, and the graph breaks."""
    known = _number(pattern)
    breaks = transforms(True) or exporting()  # which traces by modes, unless it is strict
    named = constants(settings)
    if breaks or known is None or named is None or not (bias is None or isinstance(bias, Tensor)):
        return None
    heads = [operator.index(n) for n in q.shape[:-2]]
    rows = q.shape[-2]
    columns = k.shape[-2]
    fewer = [operator.index(n) for n in k.shape[:-2]]
    sizes = (*heads, operator.index(rows), operator.index(columns)), None if bias is None else bias.shape[-1]
    key = _key(known, sizes, heads == fewer, q.device, numbers, is_causal, named, operator.index(latest.number))
    if not key:
        return None
    tensors = [q, k, v]
    if bias is not None:
        tensors.append(_bias(bias, tuple(heads), bias.shape[-1]))
    seed = torch.randint(1 << 31, (1,), device=q.device) if numbers[1] else None
    return torch.ops.sparsetc.mapped(key, tensors, seed)


def _number(pattern: Any) -> int | None:
    """Return the number of a pattern in a graph, 0 of all pairs; None if the object has none."""
    if pattern is None:
        return 0
    if isinstance(pattern, SparseTensor):
        pattern = pattern._pattern
    return operator.index(pattern.number) if isinstance(pattern, (masks.Mask, Pattern)) else None


def _key(
    known: int,
    sizes: tuple[tuple[int, ...], int | None],
    own_keys: bool,
    device: torch.device,
    numbers: tuple[float, float],
    is_causal: bool,
    settings: tuple[tuple[str, Any], ...],
    number: int,
) -> str:
    """Return the key of attention over a pattern; empty where a graph cannot have it as a node.

    It is called while a graph is traced, which sees none of it: what it returns is a constant of that graph.
    """
    (*heads, rows, columns), nnz = sizes
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        pattern = Pattern.numbered(known)
        if known and pattern is None:
            return ""
        pairs = pairs_of(pattern, tuple(heads), (rows, columns), device, is_causal)
        if nnz is not None:
            pairs = of_entries(pairs)
            if pairs.given.nnz != nnz:  # type: ignore[union-attr]
                raise ShapeError(f"attention: bias must be of {pairs.given.nnz} entries, found {nnz}")  # type: ignore[union-attr]
        if pairs.patterns > 1 and (nnz is not None or not own_keys):
            return ""
        options = of_call({name: setting(value) for name, value in settings})
        return key_of(Task(_body(numbers[0], nnz is not None, numbers[1]), pairs, options, "attention"))


_key._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=64)
def _body(scale: float, with_bias: bool, dropout: float = 0.0) -> Body:
    """Return attention as a body; kernels are kept by it."""
    products = {"s": ("q", "k")}
    if with_bias:
        return Body(products, {"bias": "entries"}, lambda s, bias: s * scale + bias, True, "v", dropout=dropout)
    return Body(products, {}, lambda s: s * scale, True, "v", dropout=dropout)


_scores: Lru[Any, Score | str] = Lru(64)
"""Functions of scores, taken apart; or why they cannot be."""
_steps: Lru[Any, Body] = Lru(64)
"""Attention by functions of scores that kernels do not have."""


def _scored(
    function: Any,
    pairs: Pairs,
    heads: Ints,
    fewer: Ints,
    numbers: tuple[float, float],
    dtype: torch.dtype,
    ordered: bool,
) -> tuple[Body, Pairs, list[Tensor]]:
    """Return attention by a function of (score, b, h, i, j), its pairs, and its vectors of numbers.

    Gradients of numbers by place are added by atomics, so not where sums are to be `ordered`.
    """
    read: list[Tensor] = []
    key = told_apart(function, read)
    score: Score | str = "it reads a tensor, in a graph or a transform of torch.func"
    if not read or not (transforming() or traced_by_modes()):
        score = _scores.once((key, pairs.device), lambda: _taken_apart(function, read, pairs.device))
    if not isinstance(score, str):
        apart = score
        reached: dict[str, dict[str, Tensor]] = {}
        if not (ordered or traced_by_modes()):
            reached = {name: pairs.kept((apart, name), partial(apart.reached, name, pairs)) for name in apart.whole}
        body = _of_score(apart, heads != fewer, frozenset(name for name, at in reached.items() if at), *numbers)

        def vectors_of(pairs: Pairs) -> list[Tensor]:
            """Return positions, and numbers that are read of tensors."""
            positions, places = _positions(heads, fewer, pairs), _places(heads, fewer, pairs)
            each = []
            for name, side in body.vectors.items():
                at = places["rows"] | reached[name] if side == "places" else places[side]
                each.append(positions[name] if name in POSITIONS else apart.computed(name, at, read))
            return [one.to(pairs.device, torch.int64 if one.dtype in INTEGERS else dtype) for one in each]

        if "entries" not in body.vectors.values():
            of_pairs = pairs.given.number if isinstance(pairs.given, Pattern) else pairs.given
            key = body, of_pairs if body.places else None, pairs.shape, pairs.device, heads, fewer, dtype
            return body, pairs, kept_of(read, key, lambda: vectors_of(pairs))
        if pairs.patterns == 1:
            pairs = of_entries(pairs)
            return body, pairs, vectors_of(pairs)
        score = "it reads a tensor by query and key, and heads have patterns of their own"
    body = _steps.once((told_apart(function), numbers, score), lambda: _in_steps(function, score, *numbers))
    vectors = _positions(heads, fewer, pairs)
    return body, pairs, [vectors[name].to(dtype) for name in POSITIONS]


def _taken_apart(function: Any, read: Sequence[Tensor], device: torch.device) -> Score | str:
    check_takes(function, "attention", 1 + len(POSITIONS))
    try:
        return taken_apart(function, read, device)
    except Untraced as error:
        if "device" in str(error) and any(one.device != device for one in read):
            raise DeviceError(f"attention: the function of scores reads a tensor that is not on {device}") from None
        return str(error)


@lru_cache(maxsize=64)
def _of_score(score: Score, shared: bool, placed: frozenset[str], scale: float, dropout: float) -> Body:
    """Return attention by a function that was taken apart; kernels are kept by it."""

    def mapped(**inputs: Tensor) -> Tensor:
        return score.function.of({**inputs, SCORE: inputs[SCORE] * scale})

    sides = score.sides(shared, placed)
    places = {name: score.whole[name] for name, side in sides.items() if side == "places"}
    return Body({SCORE: ("q", "k")}, sides, mapped, True, "v", dropout=dropout, places=places)


def _in_steps(function: Any, reason: str, scale: float, dropout: float) -> Body:
    def mapped(s: Tensor, **positions: Tensor) -> Tensor:
        return function(s * scale, *(positions[name] for name in POSITIONS))  # type: ignore[no-any-return]

    names = tuple(POSITIONS)
    return Body({SCORE: ("q", "k")}, POSITIONS, mapped, True, "v", dropout=dropout, positions=names, untraced=reason)


def _places(heads: Ints, fewer: Ints, pairs: Pairs) -> dict[Side, dict[str, Tensor]]:
    """Return the positions of rows, columns and entries: of batches and heads (heads, 1), of others (1, size)."""

    def of(sizes: Ints, **others: Tensor) -> dict[str, Tensor]:
        head = torch.arange(prod(sizes), device=pairs.device)[:, None]
        size = sizes[-1] if sizes else 1
        return {"b": head // size, "h": head % size, **{name: other[None] for name, other in others.items()}}

    def made() -> dict[Side, dict[str, Tensor]]:
        rows, columns = (torch.arange(n, device=pairs.device) for n in pairs.shape)
        places: dict[Side, dict[str, Tensor]] = {"rows": of(heads, i=rows), "columns": of(fewer, j=columns)}
        if isinstance(pairs.given, Pattern) and pairs.given.blocks is None and pairs.patterns == 1:
            row, column = pairs.given.coords
            places["entries"] = of(heads, i=row, j=column)
        return places

    return pairs.kept(("places", heads, fewer), made)


def _positions(heads: Ints, fewer: Ints, pairs: Pairs) -> dict[str, Tensor]:
    """Return numbers of batches, of heads and of queries (heads, queries), and of keys (heads of keys, keys)."""
    places = _places(heads, fewer, pairs)

    def made() -> dict[str, Tensor]:
        sizes = {"rows": (prod(heads), pairs.shape[0]), "columns": (prod(fewer), pairs.shape[1])}
        return {name: places[side][name].float().expand(sizes[side]).contiguous() for name, side in POSITIONS.items()}

    return pairs.kept(("positions", heads, fewer), made)


def _bias(bias: Tensor, heads: tuple[int, ...], nnz: int) -> Tensor:
    """Return (heads, nnz) of a bias."""
    shape = (*heads, nnz)
    sizes = tuple(bias.shape)
    fits = len(sizes) <= len(shape) and sizes[-1:] == (nnz,)
    if not fits or any(a not in (1, b) for a, b in zip(reversed(sizes), reversed(shape), strict=False)):
        raise ShapeError(
            f"attention: bias must be {(nnz,)} or broadcast to {shape}, one number an entry, found {sizes}; a "
            "table (rows, columns) is added by bias=lambda score, b, h, i, j: score + table[i, j]"
        )
    if not bias.is_floating_point():
        raise DtypeError(f"attention: bias is added to scores, and must be floating point, found {bias.dtype}")
    if len(sizes) == 1:
        return bias.expand(prod(heads), nnz)
    return bias.expand(shape).reshape(prod(heads), nnz)
