"""`map_entries`: a user's function of the entries of a pattern, in one kernel.

In: a function, the pattern, and what the function is given for each entry. Out: the sums over rows, or a sparse tensor,
differentiable. Attention is one case of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from sparsetc.errors import DtypeError, KeywordError, ShapeError
from sparsetc.maps.body import SIDES, Body, Side
from sparsetc.maps.pairs import pairs_of, parts_of
from sparsetc.maps.trace import check_takes, told_apart
from sparsetc.options import Settings
from sparsetc.pairwise import computed, of_entries
from sparsetc.support import Ints, Lru, Names
from sparsetc.support.checks import found_shape
from sparsetc.support.entry import entry_point
from sparsetc.tensor.sparse_tensor import SparseTensor

Table = Tensor
KEPT = 64
"""Functions whose kernels are kept. Not measured."""
Input = tuple[str, Tensor, int, Side]
"""The name of a product or number; a table (*heads, rows or columns, size), or numbers (*heads, numbers) of one side;
how many modes it has behind those of heads, 2 or 1; and what it has a row or number for."""
_bodies: Lru[Hashable, Body] = Lru(KEPT)


class Inputs(Settings, total=False):
    """The arguments of `map_entries` but a function, a pattern and `output`."""

    products: Mapping[str, tuple[Table, Table]] | None
    rows: Mapping[str, Tensor] | None
    columns: Mapping[str, Tensor] | None
    entries: Mapping[str, Tensor] | None
    softmax: bool
    values: Table | None


@overload
def map_entries(
    function: Callable[..., Tensor], pattern: Any, *, output: Literal["dense"] = "dense", **inputs: Unpack[Inputs]
) -> Tensor: ...
@overload
def map_entries(
    function: Callable[..., Tensor], pattern: Any, *, output: Literal["sparse"], **inputs: Unpack[Inputs]
) -> SparseTensor: ...
@entry_point
def map_entries(
    function: Callable[..., Tensor],
    pattern: Any,
    *,
    products: Mapping[str, tuple[Table, Table]] | None = None,
    rows: Mapping[str, Tensor] | None = None,
    columns: Mapping[str, Tensor] | None = None,
    entries: Mapping[str, Tensor] | None = None,
    softmax: bool = False,
    values: Table | None = None,
    output: Literal["dense", "sparse"] = "dense",
    **settings: Unpack[Settings],
) -> Tensor | SparseTensor:
    """Apply a function to each entry (i, j) of a pattern, and sum the results over each row.

    The function's arguments are named: inner products of rows of two tables, and numbers by row, by column and by
    entry. On a GPU, one kernel computes the result and two its gradients, without memory for all entries, if the
    function uses elementwise operations that kernels have. On a CPU, windows of rows are multiplied by the tiles of
    columns that they meet; large patterns that leave most of their tiles empty run as native loops where numba is
    installed, small ones in several steps, as other functions do on all devices. The log
    (``logging.getLogger("sparsetc")``, level DEBUG) says why.

    Args:
        function: takes tensors of one shape by name, and returns one; elementwise torch operations. It is traced
            once for all functions with the same code and constants; other numbers that it reads are constants.
        pattern: (rows, columns), as for `attention`.
        products: name -> (left, right) tables, (*heads, rows, d) and (*heads, columns, d): the argument is the sum
            over d of ``left[i, d] * right[j, d]``. All tables have one dtype.
        rows: name -> (*heads, rows): the argument is the number of row i.
        columns: name -> (*heads, columns): the argument is the number of column j.
        entries: name -> (nnz,) or (*heads, nnz), in lexicographic order: the argument is the number of the entry.
        softmax: normalise results: their exponentials over the sum of exponentials along a row.
        values: (*heads, columns, width): sum rows of it, each times the function's result.
        output: ``"sparse"`` returns the function's results themselves.
        settings: of `einsum`, for products in steps; kernels use precision and cache_dir.

    Returns:
        (*heads, rows, width) sums of rows of `values`; without `values`, (*heads, rows) sums of results. With
        ``output="sparse"`` a SparseTensor of the results, with dense modes for heads.

    Raises:
        KeywordError: a name given twice, or nothing to compute with.
        DtypeError: tables of several dtypes, or inputs that are not floating point.
        ShapeError: sizes and pattern do not fit together.

    Examples:
        The Poisson loss of a factorisation, over nonzeros x (Hong, Kolda and Duersch 2020), with gradients:

        >>> x = stc.SparseTensor.from_dense(torch.tensor([[2.0, 0.0], [1.0, 3.0]]))
        >>> a, b = torch.ones(2, 4, requires_grad=True), torch.ones(2, 4)
        >>> loss = stc.map_entries(
        ...     lambda m, x: m - x * torch.log(m), x.pattern, products={"m": (a, b)}, entries={"x": x.values}
        ... ).sum()
        >>> torch.autograd.grad(loss, a)[0]
        tensor([[0.5000, 0.5000, 0.5000, 0.5000],
                [1.0000, 1.0000, 1.0000, 1.0000]])
    """
    named, *sides = ({} if one is None else one for one in (products, rows, columns, entries))
    inputs = _inputs(named, dict(zip(("rows", "columns", "entries"), sides, strict=True)), values)
    by_entry = {name: tensor for name, tensor, _, side in inputs if side == "entries"}
    heads = _broadcast([tensor.shape[:-modes] for _, tensor, modes, side in inputs if side != "entries"])
    pairs = pairs_of(pattern, heads, _shape(inputs, pattern), inputs[0][1].device, False)
    if by_entry or output == "sparse":
        pairs = of_entries(pairs)
        nnz = pairs.given.nnz  # type: ignore[union-attr]
        for name, tensor in by_entry.items():
            if tensor.shape[-1] != nnz:
                found = found_shape(tensor)
                raise ShapeError(f"map_entries: {name} must have a number for each of {nnz:,} entries, found {found}")
    if pairs.patterns == 1:
        heads = _broadcast([heads, *[tensor.shape[:-1] for tensor in by_entry.values()]])
    elif output == "sparse":
        raise ShapeError("map_entries: a sparse result takes one pattern for all heads")
    sides_of = {name: side for name, _, modes, side in inputs if modes == 1}
    body = _body(function, tuple(named), sides_of, softmax, None if values is None else "values", output == "sparse")
    tensors, parts = list[Tensor](), parts_of(pairs, heads)
    for _, tensor, modes, side in inputs:
        lead = parts if side == "entries" else heads
        tensors.append(tensor if tensor.shape[:-modes] == lead else tensor.expand(*lead, *tensor.shape[-modes:]))
    (result,) = computed(body, pairs, tensors, settings, "map_entries")
    if output == "sparse":
        return SparseTensor._make(pairs.given, result.movedim(-1, 0))  # type: ignore[arg-type]
    return result


def _inputs(products: Mapping[str, Any], vectors: Mapping[Side, Mapping[str, Any]], values: Any) -> list[Input]:
    """Return tables and then numbers. Raise an error for names given twice, and for what does not go together."""
    for what, given in (("products", products), *vectors.items()):
        if not isinstance(given, Mapping):
            raise KeywordError(f"map_entries takes {what}= as a dictionary of names, found {given!r:.80}")
    names = [*products, *chain(*vectors.values())]
    if not names or len({*names}) < len(names) or not all(isinstance(name, str) for name in names):
        raise KeywordError(f"map_entries takes names, each once; found {', '.join(map(str, names)) or 'none'}")
    inputs: list[Input] = []
    for name, pair in products.items():
        tables: Any = pair if isinstance(pair, Sequence) else [pair]
        if len(tables) != 2 or len({getattr(t, "shape", (0,))[-1:] for t in tables}) != 1:
            shapes = ", ".join(map(found_shape, tables))
            raise ShapeError(f"map_entries: product {name} takes two tables of rows of one size, found {shapes}")
        inputs += [(name, table, 2, side) for table, side in zip(tables, SIDES, strict=True)]
    inputs += [] if values is None else [("values", values, 2, "columns")]
    inputs += [(name, one, 1, side) for side, of_side in vectors.items() for name, one in of_side.items()]
    kinds = {tensor.dtype if isinstance(tensor, Tensor) else type(tensor) for _, tensor, *_ in inputs}
    if not all(isinstance(kind, torch.dtype) and kind.is_floating_point for kind in kinds):
        raise DtypeError(f"map_entries takes dense floating point tensors, found {', '.join(map(str, kinds))}")
    if len({tensor.dtype for _, tensor, modes, _ in inputs if modes == 2}) > 1:
        raise DtypeError(f"map_entries takes tables of one dtype, found {', '.join(map(str, kinds))}")
    if any(tensor.ndim < modes for _, tensor, modes, _ in inputs):
        raise ShapeError(
            "map_entries takes tables (*heads, rows, size), and a mode of rows, columns or entries of numbers"
        )
    return inputs


def _shape(inputs: Sequence[Input], pattern: Any) -> tuple[int, int]:
    """Return the numbers of rows and columns, on which all tensors agree."""
    agreed: list[int] = []
    for mode, side in enumerate(SIDES):
        sizes = {tensor.shape[-modes] for _, tensor, modes, of in inputs if of == side}
        sizes = sizes or {*getattr(pattern, "shape", ())[-2:][mode : mode + 1]}
        if len(sizes) != 1:
            raise ShapeError(f"map_entries: inputs must say one number of {side}, found {[*sizes] or 'none'}")
        agreed += sizes
    return agreed[0], agreed[1]


def _body(
    function: Callable[..., Tensor],
    of_products: Names,
    sides: Mapping[str, Side],
    softmax: bool,
    table: str | None,
    stored: bool,
) -> Body:
    """Return the body, kept for functions of the same code and constants."""
    if stored and (softmax or table):
        raise KeywordError("map_entries: a sparse result is the function's own, without softmax and values")
    if softmax and table is None:
        raise KeywordError("map_entries: softmax takes values; without them, take stc.softmax of a sparse result")
    kept_names = (*of_products, *sides)

    def made() -> Body:
        check_takes(function, "map_entries", 0, kept_names)
        products = {f"s{n}": (f"l{n}", f"r{n}") for n in range(len(of_products))}
        by_side = {f"v{n}": side for n, side in enumerate(sides.values())}
        names = dict(zip([*products, *by_side], kept_names, strict=True))

        def mapped(**inputs: Tensor) -> Tensor:
            return function(**{names[name]: tensor for name, tensor in inputs.items()})

        return Body(products, by_side, mapped, softmax, table, stored)

    key = told_apart(function), of_products, tuple(sides.items()), softmax, table, stored
    return _bodies.once(key, made)


def _broadcast(leads: Sequence[Ints]) -> Ints:
    """Return the sizes that sizes in front of rows and columns broadcast to; `torch.broadcast_shapes` is slow."""
    if len({*leads}) == 1:
        return tuple(leads[0])
    try:
        return tuple(torch.broadcast_shapes(*leads))
    except RuntimeError:
        raise ShapeError(
            f"map_entries: sizes in front do not broadcast: {', '.join(str(tuple(lead)) for lead in leads)}"
        ) from None
